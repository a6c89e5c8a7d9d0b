//! The store of the fast mode: Redis alone, for one queue.
//!
//! Jobs, leases and results lie in the Redis that dispatches them, under the same hash tag: a queue is
//! one slot of a cluster. Every move is one script (`redis/*.lua`; `store.lua` lists the keys), and a
//! submission is one script that records a chunk of jobs and adds their entries at once. Times are
//! Redis's (`TIME`).
//!
//! **What may be lost.** This store is as durable as its Redis. With `appendonly yes` and `appendfsync
//! everysec` a crash loses about the last second: jobs accepted and results written in it. A failover
//! loses what the replica had not got. Without an append-only file a crash loses everything since the
//! last snapshot, or everything. What is lost is lost together: a job never comes back without its
//! entry for longer than a reconciler's round, and a result that was lost leaves its job to be run
//! again, or lost with it. Nothing is ever answered twice within what Redis still knows. Redis must not
//! evict (`maxmemory-policy noeviction`, see [`RedisStore::check`]).
//!
//! A queue is either fast or journalled: workers of the other mode would take its entries for jobs that
//! are over. Jobs that are over are kept for a retention and then expire by themselves. There are no
//! [`super::Operations`] here: no second numerics class, pauses, heartbeats, replays or purges; a dead letter is a failed job
//! with its errors until it expires.
//!
//! See also `redis/record.rs` for how a job lies in Redis.

mod accept;
mod record;
mod scripts;

use std::{fmt, sync::Arc, time::Duration};

pub use accept::AcceptError;
use async_trait::async_trait;
use redis::{FromRedisValue, RedisError};

use super::{
    Claim, ClaimRef, Claimant, Clock, FinishedAttempt, FinishedJob, JobRecord, Progress,
    Reconciled, Settled, Store, StoreError,
    attempts::{self, lease_lost},
    classes::ClassError,
};
use crate::{
    dispatch::{BacklogLimit, Connections, Entry, keys, scripts::Script},
    job::{Job, JobId, JobState, QueueName, Tenant, Timestamp},
    outcome::{Completion, JobError, Outcome},
    wire,
};

/// How long jobs that are over are kept when nothing else is said.
pub const FAST_RETENTION: Duration = Duration::from_secs(86_400);
/// Jobs of one script: some milliseconds of Redis's time.
const CHUNK: usize = 512;
/// Jobs of one kind that one script moves.
const RECONCILE_MAX: u64 = 512;

/// Id, `PRIORITY:TENANT` and cost of a job.
type Row = (String, String, u32);

/// The jobs of one queue, in Redis alone. Cheap to clone.
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

/// A Redis that must not be the only place of jobs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisConfigError {
    /// It would drop jobs or results when its memory is full.
    #[error("Redis evicts ({policy}): set maxmemory-policy noeviction")]
    Evicts {
        /// Its `maxmemory-policy`.
        policy: String,
    },
    /// It does not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn unavailable(error: RedisError) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}

/// Arguments of a script, the first of which is always the time.
struct Arguments(Vec<Vec<u8>>);

impl Arguments {
    fn push(&mut self, argument: impl Into<Vec<u8>>) {
        self.0.push(argument.into());
    }

    fn number(&mut self, number: impl fmt::Display) {
        self.push(number.to_string());
    }

    fn held(&mut self, held: ClaimRef) {
        self.push(format!("{}:{}", held.id, held.epoch));
    }
}

/// The items at these positions.
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

    /// The same store on another clock: for tests.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// The queue whose jobs these are.
    pub fn queue(&self) -> &QueueName {
        &self.queue
    }

    /// Whether this Redis is there, and keeps what it is given. What it does not tell is taken for
    /// good: a managed one may hide its settings.
    ///
    /// # Errors
    /// [`RedisConfigError`].
    pub async fn check(&self) -> Result<(), RedisConfigError> {
        let mut command = redis::cmd("INFO");
        command.arg("memory");
        let asked = match self.connections.query::<redis::Value>(&command).await {
            // A connection found broken is replaced.
            Err(_) => self.connections.query(&command).await,
            answer => answer,
        };
        let info = String::from_redis_value(asked.map_err(unavailable)?).unwrap_or_default();
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        match (field("maxmemory"), field("maxmemory_policy")) {
            (Some(bytes), Some(policy)) if bytes != "0" && policy != "noeviction" => {
                Err(RedisConfigError::Evicts { policy: policy.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Whether this Redis has kept jobs of the queue in the fast mode.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn is_used(&self) -> Result<bool, StoreError> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(format!("{}:totals", self.prefix));
        self.connections.query(&exists).await.map_err(unavailable)
    }

    /// Gives the queue its numerics class, or confirms it.
    ///
    /// # Errors
    /// [`ClassError::Mismatch`] when another class was registered first.
    pub async fn register_class(&self, class: &str) -> Result<(), ClassError> {
        let key = format!("{}:totals", self.prefix);
        let mut set = redis::cmd("HSETNX");
        set.arg(&key).arg("class").arg(class);
        let mut get = redis::cmd("HGET");
        get.arg(&key).arg("class");
        self.connections.query::<redis::Value>(&set).await.map_err(unavailable)?;
        let registered: String = self.connections.query(&get).await.map_err(unavailable)?;
        if registered == class {
            return Ok(());
        }
        let (queue, offered) = (self.queue.clone(), class.to_owned());
        Err(ClassError::Mismatch { queue, registered, allowed: Vec::new(), offered })
    }

    /// Deletes jobs with their results and errors, whatever their state; returns how many there
    /// were.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let mut count = 0;
        for chunk in ids.chunks(CHUNK) {
            let mut arguments = self.arguments();
            chunk.iter().for_each(|id| arguments.number(id));
            count += self.run::<u64>(&scripts::DELETE, &arguments).await?;
        }
        Ok(count)
    }

    /// Forgets what counts the queue's jobs, and its numerics class: for a queue that is gone for
    /// good, or was only tried. Jobs that are over expire as they would; others are not found again.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn forget_queue(&self) -> Result<(), StoreError> {
        self.run::<u64>(&scripts::DELETE, &self.arguments()).await.map(drop)
    }

    fn arguments(&self) -> Arguments {
        let now = self.clock.as_ref().map_or_else(String::new, |clock| clock().0.to_string());
        Arguments(vec![now.into_bytes()])
    }

    /// Jobs as the scripts name them, as the dispatcher does.
    fn entries(&self, rows: Vec<Row>) -> Result<Vec<Entry>, StoreError> {
        let entry = |(id, place, cost): Row| {
            let id = id.parse().map_err(|error| record::damaged("job id", error))?;
            let (priority, tenant) = keys::parse_place(&place)
                .ok_or_else(|| record::damaged("place", place.escape_debug()))?;
            Ok(Entry { id, queue: self.queue.clone(), priority, tenant: Tenant(tenant), cost })
        };
        rows.into_iter().map(entry).collect()
    }

    fn with_retention(&self) -> Arguments {
        let mut arguments = self.arguments();
        arguments.number(self.retention.as_millis());
        arguments
    }

    /// Runs a script; one whose connection broke is sent again, since each may run twice.
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
        arguments.push(wire::encode(&lease_lost()));
        ids.iter().for_each(|id| arguments.number(id));
        type Row = (usize, i64, u32, i64, Vec<u8>, Option<Vec<u8>>);
        let rows: Vec<Row> = self.run(&scripts::CLAIM, &arguments).await?;
        let claim = |(position, epoch, attempts, left, value, checkpoint): Row| {
            let expires_in = u64::try_from(left).ok().map(Duration::from_millis);
            match record::decode_job(&value) {
                Ok(job) => Some(Claim { job, epoch, attempts, expires_in, checkpoint }),
                Err(error) => {
                    // Its lease runs out, and so do its attempts; its neighbours do not wait.
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
            // Completed in the script, where the attempts are known.
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
        let mut arguments = self.arguments();
        held.iter().for_each(|held| arguments.held(*held));
        let back = at(held, self.run(&scripts::HAND_BACK, &arguments).await?);
        Ok(back.into_iter().map(|held| held.id).collect())
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

    /// Accepted jobs are not among them: they got their entries with their records, in the same
    /// Redis, and only somebody who deletes entries by hand can part them.
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

    /// Jobs that are over are counted from the queue's beginning, also those that have expired.
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
