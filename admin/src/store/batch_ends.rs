//! The lines of batches that ended, numbered in the order in which the service saw them end.
//!
//! The step that counts a batch also numbers the lines that ended since the last one. A number is added in the transaction that
//! saves the batch, under the epoch of its claim, so numbers of a batch become visible in their order: who has read up to a
//! number has missed no line, whatever order the jobs were committed in. The steps that write the output number what is left,
//! such as lines without a job.
//!
//! A line that ends again, after a retry of its batch, gets a new number in place of its old one.

use async_trait::async_trait;
use tritmill_queue::{JobState, StoreError, Timestamp};

use super::batches::BatchId;

/// The end of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineEnd {
    /// The line in the input, from 1.
    pub line: u32,
    /// The state of its job; for a line without a job, the state that the job would have.
    pub state: JobState,
    /// Time at which it ended.
    pub ended_at: Timestamp,
    /// Its line of output; `None` if its job says all of it.
    pub output: Option<String>,
}

/// What is known of a line that has a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownEnd {
    /// The line in the input, from 1.
    pub line: u32,
    /// Its state.
    pub state: JobState,
    /// Time at which it ended.
    pub ended_at: Timestamp,
    /// Whether it has a line of output of its own.
    pub has_output: bool,
}

impl KnownEnd {
    /// Whether this is the same end. Without a job, a line has no time of its own.
    pub fn is(&self, end: &LineEnd) -> bool {
        self.line == end.line
            && self.state == end.state
            && self.has_output == end.output.is_some()
            && (self.has_output || self.ended_at == end.ended_at)
    }
}

/// The order of a list of ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOrder {
    /// The order in which the lines ended.
    Completion,
    /// The order of the input.
    Lines,
}

/// Which ends of a batch to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndsPage<'a> {
    /// Their order.
    pub order: EndOrder,
    /// Those after this number, or this line.
    pub after: u64,
    /// Those up to this number, or this line.
    pub until: u64,
    /// Those in these states; without a state, all.
    pub states: &'a [JobState],
    /// Most to return.
    pub limit: u32,
}

/// Ends of lines in a store.
#[async_trait]
pub trait BatchEnds: Send + Sync {
    /// Returns ends of a batch with their numbers.
    async fn ends(
        &self,
        id: BatchId,
        page: EndsPage<'_>,
    ) -> Result<Vec<(u64, LineEnd)>, StoreError>;

    /// Returns what is known of those of the lines that have a number.
    async fn known_ends(&self, id: BatchId, lines: &[u32]) -> Result<Vec<KnownEnd>, StoreError>;
}
