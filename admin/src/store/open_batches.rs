//! Open batches: batches that lines are added to while they run.
//!
//! An open batch has an input file of its own, to which lines are appended. A line is added once: its name is kept with the key of
//! its request, so that the same line again changes nothing, and another one with that name is refused. Adding changes no document
//! of a batch that is driven meanwhile, except where a line names a new model. What is added, the next step of the batch reads.

use async_trait::async_trait;
use tritmill_queue::{QueueName, StoreError, Tenant};

use super::{
    batch_steps::CustomIdHash,
    batches::{Batch, BatchId},
};

/// A line to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedLine {
    /// Hash of its `custom_id`.
    pub name: CustomIdHash,
    /// Hash of its request.
    pub key: [u8; 32],
    /// The model that it names, with its queue.
    pub model: (String, QueueName),
    /// Its text, without a line end.
    pub text: Vec<u8>,
}

/// Lines to add to a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddedLines {
    /// The lines; no two have the same name.
    pub lines: Vec<AddedLine>,
    /// Most lines of a batch.
    pub lines_max: u64,
    /// Most bytes of its file.
    pub bytes_max: u64,
    /// Most models of a batch of lines that may name several.
    pub models_max: usize,
}

/// Result of [`add_lines`](OpenBatches::add_lines). Except for the first, nothing was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adding {
    /// All lines are in the batch.
    Added {
        /// The batch with them.
        batch: Box<Batch>,
        /// Lines that were added by this call.
        added: u64,
        /// Lines that the batch had already.
        known: u64,
    },
    /// The file that the batch began with is still being validated.
    Validating,
    /// The batch takes no lines: it was not created open, was sealed, or has ended.
    Closed(Box<Batch>),
    /// This line has the name of one with another request.
    OtherRequest(usize),
    /// This line names another model than the others, of which there may be one.
    OtherModel(usize),
    /// This line names one model too many.
    ManyModels(usize),
    /// The batch would have too many lines.
    ManyLines,
    /// The file of the batch would be too large.
    TooLarge,
}

/// Lines of open batches in a store.
#[async_trait]
pub trait OpenBatches: Send + Sync {
    /// Adds lines to an open batch of a tenant: all of them, or none.
    async fn add_lines(
        &self,
        tenant: &Tenant,
        id: BatchId,
        lines: &AddedLines,
    ) -> Result<Option<Adding>, StoreError>;
}
