//! What runs a step: a [`Backend`] holds the weights and the KV storage of one device and has no
//! other state between steps.

pub mod cpu;
pub mod cuda;
pub(crate) mod logits;
mod positions;

pub use logits::{Logits, Position, TokenLogit};

use crate::kv::BlockId;

/// Which positions of a chunk the caller wants logits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsFor {
    /// None: a prefill chunk that is not the last one.
    Nothing,
    /// The last token of the chunk.
    Last,
    /// Every token of the chunk.
    All,
    /// The last token of the chunk, of which only so many of the largest logits count: others may be
    /// left out. Equal ones all count.
    Largest(usize),
}

/// One sequence's part of a step: a prefill chunk or a single decoded token.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Tokens to run; at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them in the sequence. Earlier positions are in the KV blocks.
    pub position: usize,
    /// Block table: block `i` holds positions `16 i .. 16 i + 16`. Covers the chunk's last position.
    pub blocks: &'a [BlockId],
    /// Positions to return logits for.
    pub logits: LogitsFor,
}

/// A step that did not run. Its sequences fail; the engine goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// A token id outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The offending id.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// A chunk whose block table or positions do not fit.
    #[error(
        "chunk at position {position} with {tokens} tokens does not fit its {blocks} KV blocks"
    )]
    BadChunk {
        /// First position.
        position: usize,
        /// Tokens in the chunk.
        tokens: usize,
        /// Length of the block table.
        blocks: usize,
    },
    /// Two chunks of which one needs what the other writes: a sequence that is there twice, or two that
    /// share a block that is not full.
    #[error("two chunks of a step use KV block {}, and one writes it", .block.0)]
    SharedBlock {
        /// The block.
        block: BlockId,
    },
    /// The device reported an error.
    #[error("device failure: {0}")]
    Device(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The device works no more in this process.
    #[error("device lost: {0}")]
    DeviceLost(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A device that runs steps.
pub trait Backend: Send {
    /// Rows of the head: the length of one position's logits.
    fn vocab_size(&self) -> usize;

    /// KV blocks this backend has storage for; block ids are `0..block_count`.
    fn block_count(&self) -> usize;

    /// Bytes of weights that a decode step of [`LogitsFor::Largest`] reads, packed matrices and head,
    /// if it can say.
    fn weight_bytes(&self) -> Option<usize> {
        None
    }

    /// What a token depends on besides the request: model fingerprint, KV type, head mode and
    /// backend class, as one string.
    fn numerics_class(&self) -> &str;

    /// Runs one forward pass over all `chunks` and writes the requested logits, in chunk order and
    /// position order, into `logits` (cleared first). A sequence has one chunk of a step at most: what
    /// a chunk writes, no other may read or write.
    ///
    /// # Errors
    /// Nothing was sampled from a step that failed; the KV blocks of its chunks are undefined.
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError>;

    /// Copies the keys and values of one block to another (copy-on-write).
    fn copy_block(&mut self, from: BlockId, to: BlockId);
}
