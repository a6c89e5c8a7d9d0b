//! Batches after another one: their lines are made of its lines and answers, by a template.
//!
//! Such a batch exists from the start, with no lines. Its steps wait until the earlier batch has ended; then they make its lines, in a
//! file of its own, and check them as those of any other file. A column names the batch that it waits for, until its lines are made: a
//! batch that ends makes the next steps of those behind it due, and is not deleted before they have its answers.

use serde::{Deserialize, Serialize};
use tritmill_queue::Timestamp;

use super::batches::{Batch, BatchId};
use crate::line_template::LineTemplate;

/// The earlier batch of a batch, and what makes its lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct After {
    /// The earlier batch, of the same tenant.
    pub batch: BatchId,
    /// What makes a line from a line of it.
    pub lines: LineTemplate,
    /// Time at which the first lines were made: the completion window begins.
    #[serde(default)]
    pub began_at: Option<Timestamp>,
    /// Time at which the last line was made.
    #[serde(default)]
    pub made_at: Option<Timestamp>,
}

impl After {
    /// What a new batch begins with.
    pub fn new(batch: BatchId, lines: LineTemplate) -> Self {
        Self { batch, lines, began_at: None, made_at: None }
    }
}

impl Batch {
    /// Whether it has a file of lines: they may yet have to be made, or read elsewhere.
    pub fn has_input(&self) -> bool {
        self.after.as_ref().is_none_or(|after| after.made_at.is_some())
            && self.input_url.as_ref().is_none_or(|url| url.fetched_at.is_some())
    }

    /// Returns the batch that it waits for, or of which its lines are being made.
    pub fn awaited(&self) -> Option<BatchId> {
        let after = self.after.as_ref().filter(|_| !self.has_input());
        after.map(|after| after.batch).filter(|_| !self.state.is_terminal())
    }
}
