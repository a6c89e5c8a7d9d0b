//! The engine: scheduler, backend and sampler together.
//!
//! [`Engine::step`] finishes cancelled and expired requests, plans, copies blocks, runs the backend,
//! commits, and draws a token for every sequence with all its positions computed. The engine has no
//! thread and no clock: the caller passes the time and calls `step` until [`Engine::is_idle`].
//!
//! Invariant: a request is in `active` exactly as long as one of its sequences is in the scheduler, or waits in
//! `stored` for blocks from disk, and leaves with one `Finished` or `Failed` event.

mod active;
mod constrained;
mod drafts;
mod draw;
mod embed;
mod fork;
mod full_steps;
mod pace;
mod report;
mod rows;
#[cfg(test)]
mod simulation;
mod step;
mod stored;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use active::ActiveRequest;
use drafts::Drafts;
pub use fork::ForkError;
use full_steps::FullSteps;
use pace::Pace;
use report::DeltaBuffers;
pub use report::{EngineConfig, EngineStats, StepReport};
pub use rows::RowTarget;
use stored::Stored;

use crate::{
    backend::{Backend, Chunk, Logits, SharedBackend},
    kv::{
        BlockHash,
        disk::{BlockTiers, TierStats},
    },
    request::{Event, Request, RequestId, SubmitError},
    sampling::{SamplingMetadata, Scratch},
    scheduler::{Limits, Plan, Scheduler},
    text::TokenText,
};

/// Most bytes of blocks to take memory for at the start.
const READY_BYTES: usize = 256 << 20;

/// Continuous batching of requests over one backend.
pub struct Engine {
    backend: SharedBackend,
    vocabulary: Arc<dyn TokenText>,
    eos_tokens: Vec<u32>,
    config: EngineConfig,
    scheduler: Scheduler,
    /// The plan of the step; kept between steps for its memory.
    plan: Plan,
    pace: Pace,
    /// Start of the last step with a request of the highest priority.
    called_at: Option<Instant>,
    /// `None`: full steps have all rows.
    full_steps: Option<FullSteps>,
    /// `None`: every step yields one token per sequence.
    drafts: Option<Drafts>,
    stored: Option<Stored>,
    active: BTreeMap<RequestId, ActiveRequest>,
    next_request: u64,
    /// Text of resumed choices, and of forked ones with their tokens, reported with the next step.
    resumed: Vec<Event>,
    /// Requests to finish with the next step.
    cancelled: BTreeSet<RequestId>,
    /// Requests with a deadline, the earliest first.
    deadlines: BTreeSet<(Instant, RequestId)>,
    /// Logits of the step. // (position, vocab)
    logits: Logits,
    /// Hidden rows of the step, of an embedding model. // (position, hidden)
    hidden: Vec<f32>,
    scratch: Scratch,
    /// All logits of a position, where those of the step did not decide a draw or several draws need them. // (vocab,)
    undecided: Vec<f32>,
    /// Prefill tokens, decoded tokens and time of the last steps, while the device may still run them.
    untimed: (usize, usize, Duration),
    /// What the draws of the step need; empty between steps, and kept for its memory.
    metadata: SamplingMetadata<'static>,
    /// The chunks of the step; empty between steps, and kept for its memory.
    chunks: Vec<Chunk<'static>>,
    spare: DeltaBuffers,
    /// Counters. [`Engine::stats`] adds the gauges.
    counters: EngineStats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("numerics_class", &self.backend.numerics_class())
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Makes an engine without requests over all KV blocks of `backend`.
    pub fn new(
        mut backend: Box<dyn Backend>,
        vocabulary: Arc<dyn TokenText>,
        eos_tokens: Vec<u32>,
        config: EngineConfig,
    ) -> Self {
        let limits = Limits {
            max_sequences: config.max_sequences,
            token_budget: config.token_budget,
            prefix_cache: config.prefix_cache,
            recurrent: config.recurrent,
            groups: backend.layer_groups(),
            kept_states: config.kept_states,
            spare_states: config.spare_states,
            block_ahead: backend.as_asynchronous().is_some_and(|backend| backend.decodes_ahead()),
            stall_limit: config.stall_limit,
        };
        let scheduler = Scheduler::new(limits, backend.block_count());
        let has_drafts = config.draft_tokens > 0 && (!config.recurrent || config.spare_states > 0);
        Self {
            backend: SharedBackend::new(backend),
            vocabulary,
            eos_tokens,
            config,
            scheduler,
            plan: Plan::default(),
            pace: Pace::new(config.step_target, config.rows),
            called_at: None,
            full_steps: config
                .step_target
                .map(|target| FullSteps::new(target, config.rows.most, config.token_budget)),
            drafts: has_drafts.then(Drafts::default),
            stored: None,
            active: BTreeMap::new(),
            next_request: 0,
            resumed: Vec::new(),
            cancelled: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            logits: Logits::default(),
            hidden: Vec::new(),
            scratch: Scratch::default(),
            undecided: Vec::new(),
            untimed: Default::default(),
            metadata: SamplingMetadata::default(),
            chunks: Vec::new(),
            spare: DeltaBuffers::default(),
            counters: EngineStats::default(),
        }
    }

    /// Uses blocks on disk, too: reads those that new prompts begin with, and writes those that several prompts
    /// use. Engines of one process may share a cache. No effect without the prefix cache.
    ///
    /// Memory for as many blocks as there are on disk is taken now, up to 256 MiB: a prompt that begins like
    /// those of an earlier process need not wait for it. Some virtual machines take a second for 500 MB.
    ///
    /// # Panics
    /// If the engine had requests before.
    pub fn use_disk(&mut self, disk: BlockTiers) {
        assert_eq!(self.next_request, 0, "blocks that hold something keep it");
        if !self.config.prefix_cache {
            return;
        }
        if self.config.recurrent && self.config.kept_states == 0 {
            tracing::warn!("blocks on disk are not used: the KV memory has no room for states");
            return;
        }
        let most = READY_BYTES / self.backend.block_bytes().max(1);
        self.backend
            .ready_blocks(most.min(usize::try_from(disk.stats().usage.blocks).unwrap_or(most)));
        let block_bytes = self.backend.block_bytes();
        let recurrent = self.backend.as_recurrent();
        let state_bytes = recurrent.map(|backend| (backend.state_bytes(), block_bytes));
        self.stored = Some(Stored::new(disk, state_bytes));
    }

    /// Returns what the cache on disk has and did.
    pub fn disk_stats(&self) -> Option<TierStats> {
        self.stored.as_ref().map(|stored| stored.disk().stats())
    }

    /// Accepts a request; it starts with one of the next steps. A request with a deadline in the past is
    /// accepted and finishes with the next step.
    ///
    /// # Errors
    /// If a field is invalid ([`SubmitError::field`]) or the engine is full. The engine is unchanged then.
    pub fn submit(&mut self, mut request: Request) -> Result<RequestId, SubmitError> {
        self.check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let root = BlockHash::root(self.backend.numerics_class(), &request.salt);
        if let Some(deadline) = request.deadline {
            self.deadlines.insert((deadline, id));
        }
        let vocabulary = self.vocabulary.as_ref();
        let begins_text = request.prompt.iter().all(|&token| vocabulary.is_special(token));
        let strips_space = begins_text && vocabulary.strips_leading_space();
        // No probability left for another token than the most probable one.
        if request.sampling.top_p == 0.0 {
            request.sampling.temperature = 0.0;
            request.sampling.top_p = 1.0;
        }
        let new_active = || {
            let sizes = (self.config.context_length, self.backend.vocab_size());
            let active = ActiveRequest::new(id, &request, root, sizes, &self.eos_tokens);
            if strips_space { active.strip_leading_space() } else { active }
        };
        let mut active = new_active();
        let mut tokens = request.prompt.clone();
        let vocab_size = self.backend.vocab_size();
        let in_vocabulary = check_tokens("resume", request.resume.iter(), vocab_size).is_ok();
        let resume = in_vocabulary && !request.resume.is_empty();
        match resume.then(|| active.resume(&request.resume, self.vocabulary.as_ref())).flatten() {
            Some(text) => {
                tokens.extend(&request.resume);
                // The caller has the tokens, but has not received the text from this engine.
                self.resumed.push(Event::Delta {
                    id,
                    choice: 0,
                    text,
                    tokens: Vec::new(),
                    logprobs: Vec::new(),
                });
            }
            None => active = new_active(),
        }
        match &mut self.stored {
            Some(stored) => stored.add(&mut self.scheduler, active.sequence(0), tokens, root),
            None => self.scheduler.add(active.sequence(0), tokens, root),
        }
        self.active.insert(id, active);
        Ok(id)
    }

    /// Returns how much longer to wait for further requests before the next step, if its first request came `waited` ago:
    /// a step with few rows takes about as long as one with more. `None` to start it, and always if a sequence is running
    /// or a request of the highest priority waits.
    pub fn wait_for_more(&self, waited: Duration) -> Option<Duration> {
        let rows = self.scheduler.rows_of_first_step(self.config.rows.least)?;
        self.config.rows.wait(rows, waited, self.config.wait_limit)
    }

    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let (prompt, sampling) = (&request.prompt, &request.sampling);
        match (self.config.embeds, request.embeds) {
            (true, false) => return Err(SubmitError::Embeds),
            (false, true) => return Err(SubmitError::Generates),
            _ => {}
        }
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let (tokens, context_length) = (prompt.len(), self.config.context_length);
        // A text needs room for a token.
        let (longest, with_answer) = match request.embeds {
            true => (context_length, ""),
            false => (context_length.saturating_sub(1), ", with the answer"),
        };
        if tokens > longest {
            return Err(SubmitError::PromptTooLong { tokens, context_length, with_answer });
        }
        let capacity = self.scheduler.capacity();
        if tokens > capacity {
            return Err(SubmitError::PromptExceedsCache { tokens, capacity });
        }
        sampling.validate()?;
        let vocab_size = self.backend.vocab_size();
        check_tokens("prompt", prompt.iter(), vocab_size)?;
        check_tokens("logit_bias", sampling.logit_bias.keys(), vocab_size)?;
        check_tokens("stop_tokens", sampling.stop_tokens.iter(), vocab_size)?;
        if self.active.len() >= self.config.max_requests {
            return Err(SubmitError::Full { requests: self.active.len() });
        }
        Ok(())
    }

    /// Finishes a request with the next step, which returns what it has generated. No effect on a finished
    /// request.
    pub fn cancel(&mut self, id: RequestId) {
        if self.active.contains_key(&id) {
            self.cancelled.insert(id);
        }
    }

    /// Returns whether the engine has no requests.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// Returns the gauges and counters.
    pub fn stats(&self) -> EngineStats {
        let scheduled = self.scheduler.counters();
        let cache = self.scheduler.cache();
        let bytes = |blocks: usize| (blocks * self.backend.block_bytes()) as u64;
        EngineStats {
            running: self.scheduler.running(),
            pending: self.scheduler.pending(),
            blocks_used: cache.held(),
            blocks_cached: cache.cached(),
            blocks_total: cache.total(),
            bytes_used: bytes(cache.held()),
            bytes_total: bytes(cache.total()),
            tiers: self.disk_stats(),
            prefix_hit_tokens: scheduled.prefix_hit_tokens,
            prefix_miss_tokens: scheduled.prefix_miss_tokens,
            preemptions: scheduled.preemptions,
            disk_tokens: self.stored.as_ref().map_or(0, Stored::read_tokens),
            ..self.counters
        }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &dyn Backend {
        &self.backend
    }
}

/// Checks that every token of a field is in the vocabulary.
fn check_tokens<'a>(
    field: &'static str,
    mut tokens: impl Iterator<Item = &'a u32>,
    vocab_size: usize,
) -> Result<(), SubmitError> {
    match tokens.find(|token| **token as usize >= vocab_size) {
        None => Ok(()),
        Some(token) => Err(SubmitError::TokenOutOfRange { field, token: *token, vocab_size }),
    }
}
