//! The worker: takes jobs from a queue, runs them on its devices and records the results.
//!
//! ```text
//! feed ─► dispatcher ─pull─► claim ─► prepare ─► engine thread
//!                                                    │
//!              acknowledge ◄─ commit (finish) ◄─ collect ends
//! ```
//!
//! [`core`] decides and does no I/O; [`shell`] runs what it decides and reports back. As a service,
//! another task ([`reconciler`]) queues jobs that have become due and gives the dispatcher the entries
//! that it lost. An embedded worker fills the dispatcher itself from the store, in order of id, and ends
//! when all jobs are finished.
//!
//! | unreachable | embedded | service |
//! | --- | --- | --- |
//! | dispatcher | ends with the error | continues with what it holds, retries without end |
//! | store | ends with the error | results wait in memory; running work is stopped when its lease ends |

mod core;
mod drain_rate;
mod event_publisher;
mod heartbeat;
mod maintenance;
mod presence;
mod reconciler;
mod sampling;
mod shell;

use std::{sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};
use tritmill_engine::{Engine, backend::StepError};
use tritmill_queue::{
    DispatchError, Dispatcher, JobId, JobState, Operations, QueueName, Store, StoreError, Usage,
    events::Events,
    metrics::{MeasuredDispatcher, MeasuredStore},
};

pub(crate) use self::presence::Presence;
use crate::{engine_thread::Turns, metrics::Metrics, served::ServedModel};

/// How the dispatcher is filled, and whether the worker ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Producers fill it; the worker runs until it is stopped.
    Service,
    /// The worker fills it from the store and ends when all jobs are finished.
    Embedded,
}

/// A stop request to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Continue.
    No,
    /// Take nothing new, finish and commit what runs.
    Finish,
    /// As `Finish`, but hand back what has not ended after a while.
    Drain,
}

/// The configuration of a worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The queue it serves.
    pub queue: QueueName,
    /// Name of the process incarnation.
    pub owner: String,
    /// Choices that each device holds at once: what its engine runs, and a few prepared ones.
    pub slots: usize,
    /// Length of a lease; leases are renewed three times as often.
    pub lease: Duration,
    /// How long a drain waits for running jobs before it hands them back.
    pub drain: Duration,
    /// How long one step may run before its engine counts as hung.
    pub step_limit: Duration,
    /// How the dispatcher is filled.
    pub mode: Mode,
    /// The instruction set of CPU kernels, for display.
    pub isa: String,
}

/// Results that were committed together.
#[derive(Debug, Clone, Default)]
pub struct Committed {
    /// Each job and its new state.
    pub settled: Vec<(JobId, JobState)>,
    /// Tokens of the completed jobs.
    pub usage: Usage,
}

/// An engine and the name of its device.
#[derive(Debug)]
pub struct Device {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// The engine; all engines of a worker have the same numerics class.
    pub engine: Engine,
}

/// The reason why a worker ended before its work was done. Leases of the claims it still holds
/// expire.
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
    /// A step does not end. Claims were handed back; the process should exit, since the thread may
    /// never end.
    #[error("the engine on {device} hangs: one step has run for more than {} s", .limit.as_secs_f32())]
    EngineHangs {
        /// The device that runs the step.
        device: String,
        /// How long a step may run.
        limit: Duration,
    },
    /// A device cannot be used any more in this process. All claims were handed back; the process
    /// should exit.
    #[error("{device}: {error}")]
    DeviceLost {
        /// The lost device.
        device: String,
        /// Its last error.
        #[source]
        error: Arc<StepError>,
    },
    /// An engine's thread could not be started.
    #[error("cannot start an engine's thread: {0}")]
    Thread(#[source] std::io::Error),
}

/// A worker, ready to run.
pub struct Worker {
    /// The durable state of all jobs.
    pub store: Arc<dyn Store>,
    /// Delivers the jobs to run.
    pub dispatcher: Arc<dyn Dispatcher>,
    /// Receives heartbeats and answers with directives; `None` for an embedded worker.
    pub operations: Option<Arc<dyn Operations>>,
    /// Receives the events of streaming jobs.
    pub events: Option<Arc<dyn Events>>,
    /// The model that answers.
    pub served: Arc<ServedModel>,
    /// The configuration.
    pub config: WorkerConfig,
    /// Receives every commit. While it is full, further results wait for their commit.
    pub committed: Option<mpsc::Sender<Committed>>,
    /// Metrics, updated while the worker runs.
    pub metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// Runs on these devices, at least one, until the work is done ([`Mode::Embedded`]) or `stop` asks
    /// for a drain.
    ///
    /// # Errors
    /// See the variants of [`WorkerError`] for what becomes of the claims.
    pub async fn run(
        self,
        devices: Vec<Device>,
        stop: watch::Receiver<Stop>,
    ) -> Result<(), WorkerError> {
        let presence = self.appear();
        let result = presence.work(devices, &Turns::default(), stop).await;
        presence.leave().await;
        result
    }

    /// Starts what a worker does with engines or without.
    pub(crate) fn appear(mut self) -> Presence {
        self.measure_calls();
        Presence::start(self)
    }

    /// Records the time of every call from here on.
    fn measure_calls(&mut self) {
        let calls = &self.metrics.calls;
        self.store = Arc::new(MeasuredStore::new(Arc::clone(&self.store), calls));
        self.dispatcher = Arc::new(MeasuredDispatcher::new(Arc::clone(&self.dispatcher), calls));
        if let Some(operations) = &mut self.operations {
            *operations = Arc::new(MeasuredStore::new(Arc::clone(operations), calls));
        }
    }
}
