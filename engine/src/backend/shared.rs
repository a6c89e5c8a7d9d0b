//! A backend that several engines use: an engine and its shared forks.
//!
//! Steps and copies take turns: each uses all threads of the CPU's pool, or the whole device, so two at once would not
//! be faster. The blocks that an engine may use between its turns follow from the rules of
//! [`kv::shared`](crate::kv). States of recurrent layers are not shared: each engine has a set of slots, which its turns use.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Asynchronous, Backend, Chunk, CopyError, Logits, Recurrent, ScreenedRow, Screening, SlotSets,
    StepError,
};
use crate::{
    kv::{BlockId, LayerGroups},
    sampling::{Remainder, Threshold, TokenLogit},
};

/// A handle to a backend, of one engine.
pub struct SharedBackend {
    turns: Arc<Turns>,
    /// The engine's slots for states of recurrent layers, if there are any and several engines may have some.
    slots: Option<Slots>,
    numerics_class: Arc<str>,
    vocab_size: usize,
    block_count: usize,
    layer_groups: LayerGroups,
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

impl Turns {
    /// Waits for a turn. A step that panicked leaves only its own blocks undefined, like one that failed.
    fn take(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        let _next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A set of slots ([`SlotSets`]), which is freed with this.
struct Slots {
    set: u32,
    turns: Arc<Turns>,
}

impl Drop for Slots {
    fn drop(&mut self) {
        if let Some(sets) = slot_sets(&mut **self.turns.take()) {
            sets.drop_set(self.set);
        }
    }
}

fn slot_sets(backend: &mut dyn Backend) -> Option<&mut dyn SlotSets> {
    backend.as_recurrent()?.as_slot_sets()
}

impl SharedBackend {
    /// Makes the only handle to a backend.
    pub fn new(mut backend: Box<dyn Backend>) -> Self {
        let has_sets = slot_sets(backend.as_mut()).is_some();
        let of_engine = Self {
            numerics_class: backend.numerics_class().into(),
            vocab_size: backend.vocab_size(),
            block_count: backend.block_count(),
            layer_groups: backend.layer_groups(),
            block_bytes: backend.block_bytes(),
            weight_bytes: backend.weight_bytes(),
            draws_tokens: backend.draws_tokens(),
            is_screening: backend.as_screening().is_some(),
            state_bytes: backend.as_recurrent().map(|backend| backend.state_bytes()),
            decodes_ahead: backend.as_asynchronous().map(|backend| backend.decodes_ahead()),
            turns: Arc::new(Turns { next: Mutex::new(()), backend: Mutex::new(backend) }),
            slots: None,
        };
        let turns = Arc::clone(&of_engine.turns);
        Self { slots: has_sets.then(|| Slots { set: 0, turns }), ..of_engine }
    }

    /// Waits for a turn, in which the backend uses the engine's slots.
    fn turn(&self) -> MutexGuard<'_, Box<dyn Backend>> {
        let mut backend = self.turns.take();
        if let Some(slots) = &self.slots {
            slot_sets(&mut **backend).expect(AS_AT_START).use_set(slots.set);
        }
        backend
    }

    /// Returns a handle of another engine to the same backend. Of its slots for states of recurrent layers, `states` have the same
    /// states.
    ///
    /// # Errors
    /// If only one engine can have such slots.
    pub fn shared(&self, states: &[u32]) -> Result<Self, CopyError> {
        let slots = match (&self.slots, self.state_bytes) {
            (None, None) => None,
            (None, Some(_)) => return Err(CopyError::Unsupported),
            (Some(_), _) => {
                let set = slot_sets(&mut **self.turn()).expect(AS_AT_START).fork_set(states);
                Some(Slots { set, turns: Arc::clone(&self.turns) })
            }
        };
        let (turns, numerics_class) = (Arc::clone(&self.turns), Arc::clone(&self.numerics_class));
        Ok(Self { turns, slots, numerics_class, ..*self })
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

    fn layer_groups(&self) -> LayerGroups {
        self.layer_groups
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
