//! From a step's logits to tokens, events and ends.

use std::borrow::BorrowMut;

use super::{Engine, StepReport};
use crate::{
    backend::Position,
    request::{FinishReason, RequestError, RequestId},
    sampler::{self, Choices, Context},
    scheduler::{Plan, Planned, SequenceId},
};

impl Engine {
    /// Draws the next token of every sequence with logits, in the order of the rows.
    pub(super) fn sample_all(&mut self, plan: &Plan, report: &mut StepReport) {
        let mut logits = std::mem::take(&mut self.logits);
        let sampling = plan.chunks.iter().filter(|planned| planned.samples).count();
        assert_eq!(logits.len(), sampling, "the backend returns what was asked for");
        for (index, planned) in plan.chunks.iter().filter(|planned| planned.samples).enumerate() {
            match logits.position(index) {
                Position::All(logits) => self.sample_position(planned, logits, report),
                Position::Largest(logits) => self.sample_position(planned, logits, report),
            }
        }
        self.logits = logits;
    }

    /// Draws the next token of a sequence, and of the choices that begin with it.
    fn sample_position<C: Choices + ?Sized>(
        &mut self,
        planned: &Planned,
        logits: &mut C,
        report: &mut StepReport,
    ) {
        // A choice of the same request may have failed at an earlier position.
        let Some(active) = self.active.get_mut(&RequestId(planned.id.request)) else { return };
        let newcomers = active.start_choices();
        for choice in newcomers.clone() {
            self.scheduler.fork(planned.id, SequenceId { choice, ..planned.id });
        }
        // Drawing overwrites the logits, so the choices that start from them draw from copies.
        for choice in newcomers {
            let id = SequenceId { choice, ..planned.id };
            self.sample_one(id, planned.end, logits.to_owned().borrow_mut(), report);
        }
        self.sample_one(planned.id, planned.end, logits, report);
    }

    /// Draws the token at `position` of one choice and books it.
    fn sample_one<C: Choices + ?Sized>(
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
                return self.end(request, FinishReason::Failed, Some(error), report);
            }
        };
        self.counters.generated_tokens += 1;
        let token = drawn.token;
        let ended = active.push(id.choice, drawn, self.vocabulary.as_ref(), &mut report.events);
        self.scheduler.push_token(id, token);
        if ended {
            self.scheduler.remove(id);
            if active.has_ended() {
                self.end(request, FinishReason::Stop, None, report);
            }
        }
    }
}
