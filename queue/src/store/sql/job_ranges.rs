//! Jobs of a range of ids.

use std::ops::RangeInclusive;

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqlStore, calls::query, claims, dialect, rows};
use crate::{
    job::JobId,
    store::{
        Progress, StoreError,
        job_ranges::{CancelledJobs, EndedJob, JobRanges},
    },
};

#[async_trait]
impl JobRanges for SqlStore {
    async fn range_progress(&self, ids: RangeInclusive<JobId>) -> Result<Progress, StoreError> {
        let counts = query(concat!(
            "SELECT state, count(*) AS jobs FROM ",
            all_jobs!(),
            " WHERE id BETWEEN $1 AND $2 GROUP BY state"
        ));
        let counts = counts.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        let mut progress = Progress::default();
        for row in &self.fetch_all(counts).await? {
            *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
        }
        Ok(progress)
    }

    async fn cancel_range(
        &self,
        ids: RangeInclusive<JobId>,
        max: u32,
    ) -> Result<CancelledJobs, StoreError> {
        let found = query(concat!(
            "SELECT id FROM ",
            all_jobs!(),
            " WHERE id BETWEEN $1 AND $2
               AND state IN ('scheduled', 'queued', 'running', 'retrying')
             ORDER BY id LIMIT $3"
        ));
        let (first, last) = (Uuid::from(*ids.start()), Uuid::from(*ids.end()));
        let found = self.fetch_all(found.bind(first).bind(last).bind(i64::from(max))).await?;
        let found = rows::ids(&found)?;
        let jobs = match found.is_empty() {
            true => 0,
            false => claims::cancel(self, &found).await?.len() as u64,
        };
        Ok(CancelledJobs { jobs, more: found.len() as u64 >= u64::from(max) })
    }

    async fn ended_in_range(
        &self,
        ids: RangeInclusive<JobId>,
    ) -> Result<Vec<EndedJob>, StoreError> {
        let found = query(
            "SELECT jobs.id, state, outcome, finished_at
             FROM jobs JOIN results ON results.job_id = jobs.id
                  AND results.job_id BETWEEN $1 AND $2
             WHERE jobs.id BETWEEN $1 AND $2 ORDER BY jobs.id",
        );
        let found = found.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        let ended = |row| {
            Ok(EndedJob {
                id: rows::id(row, "id")?,
                state: rows::state(row)?,
                outcome: dialect::outcome(row)?.0,
                finished_at: rows::time(row, "finished_at")?,
            })
        };
        self.fetch_all(found).await?.iter().map(ended).collect()
    }
}
