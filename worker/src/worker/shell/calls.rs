//! Calls of store and dispatcher, and the preparation of requests.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tritmill_queue::{
    Claim, Claimant, Delivery, ErrorKind, FinishedAttempt, JobError, Outcome, Pull, Settled, Store,
    StoreError,
};

use super::CallEnd;
use crate::{
    served::ServedModel,
    translate,
    worker::{
        core::{
            io::{Answer, Command, Commit, Feed, Input, Prepared, PullPlan, Pulled},
            renewal_period,
        },
        error::WorkerError,
        setup::Worker,
    },
};

/// Jobs fed to the dispatcher at a time when it runs low.
const FEED_COUNT: u32 = 256;
/// Longest wait for the first delivery of a pull.
const PULL_WAIT: Duration = Duration::from_secs(5);
/// Wait before checking again whether a retrying job is due.
const IDLE_WAIT: Duration = Duration::from_millis(50);
/// Limit for turning one prompt into tokens.
const PREPARE_LIMIT: Duration = Duration::from_secs(60);

/// Store or dispatcher took too long.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {0:?}")]
struct NoAnswer(Duration);

/// Returns the result of a call, or an error after `limit`; the server may still execute the call.
async fn within<T, E>(limit: Duration, call: impl Future<Output = Result<T, E>>) -> Answer<T>
where
    WorkerError: From<E>,
{
    match timeout(limit, call).await {
        Ok(result) => result.map_err(WorkerError::from),
        Err(_) => Err(StoreError::Unavailable(Box::new(NoAnswer(limit))).into()),
    }
}

/// Runs a call; returns its answer.
pub(super) async fn run(worker: Arc<Worker>, limit: Duration, command: Command) -> Input {
    let Worker { store, dispatcher, config, .. } = &*worker;
    match command {
        Command::Check => Input::Checked(check(&worker).await),
        Command::Claim(ids, claim_id) => {
            let queue = Some(&config.queue);
            let by = Claimant { owner: &config.owner, lease: config.lease, claim_id, queue };
            Input::Claimed(within(limit, store.claim(&ids, by)).await)
        }
        Command::Prepare(claims) => {
            Input::Prepared(prepare(&worker.served, claims, PREPARE_LIMIT).await)
        }
        Command::Save(tokens) => {
            let encode = |(held, tokens): &(_, Vec<u32>)| {
                (*held, translate::checkpoint(&worker.served, tokens))
            };
            let checkpoints: Vec<_> = tokens.iter().map(encode).collect();
            // The next renewal finds the claims that are lost.
            let saved = within(limit, store.checkpoint(&checkpoints)).await;
            Input::Saved(saved.map(drop))
        }
        Command::Acknowledge(deliveries) => {
            let call = dispatcher.acknowledge(&config.owner, &deliveries);
            Input::Acknowledged(within(limit, call).await.map(drop))
        }
        Command::Release(deliveries) => {
            let call = dispatcher.hand_back(&config.owner, &deliveries);
            Input::Released(within(limit, call).await.map(drop))
        }
        Command::Renew(claims) => {
            let limit = renewal_period(config.lease);
            Input::Renewed(within(limit, store.renew(&claims, config.lease)).await)
        }
        Command::RenewDeliveries(deliveries) => {
            renew_deliveries(&worker, &deliveries).await;
            Input::Tick
        }
        Command::Pull(_)
        | Command::CancelPull
        | Command::Submit(_)
        | Command::Cancel(..)
        | Command::Commit(_)
        | Command::Publish(..)
        | Command::Report(_)
        | Command::Abandon(_)
        | Command::Exit(_) => Input::Tick,
    }
}

/// Pulls jobs.
pub(super) async fn pull(worker: Arc<Worker>, plan: PullPlan) -> Input {
    let Worker { dispatcher, config, .. } = &*worker;
    let pull = Pull {
        queue: &config.queue,
        consumer: &config.owner,
        max: plan.max,
        wait: PULL_WAIT.min(config.lease / 3),
        only: plan.only,
    };
    if let Some(feed) = plan.feed {
        return feed_and_pull(&worker, feed, pull).await;
    }
    let deliveries = match plan.reclaim {
        true => dispatcher.reclaim(pull, config.lease).await,
        false => dispatcher.pull(pull).await,
    };
    Input::Pulled(Pulled { feed: None, deliveries: deliveries.map_err(WorkerError::from) })
}

/// Keeps the dispatcher of an embedded worker filled, and pulls from it.
async fn feed_and_pull(worker: &Worker, mut feed: Feed, pull: Pull<'_>) -> Input {
    let deliveries = async {
        let Worker { store, dispatcher, config, .. } = worker;
        let depth = dispatcher.depth(&config.queue).await?;
        let mut fed = 0;
        if depth < pull.max && !feed.fed_all {
            let entries = store.queued(&config.queue, feed.cursor, FEED_COUNT).await?;
            feed.cursor = entries.last().map(|entry| entry.id).or(feed.cursor);
            (feed.fed_all, fed) = (entries.is_empty(), entries.len());
            dispatcher.enqueue(&entries).await?;
        }
        feed.is_dry = depth + fed == 0;
        if feed.is_dry { Ok(Vec::new()) } else { Ok(dispatcher.pull(pull).await?) }
    };
    let deliveries = deliveries.await;
    Input::Pulled(Pulled { feed: Some(feed), deliveries })
}

/// Checks whether an embedded worker has nothing left, and queues jobs that have become due.
async fn check(worker: &Worker) -> Answer<bool> {
    let Worker { store, config, .. } = worker;
    store.reconcile().await?;
    if store.unfinished(&config.queue).await? == 0 {
        return Ok(true);
    }
    if store.queued(&config.queue, None, 1).await?.is_empty() {
        sleep(IDLE_WAIT).await;
    }
    Ok(false)
}

/// A delivery that is lost here went to another worker, and the store refuses that worker's claim.
async fn renew_deliveries(worker: &Worker, deliveries: &[Delivery]) {
    let limit = renewal_period(worker.config.lease);
    let renewed = worker.dispatcher.renew(&worker.config.owner, deliveries);
    if let Err(error) = within(limit, renewed).await {
        tracing::warn!(%error, "deliveries not renewed");
    }
}

/// Hands claims back and records results, when the listener has room for the report.
pub(super) async fn commit(worker: Arc<Worker>, limit: Duration, commit: Commit) -> CallEnd {
    let permit = match &worker.committed {
        // The receiver may be gone.
        Some(committed) => committed.clone().reserve_owned().await.ok(),
        None => None,
    };
    let store = &worker.store;
    let settled = async {
        if !commit.back.is_empty() {
            within(limit, store.hand_back(&commit.back)).await?;
        }
        if !commit.suspects.is_empty() {
            within(limit, store.hand_back_suspects(&commit.suspects)).await?;
        }
        match commit.finished.as_slice() {
            [] => Ok(Vec::new()),
            finished => record(&**store, limit, finished).await,
        }
    };
    (Input::Committed(settled.await), permit)
}

/// Records results. If the store refuses a value, it gets them one by one, and an error instead of the refused ones.
async fn record(
    store: &dyn Store,
    limit: Duration,
    finished: &[FinishedAttempt],
) -> Answer<Vec<Settled>> {
    match within(limit, store.finish(finished)).await {
        Err(WorkerError::Store(StoreError::InvalidValue { .. })) => {}
        settled => return settled,
    }
    let mut settled = Vec::with_capacity(finished.len());
    for one in finished {
        let error = match within(limit, store.finish(std::slice::from_ref(one))).await {
            Ok(recorded) => {
                settled.extend(recorded);
                continue;
            }
            Err(WorkerError::Store(error @ StoreError::InvalidValue { .. })) => error,
            Err(other) => return Err(other),
        };
        tracing::error!(job = %one.claim.id, %error, "its result is refused by the database");
        let error = JobError::new(ErrorKind::InvalidRequest, "not_storable", error.to_string());
        let instead = FinishedAttempt { outcome: Outcome::Error(error), ..one.clone() };
        match within(limit, store.finish(&[instead])).await {
            Ok(recorded) => settled.extend(recorded),
            // Its lease expires, and it counts as lost.
            Err(WorkerError::Store(StoreError::InvalidValue { .. })) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(settled)
}

/// Turns claims into requests on a thread for blocking work. A prompt that takes longer than `limit`,
/// or panics, is an error of its job alone.
async fn prepare(served: &Arc<ServedModel>, claims: Vec<Claim>, limit: Duration) -> Vec<Prepared> {
    let claims: Arc<[Claim]> = claims.into();
    let mut done = Vec::with_capacity(claims.len());
    while done.len() < claims.len() {
        let (sender, mut receiver) = mpsc::channel(claims.len());
        let (served, rest, first) = (Arc::clone(served), Arc::clone(&claims), done.len());
        tokio::task::spawn_blocking(move || {
            for claim in &rest[first..] {
                let work = translate::work(&served, claim);
                let (held, stream) = (claim.claim_ref(), claim.job.stream);
                if sender.blocking_send(Prepared { held, stream, work }).is_err() {
                    return;
                }
            }
        });
        while let Ok(Some(prepared)) = timeout(limit, receiver.recv()).await {
            done.push(prepared);
        }
        if let Some(claim) = claims.get(done.len()) {
            let (held, stream) = (claim.claim_ref(), claim.job.stream);
            tracing::error!(job = %held.id, "its prompt cannot be prepared");
            done.push(Prepared {
                held,
                stream,
                work: Err(Box::new(Outcome::Error(unprepared(limit)))),
            });
        }
    }
    done
}

fn unprepared(limit: Duration) -> JobError {
    let message = format!("the prompt was not turned into tokens within {} s", limit.as_secs());
    JobError::new(ErrorKind::Engine, "prepare_failed", message)
}
