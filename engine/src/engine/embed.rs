//! Embeds prompts: a request ends with the vector of its prompt, once all of it is computed.
//!
//! The vector is the hidden row of the last token, after the final norm, divided by its length
//! ([`Pooling`](crate::config::Pooling)). It is the same to the bit, whatever else is in the steps.

use super::{Engine, StepReport};
use crate::{
    backend::{Backend as _, Chunk, LogitsFor, StepError},
    request::{FinishReason, RequestError, RequestId},
    scheduler::Plan,
};

impl Engine {
    /// Computes the chunks of a plan, and the hidden rows of the prompts that end with them.
    pub(super) fn run_hidden(&mut self, plan: &Plan) -> Result<(), StepError> {
        let chunks = plan.chunks.iter().map(|planned| {
            let logits = if planned.samples { LogitsFor::Last } else { LogitsFor::Nothing };
            Chunk { logits, ..self.scheduler.chunk(planned) }
        });
        let chunks: Vec<Chunk<'_>> = chunks.collect();
        self.backend.step_hidden(&chunks, &mut self.hidden)
    }

    /// Finishes the requests of which the prompts are computed.
    pub(super) fn embed_all(&mut self, plan: &Plan, report: &mut StepReport) {
        let hidden = std::mem::take(&mut self.hidden);
        let ended: Vec<_> = plan.chunks.iter().filter(|planned| planned.samples).collect();
        assert!(hidden.len().is_multiple_of(ended.len().max(1)), "a row for each prompt");
        let rows = hidden.chunks_exact((hidden.len() / ended.len().max(1)).max(1));
        for (planned, row) in ended.into_iter().zip(rows) {
            let id = RequestId(planned.id.request);
            match normalised(row) {
                Ok(vector) => {
                    if let Some(active) = self.active.get_mut(&id) {
                        active.set_vector(&vector);
                    }
                    self.finish(id, FinishReason::Stop, None, report);
                }
                Err(error) => self.finish(id, FinishReason::Failed, Some(error), report),
            }
        }
        self.hidden = hidden;
    }
}

/// Divides a row by its length.
fn normalised(row: &[f32]) -> Result<Vec<f32>, RequestError> {
    let length = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if !(length.is_finite() && length > 0.0) {
        return Err(RequestError::NoDirection { length });
    }
    Ok(row.iter().map(|x| (f64::from(*x) / length) as f32).collect())
}
