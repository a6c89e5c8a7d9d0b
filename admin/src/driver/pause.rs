//! The steps of a paused batch: hold its jobs, and count and number those that go to their end.

use std::time::Duration;

use super::{Budget, Interrupted, JobsChange, Next, change_jobs, numbering, progress, save};
use crate::{
    App,
    store::batch_steps::{BatchClaim, BatchWrites},
};

/// Pause between two counts while jobs run. One that is queued again meanwhile, because its worker died or its attempt
/// failed, is held.
const RUNNING: Duration = Duration::from_secs(2);
/// Pause between two steps when nothing runs: a resume makes the next step due at once.
const IDLE: Duration = Duration::from_secs(3600);

/// Holds the jobs of a batch. Running ones go to their end, unless the pause holds them as well: they keep the
/// checkpoints that their workers have saved.
pub(super) async fn step(
    app: &App,
    claim: &mut BatchClaim,
    mut budget: Budget,
) -> Result<Next, Interrupted> {
    // Before its validation it has no jobs.
    if claim.batch.at.in_progress.is_none() {
        return Ok(Next::After(IDLE));
    }
    let hold = JobsChange::Hold { running: claim.batch.steps.holds_running };
    if !change_jobs(app, claim.batch.id, hold, &mut budget).await? {
        return Ok(Next::Now);
    }
    let counted = progress::count(app, claim).await?;
    numbering::number(app, claim, counted.ended, &mut budget).await?;
    if counted.changed {
        claim.batch.steps.changed_at = Some(app.store.now().await?);
        save(app, claim, BatchWrites::default()).await?;
    }
    if budget.is_spent() {
        return Ok(Next::Now);
    }
    Ok(Next::After(if counted.active > 0 { RUNNING } else { IDLE }))
}
