//! Inputs and commands of the [`Core`](super::state::Core).

use tritmill_engine::Request;
use tritmill_queue::{
    Claim, ClaimRef, Delivery, FinishedAttempt, JobEvent, JobId, Outcome, Priority, Settled,
    store::workers::Directive,
};

use crate::{
    engine_thread::Report,
    translate::Work,
    worker::{committed::Committed, error::WorkerError},
};

/// The result of a call of store or dispatcher.
pub(in crate::worker) type Answer<T> = Result<T, WorkerError>;

/// Something that happened.
#[derive(Debug)]
pub(in crate::worker) enum Input {
    /// Time passed.
    Tick,
    /// A directive from operators.
    Directive(Directive),
    /// The process was asked to end.
    Drain,
    /// The worker makes room for another one.
    Finish,
    /// A report of a device's engine.
    Report(usize, Report),
    /// The thread of a device's engine died.
    EngineStopped(usize),
    /// An engine has too many unread commands to take this request.
    NotSubmitted(ClaimRef),
    /// An engine has too many unread commands to take this cancel.
    NotCancelled(ClaimRef),
    /// The numbers of the steps that run now, by device. Sent [`CHECKS`](super::watchdog::CHECKS)
    /// times within the step limit.
    Steps(Vec<Option<u64>>),
    /// Whether an embedded worker has nothing left to do.
    Checked(Answer<bool>),
    /// The answer to [`Command::Pull`].
    Pulled(Pulled),
    /// The answer to [`Command::Claim`].
    Claimed(Answer<Vec<Claim>>),
    /// The answer to [`Command::Prepare`].
    Prepared(Vec<Prepared>),
    /// The answer to [`Command::Commit`].
    Committed(Answer<Vec<Settled>>),
    /// The answer to [`Command::Save`].
    Saved(Answer<()>),
    /// The answer to [`Command::Acknowledge`].
    Acknowledged(Answer<()>),
    /// The answer to [`Command::Release`].
    Released(Answer<()>),
    /// The answer to [`Command::Renew`]: the claims that are no longer valid.
    Renewed(Answer<Vec<ClaimRef>>),
}

/// Something to do. Each call of store or dispatcher is answered by one input, whatever happens; at
/// most one call of each kind runs at a time.
#[derive(Debug)]
pub(in crate::worker) enum Command {
    /// Check whether an embedded worker has nothing left to do, and queue what has become due.
    Check,
    /// Pull jobs.
    Pull(PullPlan),
    /// Drop the current pull, which is then not answered. What it received is delivered again.
    CancelPull,
    /// Claim these jobs under this claim id.
    Claim(Vec<JobId>, i64),
    /// Turn these claims into requests.
    Prepare(Vec<Claim>),
    /// Give a request to an engine.
    Submit(Submission),
    /// Cancel a request in the engine of a device.
    Cancel(usize, ClaimRef),
    /// Record these results and hand these claims back.
    Commit(Commit),
    /// Save the tokens of running answers.
    Save(Vec<(ClaimRef, Vec<u32>)>),
    /// Acknowledge deliveries.
    Acknowledge(Vec<Delivery>),
    /// Hand deliveries back to the dispatcher.
    Release(Vec<Delivery>),
    /// Renew the leases of these claims.
    Renew(Vec<ClaimRef>),
    /// Keep other workers from reclaiming these deliveries. Not answered.
    RenewDeliveries(Vec<Delivery>),
    /// Publish an event of a streaming job. Not answered.
    Publish(JobId, JobEvent),
    /// Report a commit to the listener, if any. Not answered.
    Report(Committed),
    /// Do not wait for the thread of this device. Not answered.
    Abandon(usize),
    /// End the worker. The last command.
    Exit(Result<(), WorkerError>),
}

/// How to pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::worker) struct PullPlan {
    /// Maximum number of deliveries.
    pub max: usize,
    /// The only priority to pull, without a wait.
    pub only: Option<Priority>,
    /// Whether to take over deliveries of dead workers instead of new ones.
    pub reclaim: bool,
    /// The position of an embedded worker, which fills its dispatcher before the pull.
    pub feed: Option<Feed>,
}

/// Position up to which an embedded worker has fed its dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::worker) struct Feed {
    /// Last job fed.
    pub cursor: Option<JobId>,
    /// Whether the store had nothing queued after the cursor.
    pub fed_all: bool,
    /// Whether the dispatcher is empty as well.
    pub is_dry: bool,
}

/// The result of a pull and of the feeding before it.
#[derive(Debug)]
pub(in crate::worker) struct Pulled {
    pub feed: Option<Feed>,
    pub deliveries: Answer<Vec<Delivery>>,
}

/// A claim, whether its job streams, and its work for the engine, or the outcome of a job that has none.
#[derive(Debug)]
pub(in crate::worker) struct Prepared {
    pub held: ClaimRef,
    pub stream: bool,
    pub work: Result<Work, Box<Outcome>>,
}

/// The requests of a job for the engine of a device.
#[derive(Debug)]
pub(in crate::worker) struct Submission {
    pub device: usize,
    pub held: ClaimRef,
    pub requests: Vec<Request>,
    /// Whether to report text as it is generated.
    pub stream: bool,
}

/// What to write to the store about claims that ended.
#[derive(Debug, Clone, Default)]
pub(in crate::worker) struct Commit {
    /// Results to record.
    pub finished: Vec<FinishedAttempt>,
    /// Claims to hand back.
    pub back: Vec<ClaimRef>,
    /// Claims to hand back whose jobs may have broken the engine.
    pub suspects: Vec<ClaimRef>,
}
