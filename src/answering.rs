//! A batch file answered: by a worker joined to its store inside this process, or by the workers of
//! a queue elsewhere.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tritmill_client::{
    BatchFile, BatchProgress, Client, Counts, Identity, Notice, Relay, RelayProgress, Settings,
};
use tritmill_queue::{JobState, QueueName, Store, dispatch::MemoryDispatcher};
use tritmill_worker::{Committed, Device, Metrics, Mode, ServedModel, Stop, Worker, WorkerConfig};

/// Entries the dispatcher holds at most; the store holds the rest.
const DISPATCH_LIMIT: usize = 1 << 16;
/// Nobody else can claim while the file is locked, so a lease only has to outlive the process.
const LEASE: Duration = Duration::from_secs(3600);
/// How long a clean stop waits for running jobs before it hands them back.
const DRAIN: Duration = Duration::from_secs(10);

/// Far longer than any step takes; one that runs on has hung.
const STEP_LIMIT: Duration = Duration::from_secs(600);

/// Which files, and whose jobs they become.
#[derive(Debug)]
pub struct Work {
    /// Batch lines; `-` is standard input.
    pub input: PathBuf,
    /// Answers.
    pub output: PathBuf,
    /// Answers in the order of the input.
    pub ordered: bool,
    /// Forget every earlier answer.
    pub restart: bool,
    /// Run lines again that failed though nothing was wrong with them.
    pub retry_failed: bool,
    /// The model and its format, by name.
    pub queue: QueueName,
}

/// Who answers.
pub enum Answerer {
    /// A worker in this process.
    Here {
        /// The model.
        served: ServedModel,
        /// What runs it.
        devices: Vec<Device>,
        /// Sequences that each of them runs at once.
        max_sequences: usize,
    },
    /// The workers of a queue, wherever they are.
    There {
        /// The way to them.
        client: Client,
        /// Attempts that each line has.
        attempts_max: u32,
    },
}

impl Answerer {
    /// What answers depend on besides the line. Of a queue elsewhere only its name is known; its operator
    /// says of which classes its workers are.
    fn numerics_class(&self, queue: &QueueName) -> String {
        match self {
            Self::Here { served, .. } => served.numerics_class().to_owned(),
            Self::There { .. } => format!("queue {queue}"),
        }
    }
}

/// What a run says while it runs.
#[derive(Debug)]
pub enum Update {
    /// Lines and bytes of the input read so far.
    Reading(u64, u64),
    /// Something to tell.
    Notice(Notice),
    /// The input is read, or results were committed.
    Progress(BatchProgress),
}

/// Answers the file. Ends early, with what was done, when `stop` says so.
pub async fn answer(
    work: Work,
    answerer: Answerer,
    stop: watch::Receiver<Stop>,
    mut tell: impl FnMut(Update),
) -> anyhow::Result<BatchProgress> {
    let Work { input, output, ordered, restart, retry_failed, queue } = work;
    let numerics_class = answerer.numerics_class(&queue);
    let identity = Identity { model: queue.model.clone(), numerics_class };
    let queue_of_lines = queue.clone();
    let settings =
        Settings { input, output, ordered, restart, retry_failed, identity, queue: queue_of_lines };
    let mut file = BatchFile::open(settings).await?;
    file.take_notices().into_iter().for_each(|notice| tell(Update::Notice(notice)));
    let read = file
        .read(|lines, bytes| {
            tell(Update::Reading(lines, bytes));
            *stop.borrow() == Stop::No
        })
        .await?;
    let Some(counts) = read else { return Ok(BatchProgress::default()) };
    file.catch_up().await?;
    file.take_notices().into_iter().for_each(|notice| tell(Update::Notice(notice)));
    let mut progress = BatchProgress::from(counts);
    tell(Update::Progress(progress));

    let store: Arc<dyn Store> = Arc::new(file.store().clone());
    let (committed, mut commits) = mpsc::unbounded_channel::<Committed>();
    let (relayed, mut relays) = mpsc::unbounded_channel::<RelayProgress>();
    let working: JoinHandle<anyhow::Result<()>> = match answerer {
        Answerer::Here { served, devices, max_sequences } => {
            drop(relayed);
            let worker = worker(store, served, queue, max_sequences, committed);
            tokio::spawn(async move { Ok(worker.run(devices, stop).await?) })
        }
        Answerer::There { client, attempts_max } => {
            drop(committed);
            let relay = Relay::new(store, client, queue, attempts_max, relayed);
            tokio::spawn(async move { Ok(relay.run(told_to(stop)).await?) })
        }
    };
    loop {
        let (settled, tokens): (Vec<JobState>, u64) = tokio::select! {
            Some(Committed { settled, completion_tokens, .. }) = commits.recv() => {
                (settled.into_iter().map(|(_, state)| state).collect(), completion_tokens)
            }
            Some(RelayProgress { settled, completion_tokens }) = relays.recv() => {
                (settled, completion_tokens)
            }
            else => break,
        };
        progress.add(settled, tokens);
        file.follow().await?;
        tell(Update::Progress(progress));
    }
    working.await??;
    file.close().await?.into_iter().for_each(|notice| tell(Update::Notice(notice)));
    Ok(progress)
}

/// Resolves when the run is to stop; never, if nobody can say so any more.
async fn told_to(mut stop: watch::Receiver<Stop>) {
    if stop.wait_for(|stop| *stop != Stop::No).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn worker(
    store: Arc<dyn Store>,
    served: ServedModel,
    queue: QueueName,
    max_sequences: usize,
    committed: mpsc::UnboundedSender<Committed>,
) -> Worker {
    let config = WorkerConfig {
        // Nobody asks an embedded worker.
        isa: String::new(),
        queue,
        owner: format!("embedded-{}", std::process::id()),
        // A few beyond what runs, so that a freed slot is filled before the commit.
        slots: max_sequences + max_sequences.div_ceil(4),
        lease: LEASE,
        drain: DRAIN,
        step_limit: STEP_LIMIT,
        // Its store has no days to drop.
        mode: Mode::Embedded,
    };
    Worker {
        store,
        dispatcher: Arc::new(MemoryDispatcher::new(DISPATCH_LIMIT)),
        operations: None,
        events: None,
        served: Arc::new(served),
        config,
        committed,
        metrics: Arc::new(Metrics::default()),
    }
}
