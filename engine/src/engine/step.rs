//! One step of the engine, and the end of requests.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{Engine, StepReport};
use crate::{
    backend::{Backend as _, Chunk, LogitsFor, StepError},
    request::{Event, FinishReason, RequestError, RequestId},
    scheduler::{Plan, PlannedChunk, Refusal, SequenceId},
};

/// Wait of a step without work, while other engines of the storage hold the blocks that requests need.
const BLOCKED_WAIT: Duration = Duration::from_millis(1);

impl Engine {
    /// Runs one step. `now` is compared with deadlines. Without requests it does nothing.
    ///
    /// If no request can go on before another engine of the same [storage](Fork::Shared) releases blocks, the step
    /// waits for a millisecond and does nothing.
    pub fn step(&mut self, now: Instant) -> StepReport {
        let events = std::mem::take(&mut self.resumed);
        let mut report = StepReport { events, ..StepReport::default() };
        self.finish_cancelled_and_expired(now, &mut report);
        if let Some(stored) = &mut self.stored {
            stored.settle(&mut self.scheduler, &mut self.backend);
        }
        if self.scheduler.is_interactive() {
            report.limits = self
                .pace
                .limits(self.scheduler.decoding(Some(true)), self.scheduler.decoding(Some(false)));
        }
        let (mut plan, mut copied) = (std::mem::take(&mut self.plan), Ok(()));
        self.scheduler.plan(report.limits, &mut plan, |from, to| {
            if copied.is_ok() {
                copied = self.backend.copy_block(from, to);
            }
        });
        self.apply_plan(&mut plan, &mut report);
        match plan.chunks.is_empty() {
            true => self.wait(&report),
            false => self.run_plan(&plan, copied, &mut report),
        }
        self.plan = plan;
        report
    }

    /// Waits for a moment if there is nothing to do before blocks are read from disk or other engines release some.
    fn wait(&mut self, report: &StepReport) {
        if let Some(stored) = self.stored.as_mut().filter(|stored| !stored.is_idle()) {
            stored.wait();
        } else if report.events.is_empty() && !self.active.is_empty() {
            thread::sleep(BLOCKED_WAIT);
        }
    }

    /// Runs a plan with chunks. `copied` is the result of its copies.
    fn run_plan(&mut self, plan: &Plan, copied: Result<(), StepError>, report: &mut StepReport) {
        match copied.and_then(|()| self.run(plan, report)) {
            Ok(()) => {
                self.scheduler.commit(plan);
                self.sample_all(plan, report);
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
        if !report.failed {
            let StepReport { prefill_tokens, decode_tokens, limits, .. } = *report;
            self.pace.record(prefill_tokens, decode_tokens, limits, time);
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
