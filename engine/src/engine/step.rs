//! One step of the engine, and the end of requests.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{Engine, StepReport, drafts, full_steps::FullSteps};
use crate::{
    backend::{Backend as _, Chunk, LogitsFor, StepError},
    request::{Event, FinishReason, RequestError, RequestId},
    scheduler::{Plan, PlannedChunk, Refusal, StepLimits},
};

/// Wait of a step without work, while other engines of the storage hold the blocks that requests need.
const BLOCKED_WAIT: Duration = Duration::from_millis(1);
/// Steps stay short for so long after a caller's last one: the next caller often comes right after it.
const SHORT_AFTER_CALLER: Duration = Duration::from_secs(1);

/// Decodes of others in a step while a caller waits for the first token. The caller's prompt has the rest of the step, but for a small
/// part that other prompts have.
const OTHERS_WHILE_AWAITED: usize = 1;

impl Engine {
    /// Runs one step. `now` is compared with deadlines. Without requests it does nothing.
    ///
    /// If no request can go on before another engine of the same [storage](crate::Fork::Shared) releases blocks, the step
    /// waits for a millisecond and does nothing.
    pub fn step(&mut self, now: Instant) -> StepReport {
        let mut report = StepReport::default();
        self.step_into(now, &mut report);
        self.wait(&report);
        report
    }

    /// Runs one step as [`step`](Self::step) does, without a [wait](Self::wait), and replaces the report of an earlier
    /// one.
    ///
    /// It reuses the memory of that report: its list of events, and the texts and tokens of its deltas. With that, a step
    /// that only decodes sequences allocates no memory, on the processor and once its buffers have their sizes:
    /// after as many rows, positions and candidates of the largest logits in a step, on every thread. A sequence
    /// that starts gets room for its answer, in parts of 4,096 tokens with 6 bytes of text each. Memory is still
    /// allocated for log-probabilities, penalties (which count tokens), stop strings that hold back long
    /// texts, and blocks on disk.
    pub fn step_into(&mut self, now: Instant, report: &mut StepReport) {
        let mut events = std::mem::take(&mut report.events);
        self.spare.empty(&mut events);
        events.append(&mut self.resumed);
        *report = StepReport { events, ..StepReport::default() };
        self.finish_cancelled_and_expired(now, report);
        if let Some(stored) = &mut self.stored {
            stored.settle(&mut self.scheduler, &mut self.backend);
        }
        report.limits = self.limits(now);
        // A limited step has no room for tokens that may turn out to be wrong.
        let certain_only = report.limits.prefill.is_some() || report.limits.decodes.is_some();
        self.propose_drafts(report.limits, certain_only);
        let (mut plan, mut copied) = (std::mem::take(&mut self.plan), Ok(()));
        self.scheduler.plan(report.limits, &mut plan, |from, to| {
            if copied.is_ok() {
                copied = self.backend.copy_block(from, to);
            }
        });
        self.apply_plan(&mut plan, report);
        match plan.chunks.is_empty() {
            true => report.waits = report.events.is_empty() && !self.active.is_empty(),
            false => self.run_plan(&plan, copied, report),
        }
        self.plan = plan;
    }

    /// Returns the limits of the next step: while a caller reads along or waits for the first token, and for a moment after that, it
    /// is short.
    fn limits(&mut self, now: Instant) -> StepLimits {
        let (is_interactive, is_awaited) =
            (self.scheduler.is_interactive(), self.scheduler.is_awaited());
        if is_interactive || is_awaited {
            self.called_at = Some(now);
        }
        let since_call = self.called_at.map(|at| now.saturating_duration_since(at));
        let decoding = |highest| self.scheduler.decoding(Some(highest));
        let rows = self.full_steps.as_ref().map(FullSteps::limit);
        let is_short = is_interactive
            || !is_awaited && since_call.is_some_and(|time| time < SHORT_AFTER_CALLER);
        if !is_short && !is_awaited {
            return StepLimits { rows, ..StepLimits::default() };
        }
        let most = is_awaited.then_some(OTHERS_WHILE_AWAITED);
        let limits = self.pace.limits(decoding(true), decoding(false), most);
        match is_short {
            true => limits,
            // The prompt is short, or else has whole steps.
            false => StepLimits { prefill: None, rows, ..limits },
        }
    }

    /// Proposes tokens that may follow, or with `certain_only` those that must.
    fn propose_drafts(&mut self, limits: StepLimits, certain_only: bool) {
        let Some(drafts) = &mut self.drafts else { return };
        let active = &mut self.active;
        let most = self.config.draft_tokens.min(drafts::MOST);
        let (draws, decodes) = (self.backend.draws_tokens(), self.scheduler.decoding(None));
        drafts.begin(decodes, most);
        let likely = if certain_only { 0 } else { most };
        self.scheduler.for_drafts(|id, tokens, proposed| {
            proposed.clear();
            if let Some(request) = active.get_mut(&RequestId(id.request)) {
                request.propose((id.choice, tokens), drafts, (likely, draws), proposed);
            }
        });
        drafts.decide(self.scheduler.budget(limits).saturating_sub(decodes));
        self.scheduler.for_drafts(|id, tokens, proposed| {
            if let Some(request) = active.get_mut(&RequestId(id.request)) {
                request.keep_chosen((id.choice, tokens.len()), drafts, (most, draws), proposed);
            }
        });
    }

    /// Waits for a moment if a step had nothing to do before blocks are read from disk or other engines release some.
    /// [`step_into`](Self::step_into) leaves this to the caller, who may let other engines run first.
    pub fn wait(&mut self, report: &StepReport) {
        if !report.waits {
            return;
        }
        match self.stored.as_mut().filter(|stored| !stored.is_idle()) {
            Some(stored) => stored.wait(),
            None => thread::sleep(BLOCKED_WAIT),
        }
    }

    /// Runs a plan with chunks. `copied` is the result of its copies.
    fn run_plan(&mut self, plan: &Plan, copied: Result<(), StepError>, report: &mut StepReport) {
        match copied.and_then(|()| self.run(plan, report)) {
            Ok(()) => {
                self.scheduler.commit(plan);
                match self.config.embeds {
                    true => self.embed_all(plan, report),
                    false => self.sample_all(plan, report),
                }
            }
            Err(error) => self.fail_step(plan, error, report),
        }
        if let Some(stored) = &mut self.stored {
            let is_idle = self.active.is_empty();
            stored.write_some(&self.scheduler, &mut self.backend, is_idle);
        }
    }

    /// Records how long a step took. The limits of later steps follow from these times, if the engine has a
    /// [target](EngineConfig::step_target).
    pub fn record_time(&mut self, report: &StepReport, time: Duration) {
        if report.failed {
            self.untimed = Default::default();
        } else {
            // The device may run a step on while the next one begins: then their times together are known.
            let (prefill, decodes, before) = std::mem::take(&mut self.untimed);
            let (prefill_tokens, decode_tokens) =
                (prefill + report.prefill_tokens, decodes + report.decode_tokens);
            let time = before + time;
            let is_running = self.backend.as_asynchronous().is_some_and(|b| b.is_running());
            if is_running {
                self.untimed = (prefill_tokens, decode_tokens, time);
                return;
            }
            self.pace.record(prefill_tokens, decode_tokens, report.limits, time);
            let is_full = report.limits.prefill.is_none() && report.limits.decodes.is_none();
            if let Some(full_steps) = self.full_steps.as_mut().filter(|_| is_full) {
                full_steps.record(prefill_tokens, decode_tokens, time);
            }
            if let Some(drafts) = self.drafts.as_mut().filter(|_| prefill_tokens == 0) {
                drafts.record_time(decode_tokens, time.as_secs_f64());
            }
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
        for (id, refusal) in plan.refused.drain(..) {
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
        report.sequences = plan.chunks.len();
        for PlannedChunk { start, end, decodes, .. } in &plan.chunks {
            let tokens =
                if *decodes { &mut report.decode_tokens } else { &mut report.prefill_tokens };
            *tokens += end - start;
        }
        report.rows = report.prefill_tokens + report.decode_tokens;
        self.counters.steps += 1;
        self.counters.prefill_tokens += report.prefill_tokens as u64;
        self.counters.decode_tokens += report.decode_tokens as u64;
        if self.config.embeds {
            return self.run_hidden(plan);
        }
        let (scheduler, active) = (&self.scheduler, &self.active);
        let mut metadata = std::mem::take(&mut self.metadata).emptied();
        for planned in plan.chunks.iter().filter(|planned| planned.samples) {
            let request = active.get(&RequestId(planned.id.request));
            let request = request.expect("a sequence belongs to an active request");
            let tokens = scheduler.chunk(planned).tokens;
            let (_, drafts) = tokens.split_at(tokens.len() - planned.drafts);
            let first = planned.end - drafts.len();
            let row = |draft| request.metadata(planned.id.choice, first + draft, &drafts[..draft]);
            metadata.rows.extend((0..=drafts.len()).map(row));
        }
        let mut rows = &metadata.rows[..];
        let mut chunks = emptied(std::mem::take(&mut self.chunks));
        chunks.extend(plan.chunks.iter().map(|planned| {
            let chunk = scheduler.chunk(planned);
            if !planned.samples {
                return chunk;
            }
            let (draws, rest) = rows.split_at(planned.drafts + 1);
            rows = rest;
            Chunk { logits: LogitsFor::Draws(draws), ..chunk }
        }));
        let result = self.backend.step(&chunks, &mut self.logits);
        self.chunks = emptied(chunks);
        self.metadata = metadata.emptied();
        result
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
    pub(super) fn finish(
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

/// Returns an empty list in the memory of another one, for chunks that borrow from elsewhere.
fn emptied<'to>(mut chunks: Vec<Chunk<'_>>) -> Vec<Chunk<'to>> {
    chunks.clear();
    // The standard library collects a list's own elements in its memory.
    chunks.into_iter().map(|_| -> Chunk<'to> { unreachable!("the list is empty") }).collect()
}
