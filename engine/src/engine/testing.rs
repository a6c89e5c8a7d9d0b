//! A backend that detects every mistake in block bookkeeping, and the expected output of each request.
//!
//! [`HashBackend`] keeps in its "KV blocks" the token and position of every slot. The logits of a
//! position are a hash of all tokens up to it, *as read back from the blocks*: a wrong table, a
//! missed copy, a stale prefix or an overwritten block changes the tokens that are drawn.
//! [`expected`] computes the output without blocks, batches or scheduler.

mod draws;
mod expected;
mod hash_backend;
mod letters;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use super::*;
use crate::{
    kv::LayerGroups,
    request::{Choice, FinishReason, Output, RequestError},
    sampling::SamplingParams,
    scheduler::Fork,
};

pub use expected::expected;
pub use hash_backend::HashBackend;
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

/// Returns the same for a model with recurrent layers.
pub fn recurrent() -> EngineConfig {
    EngineConfig { recurrent: true, kept_states: 6, spare_states: 2, ..config() }
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
        Self::of(config, block_count, LayerGroups::ONE, ahead)
    }

    /// As [`Self::on`], with these groups of layers.
    pub fn of(config: EngineConfig, block_count: usize, groups: LayerGroups, ahead: bool) -> Self {
        let control = Arc::new(Mutex::new(Control::default()));
        let mut backend = HashBackend::new(block_count, control.clone(), ahead).with_groups(groups);
        if config.recurrent {
            let EngineConfig { max_sequences, kept_states, spare_states, .. } = config;
            backend = backend.with_states(max_sequences + kept_states + spare_states);
        }
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
            Event::Delta { id, choice, text, tokens, .. } => {
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
