//! The device as a [`Backend`].

use super::{
    device::{Address, DeviceError, Part},
    step::CudaBackend,
};
use crate::{
    backend::{Backend, Chunk, Logits, StepError, positions},
    kv::BlockId,
};

impl Backend for CudaBackend {
    fn vocab_size(&self) -> usize {
        self.shape.vocab
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn weight_bytes(&self) -> Option<usize> {
        Some(self.weights.step_bytes())
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        positions::check(chunks, &self.config, self.block_count, &mut self.state.written)?;
        self.run(chunks, logits).map_err(failure)
    }

    fn draws(&self) -> bool {
        self.weights.tables.head.finds()
    }

    fn decodes_ahead(&self) -> bool {
        true
    }

    fn is_running(&self) -> bool {
        self.state.unread.is_some()
    }

    fn wait(&mut self) -> Result<(), StepError> {
        self.finish_unread().map_err(failure)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        let (bytes, from_at, to_at) = (self.block_bytes(), self.block_at(from), self.block_at(to));
        // The ranges of a copy must not overlap.
        if from == to { Ok(()) } else { self.device.copy(from_at, to_at, bytes).map_err(failure) }
    }

    fn block_bytes(&self) -> usize {
        self.shape.kv_block_bytes()
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        let (from, before) = (self.block_at(block), content.len());
        content.resize(before + self.block_bytes(), 0);
        self.device.read(&mut [Part { from, to: &mut content[before..] }]).map_err(failure)
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        assert_eq!(content.len(), self.block_bytes(), "the content of one block");
        self.device.write(self.block_at(block), content).map_err(failure)
    }
}

fn failure(error: DeviceError) -> StepError {
    match error {
        DeviceError::Sticky { .. } | DeviceError::Lost { .. } => {
            StepError::DeviceLost(Box::new(error))
        }
        _ => StepError::Device(Box::new(error)),
    }
}

impl CudaBackend {
    /// Returns the address of a block's keys and values.
    fn block_at(&self, block: BlockId) -> Address {
        assert!((block.0 as usize) < self.block_count, "a block of this pool");
        self.kv_base + u64::from(block.0) * self.block_bytes() as u64
    }
}
