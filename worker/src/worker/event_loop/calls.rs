//! Calls of store and dispatcher on their way, one of a kind at a time: two commits could swap, and
//! two pulls would share the same free slots.

use std::{collections::HashMap, future::Future, pin::Pin, time::Duration};

use tokio::time::{Instant, timeout};
use tritmill_engine::Request;
use tritmill_queue::{Claim, ClaimRef, Delivery, JobError, JobId, Settled, StoreError};

use crate::worker::{WorkerError, in_flight::EndedClaim};

/// A call on its way, if there is one.
type Call<'a, T> = Option<Pin<Box<dyn Future<Output = T> + Send + 'a>>>;

/// How far an embedded worker has fed its dispatcher.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Feed {
    /// Last job fed.
    pub cursor: Option<JobId>,
    /// The store had nothing queued beyond the cursor.
    pub fed_all: bool,
    /// And the dispatcher nothing left.
    pub is_dry: bool,
}

/// What a pull brought, and the feeding before it.
pub(super) struct Pulled {
    pub feed: Feed,
    pub deliveries: Result<Vec<Delivery>, WorkerError>,
}

/// What a claim brought.
pub(super) struct Claimed {
    /// What was to be claimed.
    pub deliveries: Vec<Delivery>,
    /// Before the store was asked: leases run at least from here.
    pub claimed_at: Instant,
    /// What was.
    pub claims: Result<Vec<Claim>, WorkerError>,
}

/// A claim, whether it streams, and its request or why it can have none.
pub(super) struct Prepared {
    pub held: ClaimRef,
    pub stream: bool,
    pub request: Result<Request, JobError>,
}

/// Tokens of running answers by claim.
pub(super) type Tokens = HashMap<ClaimRef, Vec<u32>>;
type Settling = Result<Vec<Settled>, WorkerError>;

/// The answer to one of [`Calls`].
pub(super) enum Answer {
    Checked(Result<bool, WorkerError>),
    Pulled(Pulled),
    Claimed(Claimed),
    Prepared(Vec<Prepared>),
    Committed(Vec<EndedClaim>, Settling),
    Saved(Tokens, Result<(), WorkerError>),
    Acknowledged(Result<usize, WorkerError>),
}

/// See the module.
#[derive(Default)]
pub(super) struct Calls<'a> {
    /// Whether an embedded run has nothing left.
    pub check: Call<'a, Result<bool, WorkerError>>,
    pub pull: Call<'a, Pulled>,
    pub claim: Call<'a, Claimed>,
    pub prepare: Call<'a, Vec<Prepared>>,
    pub commit: Call<'a, (Vec<EndedClaim>, Settling)>,
    pub save: Call<'a, (Tokens, Result<(), WorkerError>)>,
    pub acknowledge: Call<'a, Result<usize, WorkerError>>,
}

impl Calls<'_> {
    /// The next answer; none ever comes while nothing was asked. May be dropped at any time.
    pub async fn next(&mut self) -> Answer {
        tokio::select! {
            (done, settled) = answer(&mut self.commit) => Answer::Committed(done, settled),
            claimed = answer(&mut self.claim) => Answer::Claimed(claimed),
            prepared = answer(&mut self.prepare) => Answer::Prepared(prepared),
            acknowledged = answer(&mut self.acknowledge) => Answer::Acknowledged(acknowledged),
            (saved, result) = answer(&mut self.save) => Answer::Saved(saved, result),
            pulled = answer(&mut self.pull) => Answer::Pulled(pulled),
            done = answer(&mut self.check) => Answer::Checked(done),
        }
    }

    /// Whether an answer may bring work: the free slots are spoken for.
    pub fn may_bring_work(&self) -> bool {
        self.check.is_some()
            || self.pull.is_some()
            || self.claim.is_some()
            || self.prepare.is_some()
    }

    /// Whether an answer about claims or entries of this worker is awaited.
    pub fn involve_claims(&self) -> bool {
        self.claim.is_some()
            || self.prepare.is_some()
            || self.commit.is_some()
            || self.acknowledge.is_some()
    }
}

async fn answer<T>(call: &mut Call<'_, T>) -> T {
    let Some(on_its_way) = call else { return std::future::pending().await };
    let answer = on_its_way.await;
    *call = None;
    answer
}

/// Store or dispatcher took too long.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
struct NoAnswer(Duration);

/// A call's result, or an error when it takes too long, whatever becomes of it at the server.
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
