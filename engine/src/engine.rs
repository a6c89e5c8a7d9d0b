//! The engine: scheduler, backend and sampler together.
//!
//! [`Engine::step`] finishes cancelled and expired requests, plans, copies blocks, runs the backend,
//! commits, and draws a token for every sequence with all its positions computed. The engine has no
//! thread and no clock: the caller passes the time and calls `step` until [`Engine::is_idle`].
//!
//! Invariant: a request is in `active` exactly as long as one of its sequences is in the scheduler, or waits in
//! `stored` for blocks from disk, and leaves with one `Finished` or `Failed` event.

mod active;
mod draw;
mod pace;
mod report;
#[cfg(test)]
mod simulation;
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
use pace::Pace;
pub use report::{EngineConfig, EngineStats, StepReport};
use stored::Stored;

use crate::{
    backend::{Backend, Chunk, Logits, LogitsFor, StepError},
    kv::{
        BLOCK_TOKENS, BlockHash,
        disk::{DiskCache, DiskStats},
    },
    request::{Event, FinishReason, Request, RequestError, RequestId, SubmitError},
    sampler::Scratch,
    scheduler::{Limits, Plan, PlannedChunk, Refusal, Scheduler, SequenceId},
    text::TokenText,
};

/// Continuous batching of requests over one backend.
pub struct Engine {
    backend: Box<dyn Backend>,
    vocabulary: Arc<dyn TokenText>,
    eos_tokens: Vec<u32>,
    config: EngineConfig,
    scheduler: Scheduler,
    pace: Pace,
    stored: Option<Stored>,
    active: BTreeMap<RequestId, ActiveRequest>,
    next_request: u64,
    /// Text of resumed choices, reported with the next step.
    resumed: Vec<Event>,
    /// Requests to finish with the next step.
    cancelled: BTreeSet<RequestId>,
    /// Requests with a deadline, the earliest first.
    deadlines: BTreeSet<(Instant, RequestId)>,
    /// Logits of the step. // (position, vocab)
    logits: Logits,
    scratch: Scratch,
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
        backend: Box<dyn Backend>,
        vocabulary: Arc<dyn TokenText>,
        eos_tokens: Vec<u32>,
        config: EngineConfig,
    ) -> Self {
        let limits = Limits {
            max_sequences: config.max_sequences,
            token_budget: config.token_budget,
            prefix_cache: config.prefix_cache,
            stall_limit: config.stall_limit,
        };
        let scheduler = Scheduler::new(limits, backend.block_count());
        Self {
            backend,
            vocabulary,
            eos_tokens,
            config,
            scheduler,
            pace: Pace::new(config.step_target),
            stored: None,
            active: BTreeMap::new(),
            next_request: 0,
            resumed: Vec::new(),
            cancelled: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            logits: Logits::default(),
            scratch: Scratch::default(),
            counters: EngineStats::default(),
        }
    }

    /// Uses blocks on disk, too: reads those that new prompts begin with, and writes those that several prompts
    /// use. Engines of one process may share a cache. No effect without the prefix cache.
    pub fn use_disk(&mut self, disk: DiskCache) {
        self.stored = self.config.prefix_cache.then(|| Stored::new(disk));
    }

    /// Returns what the cache on disk has and did.
    pub fn disk_stats(&self) -> Option<DiskStats> {
        self.stored.as_ref().map(|stored| stored.disk().stats())
    }

    /// Accepts a request; it starts with one of the next steps. A request with a deadline in the past is
    /// accepted and finishes with the next step.
    ///
    /// # Errors
    /// If a field is invalid ([`SubmitError::field`]) or the engine is full. The engine is unchanged then.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, SubmitError> {
        self.check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let root = BlockHash::root(self.backend.numerics_class(), &request.salt);
        if let Some(deadline) = request.deadline {
            self.deadlines.insert((deadline, id));
        }
        let new_active =
            || ActiveRequest::new(id, &request, self.config.context_length, &self.eos_tokens);
        let mut active = new_active();
        let mut tokens = request.prompt.clone();
        let vocab_size = self.backend.vocab_size();
        let in_vocabulary = check_tokens("resume", request.resume.iter(), vocab_size).is_ok();
        let resume = in_vocabulary && !request.resume.is_empty();
        match resume.then(|| active.resume(&request.resume, self.vocabulary.as_ref())).flatten() {
            Some(text) => {
                tokens.extend(&request.resume);
                // The caller has the tokens, but has not received the text from this engine.
                self.resumed.push(Event::Delta { id, choice: 0, text, tokens: Vec::new() });
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

    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let (prompt, sampling) = (&request.prompt, &request.sampling);
        if prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let (tokens, context_length) = (prompt.len(), self.config.context_length);
        if tokens >= context_length {
            return Err(SubmitError::PromptTooLong { tokens, context_length });
        }
        let capacity = self.scheduler.cache().total() * BLOCK_TOKENS;
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
        EngineStats {
            running: self.scheduler.running(),
            pending: self.scheduler.pending(),
            blocks_used: cache.held(),
            blocks_cached: cache.cached(),
            blocks_total: cache.total(),
            prefix_hit_tokens: scheduled.prefix_hit_tokens,
            prefix_miss_tokens: scheduled.prefix_miss_tokens,
            preemptions: scheduled.preemptions,
            disk_tokens: self.stored.as_ref().map_or(0, Stored::read_tokens),
            ..self.counters
        }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Runs one step. `now` is compared with deadlines. Without requests it does nothing.
    pub fn step(&mut self, now: Instant) -> StepReport {
        let events = std::mem::take(&mut self.resumed);
        let mut report = StepReport { events, ..StepReport::default() };
        self.finish_cancelled_and_expired(now, &mut report);
        if let Some(stored) = &mut self.stored {
            stored.settle(&mut self.scheduler, self.backend.as_mut());
        }
        report.prefill_max = match self.scheduler.is_interactive() {
            true => self.pace.prefill_rows(self.scheduler.decoding()),
            false => None,
        };
        let mut plan = self.scheduler.plan(report.prefill_max);
        self.apply_plan(&mut plan, &mut report);
        if plan.chunks.is_empty() {
            if let Some(stored) = self.stored.as_mut().filter(|stored| !stored.is_idle()) {
                stored.wait();
            }
            return report;
        }
        let result = self.run(&plan, &mut report);
        match result {
            Ok(()) => {
                self.scheduler.commit(&plan);
                self.sample_all(&plan, &mut report);
            }
            Err(error) => self.fail_step(&plan, error, &mut report),
        }
        if let Some(stored) = &mut self.stored {
            let is_idle = self.active.is_empty();
            stored.write_some(&self.scheduler, self.backend.as_mut(), is_idle);
        }
        report
    }

    /// Records how long a step took. The limits of later steps follow from these times, if the engine has a
    /// [target](EngineConfig::step_target).
    pub fn record_time(&mut self, report: &StepReport, time: Duration) {
        if !report.failed {
            let StepReport { prefill_tokens, decode_tokens, prefill_max, .. } = *report;
            self.pace.record(prefill_tokens, decode_tokens, prefill_max, time);
            if let Some(stored) = &mut self.stored {
                stored.record_time(prefill_tokens, time);
            }
        }
    }

    fn finish_cancelled_and_expired(&mut self, now: Instant, report: &mut StepReport) {
        for id in std::mem::take(&mut self.cancelled) {
            self.finish(id, FinishReason::Cancelled, None, report);
        }
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline <= now
        {
            self.finish(id, FinishReason::Deadline, None, report);
        }
    }

    /// Applies the plan's decisions to requests, and drops chunks of refused requests.
    fn apply_plan(&mut self, plan: &mut Plan, report: &mut StepReport) {
        report.preempted = plan.preempted.len();
        for (id, cached_tokens) in &plan.admitted {
            report.admitted.push(RequestId(id.request));
            if let Some(active) = self.active.get_mut(&RequestId(id.request)) {
                active.record_cached(*cached_tokens);
            }
            if let Some(stored) = &mut self.stored {
                stored.note_shared(self.scheduler.named_blocks(*id, *cached_tokens));
            }
        }
        for (id, refusal) in std::mem::take(&mut plan.refused) {
            let error = match refusal {
                Refusal::OutOfBlocks { needed, total } => {
                    RequestError::OutOfBlocks { needed, total }
                }
                Refusal::NoProgress { stalls } => RequestError::NoProgress { stalls },
            };
            self.finish(RequestId(id.request), FinishReason::Failed, Some(error), report);
        }
        plan.chunks.retain(|planned| self.scheduler.contains(planned.id));
    }

    fn run(&mut self, plan: &Plan, report: &mut StepReport) -> Result<(), StepError> {
        for (from, to) in &plan.copies {
            self.backend.copy_block(*from, *to);
        }
        let wanted: Vec<LogitsFor> =
            plan.chunks.iter().map(|planned| self.logits_for(planned.id)).collect();
        let chunks: Vec<Chunk<'_>> = plan
            .chunks
            .iter()
            .zip(wanted)
            .map(|(planned, logits)| self.scheduler.chunk(planned, logits))
            .collect();
        let (decodes, prefills): (Vec<&PlannedChunk>, Vec<&PlannedChunk>) =
            plan.chunks.iter().partition(|planned| planned.decodes);
        let tokens =
            |chunks: &[&PlannedChunk]| chunks.iter().map(|c| c.end - c.start).sum::<usize>();
        report.sequences = plan.chunks.len();
        report.prefill_tokens = tokens(&prefills);
        report.decode_tokens = tokens(&decodes);
        report.rows = report.prefill_tokens + report.decode_tokens;
        self.counters.steps += 1;
        self.counters.prefill_tokens += report.prefill_tokens as u64;
        self.counters.decode_tokens += report.decode_tokens as u64;
        self.backend.step(&chunks, &mut self.logits)
    }

    /// Returns the logits that the next draw of a sequence needs.
    fn logits_for(&self, id: SequenceId) -> LogitsFor {
        let active = self.active.get(&RequestId(id.request));
        let count = active.and_then(|active| active.logits_needed(id.choice));
        count.map_or(LogitsFor::Last, LogitsFor::Largest)
    }

    fn fail_step(&mut self, plan: &Plan, error: StepError, report: &mut StepReport) {
        report.failed = true;
        self.counters.failed_steps += 1;
        self.scheduler.invalidate(plan);
        let error = Arc::new(error);
        for planned in &plan.chunks {
            let error = RequestError::Step(error.clone());
            self.finish(RequestId(planned.id.request), FinishReason::Failed, Some(error), report);
        }
    }

    /// Removes a request in any state from the engine. Unfinished choices get `reason`.
    fn finish(
        &mut self,
        id: RequestId,
        reason: FinishReason,
        error: Option<RequestError>,
        report: &mut StepReport,
    ) {
        let Some(mut active) = self.active.remove(&id) else { return };
        for choice in 0..active.started() {
            self.scheduler.remove(active.sequence(choice));
        }
        if let Some(stored) = &mut self.stored {
            stored.remove(id.0);
        }
        self.cancelled.remove(&id);
        if let Some(deadline) = active.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        active.finish_choices(reason, &mut report.events);
        let output = active.into_output();
        report.events.push(match error {
            None => {
                self.counters.finished += 1;
                Event::Finished { id, output }
            }
            Some(error) => {
                self.counters.failed += 1;
                Event::Failed { id, error, output }
            }
        });
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
