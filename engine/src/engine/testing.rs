//! A backend that detects every mistake in block bookkeeping, and the expected output of each request.
//!
//! [`HashBackend`] keeps in its "KV blocks" the token and position of every slot. The logits of a
//! position are a hash of all tokens up to it, *as read back from the blocks*: a wrong table, a
//! missed copy, a stale prefix or an overwritten block changes the tokens that are drawn.
//! [`expected`] computes the output without blocks, batches or scheduler.

mod expected;
mod letters;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use super::*;
use crate::{
    backend::{
        Above, Chunk, CopyError, KeptRow, Logits, LogitsFor, Rest, StepError, TokenLogit,
        logits as of_logits,
    },
    kv::BlockId,
    request::{Choice, FinishReason, Output, RequestError},
    sampler::SamplingParams,
    scheduler::Fork,
};

pub use expected::expected;
pub use letters::Letters;

pub const VOCAB: usize = 48;
pub const EOS: u32 = 47;
/// A special token that does not end a choice.
pub const SPECIAL: u32 = 46;
/// Sequences that start with this token get NaN once they are [`POISON_AT`] long.
pub const POISON: u32 = 45;
pub const POISON_AT: usize = 5;
pub const CONTEXT: usize = 200;

/// Commands of a test to the backend, and the backend's counters.
#[derive(Debug, Default)]
pub struct Control {
    pub fail_next: bool,
    pub fail_copy: bool,
    pub copies: usize,
    /// What the backend says of the last step: whether the device may still run it.
    pub is_running: bool,
}

type Slot = Option<(u32, usize)>; // token, position

pub struct HashBackend {
    blocks: Vec<[Slot; BLOCK_TOKENS]>,
    control: Arc<Mutex<Control>>,
    /// Whether each step begins the decodes of the next one, which write a slot behind the sequence.
    ahead: bool,
}

impl HashBackend {
    /// Reads the tokens at `0..=last` from the blocks of `chunk`.
    fn read(&self, chunk: &Chunk<'_>, last: usize) -> Vec<u32> {
        let token = |position: usize| {
            let block = chunk.blocks[position / BLOCK_TOKENS];
            let slot = self.blocks[block.index()][position % BLOCK_TOKENS];
            let (token, stored) = slot.expect("every earlier position was computed");
            assert_eq!(stored, position, "block {block:?} holds other positions");
            token
        };
        (0..=last).map(token).collect()
    }

    /// Returns the position after a chunk if its next decode may be begun.
    fn ahead_of(chunk: &Chunk<'_>) -> Option<usize> {
        let next = chunk.position + chunk.tokens.len();
        let has_room = next < chunk.blocks.len() * BLOCK_TOKENS;
        (has_room && matches!(chunk.logits, LogitsFor::Largest(_))).then_some(next)
    }

    /// Checks that a block written by a chunk is in no other table of the step.
    fn check_writes(&self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            let last = chunk.position + chunk.tokens.len() - 1;
            let last = Self::ahead_of(chunk).filter(|_| self.ahead).unwrap_or(last) / BLOCK_TOKENS;
            for written in &chunk.blocks[chunk.position / BLOCK_TOKENS..=last] {
                let readers = chunks.iter().filter(|other| other.blocks.contains(written));
                assert_eq!(readers.count(), 1, "{written:?} is written while others read it");
            }
        }
    }
}

impl Backend for HashBackend {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn block_count(&self) -> usize {
        self.blocks.len()
    }

    fn numerics_class(&self) -> &str {
        "hash"
    }

    fn decodes_ahead(&self) -> bool {
        self.ahead
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        assert!(!chunks.is_empty() && chunks.iter().all(|chunk| !chunk.tokens.is_empty()));
        self.check_writes(chunks);
        let fails = std::mem::take(&mut self.control.lock().expect("no panic holds it").fail_next);
        for chunk in chunks {
            for (offset, token) in chunk.tokens.iter().enumerate() {
                let position = chunk.position + offset;
                let block = chunk.blocks[position / BLOCK_TOKENS].index();
                let slot = (*token, if fails { usize::MAX } else { position });
                self.blocks[block][position % BLOCK_TOKENS] = Some(slot);
            }
        }
        for (chunk, next) in chunks.iter().filter_map(|c| Some((c, Self::ahead_of(c)?))) {
            if self.ahead {
                let block = chunk.blocks[next / BLOCK_TOKENS].index();
                self.blocks[block][next % BLOCK_TOKENS] = Some((0, usize::MAX));
            }
        }
        if fails {
            return Err(StepError::Device("requested by the test".into()));
        }
        logits.clear(VOCAB);
        let wanted = || chunks.iter().filter(|chunk| chunk.logits != LogitsFor::Nothing);
        let rankings = |chunk: &Chunk<'_>| match chunk.logits {
            LogitsFor::Largest(ranking) => vec![Some(ranking)],
            LogitsFor::Each(rankings) => rankings.iter().copied().map(Some).collect(),
            _ => vec![None],
        };
        logits.lay_out(wanted().flat_map(rankings).map(|ranking| ranking.is_none()));
        let (mut all, mut lists, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in wanted() {
            let rankings = rankings(chunk);
            let first = chunk.position + chunk.tokens.len() - rankings.len();
            for (position, ranking) in (first..).zip(rankings) {
                let row = logits_after(&self.read(chunk, position));
                match ranking {
                    Some(ranking) => {
                        lists.push(of_logits::first(&row, &ranking));
                        kept.push((ranking.keeps, row));
                    }
                    None => all.extend(row),
                }
            }
        }
        logits.all_mut().copy_from_slice(&all);
        logits.set_largest(lists.iter().map(Vec::as_slice));
        // Hidden rows are the logits themselves.
        let of_kept = logits.keep(kept.iter().map(|(keeps, _)| *keeps));
        of_kept.hidden.extend(kept.iter().filter(|(keeps, _)| *keeps).flat_map(|(_, row)| row));
        Ok(())
    }

    fn tokens_above(
        &mut self,
        kept: KeptRow<'_>,
        above: Above,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Rest>, StepError> {
        let (tokens, rest) = of_logits::above(kept.hidden, above);
        found.clear();
        found.extend(tokens);
        // A bound that is not close, so that some draws are undecided: after the last look, a tenth of the largest weight.
        Ok(Some(Rest { weight: rest.weight * 2.0 + 4e4, ..rest }))
    }

    fn all_logits(&mut self, kept: KeptRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        logits.extend_from_slice(kept.hidden);
        Ok(())
    }

    fn token_logits(
        &mut self,
        kept: KeptRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        let logit = |id: &u32| TokenLogit { id: *id, logit: kept.hidden[*id as usize] };
        found.extend(tokens.iter().map(logit));
        Ok(())
    }

    fn block_bytes(&self) -> usize {
        12 * BLOCK_TOKENS
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        for slot in self.blocks[block.index()] {
            let (token, position) = slot.expect("only full blocks are read");
            content.extend(token.to_le_bytes());
            content.extend((position as u64).to_le_bytes());
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        for (slot, bytes) in self.blocks[block.index()].iter_mut().zip(content.chunks_exact(12)) {
            let (token, position) = bytes.split_at(4);
            let token = u32::from_le_bytes(token.try_into().expect("four bytes"));
            let position = u64::from_le_bytes(position.try_into().expect("eight bytes"));
            *slot = Some((token, position as usize));
        }
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.control.lock().expect("no panic holds it").is_running
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.blocks[to.index()] = self.blocks[from.index()];
        let mut control = self.control.lock().expect("no panic holds it");
        control.copies += 1;
        if std::mem::take(&mut control.fail_copy) {
            return Err(StepError::Device("requested by the test".into()));
        }
        Ok(())
    }

    fn with_copies(&mut self, blocks: &[BlockId]) -> Result<Box<dyn Backend>, CopyError> {
        let mut copy = vec![[None; BLOCK_TOKENS]; self.blocks.len()];
        for block in blocks {
            copy[block.index()] = self.blocks[block.index()];
        }
        Ok(Box::new(Self { blocks: copy, control: self.control.clone(), ..*self }))
    }
}

/// The model: a function from all tokens to logits.
fn logits_after(tokens: &[u32]) -> Vec<f32> {
    if tokens[0] == POISON && tokens.len() >= POISON_AT {
        return vec![f32::NAN; VOCAB];
    }
    let mut hasher = blake3::Hasher::new();
    tokens.iter().for_each(|token| {
        hasher.update(&token.to_le_bytes());
    });
    let mut bytes = [0u8; 2 * VOCAB];
    hasher.finalize_xof().fill(&mut bytes);
    let logit = |pair: &[u8]| f32::from(i16::from_le_bytes([pair[0], pair[1]])) / 8192.0;
    bytes.chunks_exact(2).map(logit).collect()
}

/// Returns the engine's defaults with limits small enough for a test to reach.
pub fn config() -> EngineConfig {
    EngineConfig { max_sequences: 8, token_budget: 64, ..EngineConfig::new(CONTEXT) }
}

/// An engine over a [`HashBackend`], a clock, and everything that the engine has reported.
pub struct Harness {
    pub engine: Engine,
    pub control: Arc<Mutex<Control>>,
    pub now: Instant,
    pub outputs: BTreeMap<RequestId, (Output, Option<RequestError>)>,
    /// Tokens and text of all deltas, by request and choice.
    pub deltas: BTreeMap<(RequestId, u32), (Vec<u32>, String)>,
    /// Whether no other engine uses the storage, so that each step can be audited.
    pub is_alone: bool,
}

impl Harness {
    pub fn new(config: EngineConfig, block_count: usize) -> Self {
        Self::on(config, block_count, false)
    }

    /// An engine on a backend that begins the next decodes with each step, or does not.
    pub fn on(config: EngineConfig, block_count: usize, ahead: bool) -> Self {
        let control = Arc::new(Mutex::new(Control::default()));
        let blocks = vec![[None; BLOCK_TOKENS]; block_count];
        let backend = HashBackend { blocks, control: control.clone(), ahead };
        let engine = Engine::new(Box::new(backend), Arc::new(Letters::new()), vec![EOS], config);
        let (outputs, deltas) = (BTreeMap::new(), BTreeMap::new());
        Self { engine, control, now: Instant::now(), outputs, deltas, is_alone: true }
    }

    /// Forks the engine, and everything that it has reported.
    pub fn fork(&mut self, kind: Fork) -> Self {
        self.is_alone &= kind == Fork::Deep;
        Self {
            engine: self.engine.fork(kind).expect("the backend can be copied"),
            control: self.control.clone(),
            now: self.now,
            outputs: self.outputs.clone(),
            deltas: self.deltas.clone(),
            is_alone: kind == Fork::Deep,
        }
    }

    pub fn submit(&mut self, request: &Request) -> RequestId {
        self.engine.submit(request.clone()).expect("the request is valid")
    }

    /// Runs one step of the engine, a second later, and checks every invariant.
    pub fn step(&mut self) -> StepReport {
        self.now += Duration::from_secs(1);
        let report = self.engine.step(self.now);
        // Slow enough that limits of prefill change.
        let time = Duration::from_millis(20 + 9 * report.rows as u64);
        self.engine.record_time(&report, time);
        if self.is_alone {
            self.engine.scheduler.audit();
        }
        for event in &report.events {
            self.record(event.clone());
        }
        report
    }

    fn record(&mut self, event: Event) {
        let (id, output, error) = match event {
            Event::Delta { id, choice, text, tokens } => {
                assert!(!self.outputs.contains_key(&id), "{id:?} got a delta after it finished");
                let (all, whole) = self.deltas.entry((id, choice)).or_default();
                all.extend(tokens);
                whole.push_str(&text);
                return;
            }
            Event::Finished { id, output } => (id, output, None),
            Event::Failed { id, error, output } => (id, output, Some(error)),
        };
        for choice in &output.choices {
            let received = self.deltas.remove(&(id, choice.index)).unwrap_or_default();
            assert_eq!(received, (choice.tokens.clone(), choice.text.clone()), "deltas add up");
        }
        let total: usize = output.choices.iter().map(|choice| choice.tokens.len()).sum();
        assert_eq!(output.completion_tokens, total);
        assert!(self.outputs.insert(id, (output, error)).is_none(), "{id:?} finished twice");
    }

    /// Steps until the engine is idle, and checks that every block has been released.
    pub fn run(&mut self) {
        self.run_beside_others();
        assert_eq!(self.engine.stats().blocks_used, 0);
    }

    /// Steps until the engine is idle. Other engines may use its storage.
    pub fn run_beside_others(&mut self) {
        let mut steps = 0;
        while !self.engine.is_idle() {
            self.step();
            steps += 1;
            assert!(steps < 20_000, "the engine does not become idle: {:?}", self.engine);
        }
        let stats = self.engine.stats();
        assert_eq!((stats.running, stats.pending), (0, 0));
    }

    pub fn fail_next_step(&self) {
        self.control.lock().expect("no panic holds it").fail_next = true;
    }

    pub fn output(&self, id: RequestId) -> &Output {
        &self.outputs[&id].0
    }

    /// Submits a request, runs until the engine is idle, and returns the output.
    pub fn complete(&mut self, request: &Request) -> &Output {
        let id = self.submit(request);
        self.run();
        self.output(id)
    }

    /// Returns the choices of [`Self::complete`].
    pub fn choices(&mut self, request: &Request) -> Vec<Choice> {
        self.complete(request).choices.clone()
    }
}

/// Returns a prompt of `length` letters, different for every `kind`.
pub fn prompt(kind: u32, length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (kind * 7 + i * (kind % 5 + 1)) % 44).collect()
}

/// Returns a request that generates exactly `max_tokens` tokens, with a seed from `kind`.
pub fn request(kind: u32, length: usize, max_tokens: usize) -> Request {
    let sampling = SamplingParams {
        max_tokens,
        ignore_eos: true,
        seed: u64::from(kind),
        ..SamplingParams::default()
    };
    Request { prompt: prompt(kind, length), sampling, ..Request::default() }
}
