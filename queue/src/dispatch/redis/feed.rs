//! Adds entries, now or later, and reports the backlog.

use std::{collections::HashMap, time::Duration};

use redis::RedisError;

use super::{Delayed, Inner, keys, scripts, unavailable};
use crate::{
    dispatch::{Backlog, Demand, DispatchError, Entry, Limit, Missing, Quotas},
    job::{QueueName, Tenant},
};

/// Entries of one script: a few milliseconds of Redis's time.
const CHUNK: usize = 512;
/// Time after which to try again if no time is known.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Tenants of each priority that are searched for the oldest entry.
const TENANTS_LOOKED_AT: usize = 128;

/// Arguments of the enqueue script besides the entries of a chunk.
#[derive(Default)]
struct Admission {
    /// Entries and tokens of later chunks, which must fit as well.
    entries_after: usize,
    tokens_after: u64,
    mode: Mode,
}

/// Which limits apply, and where entries are added.
#[derive(Clone, Copy, Default)]
enum Mode {
    #[default]
    New,
    /// The limits were checked before.
    Checked,
    /// Requeued.
    Again,
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Checked => "checked",
            Self::Again => "again",
        }
    }
}

/// Groups entries by queue.
fn by_queue(entries: &[Entry]) -> Vec<(&QueueName, Vec<&Entry>)> {
    let mut queues: Vec<(&QueueName, Vec<&Entry>)> = Vec::new();
    let mut index: HashMap<&QueueName, usize> = HashMap::new();
    for entry in entries {
        let at = *index.entry(&entry.queue).or_insert_with(|| {
            queues.push((&entry.queue, Vec::new()));
            queues.len() - 1
        });
        queues[at].1.push(entry);
    }
    queues
}

fn tokens(entries: &[&Entry]) -> u64 {
    entries.iter().map(|entry| u64::from(entry.cost)).sum()
}

/// Returns the error for a failed script. A Redis with full memory refuses scripts that add data as
/// a whole.
pub(crate) fn refusal(queue: &QueueName, error: RedisError) -> DispatchError {
    if error.code() == Some("OOM") {
        let (queue, limit) = (queue.clone(), Limit::Memory);
        return DispatchError::Busy { queue, limit, retry_after: RETRY_AFTER };
    }
    unavailable(error)
}

impl Inner {
    /// Enqueues a single chunk of one queue with one script. Otherwise checks all queues first and then
    /// adds: all or nothing, except that concurrent producers may together exceed a limit by a chunk.
    /// After an error in between, the caller can retry: nothing is added twice.
    pub(super) async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        let (mut added, queues) = (0, by_queue(entries));
        if let [(queue, entries)] = &*queues
            && entries.len() <= CHUNK
        {
            return self.add(queue, entries, Admission::default()).await;
        }
        for (queue, entries) in &queues {
            // For a single queue, the first chunk's script checks the limits for all chunks, so
            // that known entries do not count.
            let (first, rest) = entries.split_at(if queues.len() == 1 { CHUNK } else { 0 });
            let (entries_after, tokens_after) = (rest.len(), tokens(rest));
            let admission = Admission { entries_after, tokens_after, mode: Mode::New };
            added += self.add(queue, first, admission).await?;
        }
        for (queue, entries) in &queues {
            let done = if queues.len() == 1 { CHUNK } else { 0 };
            for chunk in entries[done..].chunks(CHUNK) {
                let admission = Admission { mode: Mode::Checked, ..Admission::default() };
                added += self.add(queue, chunk, admission).await?;
            }
        }
        Ok(added)
    }

    /// Requeues in chunks; after an error in between, the caller can retry.
    pub(super) async fn requeue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        let mut added = 0;
        for (queue, entries) in by_queue(entries) {
            for chunk in entries.chunks(CHUNK) {
                let admission = Admission { mode: Mode::Again, ..Admission::default() };
                added += self.add(queue, chunk, admission).await?;
            }
        }
        Ok(added)
    }

    pub(super) async fn missing(
        &self,
        queue: &QueueName,
    ) -> Result<Option<Missing>, DispatchError> {
        let (prefix, none) = (keys::prefix(queue), &[] as &[&str]);
        let found: Vec<u64> = self
            .connections
            .run_again(&scripts::MISSING, &prefix, none)
            .await
            .map_err(unavailable)?;
        let [entries, tokens, refilling] = found[..] else { return Ok(None) };
        Ok(Some(Missing { entries, tokens, refilling: refilling == 1 }))
    }

    pub(super) async fn set_missing(
        &self,
        queue: &QueueName,
        missing: Missing,
    ) -> Result<(), DispatchError> {
        let prefix = keys::prefix(queue);
        let values = [missing.entries, missing.tokens, u64::from(missing.refilling)];
        let set: Result<u64, _> =
            self.connections.run_again(&scripts::SET_MISSING, &prefix, &values).await;
        set.map(drop).map_err(|error| refusal(queue, error))
    }

    /// Checks the limits of a queue without adding anything.
    pub(super) async fn admit(
        &self,
        demand: &Demand,
        quotas: &Quotas,
    ) -> Result<(), DispatchError> {
        let tokens_max = quotas.tokens.map_or(self.limit.tokens, |own| own.min(self.limit.tokens));
        let tokens_max = demand.part_of(tokens_max);
        let entries_max = demand.entries_of(self.limit.entries);
        let tokens: u64 = demand.tokens.values().sum();
        let mut arguments = vec![
            entries_max.to_string(),
            tokens_max.to_string(),
            demand.entries.to_string(),
            tokens.to_string(),
        ];
        let bounded: Vec<(&Tenant, u64, u64)> = demand
            .tokens
            .iter()
            .filter_map(|(tenant, tokens)| {
                Some((tenant, *tokens, demand.part_of(quotas.of(tenant)?)))
            })
            .collect();
        for (tenant, tokens, quota) in &bounded {
            arguments.extend([keys::escape(&tenant.0), tokens.to_string(), quota.to_string()]);
        }
        let queue = &demand.queue;
        let run =
            self.connections.run_again(&scripts::ADMIT, &keys::prefix(queue), &arguments).await;
        let (bound, retry_ms): (usize, u64) = run.map_err(|error| refusal(queue, error))?;
        let limit = match bound {
            0 => return Ok(()),
            1 => Limit::Entries(entries_max),
            2 => Limit::Tokens(tokens_max),
            other => Limit::Tenant(bounded.get(other - 3).map_or(0, |(_, _, quota)| *quota)),
        };
        let retry_after = Duration::from_millis(retry_ms);
        Err(DispatchError::Busy { queue: queue.clone(), limit, retry_after })
    }

    async fn add(
        &self,
        queue: &QueueName,
        entries: &[&Entry],
        admission: Admission,
    ) -> Result<usize, DispatchError> {
        let mut arguments = vec![
            self.limit.entries.to_string(),
            self.limit.tokens.to_string(),
            admission.entries_after.to_string(),
            admission.tokens_after.to_string(),
            admission.mode.as_str().to_owned(),
        ];
        for entry in entries {
            let (id, cost) = (entry.id.to_string(), entry.cost.to_string());
            arguments.extend([id, keys::place(entry.priority, &entry.tenant), cost]);
        }
        let prefix = keys::prefix(queue);
        let run = self.connections.run_again(&scripts::ENQUEUE, &prefix, &arguments).await;
        let (added, which, retry_ms): (i64, u8, u64) =
            run.map_err(|error| refusal(queue, error))?;
        if let Ok(added) = usize::try_from(added) {
            return Ok(added);
        }
        Err(self.limit.busy(queue, which, retry_ms))
    }

    pub(super) async fn delay(&self, delayed: &[Delayed]) -> Result<(), DispatchError> {
        let mut queues: HashMap<&QueueName, Vec<&Delayed>> = HashMap::new();
        for one in delayed {
            queues.entry(&one.entry.queue).or_default().push(one);
        }
        for (queue, delayed) in queues {
            let prefix = keys::prefix(queue);
            for chunk in delayed.chunks(CHUNK) {
                let mut arguments = vec![self.limit.entries.to_string()];
                for Delayed { entry, due } in chunk {
                    let (id, cost) = (entry.id.to_string(), entry.cost.to_string());
                    arguments.extend([
                        id,
                        keys::place(entry.priority, &entry.tenant),
                        cost,
                        due.0.to_string(),
                    ]);
                }
                let run = self.connections.run_again(&scripts::DELAY, &prefix, &arguments);
                let kept: i64 = run.await.map_err(|error| refusal(queue, error))?;
                if kept < 0 {
                    let limit = Limit::Entries(self.limit.entries);
                    let queue = queue.clone();
                    return Err(DispatchError::Busy { queue, limit, retry_after: RETRY_AFTER });
                }
            }
        }
        Ok(())
    }

    pub(super) async fn promote(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        let (prefix, mut count) = (keys::prefix(queue), 0);
        loop {
            let limit = [CHUNK.to_string()];
            let run = self.connections.run_again(&scripts::PROMOTE, &prefix, &limit);
            let moved: usize = run.await.map_err(unavailable)?;
            count += moved;
            if moved < CHUNK {
                return Ok(count);
            }
        }
    }

    pub(super) async fn backlog(&self, queue: &QueueName) -> Result<Backlog, DispatchError> {
        let (prefix, tenants) = (keys::prefix(queue), [TENANTS_LOOKED_AT.to_string()]);
        let run = self.connections.run_again(&scripts::BACKLOG, &prefix, &tenants);
        let (entries, tokens, oldest, rate, delayed): (usize, u64, i64, f64, usize) =
            run.await.map_err(unavailable)?;
        let oldest_ms = u64::try_from(oldest).ok();
        let drain_rate = (rate >= 0.0).then_some(rate);
        Ok(Backlog { entries, tokens, oldest_ms, delayed, drain_rate })
    }

    pub(super) async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        let mut command = redis::cmd("HGET");
        command.arg(format!("{}:meta", keys::prefix(queue))).arg("n");
        let waiting: Option<i64> =
            self.connections.query_again(&command).await.map_err(unavailable)?;
        let waiting = waiting.unwrap_or(0);
        Ok(usize::try_from(waiting).unwrap_or(0))
    }
}
