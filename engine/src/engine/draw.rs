//! Turns a step's logits into tokens, events and finished requests.

use std::borrow::BorrowMut;

use super::{Engine, StepReport};
use crate::{
    backend::PositionLogits,
    request::{FinishReason, RequestError, RequestId},
    sampler::{self, Context, LogitSet},
    scheduler::{Fork, Plan, PlannedChunk, SequenceId},
};

impl Engine {
    /// Draws the next token of every sequence that has logits, in the order of the chunks.
    pub(super) fn sample_all(&mut self, plan: &Plan, report: &mut StepReport) {
        let mut logits = std::mem::take(&mut self.logits);
        let sampling = plan.chunks.iter().filter(|planned| planned.samples).count();
        assert_eq!(logits.len(), sampling, "the backend returns the requested positions");
        for (index, planned) in plan.chunks.iter().filter(|planned| planned.samples).enumerate() {
            match logits.position(index) {
                PositionLogits::All(logits) => self.sample_position(planned, logits, report),
                PositionLogits::Largest(logits) => self.sample_position(planned, logits, report),
            }
        }
        self.logits = logits;
    }

    /// Draws the next token of a sequence, and of the choices that start with it.
    fn sample_position<C: LogitSet + ?Sized>(
        &mut self,
        planned: &PlannedChunk,
        logits: &mut C,
        report: &mut StepReport,
    ) {
        // A choice of the same request may have failed at an earlier position.
        let Some(active) = self.active.get_mut(&RequestId(planned.id.request)) else { return };
        let new_choices = active.start_choices();
        for choice in new_choices.clone() {
            let child = SequenceId { choice, ..planned.id };
            self.scheduler.fork(planned.id, child, Fork::Shared, |_, _| {});
        }
        // Drawing overwrites the logits, so the choices that start from them draw from copies.
        for choice in new_choices {
            let id = SequenceId { choice, ..planned.id };
            self.sample_choice(id, planned.end, logits.to_owned().borrow_mut(), report);
        }
        self.sample_choice(planned.id, planned.end, logits, report);
    }

    /// Draws the token at `position` of one choice and adds it.
    fn sample_choice<C: LogitSet + ?Sized>(
        &mut self,
        id: SequenceId,
        position: usize,
        logits: &mut C,
        report: &mut StepReport,
    ) {
        let request = RequestId(id.request);
        let Some(active) = self.active.get_mut(&request) else { return };
        let context: Context<'_> = active.context(id.choice, position);
        let drawn = match sampler::sample(logits, &active.sampling, context, &mut self.scratch) {
            Ok(drawn) => drawn,
            Err(source) => {
                let error = RequestError::Sample { position, source };
                return self.finish(request, FinishReason::Failed, Some(error), report);
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
        if ended {
            self.scheduler.remove(id);
            if active.is_finished() {
                self.finish(request, FinishReason::Stop, None, report);
            }
        }
    }
}
