//! The worker's loop.
//!
//! ```text
//! feed ─► dispatcher ─pull─► claim ─► prepare ─► engine thread
//!                                                    │
//!              acknowledge ◄─ commit (finish) ◄─ collect ends
//! ```
//!
//! One task owns all state ([`event_loop`]); leases are renewed by another ([`renewer`]), which no work can
//! hold up. As a service, a third ([`reconciler`]) moves what time has moved and feeds the dispatcher
//! what it lost. Embedded, the worker is its own feeder: it fills the dispatcher from the store in
//! order of id and ends when nothing is unfinished.
//!
//! | away | embedded | service |
//! | --- | --- | --- |
//! | dispatcher | ends with the error | goes on with what it holds, tries again without end |
//! | store | ends with the error | results wait in memory; what runs is stopped when its lease ends |

mod backoff;
mod breaker;
mod devices;
mod event_loop;
mod event_publisher;
mod heartbeat;
mod in_flight;
mod reconciler;
mod renewer;

use std::{sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};
use tritmill_engine::backend::StepError;
use tritmill_queue::{
    DispatchError, Dispatcher, JobId, JobState, Operations, QueueName, Store, StoreError,
    events::Events,
};

pub use self::devices::Device;
use self::{
    devices::Devices, event_loop::EventLoop, heartbeat::HeartbeatTask, reconciler::Reconciler,
    renewer::Renewer,
};
use crate::{metrics::Metrics, served::ServedModel};

/// How long the last word may take.
const GOODBYE_LIMIT: Duration = Duration::from_secs(2);

/// Who fills the dispatcher, and when the worker ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Others fill it; the worker runs until it is told to stop.
    Service,
    /// The worker fills it from the store and ends when nothing is unfinished.
    Embedded,
}

/// What a worker is told from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Go on.
    No,
    /// Take nothing new, finish and commit what runs, hand the rest back.
    Drain,
}

/// How a worker works.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The queue it serves.
    pub queue: QueueName,
    /// Name of the process incarnation.
    pub owner: String,
    /// Choices each device holds at once: what its engine runs, and a few prepared ones.
    pub slots: usize,
    /// Length of a claim; renewed three times as often.
    pub lease: Duration,
    /// How long a drain waits for running jobs before it hands them back.
    pub drain: Duration,
    /// How long one step may run before the worker takes the engine for hung.
    pub step_limit: Duration,
    /// Who fills the dispatcher.
    pub mode: Mode,
    /// The instruction set of the kernels, if they are a processor's; for people.
    pub isa: String,
}

/// Results that were committed together.
#[derive(Debug, Clone, Default)]
pub struct Committed {
    /// Each job and its state now.
    pub settled: Vec<(JobId, JobState)>,
    /// Prompt tokens of the completed ones.
    pub prompt_tokens: u64,
    /// Generated tokens of the completed ones.
    pub completion_tokens: u64,
}

/// Why a worker ended before its work did. Claims that are left lapse.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The store failed for longer than the worker waits.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The dispatcher failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// An engine's thread died.
    #[error("the engine on {0} stopped: its thread panicked")]
    EngineStopped(String),
    /// A step did not end. Claims were handed back; the process should end, its thread never may.
    #[error("the engine on {device} hangs: one step has run for more than {} s", .limit.as_secs_f32())]
    EngineHangs {
        /// Whose step it is.
        device: String,
        /// How long one may run.
        limit: Duration,
    },
    /// A device works no more in this process. All claims were handed back; the process should end.
    #[error("{device}: {error}")]
    DeviceLost {
        /// Which.
        device: String,
        /// What it said last.
        #[source]
        error: Arc<StepError>,
    },
    /// An engine's thread could not be started.
    #[error("cannot start an engine's thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// A worker, ready to run.
pub struct Worker {
    /// The truth.
    pub store: Arc<dyn Store>,
    /// Says what is next.
    pub dispatcher: Arc<dyn Dispatcher>,
    /// Where it says that it lives and hears what operators want; an embedded one has nobody to
    /// tell.
    pub operations: Option<Arc<dyn Operations>>,
    /// Where subscribers listen, if anywhere.
    pub events: Option<Arc<dyn Events>>,
    /// What answers.
    pub served: Arc<ServedModel>,
    /// How.
    pub config: WorkerConfig,
    /// Told of every commit; the worker does not mind if nobody listens.
    pub committed: mpsc::UnboundedSender<Committed>,
    /// What it counts while it works.
    pub metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// Runs on these devices, at least one, until the work is done ([`Mode::Embedded`]) or `stop` says
    /// so.
    ///
    /// # Errors
    /// [`WorkerError`].
    pub async fn run(
        self,
        devices: Vec<Device>,
        mut stop: watch::Receiver<Stop>,
    ) -> Result<(), WorkerError> {
        let devices = Devices::start(devices, self.config.slots, &self.metrics)
            .map_err(WorkerError::Thread)?;
        let (holding, held) = watch::channel(Vec::new());
        let (lost, lost_leases) = mpsc::unbounded_channel();
        let renewer = Renewer {
            store: Arc::clone(&self.store),
            dispatcher: Arc::clone(&self.dispatcher),
            owner: self.config.owner.clone(),
            lease: self.config.lease,
            held,
            lost,
            metrics: Arc::clone(&self.metrics),
        };
        // Both end by themselves: the one with the event_loop, the other when it is aborted.
        tokio::spawn(renewer.run());
        let reconciling = (self.config.mode == Mode::Service).then(|| {
            let reconciler = Reconciler::of(&self);
            tokio::spawn(reconciler.run())
        });
        let (directing, directive) =
            watch::channel(heartbeat::initial_directive(self.operations.is_some()));
        let beating = self.operations.clone().map(|operations| {
            let (metrics, config) = (Arc::clone(&self.metrics), self.config.clone());
            let numerics_class = self.served.numerics_class().to_owned();
            let heartbeat =
                HeartbeatTask { operations, metrics, config, numerics_class, directive: directing };
            tokio::spawn(heartbeat.run())
        });
        let events = self.events.clone().map(|events| {
            let (tell, told) = mpsc::unbounded_channel();
            // Ends by itself, when the last event is out.
            tokio::spawn(event_publisher::run(events, told));
            tell
        });
        let mut event_loop =
            EventLoop::new(&self, devices, holding, lost_leases, directive, events);
        let result = event_loop.run(&mut stop).await;
        reconciling.into_iter().chain(beating).for_each(|task| task.abort());
        if let Some(operations) = &self.operations {
            // A worker that could not say goodbye is listed as silent.
            let goodbye = operations.forget_worker(&self.config.owner);
            let _ = tokio::time::timeout(GOODBYE_LIMIT, goodbye).await;
        }
        result
    }
}
