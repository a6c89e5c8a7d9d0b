//! The work of one step, as the scheduler has planned it.

use super::SequenceId;
use crate::kv::BlockId;

/// One sequence's part of a step: the tokens at `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedChunk {
    /// The sequence.
    pub id: SequenceId,
    /// First position.
    pub start: usize,
    /// Position after the last.
    pub end: usize,
    /// Whether the chunk ends with the sequence's last token, so that the next one is sampled.
    pub samples: bool,
    /// Whether this is a decode (otherwise a prefill chunk).
    pub decodes: bool,
    /// Tokens at the end that are drafts.
    pub drafts: usize,
    /// Whether the sequence alone has the block after the last position, which begins with the next one.
    pub has_next: bool,
}

/// The reason a sequence cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It needs more blocks than the pool has.
    OutOfBlocks {
        /// Blocks that its tokens take.
        needed: usize,
        /// Blocks in the pool.
        total: usize,
    },
    /// It got no new token within the stall limit.
    NoProgress {
        /// Steps without work, and preemptions, since its newest token.
        stalls: u32,
    },
}

/// Limits of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepLimits {
    /// Most rows. Prompts have half as many at least, however many sequences decode.
    pub rows: Option<usize>,
    /// Most tokens in prefill chunks.
    pub prefill: Option<usize>,
    /// Most decodes of sequences that are not of the highest priority; these decode in turns.
    pub decodes: Option<usize>,
}

/// The work of one step.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Chunks to run, at most one per sequence.
    pub chunks: Vec<PlannedChunk>,
    /// Block copies that were made for the step, in order: from, to.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Sequences that became pending again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that the caller must remove.
    pub refused: Vec<(SequenceId, Refusal)>,
    /// Admitted sequences, and the number of their tokens found in the prefix cache.
    pub admitted: Vec<(SequenceId, usize)>,
}

impl Plan {
    pub(super) fn clear(&mut self) {
        let Self { chunks, copies, preempted, refused, admitted } = self;
        chunks.clear();
        copies.clear();
        preempted.clear();
        refused.clear();
        admitted.clear();
    }
}
