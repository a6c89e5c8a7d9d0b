//! [`Pass`]: which lines of a page run, when lines run again.

use std::collections::{HashMap, HashSet};

use tritmill_queue::{JobId, StoreError, store::RangedJob};

use super::lines::Line;
use crate::{
    App,
    store::{Batch, step_state::Rerun},
};

/// A page of a pass over the file.
pub(super) struct Pass {
    /// The pass; `None` in the first one, in which all lines run.
    rerun: Option<Rerun>,
    /// The jobs of its lines, by line.
    jobs: HashMap<u32, RangedJob>,
    /// Lines without a job that the database refuses.
    refused: HashSet<u32>,
}

impl Pass {
    /// Looks up the jobs of a page, if lines run again.
    pub async fn of(app: &App, batch: &Batch, page: &[Line]) -> Result<Self, StoreError> {
        let rerun = batch.steps.reruns.first().cloned();
        let mut pass = Self { rerun, jobs: HashMap::new(), refused: HashSet::new() };
        if let (Some(_), Some(first), Some(last)) = (&pass.rerun, page.first(), page.last()) {
            let number = |line: &Line| u32::try_from(line.after.line).unwrap_or(u32::MAX);
            let jobs = batch.id.jobs(number(first), number(last));
            let known = app.store.states_in_range(jobs).await?;
            let of_line = |job: RangedJob| batch.id.line(job.id).map(|line| (line, job));
            pass.jobs = known.into_iter().filter_map(of_line).collect();
            pass.refused = batch.steps.not_storable.keys().copied().collect();
        }
        Ok(pass)
    }

    /// Whether a valid line runs.
    pub fn runs(&self, line: u32) -> bool {
        match (&self.rerun, self.jobs.get(&line)) {
            (None, _) => true,
            (Some(rerun), None) => rerun.has_new(line) && !self.refused.contains(&line),
            (Some(rerun), Some(job)) => runs_again(rerun, line, job),
        }
    }

    /// Returns the ended jobs that run again.
    pub fn again(&self) -> HashSet<JobId> {
        let Some(rerun) = &self.rerun else { return HashSet::new() };
        let ended = self.jobs.iter().filter(|(line, job)| runs_again(rerun, **line, job));
        ended.map(|(_, job)| job.id).collect()
    }
}

fn runs_again(rerun: &Rerun, line: u32, job: &RangedJob) -> bool {
    let finished_at = job.finished_at.filter(|_| job.state.is_terminal());
    finished_at.is_some_and(|at| rerun.has_ended(line, job.state, at))
}

#[cfg(test)]
mod tests {
    use tritmill_queue::{JobState, Timestamp};

    use super::*;
    use crate::store::step_state::RerunLines;

    #[test]
    fn only_lines_without_an_answer_run_again_and_none_that_is_open() {
        let job = |line: u32, state: JobState, finished_at: Option<i64>| {
            let finished_at = finished_at.map(Timestamp);
            (line, RangedJob { id: JobId::generate(), custom_id: None, state, finished_at })
        };
        let rerun = Rerun { lines: RerunLines::Unanswered, at: Timestamp(10), reached: Some(6) };
        let jobs = [
            job(1, JobState::Completed, Some(5)),
            job(2, JobState::Failed, Some(5)),
            job(3, JobState::Queued, None),
            job(4, JobState::Failed, Some(15)),
        ];
        let failed = jobs[1].1.id;
        let (jobs, refused) = (HashMap::from(jobs), HashSet::from([5]));
        let mut pass = Pass { rerun: Some(rerun), jobs, refused };
        let runs = |pass: &Pass| (1..=7).filter(|line| pass.runs(*line)).collect::<Vec<_>>();
        assert_eq!(runs(&pass), [2, 6, 7]);
        assert_eq!(pass.again(), HashSet::from([failed]));
        pass.rerun = None;
        assert_eq!((runs(&pass).len(), pass.again().len()), (7, 0));
    }
}
