//! Configuration of an engine, reports of its steps, and its statistics.

use std::time::Duration;

use super::RowTarget;
use crate::{
    backend::STEP_ROWS,
    formats::Format,
    kv::disk::TierStats,
    request::{Event, RequestId},
    scheduler::StepLimits,
};

/// Bounds of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Longest sequence in tokens, prompt and answer together.
    pub context_length: usize,
    /// Sequences that may hold KV blocks at once; at least 1.
    pub max_sequences: usize,
    /// Tokens of one step, prefill chunks and decodes together; raised to `max_sequences`.
    pub token_budget: usize,
    /// Whether KV blocks are reused by content.
    pub prefix_cache: bool,
    /// Steps without work, or preemptions, after which a sequence without a new token fails.
    pub stall_limit: u32,
    /// Most requests in the engine, pending ones included.
    pub max_requests: usize,
    /// Time of a step while a request of the highest priority is decoded: prefill chunks are limited to what fits. Other steps are
    /// as short as they can be without a loss of more than 2 % of the rate of prompts, and no shorter than this.
    /// `None`: steps are always full. Needs [`Engine::record_time`](super::Engine::record_time).
    pub step_target: Option<Duration>,
    /// Rows of a step that the kernels use well.
    pub rows: RowTarget,
    /// Longest wait of an idle engine for so many rows. See [`Engine::wait_for_more`](super::Engine::wait_for_more).
    pub wait_limit: Duration,
    /// Most drafts of a sequence in a step: tokens that may follow its newest one, computed with it where that pays, at most 64. 0
    /// for none. Needs [`Engine::record_time`](super::Engine::record_time).
    pub draft_tokens: usize,
    /// Whether the model embeds prompts instead of continuing them.
    pub embeds: bool,
    /// Whether the model has recurrent layers.
    pub recurrent: bool,
    /// Slots of the backend for states that are kept where prefixes end, after those of `max_sequences`. Without any, a model with
    /// recurrent layers computes every prompt from its start.
    pub kept_states: usize,
    /// Slots of the backend for states after drafts, after those of kept states. Without any, a model with recurrent layers has no
    /// drafts.
    pub spare_states: usize,
}

impl EngineConfig {
    /// Returns the defaults for a model of this context length.
    pub fn new(context_length: usize) -> Self {
        Self {
            context_length,
            max_sequences: 64,
            token_budget: STEP_ROWS,
            prefix_cache: true,
            stall_limit: 1000,
            max_requests: 16_384,
            step_target: Some(Duration::from_millis(150)),
            rows: RowTarget::for_format(Format::I2S),
            wait_limit: Duration::from_millis(10),
            draft_tokens: 8,
            embeds: false,
            recurrent: false,
            kept_states: 0,
            spare_states: 0,
        }
    }
}

/// Memory of deltas that were reported, for later ones.
#[derive(Debug, Default)]
pub(super) struct DeltaBuffers(Vec<(String, Vec<u32>)>);

impl DeltaBuffers {
    /// Most deltas that it keeps the memory of.
    const DELTAS_MAX: usize = 1024;
    /// Bytes of text that a delta has room for from the start.
    const TEXT_BYTES: usize = 64;

    /// Returns an empty text and an empty list of tokens.
    pub fn take(&mut self) -> (String, Vec<u32>) {
        self.0.pop().unwrap_or_else(|| (String::with_capacity(Self::TEXT_BYTES), Vec::new()))
    }

    /// Takes the memory of the deltas of a report.
    pub fn empty(&mut self, events: &mut Vec<Event>) {
        for event in events.drain(..) {
            if let Event::Delta { mut text, mut tokens, .. } = event
                && self.0.len() < Self::DELTAS_MAX
            {
                text.clear();
                tokens.clear();
                self.0.push((text, tokens));
            }
        }
    }
}

/// Results of one step.
#[derive(Debug, Clone, Default)]
pub struct StepReport {
    /// Events of requests, in order.
    pub events: Vec<Event>,
    /// Sequences that took part.
    pub sequences: usize,
    /// Tokens computed: rows of the step's matrices.
    pub rows: usize,
    /// Rows of prefill chunks.
    pub prefill_tokens: usize,
    /// Rows of decodes, drafts included.
    pub decode_tokens: usize,
    /// Sequences that became pending again.
    pub preempted: usize,
    /// Requests with a sequence that was admitted, again ones included.
    pub admitted: Vec<RequestId>,
    /// Whether the backend reported an error.
    pub failed: bool,
    /// Whether requests wait for blocks that are read from disk, or that other engines hold, and nothing else happened.
    pub waits: bool,
    /// Limits of the step.
    pub limits: StepLimits,
}

/// Gauges and counters of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Sequences that hold KV blocks.
    pub running: usize,
    /// Pending sequences, which hold no KV blocks.
    pub pending: usize,
    /// KV blocks held by sequences, of all engines that share the storage.
    pub blocks_used: usize,
    /// KV blocks kept for their contents.
    pub blocks_cached: usize,
    /// All KV blocks.
    pub blocks_total: usize,
    /// Bytes of the blocks held by sequences.
    pub bytes_used: u64,
    /// Bytes of all KV blocks.
    pub bytes_total: u64,
    /// The tiers below the KV blocks, of all engines that share them; `None` without any.
    pub tiers: Option<TierStats>,
    /// Tokens found in the prefix cache at admissions.
    pub prefix_hit_tokens: u64,
    /// Tokens not found there, which had to be computed.
    pub prefix_miss_tokens: u64,
    /// Tokens with keys and values that were read from disk.
    pub disk_tokens: u64,
    /// Steps the backend ran.
    pub steps: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Tokens computed in prefill chunks.
    pub prefill_tokens: u64,
    /// Tokens computed in decodes, drafts included.
    pub decode_tokens: u64,
    /// Drafts that were computed.
    pub drafted_tokens: u64,
    /// Drafts that were drawn: each saved a decode.
    pub accepted_tokens: u64,
    /// Draws that do not need all logits by their parameters, and for which all were computed: the most probable tokens did not decide
    /// them, or a backend does not take so many tokens.
    pub undecided_draws: u64,
    /// Tokens drawn.
    pub generated_tokens: u64,
    /// Sequences that became pending again.
    pub preemptions: u64,
    /// Requests that finished, cancelled and expired ones included.
    pub finished: u64,
    /// Requests that failed.
    pub failed: u64,
}
