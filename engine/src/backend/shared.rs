//! A backend that several engines use: an engine and its shared forks.
//!
//! Steps and copies take turns: each uses all threads of the CPU's pool, or the whole device, so two at once would not
//! be faster. The blocks that an engine may use between its turns follow from the rules of
//! [`kv::shared`](crate::kv).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Asynchronous, Backend, Chunk, CopyError, Logits, Recurrent, ScreenedRow, Screening, StepError,
};
use crate::{
    kv::BlockId,
    sampling::{Remainder, Threshold, TokenLogit},
};

/// A handle to a backend. Clones are handles to the same backend.
#[derive(Clone)]
pub struct SharedBackend {
    turns: Arc<Turns>,
    numerics_class: Arc<str>,
    vocab_size: usize,
    block_count: usize,
    block_bytes: usize,
    weight_bytes: Option<usize>,
    draws_tokens: bool,
    is_screening: bool,
    /// Bytes of a state; `None` without recurrent layers.
    state_bytes: Option<usize>,
    /// Whether it decodes ahead; `None` if it is not asynchronous.
    decodes_ahead: Option<bool>,
}

struct Turns {
    /// Held by the engine that is next. A lock is not fair: without this one, an engine that steps without a pause
    /// could keep others waiting.
    next: Mutex<()>,
    backend: Mutex<Box<dyn Backend>>,
}

impl SharedBackend {
    /// Makes the only handle to a backend.
    pub fn new(mut backend: Box<dyn Backend>) -> Self {
        Self {
            numerics_class: backend.numerics_class().into(),
            vocab_size: backend.vocab_size(),
            block_count: backend.block_count(),
            block_bytes: backend.block_bytes(),
            weight_bytes: backend.weight_bytes(),
            draws_tokens: backend.draws_tokens(),
            is_screening: backend.as_screening().is_some(),
            state_bytes: backend.as_recurrent().map(|backend| backend.state_bytes()),
            decodes_ahead: backend.as_asynchronous().map(|backend| backend.decodes_ahead()),
            turns: Arc::new(Turns { next: Mutex::new(()), backend: Mutex::new(backend) }),
        }
    }

    /// Waits for a turn. A step that panicked leaves only its own blocks undefined, like one that failed.
    fn turn(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        let _next = self.turns.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.turns.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns [`Backend::with_copies`], without exclusive access to the handle.
    ///
    /// # Errors
    /// As there.
    pub fn copied(&self, blocks: &[BlockId], states: &[u32]) -> Result<Self, CopyError> {
        self.turn().with_copies(blocks, states).map(Self::new)
    }
}

impl Backend for SharedBackend {
    fn step_hidden(
        &mut self,
        chunks: &[Chunk<'_>],
        hidden: &mut Vec<f32>,
    ) -> Result<(), StepError> {
        self.turn().step_hidden(chunks, hidden)
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn weight_bytes(&self) -> Option<usize> {
        self.weight_bytes
    }

    fn as_screening(&mut self) -> Option<&mut dyn Screening> {
        if self.is_screening { Some(self) } else { None }
    }

    fn as_asynchronous(&mut self) -> Option<&mut dyn Asynchronous> {
        if self.decodes_ahead.is_some() { Some(self) } else { None }
    }

    fn as_recurrent(&mut self) -> Option<&mut dyn Recurrent> {
        if self.state_bytes.is_some() { Some(self) } else { None }
    }

    fn draws_tokens(&self) -> bool {
        self.draws_tokens
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        self.turn().step(chunks, logits)
    }

    fn run_tasks(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.turn().run_tasks(count, task);
    }

    fn ready_blocks(&mut self, count: usize) {
        self.turn().ready_blocks(count);
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.turn().copy_block(from, to)
    }

    fn with_copies(
        &mut self,
        blocks: &[BlockId],
        states: &[u32],
    ) -> Result<Box<dyn Backend>, CopyError> {
        self.turn().with_copies(blocks, states)
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.turn().read_block(block, content)
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        self.turn().write_block(block, content)
    }
}

/// Why the backend still has an ability: abilities do not change, and were looked for at the start.
const AS_AT_START: &str = "the backend had this ability at the start";

impl Screening for SharedBackend {
    fn at_least(
        &mut self,
        row: ScreenedRow<'_>,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, StepError> {
        self.turn().as_screening().expect(AS_AT_START).at_least(row, threshold, found)
    }

    fn logits_of(
        &mut self,
        row: ScreenedRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        self.turn().as_screening().expect(AS_AT_START).logits_of(row, tokens, found)
    }

    fn all(&mut self, row: ScreenedRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError> {
        self.turn().as_screening().expect(AS_AT_START).all(row, logits)
    }
}

impl Recurrent for SharedBackend {
    fn state_bytes(&self) -> usize {
        self.state_bytes.expect(AS_AT_START)
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result<(), StepError> {
        self.turn().as_recurrent().expect(AS_AT_START).copy_state(from, to)
    }

    fn read_state(&mut self, slot: u32, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.turn().as_recurrent().expect(AS_AT_START).read_state(slot, content)
    }

    fn write_state(&mut self, slot: u32, content: &[u8]) -> Result<(), StepError> {
        self.turn().as_recurrent().expect(AS_AT_START).write_state(slot, content)
    }
}

impl Asynchronous for SharedBackend {
    fn decodes_ahead(&self) -> bool {
        self.decodes_ahead == Some(true)
    }

    fn is_running(&mut self) -> bool {
        self.turn().as_asynchronous().expect(AS_AT_START).is_running()
    }

    fn wait(&mut self) -> Result<(), StepError> {
        self.turn().as_asynchronous().expect(AS_AT_START).wait()
    }
}
