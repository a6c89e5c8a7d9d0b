//! Adds entries, now or later, and reports the backlog.

use std::{collections::HashMap, time::Duration};

use redis::RedisError;

use super::{Delayed, Inner, keys, scripts, unavailable};
use crate::{
    dispatch::{Backlog, DispatchError, Entry, Limit, Missing},
    job::QueueName,
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

/// A shard of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shard<'a> {
    queue: &'a QueueName,
    number: u16,
}

impl Shard<'_> {
    fn prefix(&self) -> String {
        keys::shard_prefix(self.queue, self.number)
    }
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
    /// Groups items by the shard of their entry.
    fn by_shard<'a, T>(
        &self,
        items: &'a [T],
        entry: impl Fn(&T) -> &Entry,
    ) -> Vec<(Shard<'a>, Vec<&'a T>)> {
        let mut shards: Vec<(Shard<'_>, Vec<&T>)> = Vec::new();
        let mut index: HashMap<Shard<'_>, usize> = HashMap::new();
        for item in items {
            let entry = entry(item);
            let shard = Shard { queue: &entry.queue, number: self.shard_of(entry) };
            let at = *index.entry(shard).or_insert_with(|| {
                shards.push((shard, Vec::new()));
                shards.len() - 1
            });
            shards[at].1.push(item);
        }
        shards
    }

    /// Enqueues a single chunk of one shard with one script. Otherwise checks all shards first and then
    /// adds: all or nothing, except that concurrent producers may together exceed a limit by a chunk.
    /// After an error in between, the caller can retry: nothing is added twice.
    pub(super) async fn enqueue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        let (mut added, shards) = (0, self.by_shard(entries, |entry| entry));
        if let [(shard, entries)] = &*shards
            && entries.len() <= CHUNK
        {
            return self.add(*shard, entries, Admission::default()).await;
        }
        for (shard, entries) in &shards {
            // For a single shard, the first chunk's script checks the limits for all chunks, so
            // that known entries do not count.
            let (first, rest) = entries.split_at(if shards.len() == 1 { CHUNK } else { 0 });
            let (entries_after, tokens_after) = (rest.len(), tokens(rest));
            let admission = Admission { entries_after, tokens_after, mode: Mode::New };
            added += self.add(*shard, first, admission).await?;
        }
        for (shard, entries) in &shards {
            let done = if shards.len() == 1 { CHUNK } else { 0 };
            for chunk in entries[done..].chunks(CHUNK) {
                let admission = Admission { mode: Mode::Checked, ..Admission::default() };
                added += self.add(*shard, chunk, admission).await?;
            }
        }
        Ok(added)
    }

    /// Requeues in chunks; after an error in between, the caller can retry.
    pub(super) async fn requeue(&self, entries: &[Entry]) -> Result<usize, DispatchError> {
        let mut added = 0;
        for (shard, entries) in self.by_shard(entries, |entry| entry) {
            for chunk in entries.chunks(CHUNK) {
                let admission = Admission { mode: Mode::Again, ..Admission::default() };
                added += self.add(shard, chunk, admission).await?;
            }
        }
        Ok(added)
    }

    pub(super) async fn missing(
        &self,
        queue: &QueueName,
    ) -> Result<Option<Missing>, DispatchError> {
        let mut sum = Missing::default();
        for prefix in self.prefixes(queue) {
            let none = &[] as &[&str];
            let run = self.connections.run_again(&scripts::MISSING, &prefix, none);
            let found: Vec<u64> = run.await.map_err(unavailable)?;
            let [entries, tokens, refilling] = found[..] else { return Ok(None) };
            sum.entries += entries;
            sum.tokens += tokens;
            sum.refilling |= refilling == 1;
        }
        Ok(Some(sum))
    }

    pub(super) async fn set_missing(
        &self,
        queue: &QueueName,
        missing: Missing,
    ) -> Result<(), DispatchError> {
        // Shard 0 has the count of all.
        let (mut entries, mut tokens) = (missing.entries, missing.tokens);
        for prefix in self.prefixes(queue) {
            let values = [entries, tokens, u64::from(missing.refilling)];
            let set: Result<u64, _> =
                self.connections.run_again(&scripts::SET_MISSING, &prefix, &values).await;
            set.map_err(|error| refusal(queue, error))?;
            (entries, tokens) = (0, 0);
        }
        Ok(())
    }

    async fn add(
        &self,
        shard: Shard<'_>,
        entries: &[&Entry],
        admission: Admission,
    ) -> Result<usize, DispatchError> {
        let queue = shard.queue;
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
        let prefix = shard.prefix();
        let run = self.connections.run_again(&scripts::ENQUEUE, &prefix, &arguments).await;
        let (added, which, retry_ms): (i64, u8, u64) =
            run.map_err(|error| refusal(queue, error))?;
        if let Ok(added) = usize::try_from(added) {
            self.ring(&prefix, added).await;
            return Ok(added);
        }
        Err(self.limit.busy(queue, which, retry_ms))
    }

    pub(super) async fn delay(&self, delayed: &[Delayed]) -> Result<(), DispatchError> {
        for (shard, delayed) in self.by_shard(delayed, |one| &one.entry) {
            let (queue, prefix) = (shard.queue, shard.prefix());
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
                // One consumer learns the new time.
                self.ring(&prefix, 1).await;
            }
        }
        Ok(())
    }

    pub(super) async fn promote(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        let mut count = 0;
        for prefix in self.prefixes(queue) {
            loop {
                let limit = [CHUNK.to_string()];
                let run = self.connections.run_again(&scripts::PROMOTE, &prefix, &limit);
                let moved: usize = run.await.map_err(unavailable)?;
                self.ring(&prefix, moved).await;
                count += moved;
                if moved < CHUNK {
                    break;
                }
            }
        }
        Ok(count)
    }

    pub(super) async fn backlog(&self, queue: &QueueName) -> Result<Backlog, DispatchError> {
        let (mut sum, tenants) = (Backlog::default(), [TENANTS_LOOKED_AT.to_string()]);
        for prefix in self.prefixes(queue) {
            let run = self.connections.run_again(&scripts::BACKLOG, &prefix, &tenants);
            let (entries, tokens, oldest, rate, delayed): (usize, u64, i64, f64, usize) =
                run.await.map_err(unavailable)?;
            sum.entries += entries;
            sum.tokens += tokens;
            sum.oldest_ms = sum.oldest_ms.max(u64::try_from(oldest).ok());
            sum.delayed += delayed;
            if rate >= 0.0 {
                sum.drain_rate = Some(sum.drain_rate.unwrap_or(0.0) + rate);
            }
        }
        Ok(sum)
    }

    pub(super) async fn depth(&self, queue: &QueueName) -> Result<usize, DispatchError> {
        let mut sum = 0;
        for prefix in self.prefixes(queue) {
            let mut command = redis::cmd("HGET");
            command.arg(format!("{prefix}:meta")).arg("n");
            let waiting: Option<i64> =
                self.connections.query_again(&command).await.map_err(unavailable)?;
            sum += usize::try_from(waiting.unwrap_or(0)).unwrap_or(0);
        }
        Ok(sum)
    }
}
