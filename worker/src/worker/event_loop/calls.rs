//! Calls of store and dispatcher that have no answer yet. At most one call of each kind runs at a
//! time: two commits could be reordered, and two pulls would count the same free slots.

use std::{collections::HashMap, future::Future, pin::Pin, time::Duration};

use tokio::{
    sync::mpsc::Permit,
    time::{Instant, timeout},
};
use tritmill_engine::Request;
use tritmill_queue::{Claim, ClaimRef, Delivery, JobError, JobId, Settled, StoreError};

use crate::worker::{Committed, WorkerError, in_flight::EndedClaim};

/// A call without an answer, if any.
type Call<'a, T> = Option<Pin<Box<dyn Future<Output = T> + Send + 'a>>>;

/// Position up to which an embedded worker has fed its dispatcher.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Feed {
    /// Last job fed.
    pub cursor: Option<JobId>,
    /// Whether the store had nothing queued after the cursor.
    pub fed_all: bool,
    /// Whether the dispatcher is empty as well.
    pub is_dry: bool,
}

/// The result of a pull and of the feeding before it.
pub(super) struct Pulled {
    pub feed: Feed,
    pub deliveries: Result<Vec<Delivery>, WorkerError>,
}

/// The result of a claim.
pub(super) struct Claimed {
    /// The deliveries to claim.
    pub deliveries: Vec<Delivery>,
    /// Time just before the store was called: leases end no earlier than counted from this time.
    pub claimed_at: Instant,
    /// The claims that succeeded.
    pub claims: Result<Vec<Claim>, WorkerError>,
}

/// A claim, whether its job streams, and its engine request or the reason why the job has no
/// request.
pub(super) struct Prepared {
    pub held: ClaimRef,
    pub stream: bool,
    pub request: Result<Request, JobError>,
}

/// The result of a commit.
pub(super) struct Commit<'a> {
    pub ended: Vec<EndedClaim>,
    pub settled: Result<Vec<Settled>, WorkerError>,
    /// Room for its report, if there is a listener.
    pub permit: Option<Permit<'a, Committed>>,
}

/// Tokens of running answers by claim.
pub(super) type Tokens = HashMap<ClaimRef, Vec<u32>>;

/// The answer to one of [`Calls`].
pub(super) enum Answer<'a> {
    Checked(Result<bool, WorkerError>),
    Pulled(Pulled),
    Claimed(Claimed),
    Prepared(Vec<Prepared>),
    Committed(Commit<'a>),
    Saved(Tokens, Result<(), WorkerError>),
    Acknowledged(Result<usize, WorkerError>),
}

/// One call of each kind.
#[derive(Default)]
pub(super) struct Calls<'a> {
    /// The check whether an embedded worker has no jobs left.
    pub check: Call<'a, Result<bool, WorkerError>>,
    pub pull: Call<'a, Pulled>,
    pub claim: Call<'a, Claimed>,
    pub prepare: Call<'a, Vec<Prepared>>,
    pub commit: Call<'a, Commit<'a>>,
    pub save: Call<'a, (Tokens, Result<(), WorkerError>)>,
    pub acknowledge: Call<'a, Result<usize, WorkerError>>,
}

impl<'a> Calls<'a> {
    /// Returns the next answer; pending while there are no calls. Dropping the future loses
    /// nothing.
    pub async fn next(&mut self) -> Answer<'a> {
        tokio::select! {
            commit = answer(&mut self.commit) => Answer::Committed(commit),
            claimed = answer(&mut self.claim) => Answer::Claimed(claimed),
            prepared = answer(&mut self.prepare) => Answer::Prepared(prepared),
            acknowledged = answer(&mut self.acknowledge) => Answer::Acknowledged(acknowledged),
            (saved, result) = answer(&mut self.save) => Answer::Saved(saved, result),
            pulled = answer(&mut self.pull) => Answer::Pulled(pulled),
            finished = answer(&mut self.check) => Answer::Checked(finished),
        }
    }

    /// Returns whether a call may bring work: the free slots are reserved for it.
    pub fn may_bring_work(&self) -> bool {
        self.check.is_some()
            || self.pull.is_some()
            || self.claim.is_some()
            || self.prepare.is_some()
    }

    /// Returns whether a call about claims or deliveries of this worker has no answer yet.
    pub fn involve_claims(&self) -> bool {
        self.claim.is_some()
            || self.prepare.is_some()
            || self.commit.is_some()
            || self.acknowledge.is_some()
    }
}

async fn answer<T>(call: &mut Call<'_, T>) -> T {
    let Some(pending) = call else { return std::future::pending().await };
    let answer = pending.await;
    *call = None;
    answer
}

/// Store or dispatcher took too long.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
struct NoAnswer(Duration);

/// Returns the result of a call, or an error after `limit`; the server may still execute the call.
pub(super) async fn within<T, E>(
    limit: Duration,
    call: impl Future<Output = Result<T, E>>,
) -> Result<T, WorkerError>
where
    WorkerError: From<E>,
{
    match timeout(limit, call).await {
        Ok(result) => result.map_err(WorkerError::from),
        Err(_) => Err(StoreError::Unavailable(Box::new(NoAnswer(limit))).into()),
    }
}
