//! What a worker reports of its commits.

use tritmill_queue::{JobId, JobState, Usage};

/// Results that were committed together.
#[derive(Debug, Clone, Default)]
pub struct Committed {
    /// Each job and its new state.
    pub settled: Vec<(JobId, JobState)>,
    /// Tokens of the completed jobs.
    pub usage: Usage,
}
