//! Turns a step's logits into tokens, events and finished requests.

use std::{borrow::BorrowMut, sync::Arc};

use super::{Engine, StepReport};
use crate::{
    backend::{
        Above, Backend as _, Distribution, KeptRow, Logits, PositionLogits, StepError, TokenLogit,
    },
    request::{FinishReason, RequestError, RequestId},
    sampler::{self, Context, Drawn, Known, LogitSet, Logprobs, Sampled},
    scheduler::{Fork, Plan, PlannedChunk, SequenceId},
};

/// What became of a draw.
enum Draw {
    /// This token was drawn; the choice goes on.
    Token(u32),
    /// The choice has ended.
    Ended,
    /// The logits do not decide which token it is: see [`Sampled::Undecided`].
    Undecided { first: u32, above: Option<Above> },
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
        let raises = self.list_raised(planned.id, position);
        let distribution = logits.take_distribution(index);
        let reported = distribution.as_ref();
        let drawn = match logits.position(index) {
            PositionLogits::Drawn(TokenLogit { id: token, logit }) => {
                let logprobs = reported.map(|distribution| Logprobs::of(distribution, logit));
                self.push_drawn(planned.id, Drawn { token, logprobs }, report)
            }
            PositionLogits::All(all) => {
                let active = self.active.get(&RequestId(planned.id.request));
                // Those that the backend found did not decide the draw.
                let is_undecided =
                    active.is_some_and(|active| active.needs_some(planned.id.choice, position));
                self.counters.undecided_draws += u64::from(is_undecided);
                self.draw_all_choices(planned, position, all, reported, report)
            }
            PositionLogits::Largest(some) if !raises => {
                self.draw_all_choices(planned, position, some, reported, report)
            }
            PositionLogits::Largest(some) => {
                let mut with_raised = std::mem::take(&mut self.further);
                with_raised.clear();
                with_raised.extend_from_slice(some);
                let kept = logits.kept(index).expect("it was asked for");
                let drawn = match self.add_raised(kept, &mut with_raised) {
                    Ok(()) => {
                        let some = &mut with_raised[..];
                        self.draw_all_choices(planned, position, some, reported, report)
                    }
                    Err(error) => self.fail(planned.id, error, report),
                };
                self.further = with_raised;
                drawn
            }
        };
        let token = match drawn {
            Draw::Token(token) => Some(token),
            Draw::Ended => None,
            Draw::Undecided { first, above } => {
                let kept = logits.kept(index).expect("it was asked for");
                self.look_further(planned.id, position, kept, first, above, report)
            }
        };
        let next = token.filter(|_| draft < planned.drafts);
        next.is_some_and(|token| self.scheduler.accept(planned.id, draft, token))
    }

    /// Lists the tokens of the next draw that may get a larger logit than the model's; false if there are none.
    fn list_raised(&mut self, id: SequenceId, position: usize) -> bool {
        self.raised.clear();
        if let Some(active) = self.active.get(&RequestId(id.request)) {
            let context = active.context(id.choice, position);
            sampler::raised_tokens(&active.sampling, context, &mut self.raised);
        }
        !self.raised.is_empty()
    }

    /// Adds the listed tokens to those that were found, by ascending token.
    fn add_raised(
        &mut self,
        kept: KeptRow<'_>,
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        let is_found = |token: &u32| found.binary_search_by_key(token, |found| found.id).is_ok();
        self.raised.retain(|token| !is_found(token));
        if !self.raised.is_empty() {
            self.backend.token_logits(kept, &self.raised, found)?;
            found.sort_unstable_by_key(|found| found.id);
        }
        Ok(())
    }

    /// Draws the next token of a sequence from further tokens, after those of the step did not decide it.
    fn look_further(
        &mut self,
        id: SequenceId,
        position: usize,
        kept: KeptRow<'_>,
        first: u32,
        mut above: Option<Above>,
        report: &mut StepReport,
    ) -> Option<u32> {
        let mut further = std::mem::take(&mut self.further);
        let mut looks = 0;
        let drawn = loop {
            let found = match above {
                None => Ok(None),
                Some(above) => self.backend.tokens_above(kept, above, &mut further),
            };
            let found = match found {
                Ok(Some(rest)) if self.list_raised(id, position) => {
                    self.add_raised(kept, &mut further).map(|()| Some(rest))
                }
                found => found,
            };
            looks += 1;
            let drawn = match found {
                Ok(Some(rest)) => {
                    let known = Some(Known { rest, first, looks });
                    self.draw(id, position, &mut further[..], known, None, report)
                }
                Ok(None) => self.draw_from_all(id, position, kept, report),
                Err(error) => self.fail(id, error, report),
            };
            match drawn {
                Draw::Undecided { above: next, .. } => above = next,
                Draw::Token(token) => break Some(token),
                Draw::Ended => break None,
            }
        };
        self.further = further;
        drawn
    }

    /// Draws the next token of a sequence from all logits.
    fn draw_from_all(
        &mut self,
        id: SequenceId,
        position: usize,
        kept: KeptRow<'_>,
        report: &mut StepReport,
    ) -> Draw {
        self.counters.undecided_draws += 1;
        let mut all = std::mem::take(&mut self.undecided);
        let drawn = match self.backend.all_logits(kept, &mut all) {
            Ok(()) => self.draw(id, position, &mut all[..], None, None, report),
            Err(error) => self.fail(id, error, report),
        };
        self.undecided = all;
        drawn
    }

    /// Ends a request after a failure of the backend.
    fn fail(&mut self, id: SequenceId, error: StepError, report: &mut StepReport) -> Draw {
        let error = RequestError::Step(Arc::new(error));
        self.finish(RequestId(id.request), FinishReason::Failed, Some(error), report);
        Draw::Ended
    }

    /// Draws the next token of a sequence, and of the choices that start with it. Returns what became of the former.
    fn draw_all_choices<C: LogitSet + ?Sized>(
        &mut self,
        planned: &PlannedChunk,
        position: usize,
        logits: &mut C,
        distribution: Option<&Distribution>,
        report: &mut StepReport,
    ) -> Draw {
        // A choice of the same request may have failed at an earlier position.
        let Some(active) = self.active.get_mut(&RequestId(planned.id.request)) else {
            return Draw::Ended;
        };
        let new_choices = active.start_choices();
        for choice in new_choices.clone() {
            let child = SequenceId { choice, ..planned.id };
            self.scheduler.fork(planned.id, child, Fork::Shared, |_, _| {});
        }
        // Drawing overwrites the logits, so the choices that start from them draw from copies.
        for choice in new_choices {
            let id = SequenceId { choice, ..planned.id };
            let copy = &mut logits.to_owned();
            self.draw(id, position, copy.borrow_mut(), None, distribution, report);
        }
        self.draw(planned.id, position, logits, None, distribution, report)
    }

    /// Draws the token at `position` of one choice and adds it.
    fn draw<C: LogitSet + ?Sized>(
        &mut self,
        id: SequenceId,
        position: usize,
        logits: &mut C,
        known: Option<Known>,
        distribution: Option<&Distribution>,
        report: &mut StepReport,
    ) -> Draw {
        let request = RequestId(id.request);
        let Some(active) = self.active.get_mut(&request) else { return Draw::Ended };
        let context = Context { known, distribution, ..active.context(id.choice, position) };
        let drawn = match sampler::sample(logits, &active.sampling, context, &mut self.scratch) {
            Ok(Sampled::Drawn(drawn)) => drawn,
            Ok(Sampled::Undecided { first, above }) => return Draw::Undecided { first, above },
            Err(source) => {
                let error = RequestError::Sample { position, source };
                self.finish(request, FinishReason::Failed, Some(error), report);
                return Draw::Ended;
            }
        };
        self.push_drawn(id, drawn, report)
    }

    /// Adds a drawn token to its choice.
    fn push_drawn(&mut self, id: SequenceId, drawn: Drawn, report: &mut StepReport) -> Draw {
        let request = RequestId(id.request);
        let Some(active) = self.active.get_mut(&request) else { return Draw::Ended };
        self.counters.generated_tokens += 1;
        let token = drawn.token;
        if let Some(more) = active.reserve(id.choice) {
            self.scheduler.reserve(id, more);
        }
        let events = (&mut report.events, &mut self.spare);
        let ended = active.push(id.choice, drawn, self.vocabulary.as_ref(), events);
        self.scheduler.push_token(id, token);
        if !ended {
            return Draw::Token(token);
        }
        if let Some(drafts) = &mut self.drafts {
            active.keep(self.scheduler.tokens(id), drafts);
        }
        self.scheduler.remove(id);
        if active.is_finished() {
            self.finish(request, FinishReason::Stop, None, report);
        }
        Draw::Ended
    }
}
