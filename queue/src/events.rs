//! Events of jobs: a capped stream per job that expires, in Redis or in memory.
//!
//! Workers publish merged events; a subscriber reads from the start, even if it subscribes late, and
//! then waits for more. Events are not durable: a stream may be refused, cut at its cap, expire or be
//! lost, and the subscriber then gets the result, or the rest of it, from the store.

mod memory;
mod redis;

use std::{fmt, str::FromStr, time::Duration};

use async_trait::async_trait;
pub use memory::MemoryEvents;
pub use redis::{EventLimits, RedisEvents};
use serde::{Deserialize, Serialize};

use crate::{
    dispatch::DispatchError,
    job::{JobId, JobState},
    outcome::TokenLogprob,
};

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JobEvent {
    /// The job was queued, for the first time or again.
    Queued,
    /// A worker started the job. Deltas of earlier attempts must be discarded.
    Started,
    /// The model begins to call a tool.
    Call {
        /// Index of the job's choice.
        choice: u32,
        /// Index of the call in the choice.
        call: u32,
        /// Name of the function.
        name: String,
    },
    /// Text was generated.
    Delta {
        /// Index of the job's choice.
        choice: u32,
        /// The part of the choice that it belongs to.
        #[serde(default, skip_serializing_if = "Part::is_content")]
        part: Part,
        /// Bytes of this part before the text: a reader sees by it that an event was lost or came twice.
        #[serde(default, skip_serializing_if = "is_zero")]
        offset: u64,
        /// Text to append to the part; may be empty beside log probabilities.
        text: String,
        /// Log probabilities of the tokens, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        logprobs: Option<NewLogprobs>,
    },
    /// The job reached a terminal state; the store has the result.
    Finished {
        /// The terminal state.
        state: JobState,
    },
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Log probabilities of new tokens of a choice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewLogprobs {
    /// Tokens of the choice before these.
    pub offset: u64,
    /// The tokens.
    pub tokens: Vec<TokenLogprob>,
}

/// A part of an answer.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// The text itself.
    #[default]
    Content,
    /// What the model thinks before it answers.
    Reasoning,
    /// The arguments of the call with this index.
    Arguments(u32),
}

impl Part {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde calls")]
    fn is_content(&self) -> bool {
        *self == Self::Content
    }
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

    /// Waits before a reader that does not block looks again: until the job has events after `after`, at most for
    /// `longest`. Where nothing tells of new events, it takes `longest`.
    async fn wait_for_events(&self, job: JobId, after: EventId, longest: Duration) {
        let _ = (job, after);
        tokio::time::sleep(longest).await;
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
