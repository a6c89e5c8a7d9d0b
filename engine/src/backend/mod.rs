//! Backends: a [`Backend`] runs steps on one device. It holds the weights and the KV storage, and has no
//! other state between steps.

pub(crate) mod class;
pub mod cpu;
pub mod cuda;
pub(crate) mod logits;
pub(crate) mod positions;
mod rope_scaling;
mod shared;
pub(crate) mod slot_sets;
mod step_row;

pub use logits::{Logits, PositionLogits, ScreenedRow};
pub(crate) use shared::SharedBackend;
pub(crate) use step_row::StepRow;

use rayon::prelude::*;

use crate::{
    config::Norm,
    files::{Model, ModelError},
    kv::{BlockId, LayerGroups},
    sampling::{Largest, Remainder, RowMetadata, Threshold, TokenLogit},
};

/// Returns the weights of the norm before the head, divided by the divisor of the logits.
fn final_norm(model: &Model) -> Result<Vec<f32>, ModelError> {
    let mut weights = model.norm(Norm::Final)?;
    let divisor = model.config().multipliers.logit_divisor;
    weights.iter_mut().for_each(|weight| *weight /= divisor);
    Ok(weights)
}

/// Rows of a step that prompts fill on a processor.
pub const STEP_ROWS: usize = 512;

/// The positions of a chunk that logits are requested for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LogitsFor<'a> {
    /// No position: a prefill chunk that is not the last one.
    Nothing,
    /// The last token of the chunk.
    Last,
    /// Every token of the chunk.
    All,
    /// The last token of the chunk, and at least its largest logits. Others may be left out.
    Largest(Largest),
    /// The last tokens of the chunk, one for each draw: what the draw asks for first, or the drawn token.
    Draws(&'a [RowMetadata<'a>]),
}

impl LogitsFor<'_> {
    /// The last token of the chunk, and at least this many of its largest logits.
    pub const fn largest(count: usize) -> Self {
        Self::Largest(Largest::logits(count))
    }
}

/// One sequence's part of a step: a prefill chunk or a single decoded token.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Tokens to compute; at least one.
    pub tokens: &'a [u32],
    /// Position of the first token in the sequence. Earlier positions are in the KV blocks.
    pub position: usize,
    /// Block table: block `i` holds positions `16 i .. 16 i + 16`. Covers the chunk's last position. That of the layers without a
    /// window, if the backend has [groups](Backend::layer_groups) of layers with one.
    pub blocks: &'a [BlockId],
    /// The tables of these groups, from the [first block](LayerGroups::first_block) on that the chunk reads. // (group)
    pub windows: &'a [Vec<BlockId>],
    /// Positions that logits are requested for.
    pub logits: LogitsFor<'a>,
    /// Where models with recurrent layers keep the sequence's state.
    pub state: StateSlots<'a>,
}

/// The slots of a chunk for states of recurrent layers. In a step a slot is written by one chunk at most, and then no other reads it.
/// A chunk may keep a state in the slot that it begins with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateSlots<'a> {
    /// The slot of the sequence, which has its state after the step. A chunk at position 0 begins with an empty state.
    pub own: u32,
    /// The slot with its state before the step, if it is another one.
    pub from: Option<u32>,
    /// States that the step keeps: tokens of the chunk that a state is after, in ascending order, and the slot for it.
    pub saves: &'a [(usize, u32)],
}

impl From<u32> for StateSlots<'_> {
    /// Returns the slot of a sequence that has its state there.
    fn from(own: u32) -> Self {
        Self { own, from: None, saves: &[] }
    }
}

/// A step failed. Its sequences fail; the engine continues.
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
    /// The positions of a chunk do not fit its block table, the context or the pool.
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
    /// A chunk uses a block that another chunk writes: a sequence has two chunks, or two sequences share a
    /// block that is not full.
    #[error("two chunks of a step use KV block {}, and one writes it", .block.0)]
    SharedBlock {
        /// The block.
        block: BlockId,
    },
    /// A chunk's place for the state of its sequence does not exist, or another chunk has it.
    #[error("state {slot} of {slots} cannot be used by a chunk")]
    BadSlot {
        /// The place.
        slot: u32,
        /// Number of places.
        slots: usize,
    },
    /// The device reported an error.
    #[error("device failure: {0}")]
    Device(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The device cannot be used again in this process.
    #[error("device lost: {0}")]
    DeviceLost(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// A backend's KV storage was not copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The device has one KV storage, which takes most of its memory.
    #[error("this backend cannot have a second KV storage: share the blocks instead")]
    Unsupported,
    /// The device reported an error.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// A device that runs steps.
pub trait Backend: Send {
    /// Returns the number of rows of the head: the length of one position's logits.
    fn vocab_size(&self) -> usize;

    /// Returns the number of KV blocks this backend has storage for; block ids are `0..block_count`.
    fn block_count(&self) -> usize;

    /// Returns the groups of layers that have blocks.
    fn layer_groups(&self) -> LayerGroups {
        LayerGroups::ONE
    }

    /// Returns the number of bytes of weights, packed matrices and head, that a decode step with
    /// [`LogitsFor::Largest`] reads, if known.
    fn weight_bytes(&self) -> Option<usize> {
        None
    }

    /// Returns the rows of a step that prompts fill: with more, prompts are hardly faster.
    fn step_rows(&self) -> usize {
        STEP_ROWS
    }

    /// Returns everything that a token depends on besides the request, as one string: model fingerprint, KV
    /// type, head mode and backend class.
    fn numerics_class(&self) -> &str;

    /// Runs one forward pass over all `chunks` and writes the requested logits, in chunk order and
    /// position order, into `logits` (cleared first). A sequence has at most one chunk per step: no chunk
    /// may read or write what another writes.
    ///
    /// # Errors
    /// If a chunk is invalid or the device fails. The KV blocks that the chunks write are undefined then.
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError>;

    /// Runs one forward pass over all `chunks`, and writes the hidden rows after the final norm of the last positions of those with
    /// [`LogitsFor::Last`] to `hidden` (cleared first). // (chunks, hidden)
    ///
    /// # Errors
    /// As [`step`](Self::step), or if the device does not embed texts (the default).
    fn step_hidden(
        &mut self,
        chunks: &[Chunk<'_>],
        hidden: &mut Vec<f32>,
    ) -> Result<(), StepError> {
        let _ = (chunks, hidden);
        Err(StepError::Device("this device does not embed texts".into()))
    }

    /// Returns what makes the steps of a GPU faster, and what became of it.
    fn features(&self) -> Vec<cuda::FeatureReport> {
        Vec::new()
    }

    /// Returns the backend as one that draws with fewer than all logits, if it is one.
    fn as_screening(&mut self) -> Option<&mut dyn Screening> {
        None
    }

    /// Returns the backend as one that runs on while the host does something else, if it is one.
    fn as_asynchronous(&mut self) -> Option<&mut dyn Asynchronous> {
        None
    }

    /// Returns the backend as one with recurrent layers, if it is one.
    fn as_recurrent(&mut self) -> Option<&mut dyn Recurrent> {
        None
    }

    /// Returns whether steps draw the tokens of [`LogitsFor::Draws`] and report the distributions of their rows, where they can.
    fn draws_tokens(&self) -> bool {
        false
    }

    /// Runs `task(0)` … `task(count - 1)` between two steps, each once and on any thread, and returns when all have finished.
    fn run_tasks(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..count).into_par_iter().for_each(task);
    }

    /// Takes memory for the first blocks, so that their first use does not wait for it.
    fn ready_blocks(&mut self, count: usize) {
        let _ = count;
    }

    /// Copies the keys and values of one block to another (copy-on-write).
    ///
    /// # Errors
    /// If the device fails. The second block is undefined then.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError>;

    /// Returns a backend with the same weights, which are not copied, and KV storage of its own with the same number of
    /// blocks. In it, `blocks` have the same contents as here, and slots of `states` the same states; others are undefined.
    ///
    /// # Errors
    /// [`CopyError::Unsupported`] if the backend cannot have a second storage (the default), or if the device fails.
    fn with_copies(
        &mut self,
        blocks: &[BlockId],
        states: &[u32],
    ) -> Result<Box<dyn Backend>, CopyError> {
        let _ = (blocks, states);
        Err(CopyError::Unsupported)
    }

    /// Returns the number of bytes of the keys and values of one block, over all layers of a group.
    fn block_bytes(&self) -> usize;

    /// Appends the keys and values of a block to `content`: [`block_bytes`](Self::block_bytes) bytes, in a layout that
    /// backends of the same numerics class share.
    ///
    /// # Errors
    /// If the device fails.
    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError>;

    /// Writes what [`read_block`](Self::read_block) of the same numerics class returned.
    ///
    /// # Errors
    /// If the device fails. The block is undefined then.
    ///
    /// # Panics
    /// If `content` has not [`block_bytes`](Self::block_bytes) bytes.
    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError>;
}

/// A backend that finds few logits of a position without computing all, and keeps of it what answers further questions.
pub trait Screening {
    /// Writes at least the tokens of a row with a logit of at least the threshold's to `found`, by ascending token; returns what
    /// is known of the others. `None` if these are so many that it is faster to compute all logits.
    ///
    /// # Errors
    /// If the device fails.
    fn at_least(
        &mut self,
        row: ScreenedRow<'_>,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, StepError>;

    /// Computes the logits of these tokens of a row, in ascending order, and adds them to `found`.
    ///
    /// # Errors
    /// If the device fails.
    fn logits_of(
        &mut self,
        row: ScreenedRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError>;

    /// Computes all logits of a row. // (vocab,)
    ///
    /// # Errors
    /// If the device fails.
    fn all(&mut self, row: ScreenedRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError>;
}

/// A backend with recurrent layers. A sequence has a state besides its blocks, in a slot ([`StateSlots`]).
pub trait Recurrent {
    /// Returns the number of bytes of a state.
    fn state_bytes(&self) -> usize;

    /// Returns the backend as one with slots for several engines, if it is one.
    fn as_slot_sets(&mut self) -> Option<&mut dyn SlotSets> {
        None
    }

    /// Copies the state in a slot to another one.
    ///
    /// # Errors
    /// If the device fails. The second slot is undefined then.
    fn copy_state(&mut self, from: u32, to: u32) -> Result<(), StepError>;

    /// Appends the state in a slot to `content`: [`state_bytes`](Self::state_bytes) bytes, in a layout that backends of the same
    /// numerics class share.
    ///
    /// # Errors
    /// If the device fails.
    fn read_state(&mut self, slot: u32, content: &mut Vec<u8>) -> Result<(), StepError>;

    /// Writes what [`read_state`](Self::read_state) of the same numerics class returned.
    ///
    /// # Errors
    /// If the device fails. The slot is undefined then.
    ///
    /// # Panics
    /// If `content` has not [`state_bytes`](Self::state_bytes) bytes.
    fn write_state(&mut self, slot: u32, content: &[u8]) -> Result<(), StepError>;
}

/// A backend with recurrent layers that several engines share: each has a set of slots of its own, with the same numbers.
pub trait SlotSets {
    /// Makes another set of as many slots, in which `slots` have the same states as in the set in use; others are undefined.
    /// Returns its number; that of the first set is 0.
    fn fork_set(&mut self, slots: &[u32]) -> u32;

    /// Uses a set from now on.
    ///
    /// # Panics
    /// If the set was dropped, or never made.
    fn use_set(&mut self, set: u32);

    /// Frees a set, which is not used again.
    fn drop_set(&mut self, set: u32);
}

/// A backend with a device that may still run a step when [`Backend::step`] has returned.
pub trait Asynchronous {
    /// Returns whether a step may begin the decodes of the next one. Block tables may then have a block after the last position
    /// of a chunk, which belongs to the sequence alone.
    fn decodes_ahead(&self) -> bool;

    /// Returns whether the device may still run the last step: a step that returns no logits need not wait for it.
    fn is_running(&mut self) -> bool;

    /// Waits until the device has run the last step.
    ///
    /// # Errors
    /// If the device fails.
    fn wait(&mut self) -> Result<(), StepError>;
}
