//! Adds entries, now or later.

use std::{collections::HashMap, time::Duration};

use super::{
    inner::{Inner, RETRY_AFTER, refusal, unavailable},
    keys, scripts,
};
use crate::{
    dispatch::{DispatchError, Entry, Limit},
    job::{QueueName, Timestamp},
};

/// Entries of one script: a few milliseconds of Redis's time.
const CHUNK: usize = 512;
/// The limit on entries, as `enqueue.lua` returns it.
const LIMIT_ENTRIES: u8 = 1;

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
    Requeue,
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Checked => "checked",
            Self::Requeue => "requeue",
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

/// The deadline of an entry, as `enqueue.lua` takes it.
fn deadline(entry: &Entry) -> String {
    match entry.expires_at {
        _ if entry.is_first => "first".to_owned(),
        expires_at => expires_at.map_or(0, |at| at.0.max(0)).to_string(),
    }
}

/// An entry and its due time, on Redis's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delayed {
    /// The entry.
    pub entry: Entry,
    /// Due time, on Redis's clock.
    pub due: Timestamp,
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
                let admission = Admission { mode: Mode::Requeue, ..Admission::default() };
                added += self.add(shard, chunk, admission).await?;
            }
        }
        Ok(added)
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
            let place = keys::place(entry.priority, &entry.tenant);
            arguments.extend([id, place, cost, deadline(entry)]);
        }
        let prefix = shard.prefix();
        let run = self.connections.run_again(&scripts::ENQUEUE, &prefix, &arguments).await;
        let (added, which, retry_ms): (i64, u8, u64) =
            run.map_err(|error| refusal(queue, error))?;
        if let Ok(added) = usize::try_from(added) {
            self.wake(&prefix, added).await;
            return Ok(added);
        }
        let limit = match which {
            LIMIT_ENTRIES => Limit::Entries(self.limit.entries),
            _ => Limit::Tokens(self.limit.tokens),
        };
        let (queue, retry_after) = (queue.clone(), Duration::from_millis(retry_ms));
        Err(DispatchError::Busy { queue, limit, retry_after })
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
                self.wake(&prefix, 1).await;
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
                self.wake(&prefix, moved).await;
                count += moved;
                if moved < CHUNK {
                    break;
                }
            }
        }
        Ok(count)
    }
}
