//! The decodes that the device computes before they are asked for.
//!
//! While the host handles the tokens of one step, the device already computes the next: the draws of a pass leave their tokens
//! in device memory, where the next pass takes them, and the host uploads everything else. A later step takes the results of
//! a row only if it asks for exactly that row: token, position, blocks, draw and changes of logits. No decodes are begun beside
//! sequences that need a pass in the next step anyway: those with drafts, and those with penalties, which depend on the drawn token. What is not taken is forgotten, and the keys and
//! values that it wrote lie behind the sequence's last position, where a later pass writes before it reads. So results are the same
//! as without.

use std::ops::Range;

use super::{
    draws::{Chunk, RowDraw},
    found::InFlight,
};
use crate::{kv::BlockId, sampling::LogitChange};

/// Share of rows not taken above which no decodes are begun.
pub const MISSES_MAX: f32 = 0.25;
/// Share of the last step in the average of misses.
const NEW: f32 = 0.2;

/// The decodes that may follow a step.
#[derive(Debug)]
pub struct Ahead {
    pub rows: Vec<Row>,
    /// Block tables, one after another.
    pub blocks: Vec<BlockId>,
    /// Changes of logits, one row's after another's.
    pub changes: Vec<LogitChange>,
    /// `None` if the device does not compute them.
    pub pass: Option<InFlight>,
    /// The half of the carried tokens for the draws of this pass.
    pub half: usize,
    /// Average share of rows that were not asked for.
    pub misses: f32,
    /// Rows that were taken since the start.
    pub taken: usize,
}

impl Default for Ahead {
    /// Nothing, and a share of misses that falls below the limit with the first decodes that follow others.
    fn default() -> Self {
        let (rows, blocks, changes) = (Vec::new(), Vec::new(), Vec::new());
        Self { rows, blocks, changes, pass: None, half: 0, misses: MISSES_MAX + 0.05, taken: 0 }
    }
}

/// A sequence's next decode.
#[derive(Debug)]
pub struct Row {
    /// Index of the chunk before it.
    pub chunk: usize,
    /// `None` if the chunk's token is not known.
    pub token: Option<u32>,
    pub position: usize,
    pub blocks: Range<usize>,
    /// Of its only row.
    pub draw: Option<RowDraw>,
    pub changes: Range<usize>,
}

impl Ahead {
    /// Finds the rows that chunks ask for.
    pub fn find(&self, chunks: &[Chunk<'_>]) -> Vec<Option<usize>> {
        let mut next = 0;
        let find = |chunk: &Chunk<'_>| {
            let (&[token], Some((draw, changes))) = (chunk.tokens, chunk.logits.of_last()) else {
                return None;
            };
            let is_it = |row: &Row| {
                row.position == chunk.position
                    && row.token == Some(token)
                    && row.draw == Some(draw)
                    && self.changes[row.changes.clone()] == *changes
                    && chunk.blocks.starts_with(&self.blocks[row.blocks.clone()])
            };
            // Sequences mostly keep their order.
            let (before, after) = self.rows.split_at(next);
            let found = after.iter().position(is_it).map(|place| next + place);
            let found = found.or_else(|| before.iter().position(is_it));
            next = found.map_or(next, |found| found + 1);
            found
        };
        chunks.iter().map(find).collect()
    }

    /// Returns whether the device computes the decodes.
    #[cfg(test)]
    pub fn is_begun(&self) -> bool {
        self.pass.is_some()
    }

    /// Returns the average share of misses, with those of a step that asked for so many of the rows.
    pub fn misses_with(&self, found: usize) -> f32 {
        if self.rows.is_empty() {
            return self.misses;
        }
        let of_step = 1.0 - found as f32 / self.rows.len() as f32;
        (1.0 - NEW) * self.misses + NEW * of_step
    }
}
