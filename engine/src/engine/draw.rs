//! Turns a step's logits into tokens, events and finished requests.

use std::sync::{Arc, Mutex, PoisonError};

use tritmill_grammar::GrammarError;

use super::{
    Engine, StepReport,
    active::{ActiveRequest, StaleMask},
    drafts::{ChoiceDrafts, Expected},
    fork::copy_in,
};
use crate::{
    backend::{Backend as _, Logits, PositionLogits, StepRow},
    request::{FinishReason, RequestError, RequestId},
    sampling::{self, Distribution, DrawError, Drawn, Logprobs},
    scheduler::{Fork, Plan, PlannedChunk, SequenceId},
};

/// The logits of a position, and its distribution if the backend has reported it.
struct Position<'a> {
    logits: &'a mut Logits,
    index: usize,
    distribution: Option<&'a Distribution>,
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
            let expected = self.take_expected(planned);
            let mut accepted = 0;
            while self.sample_position(planned, accepted, &mut logits, first + accepted, report) {
                accepted += 1;
            }
            self.record_drafts(planned, expected, accepted);
            first += planned.drafts + 1;
        }
        self.logits = logits;
        self.find_masks(report);
    }

    /// Finds what may come next in the choices that a grammar describes, on all threads of the backend.
    fn find_masks(&mut self, report: &mut StepReport) {
        let stale = self.active.values_mut().flat_map(ActiveRequest::stale_masks);
        let stale: Vec<Mutex<StaleMask<'_>>> = stale.map(Mutex::new).collect();
        if stale.is_empty() {
            return;
        }
        self.backend.run_tasks(stale.len(), &|index| {
            stale[index].lock().unwrap_or_else(PoisonError::into_inner).find()
        });
        let failed = stale.into_iter().filter_map(|mask| {
            let StaleMask { id, result, .. } =
                mask.into_inner().unwrap_or_else(PoisonError::into_inner);
            result.err().map(|error| (id, error))
        });
        let failed: Vec<(RequestId, GrammarError)> = failed.collect();
        for (id, error) in failed {
            self.finish(id, FinishReason::Failed, Some(error.into()), report);
        }
    }

    fn take_expected(&mut self, planned: &PlannedChunk) -> Expected {
        let request = self.active.get_mut(&RequestId(planned.id.request));
        request.map(|request| request.take_expected(planned.id.choice)).unwrap_or_default()
    }

    fn record_drafts(&mut self, planned: &PlannedChunk, expected: Expected, accepted: usize) {
        self.counters.drafted_tokens += planned.drafts as u64;
        self.counters.accepted_tokens += accepted as u64;
        let Some(drafts) = &mut self.drafts else { return };
        let request = self.active.get_mut(&RequestId(planned.id.request));
        let counts = (planned.drafts, accepted);
        match request.map(|request| request.drafts_mut(planned.id.choice)) {
            Some((choice, has_ended)) => drafts.record(choice, expected, counts, has_ended),
            None => drafts.record(&mut ChoiceDrafts::default(), expected, counts, true),
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
        let distribution = logits.take_distribution(index);
        let reported = distribution.as_ref();
        let token = match logits.position(index) {
            PositionLogits::Drawn(drawn) => {
                let logprobs = reported
                    .map(|distribution| Logprobs::from_distribution(distribution, drawn.logit));
                self.push_drawn(planned.id, Drawn { token: drawn.id, logprobs }, report)
            }
            PositionLogits::All(_) | PositionLogits::Largest(_) => {
                let of = Position { logits, index, distribution: reported };
                self.draw_all_choices(planned.id, position, of, report)
            }
        };
        let next = token.filter(|_| draft < planned.drafts);
        next.is_some_and(|token| self.scheduler.accept(planned.id, draft, token))
    }

    /// Draws the next token of a sequence, and of the choices that start with it. Returns the former's, if it goes on.
    fn draw_all_choices(
        &mut self,
        id: SequenceId,
        position: usize,
        mut of: Position<'_>,
        report: &mut StepReport,
    ) -> Option<u32> {
        let backend_draws = self.backend.draws_tokens();
        // A choice of the same request may have failed at an earlier position.
        let active = self.active.get_mut(&RequestId(id.request))?;
        if matches!(of.logits.position(of.index), PositionLogits::All(_)) {
            // Those that the backend found did not decide the draw.
            let needs_all = active.metadata(id.choice, position, &[]).needs_all(backend_draws);
            self.counters.undecided_draws += u64::from(!needs_all);
        }
        let new_choices = active.start_choices();
        let mut copied = Ok(());
        for choice in new_choices.clone() {
            let child = SequenceId { choice, ..id };
            self.scheduler.fork(id, child, Fork::Shared, |copy| {
                if copied.is_ok() {
                    copied = copy_in(&mut self.backend, copy);
                }
            });
        }
        if let Err(error) = copied {
            let error = RequestError::Step(Arc::new(error));
            self.finish(RequestId(id.request), FinishReason::Failed, Some(error), report);
            return None;
        }
        for choice in new_choices {
            self.draw(SequenceId { choice, ..id }, position, &mut of, true, report);
        }
        self.draw(id, position, &mut of, false, report)
    }

    /// Draws the token at `position` of one choice and adds it; returns it if the choice goes on. `others_follow` keeps the logits
    /// for other choices.
    fn draw(
        &mut self,
        id: SequenceId,
        position: usize,
        of: &mut Position<'_>,
        others_follow: bool,
        report: &mut StepReport,
    ) -> Option<u32> {
        let request = RequestId(id.request);
        let active = self.active.get(&request)?;
        let metadata = active.metadata(id.choice, position, &[]);
        let mut row = match of.logits.row(of.index) {
            // A draw overwrites them.
            (PositionLogits::All(all), _) if others_follow => {
                self.undecided.clear();
                self.undecided.extend_from_slice(all);
                Some(StepRow::Whole(&mut self.undecided))
            }
            found => StepRow::new(found, self.backend.as_screening(), &mut self.undecided),
        };
        let row = row.as_mut().expect("the backend has not drawn it");
        let drawn = sampling::sample(row, &metadata, of.distribution, &mut self.scratch);
        self.counters.undecided_draws += u64::from(row.was_undecided());
        let error = match drawn {
            Ok(drawn) => return self.push_drawn(id, drawn, report),
            Err(DrawError::Sample(source)) => RequestError::Sample { position, source },
            Err(DrawError::Row(error)) => RequestError::Step(Arc::new(error)),
        };
        self.finish(request, FinishReason::Failed, Some(error), report);
        None
    }

    /// Adds a drawn token to its choice; returns it if the choice goes on.
    fn push_drawn(&mut self, id: SequenceId, drawn: Drawn, report: &mut StepReport) -> Option<u32> {
        let request = RequestId(id.request);
        let active = self.active.get_mut(&request)?;
        self.counters.generated_tokens += 1;
        let token = drawn.token;
        if let Some(more) = active.reserve(id.choice) {
            self.scheduler.reserve(id, more);
        }
        let events = (&mut report.events, &mut self.spare);
        let ended = active.push(id.choice, drawn, self.vocabulary.as_ref(), events);
        self.scheduler.push_token(id, token);
        match ended {
            Ok(false) => return Some(token),
            Ok(true) => {}
            Err(error) => {
                self.finish(request, FinishReason::Failed, Some(error.into()), report);
                return None;
            }
        }
        if let Some(drafts) = &mut self.drafts {
            active.keep(id.choice, self.scheduler.tokens(id), drafts);
        }
        self.scheduler.remove(id);
        if active.is_finished() {
            self.finish(request, FinishReason::Stop, None, report);
        }
        None
    }
}
