//! The store of the fast mode: one queue in Redis alone.
//!
//! Jobs, leases and results are in the same Redis as the dispatcher's entries, under the same hash tag: a
//! queue is one cluster slot. Every state change is one script (`redis/*.lua`; `store.lua` lists the keys),
//! and a submission is one script that records a chunk of jobs and adds their entries. Times are those of
//! Redis (`TIME`).
//!
//! **What may be lost.** This store is as durable as its Redis. With `appendonly yes` and `appendfsync
//! everysec` a crash loses about the last second: jobs accepted and results written in it. A failover loses
//! what the replica had not received. Without an append-only file a crash loses everything since the last
//! snapshot, or everything. Losses are consistent: a job is without its entry for at most one round of a
//! reconciler, and a job with a lost result runs again or is lost as well. A job that Redis still has never
//! gets two results. Redis must not evict (`maxmemory-policy noeviction`, see [`RedisStore::check`]).
//!
//! A queue is either fast or journalled: workers of the other mode would take its entries for finished
//! jobs. Finished jobs are kept for a retention and then expire. [`super::Operations`] is not available:
//! no second numerics class, pauses, heartbeats, replays or purges; a dead letter is a failed job with its
//! errors until it expires.
//!
//! See also `redis/record.rs` for the encoding of a job.

mod accept;
mod manage;
mod record;
mod scripts;

use std::{fmt, sync::Arc, time::Duration};

pub use accept::AcceptError;
use async_trait::async_trait;
pub use manage::RedisConfigError;
use redis::{FromRedisValue, RedisError};

use super::{
    Claim, ClaimRef, Claimant, Clock, FinishedAttempt, FinishedJob, JobRecord, Progress,
    Reconciled, Settled, Store, StoreError,
    attempts::{self, AWAY_AFTER, AWAY_LEASE, lease_lost},
};
use crate::{
    dispatch::{BacklogLimit, Connections, Entry, keys, scripts::Script},
    job::{Job, JobId, JobState, QueueName, Tenant, Timestamp},
    outcome::{Completion, JobError, Outcome},
    wire,
};

/// How long finished jobs are kept by default.
pub const FAST_RETENTION: Duration = Duration::from_secs(86_400);
/// Jobs of one script: a few milliseconds of Redis's time.
const CHUNK: usize = 512;
/// Maximum number of jobs of one kind that one script moves.
const RECONCILE_MAX: u64 = 512;

/// Id, `PRIORITY:TENANT` and cost of a job.
type Row = (String, String, u32);

/// The jobs of one queue in Redis. Cheap to clone.
#[derive(Clone)]
pub struct RedisStore {
    connections: Arc<Connections>,
    queue: QueueName,
    prefix: String,
    limit: BacklogLimit,
    retention: Duration,
    clock: Option<Clock>,
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("connections", &self.connections)
            .field("queue", &self.queue)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

fn unavailable(error: RedisError) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}

/// Arguments of a script. The first is always the time.
struct Arguments(Vec<Vec<u8>>);

impl Arguments {
    fn push(&mut self, argument: impl Into<Vec<u8>>) {
        self.0.push(argument.into());
    }

    fn number(&mut self, number: impl fmt::Display) {
        self.push(number.to_string());
    }

    fn held(&mut self, held: ClaimRef) {
        self.push(format!("{}:{}", held.id, record::raw_epoch(held)));
    }
}

/// Returns the items at these positions.
fn at<T: Copy>(items: &[T], positions: Vec<usize>) -> Vec<T> {
    positions.into_iter().filter_map(|position| items.get(position).copied()).collect()
}

impl RedisStore {
    pub(crate) fn new(
        connections: Arc<Connections>,
        queue: QueueName,
        limit: BacklogLimit,
        retention: Duration,
    ) -> Self {
        let (prefix, clock) = (keys::prefix(&queue), None);
        let retention = retention.max(Duration::from_millis(1));
        Self { connections, queue, prefix, limit, retention, clock }
    }

    /// Replaces the clock, for tests.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// Returns the queue of this store.
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    fn arguments(&self) -> Arguments {
        let now = self.clock.as_ref().map_or_else(String::new, |clock| clock().0.to_string());
        Arguments(vec![now.into_bytes()])
    }

    /// Converts rows of the scripts to entries.
    fn entries(&self, rows: Vec<Row>) -> Result<Vec<Entry>, StoreError> {
        let entry = |(id, place, cost): Row| {
            let id = id.parse().map_err(|error| record::damaged("job id", error))?;
            let (priority, tenant) = keys::parse_place(&place)
                .ok_or_else(|| record::damaged("place", place.escape_debug()))?;
            let (queue, tenant) = (self.queue.clone(), Tenant(tenant));
            // Jobs of the fast mode have no shards.
            Ok(Entry { id, queue, priority, tenant, cost, shard_key: 0 })
        };
        rows.into_iter().map(entry).collect()
    }

    fn with_retention(&self) -> Arguments {
        let mut arguments = self.arguments();
        arguments.number(self.retention.as_millis());
        arguments
    }

    async fn release(&self, held: &[ClaimRef], suspects: bool) -> Result<Vec<JobId>, StoreError> {
        let mut arguments = self.arguments();
        arguments.number(u8::from(suspects));
        for held in held {
            arguments.push(format!("{}:{}", held.id, record::tag(held.claim_id)));
        }
        let back = at(held, self.run(&scripts::HAND_BACK, &arguments).await?);
        Ok(back.into_iter().map(|held| held.id).collect())
    }

    /// Runs a script, again if its connection broke: all scripts are idempotent.
    async fn run<T: FromRedisValue>(
        &self,
        script: &Script,
        arguments: &Arguments,
    ) -> Result<T, StoreError> {
        self.connections.run_again(script, &self.prefix, &arguments.0).await.map_err(unavailable)
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        let arguments = self.submission(jobs, None)?;
        self.run::<redis::Value>(&scripts::SUBMIT, &arguments).await.map(drop)
    }

    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        let mut arguments = self.arguments();
        arguments.number(by.lease.as_millis());
        arguments.number(record::tag(by.claim_id));
        ids.iter().for_each(|id| arguments.number(id));
        type Row = (usize, i64, u32, u8, i64, Vec<u8>, Option<Vec<u8>>);
        let rows: Vec<Row> = self.run(&scripts::CLAIM, &arguments).await?;
        let claim = |(position, raw, attempts, alone, left, value, checkpoint): Row| {
            let expires_in = u64::try_from(left).ok().map(Duration::from_millis);
            let (epoch, alone) = (record::epoch(raw), alone == 1);
            match record::decode_job(&value) {
                Ok(job) => {
                    let claim_id = by.claim_id;
                    Some(Claim { job, epoch, claim_id, attempts, alone, expires_in, checkpoint })
                }
                Err(error) => {
                    // The job's leases expire until its attempts are used up; other jobs are not
                    // delayed.
                    let job = ids.get(position).map(ToString::to_string).unwrap_or_default();
                    tracing::error!(job, %error, "a claimed job cannot be read");
                    None
                }
            }
        };
        Ok(rows.into_iter().filter_map(claim).collect())
    }

    async fn renew(&self, held: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError> {
        let mut arguments = self.arguments();
        arguments.number(lease.as_millis());
        held.iter().for_each(|held| arguments.held(*held));
        Ok(at(held, self.run(&scripts::RENEW, &arguments).await?))
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        let mut arguments = self.arguments();
        for (held, bytes) in saved {
            arguments.held(*held);
            arguments.push(bytes.as_slice());
        }
        let held: Vec<ClaimRef> = saved.iter().map(|(held, _)| *held).collect();
        Ok(at(&held, self.run(&scripts::CHECKPOINT, &arguments).await?))
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        let mut arguments = self.with_retention();
        arguments.number(attempts::BACKOFF_BASE.as_millis());
        arguments.number(attempts::BACKOFF_MAX.as_millis());
        arguments.number(attempts::BACKOFF_DOUBLINGS_MAX);
        for FinishedAttempt { claim: held, outcome, .. } in finished {
            arguments.held(*held);
            // The script decides between retrying and failed, since it reads the number of
            // attempts.
            let verdict = attempts::verdict(outcome, 0, u32::MAX);
            arguments.push([record::letter(verdict)]);
            arguments.push(wire::encode(outcome));
            match outcome {
                Outcome::Completed(Completion { usage, .. }) => {
                    arguments.number(usage.prompt_tokens);
                    arguments.number(usage.completion_tokens);
                }
                Outcome::Error(error) => {
                    arguments.push(wire::encode(error));
                    arguments.number(attempts::jitter(held.id));
                }
                Outcome::Expired => {
                    arguments.push("");
                    arguments.number(0);
                }
            }
        }
        let letters: Vec<u8> = self.run(&scripts::FINISH, &arguments).await?;
        let settle = |(finished, letter): (&FinishedAttempt, u8)| {
            Some(Settled { id: finished.claim.id, state: record::state(letter)? })
        };
        Ok(finished.iter().zip(letters).filter_map(settle).collect())
    }

    async fn hand_back(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        self.release(held, false).await
    }

    async fn hand_back_suspects(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        self.release(held, true).await
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        let mut cancelled = Vec::new();
        for chunk in ids.chunks(CHUNK) {
            let mut arguments = self.with_retention();
            chunk.iter().for_each(|id| arguments.number(id));
            cancelled.extend(at(chunk, self.run(&scripts::CANCEL, &arguments).await?));
        }
        Ok(cancelled)
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        if let Some(clock) = &self.clock {
            return Ok(clock());
        }
        let (seconds, micros): (i64, i64) =
            self.connections.query(&redis::cmd("TIME")).await.map_err(unavailable)?;
        Ok(Timestamp(seconds * 1000 + micros / 1000))
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        let mut arguments = self.with_retention();
        arguments.number(RECONCILE_MAX);
        arguments.number(AWAY_AFTER.as_millis());
        arguments.number(AWAY_LEASE.as_millis());
        arguments.push(wire::encode(&lease_lost()));
        arguments.push(wire::encode(&Outcome::Error(lease_lost())));
        arguments.push(wire::encode(&Outcome::Expired));
        let mut done = Reconciled::default();
        loop {
            let (moved, more, queued): (u64, u8, Vec<Row>) =
                self.run(&scripts::RECONCILE, &arguments).await?;
            let queued: Vec<Entry> = self.entries(queued)?;
            done.extend(moved, queued);
            if more == 0 {
                return Ok(done);
            }
        }
    }

    /// Does not return accepted jobs: their entries were added together with them, in the same Redis, and
    /// are lost only if another program deletes them.
    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        if *queue != self.queue {
            return Ok(Vec::new());
        }
        let mut arguments = self.arguments();
        arguments.push(after.map_or_else(String::new, |id| id.to_string()));
        arguments.number(limit);
        self.entries(self.run(&scripts::QUEUED, &arguments).await?)
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(format!("{}:job:{id}", self.prefix));
        let value: Option<Vec<u8>> = self.connections.query(&get).await.map_err(unavailable)?;
        let Some(value) = value else { return Ok(None) };
        let mut record = record::decode(&value)?;
        if record.attempts > 0 {
            let mut list = redis::cmd("LRANGE");
            list.arg(format!("{}:errors:{id}", self.prefix)).arg(0).arg(-1);
            let errors: Vec<Vec<u8>> = self.connections.query(&list).await.map_err(unavailable)?;
            let decode = |bytes: &Vec<u8>| {
                wire::decode::<JobError>(bytes).map_err(|error| record::damaged("error", error))
            };
            record.errors = errors.iter().map(decode).collect::<Result<_, _>>()?;
        }
        Ok(Some(record))
    }

    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        let mut ended = Vec::new();
        for chunk in ids.chunks(CHUNK) {
            let mut arguments = self.arguments();
            chunk.iter().for_each(|id| arguments.number(id));
            let rows: Vec<(usize, String, Vec<u8>)> = self.run(&scripts::ENDED, &arguments).await?;
            for (position, letter, outcome) in rows {
                let state = letter.bytes().next().and_then(record::state);
                let (Some(id), Some(state)) = (chunk.get(position), state) else {
                    return Err(record::damaged("state", letter));
                };
                let outcome = record::decode_outcome(&outcome)?;
                ended.push(FinishedJob { id: *id, state, outcome });
            }
        }
        Ok(ended)
    }

    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        let progress = self.progress(Some(queue)).await?;
        Ok(progress.scheduled + progress.queued + progress.running + progress.retrying)
    }

    /// Counts finished jobs since the queue began, including jobs that are no longer kept.
    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        let mut progress = Progress::default();
        if queue.is_some_and(|queue| *queue != self.queue) {
            return Ok(progress);
        }
        let counts: [u64; 10] = self.run(&scripts::PROGRESS, &self.arguments()).await?;
        let [states @ .., prompt_tokens, completion_tokens] = counts;
        for (state, count) in JobState::ALL.into_iter().zip(states) {
            *progress.counter(state) = count;
        }
        (progress.prompt_tokens, progress.completion_tokens) = (prompt_tokens, completion_tokens);
        Ok(progress)
    }
}
