//! Events of jobs: a capped stream per job that expires, in Redis or in memory.
//!
//! Workers publish merged events; a subscriber reads from the start, even if it subscribes late, and
//! then waits for more. Events are not durable: a stream may be cut at its cap, expire or be lost,
//! and the subscriber then gets the result from the store.

mod memory;

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use async_trait::async_trait;
pub use memory::MemoryEvents;
use redis::streams::StreamReadReply;
use serde::{Deserialize, Serialize};

use crate::{
    dispatch::{BLOCK_MAX, Connections, DispatchError},
    job::{JobId, JobState},
    wire,
};

/// Approximate cap of a job's stream: Redis trims whole nodes.
const EVENTS_MAX: usize = 16 << 10;
/// How long a stream is kept after its last event.
const EXPIRE: Duration = Duration::from_secs(3600);
/// Maximum number of events of one read.
const READ_MAX: usize = 256;

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobEvent {
    /// The job was queued, for the first time or again.
    Queued,
    /// A worker started the job. Deltas of earlier attempts must be discarded.
    Started,
    /// Text was generated.
    Delta {
        /// Index of the job's choice.
        choice: u32,
        /// Text to append to the choice.
        text: String,
    },
    /// The job reached a terminal state; the store has the result.
    Finished {
        /// The terminal state.
        state: JobState,
    },
}

/// Position of a subscriber in a job's events. The default is the position before the first event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct EventId {
    ms: u64,
    sequence: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.ms, self.sequence)
    }
}

/// A text is not an [`EventId`].
#[derive(Debug, thiserror::Error)]
#[error("an event id is two numbers with a hyphen between them")]
pub struct BadEventId;

impl FromStr for EventId {
    type Err = BadEventId;

    fn from_str(text: &str) -> Result<Self, BadEventId> {
        let (ms, sequence) = text.split_once('-').ok_or(BadEventId)?;
        let number = |text: &str| text.parse().map_err(|_| BadEventId);
        Ok(Self { ms: number(ms)?, sequence: number(sequence)? })
    }
}

/// Publishes and reads events of jobs.
#[async_trait]
pub trait Events: Send + Sync {
    /// Appends events to a job's stream, in order. Callers may ignore a failure.
    async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError>;

    /// Returns a job's events after `after`, oldest first; waits up to `wait` for the first.
    async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError>;
}

#[async_trait]
impl Events for RedisEvents {
    async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError> {
        Self::publish(self, job, events).await
    }

    async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError> {
        Self::read_events(self, job, after, wait).await
    }
}

/// Events of jobs in Redis.
#[derive(Debug, Clone)]
pub struct RedisEvents {
    connections: Arc<Connections>,
}

fn key(job: JobId) -> String {
    format!("tm:ev:{{{job}}}")
}

impl RedisEvents {
    pub(crate) fn new(connections: Arc<Connections>) -> Self {
        Self { connections }
    }

    /// Appends events to a job's stream, in order. Callers may ignore a failure.
    pub async fn publish(&self, job: JobId, events: &[JobEvent]) -> Result<(), DispatchError> {
        if events.is_empty() {
            return Ok(());
        }
        let key = key(job);
        let mut pipeline = redis::pipe();
        for event in events {
            let append = pipeline.cmd("XADD").arg(&key).arg("MAXLEN").arg("~").arg(EVENTS_MAX);
            append.arg("*").arg("e").arg(wire::encode(event)).ignore();
        }
        pipeline.cmd("EXPIRE").arg(&key).arg(EXPIRE.as_secs()).ignore();
        let sent = self.connections.pipeline(&pipeline).await;
        sent.map_err(|error| DispatchError::Unavailable(Box::new(error)))
    }

    /// Appends generated text to a job's stream.
    ///
    /// # Errors
    /// As [`Self::publish`].
    pub async fn publish_delta(
        &self,
        job: JobId,
        choice: u32,
        text: &str,
    ) -> Result<(), DispatchError> {
        self.publish(job, &[JobEvent::Delta { choice, text: text.to_owned() }]).await
    }

    /// Returns a job's events after `after`, oldest first; waits up to `wait` for the first. Entries
    /// that are not events are skipped.
    pub async fn read_events(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<Vec<(EventId, JobEvent)>, DispatchError> {
        let started = std::time::Instant::now();
        let mut after = after;
        loop {
            let left = wait.saturating_sub(started.elapsed());
            let (last, events) = self.read(job, after, left).await?;
            if !events.is_empty() || (left.is_zero() && last == after) {
                return Ok(events);
            }
            after = last;
        }
    }

    /// One read: the last id seen, and the decoded events.
    async fn read(
        &self,
        job: JobId,
        after: EventId,
        wait: Duration,
    ) -> Result<(EventId, Vec<(EventId, JobEvent)>), DispatchError> {
        let mut command = redis::cmd("XREAD");
        command.arg("COUNT").arg(READ_MAX);
        if !wait.is_zero() {
            let ms = wait.min(BLOCK_MAX).as_millis().max(1);
            command.arg("BLOCK").arg(u64::try_from(ms).unwrap_or(1));
        }
        command.arg("STREAMS").arg(key(job)).arg(after.to_string());
        let reply: Result<Option<StreamReadReply>, _> = match wait.is_zero() {
            true => self.connections.query(&command).await,
            false => self.connections.block(&command).await,
        };
        let reply = reply.map_err(|error| DispatchError::Unavailable(Box::new(error)))?;
        let (mut last, mut events) = (after, Vec::new());
        for entry in reply.into_iter().flat_map(|reply| reply.keys).flat_map(|key| key.ids) {
            let Ok(id) = entry.id.parse::<EventId>() else { continue };
            last = id;
            let bytes: Option<Vec<u8>> = entry.get("e");
            match bytes.map(|bytes| wire::decode(&bytes)) {
                Some(Ok(event)) => events.push((id, event)),
                _ => tracing::warn!(%job, %id, "skipped an entry that is not an event"),
            }
        }
        Ok((last, events))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_ids_round_trip_through_text() {
        let id: EventId = "1700000000000-7".parse().expect("an id");
        assert_eq!(id.to_string(), "1700000000000-7");
        assert!(EventId::default() < id);
        for wrong in ["", "1", "1-", "-1", "a-b", "$"] {
            assert!(wrong.parse::<EventId>().is_err(), "{wrong}");
        }
    }
}
