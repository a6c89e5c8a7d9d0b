//! Turns a step's logits into tokens, events and finished requests.

use std::{borrow::BorrowMut, sync::Arc};

use super::{Engine, StepReport};
use crate::{
    backend::{Backend as _, Logits, PositionLogits, Rest},
    request::{FinishReason, RequestError, RequestId},
    sampler::{self, Context, LogitSet},
    scheduler::{Fork, Plan, PlannedChunk, SequenceId},
};

/// What became of a draw.
enum Sampled {
    /// This token was drawn; the choice goes on.
    Token(u32),
    /// The choice has ended.
    Ended,
    /// The logits do not decide which token it is; all are needed.
    Undecided,
}

impl Engine {
    /// Draws the next token of every sequence that has logits, in the order of the chunks, and the tokens after it as long
    /// as they are the sequence's drafts.
    pub(super) fn sample_all(&mut self, plan: &Plan, report: &mut StepReport) {
        let mut logits = std::mem::take(&mut self.logits);
        let sampling = || plan.chunks.iter().filter(|planned| planned.samples);
        let positions: usize = sampling().map(|planned| planned.drafts + 1).sum();
        assert_eq!(logits.len(), positions, "the backend returns the requested positions");
        let mut first = 0;
        for planned in sampling() {
            let mut accepted = 0;
            while self.sample_position(planned, accepted, &mut logits, first + accepted, report) {
                accepted += 1;
            }
            self.record_drafts(planned, accepted);
            first += planned.drafts + 1;
        }
        self.logits = logits;
    }

    fn record_drafts(&mut self, planned: &PlannedChunk, accepted: usize) {
        if planned.drafts == 0 {
            return;
        }
        self.counters.drafted_tokens += planned.drafts as u64;
        self.counters.accepted_tokens += accepted as u64;
        let request = self.active.get_mut(&RequestId(planned.id.request));
        if let (Some(drafts), Some(request)) = (&mut self.drafts, request) {
            request.record_drafts(planned.id.choice, drafts, planned.drafts, accepted);
        }
    }

    /// Draws the token of a sequence after so many of its drafts. Returns whether it is the next draft.
    fn sample_position(
        &mut self,
        planned: &PlannedChunk,
        draft: usize,
        logits: &mut Logits,
        index: usize,
        report: &mut StepReport,
    ) -> bool {
        let position = planned.end - planned.drafts + draft;
        let rest = logits.rest(index);
        let sampled = match logits.position(index) {
            PositionLogits::All(all) => {
                self.sample_all_choices(planned, position, all, None, report)
            }
            PositionLogits::Largest(some) => {
                self.sample_all_choices(planned, position, some, rest, report)
            }
        };
        let token = match sampled {
            Sampled::Token(token) => Some(token),
            Sampled::Ended => None,
            Sampled::Undecided => {
                self.sample_undecided(planned, position, logits.hidden(index), report)
            }
        };
        let next = token.filter(|_| draft < planned.drafts);
        next.is_some_and(|token| self.scheduler.accept(planned.id, draft, token))
    }

    /// Draws the next token of a sequence from all logits, after those that were computed did not decide it.
    fn sample_undecided(
        &mut self,
        planned: &PlannedChunk,
        position: usize,
        hidden: &[f32],
        report: &mut StepReport,
    ) -> Option<u32> {
        self.counters.undecided_draws += 1;
        let mut all = std::mem::take(&mut self.undecided);
        let computed = self.backend.all_logits(hidden, &mut all);
        let token = match computed {
            Ok(()) => self.sample_choice(planned.id, position, &mut all[..], None, report),
            Err(error) => {
                let error = RequestError::Step(Arc::new(error));
                let request = RequestId(planned.id.request);
                self.finish(request, FinishReason::Failed, Some(error), report);
                Sampled::Ended
            }
        };
        self.undecided = all;
        if let Sampled::Token(token) = token { Some(token) } else { None }
    }

    /// Draws the next token of a sequence, and of the choices that start with it. Returns what became of the former.
    fn sample_all_choices<C: LogitSet + ?Sized>(
        &mut self,
        planned: &PlannedChunk,
        position: usize,
        logits: &mut C,
        rest: Option<Rest>,
        report: &mut StepReport,
    ) -> Sampled {
        // A choice of the same request may have failed at an earlier position.
        let Some(active) = self.active.get_mut(&RequestId(planned.id.request)) else {
            return Sampled::Ended;
        };
        let new_choices = active.start_choices();
        for choice in new_choices.clone() {
            let child = SequenceId { choice, ..planned.id };
            self.scheduler.fork(planned.id, child, Fork::Shared, |_, _| {});
        }
        // Drawing overwrites the logits, so the choices that start from them draw from copies.
        for choice in new_choices {
            let id = SequenceId { choice, ..planned.id };
            self.sample_choice(id, position, logits.to_owned().borrow_mut(), rest, report);
        }
        self.sample_choice(planned.id, position, logits, rest, report)
    }

    /// Draws the token at `position` of one choice and adds it.
    fn sample_choice<C: LogitSet + ?Sized>(
        &mut self,
        id: SequenceId,
        position: usize,
        logits: &mut C,
        rest: Option<Rest>,
        report: &mut StepReport,
    ) -> Sampled {
        let request = RequestId(id.request);
        let Some(active) = self.active.get_mut(&request) else { return Sampled::Ended };
        let context = Context { rest, ..active.context(id.choice, position) };
        let drawn = match sampler::sample(logits, &active.sampling, context, &mut self.scratch) {
            Ok(Some(drawn)) => drawn,
            Ok(None) => return Sampled::Undecided,
            Err(source) => {
                let error = RequestError::Sample { position, source };
                self.finish(request, FinishReason::Failed, Some(error), report);
                return Sampled::Ended;
            }
        };
        self.counters.generated_tokens += 1;
        let token = drawn.token;
        if let Some(more) = active.reserve(id.choice) {
            self.scheduler.reserve(id, more);
        }
        let events = (&mut report.events, &mut self.spare);
        let ended = active.push(id.choice, drawn, self.vocabulary.as_ref(), events);
        self.scheduler.push_token(id, token);
        if !ended {
            return Sampled::Token(token);
        }
        if let Some(drafts) = &mut self.drafts {
            active.keep(self.scheduler.tokens(id), drafts);
        }
        self.scheduler.remove(id);
        if active.is_finished() {
            self.finish(request, FinishReason::Stop, None, report);
        }
        Sampled::Ended
    }
}
