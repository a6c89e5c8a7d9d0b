//! Dead letters: jobs that failed permanently.

use std::time::Duration;

use async_trait::async_trait;

use super::{JobRecord, StoreError};
use crate::job::{Job, JobId, QueueName, Timestamp};

/// A job that failed permanently.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// The job with all its errors.
    pub record: JobRecord,
    /// The earlier dead letter that this job replays.
    pub replay_of: Option<JobId>,
}

/// A dead letter and the new job that repeats it.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// The dead letter; it is kept.
    pub replay_of: JobId,
    /// The new job, queued or scheduled; the caller adds its entry to the dispatcher.
    pub job: Job,
}

/// Spreads replays over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Due time of the first replay.
    pub from: Timestamp,
    /// Time between two replays.
    pub every: Duration,
}

impl Pace {
    /// Returns the due time of the replay that follows `before` others.
    pub(super) fn due(self, before: usize) -> Timestamp {
        self.from.after(self.every.saturating_mul(u32::try_from(before).unwrap_or(u32::MAX)))
    }
}

/// Lists, replays and deletes dead letters.
#[async_trait]
pub trait DeadLetters: Send + Sync {
    /// Returns up to `limit` dead letters of a queue with an id above `after`, in order of id.
    async fn dead_letters(
        &self,
        queue: &QueueName,
        limit: u32,
        after: Option<JobId>,
    ) -> Result<Vec<DeadLetter>, StoreError>;

    /// Submits each of these dead letters again as a new job without a deadline, due now or at the
    /// given pace. Ids of other jobs are ignored. On an error nothing was submitted.
    async fn replay(&self, ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError>;

    /// Deletes these dead letters with their errors; returns how many were deleted.
    async fn purge(&self, ids: &[JobId]) -> Result<u64, StoreError>;
}
