//! Answers a batch file, with a worker in this process or through a remote queue.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tritmill_client::{
    BatchFile, BatchProgress, Client, Identity, Notice, Relay, RelayProgress, Settings,
};
use tritmill_queue::{JobState, QueueName, Store, Usage, dispatch::MemoryDispatcher};
use tritmill_worker::{Committed, Device, Metrics, Mode, ServedModel, Stop, Worker, WorkerConfig};

/// Maximum entries in the dispatcher; the store has the others.
const DISPATCH_LIMIT: usize = 1 << 16;
/// Lease of the jobs. The file is locked for other processes, so it need not expire.
const LEASE: Duration = Duration::from_secs(3600);
/// Maximum number of commits with results that are not written to the output yet.
const COMMITS_MAX: usize = 64;
/// Time for running jobs to finish at a stop, before they are handed back.
const DRAIN: Duration = Duration::from_secs(10);

/// Time after which a step counts as hung, far longer than any step takes.
const STEP_LIMIT: Duration = Duration::from_secs(600);

/// The worker or queue that answers.
pub enum Answerer {
    /// A worker in this process.
    Local {
        /// The model.
        served: ServedModel,
        /// Devices with their engines.
        devices: Vec<Device>,
        /// Concurrent sequences of each device.
        max_sequences: usize,
    },
    /// The workers of a queue.
    Remote {
        /// Client of the queue.
        client: Client,
        /// Maximum attempts of each line.
        attempts_max: u32,
    },
}

impl Answerer {
    /// Returns what answers depend on besides the line. Of a remote queue only the name is known; its
    /// operator decides on the classes of its workers.
    pub fn identity(&self, queue: &QueueName) -> Identity {
        let (numerics_class, limits) = match self {
            Self::Local { served, .. } => {
                (served.numerics_class().to_owned(), served.limits().to_string())
            }
            Self::Remote { .. } => {
                (format!("queue {queue}"), "the limits of its workers".to_owned())
            }
        };
        Identity { model: queue.model.clone(), numerics_class, limits }
    }
}

/// An update of a run.
#[derive(Debug)]
pub enum Update {
    /// Lines and bytes of the input read so far.
    Reading(u64, u64),
    /// A message for the user.
    Notice(Notice),
    /// Progress, after the input is read and after every commit.
    Progress(BatchProgress),
}

/// Answers the file. Ends early if `stop` changes, and keeps the answers so far.
pub async fn answer(
    settings: Settings,
    answerer: Answerer,
    stop: watch::Receiver<Stop>,
    mut report: impl FnMut(Update),
) -> anyhow::Result<BatchProgress> {
    let queue = settings.queue.clone();
    let mut file = BatchFile::open(settings).await?;
    file.take_notices().into_iter().for_each(|notice| report(Update::Notice(notice)));
    let read = file
        .read(|lines, bytes| {
            report(Update::Reading(lines, bytes));
            *stop.borrow() == Stop::No
        })
        .await?;
    let Some(counts) = read else { return Ok(BatchProgress::default()) };
    file.catch_up().await?;
    file.take_notices().into_iter().for_each(|notice| report(Update::Notice(notice)));
    let mut progress = BatchProgress::from(counts);
    report(Update::Progress(progress));

    let store: Arc<dyn Store> = Arc::new(file.store().clone());
    let (committed, mut commits) = mpsc::channel::<Committed>(COMMITS_MAX);
    let (relayed, mut relays) = mpsc::channel::<RelayProgress>(COMMITS_MAX);
    let working: JoinHandle<anyhow::Result<()>> = match answerer {
        Answerer::Local { served, devices, max_sequences } => {
            drop(relayed);
            let worker = worker(store, served, queue, max_sequences, committed);
            tokio::spawn(async move { Ok(worker.run(devices, stop).await?) })
        }
        Answerer::Remote { client, attempts_max } => {
            drop(committed);
            let relay = Relay::new(store, client, queue, attempts_max, relayed);
            tokio::spawn(async move { Ok(relay.run(stopped(stop)).await?) })
        }
    };
    loop {
        let (settled, usage): (Vec<JobState>, Usage) = tokio::select! {
            Some(Committed { settled, usage }) = commits.recv() => {
                (settled.into_iter().map(|(_, state)| state).collect(), usage)
            }
            Some(RelayProgress { settled, usage }) = relays.recv() => (settled, usage),
            else => break,
        };
        progress.add(settled, usage);
        file.follow().await?;
        report(Update::Progress(progress));
    }
    working.await??;
    file.close().await?.into_iter().for_each(|notice| report(Update::Notice(notice)));
    Ok(progress)
}

/// Resolves when the run is to stop; never, if the sender is dropped.
async fn stopped(mut stop: watch::Receiver<Stop>) {
    if stop.wait_for(|stop| *stop != Stop::No).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn worker(
    store: Arc<dyn Store>,
    served: ServedModel,
    queue: QueueName,
    max_sequences: usize,
    committed: mpsc::Sender<Committed>,
) -> Worker {
    let config = WorkerConfig {
        // Only shown on the pages of a service.
        isa: String::new(),
        queue,
        owner: format!("embedded-{}", std::process::id()),
        // More than the running sequences, so that a free slot is filled before the commit.
        slots: max_sequences + max_sequences.div_ceil(4),
        lease: LEASE,
        drain: DRAIN,
        step_limit: STEP_LIMIT,
        // Its store has no retention.
        mode: Mode::Embedded,
    };
    Worker {
        store,
        dispatcher: Arc::new(MemoryDispatcher::new(DISPATCH_LIMIT)),
        operations: None,
        events: None,
        served: Arc::new(served),
        config,
        committed: Some(committed),
        metrics: Arc::new(Metrics::default()),
    }
}
