//! Numbers the lines of a batch that ended, so that their results can be read while it runs: see [`batch_ends`].
//!
//! A pass reads the jobs that ended since the last pass. A transaction that took long may commit a job behind the place where
//! the pass began: then fewer jobs have numbers than have ended, and the next pass begins again at the first job. What a pass
//! leaves, the writing of the output numbers.
//!
//! [`batch_ends`]: crate::store::batch_ends

use std::collections::HashMap;

use tritmill_queue::{StoreError, store::JobEnd};

use super::{Budget, Interrupted, save};
use crate::{
    App,
    store::{
        Batch,
        batch_ends::{KnownEnd, LineEnd},
        batch_steps::{BatchClaim, BatchWrites},
        step_state::NumberingState,
    },
};

/// Jobs that are numbered in one transaction.
const PAGE: u32 = 1000;

/// Numbers the jobs that ended, of which there are `ended` at least, within the budget.
pub(super) async fn number(
    app: &App,
    claim: &mut BatchClaim,
    ended: u64,
    budget: &mut Budget,
) -> Result<(), Interrupted> {
    let mut mark = claim.batch.steps.numbering.mark;
    while !budget.is_spent() {
        let ids = claim.batch.id.all_jobs();
        let found = app.store.ends_after(ids, mark, PAGE).await?;
        let is_last = found.ends.len() < PAGE as usize;
        budget.spend(found.ends.len(), 0);
        mark = found.ends.last().map_or(mark, |last| last.mark);
        let ends: Vec<LineEnd> =
            found.ends.iter().filter_map(|end| of_job(&claim.batch, end)).collect();
        let ends = unknown(app, &claim.batch, ends).await?;
        let state = &mut claim.batch.steps.numbering;
        state.jobs += match state.is_caught_up {
            true => ends.len() as u64,
            false => found.ends.len() as u64,
        };
        // Within the first pass nothing is read twice.
        state.mark = if state.is_caught_up || is_last { found.resume } else { mark };
        state.is_caught_up |= is_last;
        if !ends.is_empty() {
            claim.batch.last_end += ends.len() as u64;
            save(app, claim, BatchWrites { ends: &ends, ..BatchWrites::default() }).await?;
        }
        if is_last {
            let state = &mut claim.batch.steps.numbering;
            if state.jobs < ended {
                *state = NumberingState::default();
            }
            return Ok(());
        }
    }
    // Also where all that was read had a number.
    save(app, claim, BatchWrites::default()).await
}

fn of_job(batch: &Batch, end: &JobEnd) -> Option<LineEnd> {
    let line = batch.id.line(end.id)?;
    Some(LineEnd { line, state: end.state, ended_at: end.finished_at, output: None })
}

/// Returns the ends that have no number yet. A line that ended again, at another time or in another way, is among them.
pub(super) async fn unknown(
    app: &App,
    batch: &Batch,
    mut ends: Vec<LineEnd>,
) -> Result<Vec<LineEnd>, StoreError> {
    if ends.is_empty() {
        return Ok(ends);
    }
    let lines: Vec<u32> = ends.iter().map(|end| end.line).collect();
    let known = app.store.known_ends(batch.id, &lines).await?;
    let known: HashMap<u32, KnownEnd> = known.into_iter().map(|end| (end.line, end)).collect();
    ends.retain(|end| !known.get(&end.line).is_some_and(|known| known.is(end)));
    Ok(ends)
}
