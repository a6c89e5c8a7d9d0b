//! Jobs of a range of ids.

use std::ops::RangeInclusive;

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    SqlStore,
    calls::{Query, Row, query},
    charges, claims, dialect, rows,
};
use crate::{
    job::{JobId, QueueName, Timestamp},
    store::{
        Progress, StoreError,
        job_ranges::{ChangedJobs, EndMark, EndedJob, JobEnd, JobEnds, JobRanges, RangedJob},
    },
};

/// Jobs of a range with their ends; `$1` and `$2` are its bounds.
macro_rules! ranged_jobs {
    ($also:expr) => {
        concat!(
            "SELECT jobs.id, custom_id, state, finished_at FROM ",
            all_jobs!(),
            " AS jobs LEFT JOIN results ON results.job_id = jobs.id
                 AND results.job_id BETWEEN $1 AND $2
             WHERE jobs.id BETWEEN $1 AND $2",
            $also,
            " ORDER BY jobs.id"
        )
    };
}

fn ranged_job(row: &Row) -> Result<RangedJob, StoreError> {
    Ok(RangedJob {
        id: rows::id(row, "id")?,
        custom_id: rows::get(row, "custom_id")?,
        state: rows::state(row)?,
        finished_at: rows::time_or_none(row, "finished_at")?,
    })
}

/// A job that can still start and is not held, or runs if `running` says to hold those as well.
macro_rules! startable {
    ($running:literal) => {
        concat!(
            "(state IN ('queued', 'retrying') OR (state = 'scheduled' AND run_at IS NOT NULL)
              OR (state = 'running' AND ",
            $running,
            "))"
        )
    };
}

/// A job that waits in another queue than that of model `$3` and format `$4`, and is not held.
macro_rules! waits_elsewhere {
    () => {
        "(state IN ('queued', 'retrying') OR (state = 'scheduled' AND run_at IS NOT NULL))
         AND (model <> $3 OR format <> $4)"
    };
}

/// A job that has not ended and has another deadline than `$3`.
macro_rules! other_deadline {
    () => {
        "state IN ('scheduled', 'queued', 'running', 'retrying') AND coalesce(expires_at, 0) <> $3"
    };
}

/// Ends of a range after the mark `$3` of the job `$4`; `$1` and `$2` are the range's bounds.
macro_rules! ends_after {
    ($of_result:expr, $of_job:expr) => {
        concat!(
            "SELECT jobs.id, state, finished_at, ",
            end_mark!(),
            " AS mark
             FROM results JOIN jobs ON jobs.id = results.job_id AND ",
            $of_job,
            " BETWEEN $1 AND $2
             WHERE ",
            $of_result,
            " BETWEEN $1 AND $2 AND outcome IS NOT NULL
               AND ",
            end_mark!(),
            " >= $3 AND (",
            end_mark!(),
            ", results.job_id) > ($3, $4)
             ORDER BY ",
            end_mark!(),
            ", results.job_id LIMIT $5"
        )
    };
}

/// Returns up to `max` open jobs of a range by a statement, of which the caller has bound the parameters before `LIMIT`.
async fn find(
    store: &SqlStore,
    found: Query<'_>,
    max: u32,
) -> Result<(Vec<JobId>, bool), StoreError> {
    let found = rows::ids(&store.fetch_all(found.bind(i64::from(max))).await?)?;
    let more = found.len() as u64 >= u64::from(max);
    Ok((found, more))
}

/// Changes up to `max` open jobs of a range. The first statement finds them: its parameters are the bounds of the range, what `bind`
/// binds, and the limit. The second changes those: its parameters are the clock, the ids, and what `bind` binds.
async fn change_found(
    store: &SqlStore,
    (ids, max): (RangeInclusive<JobId>, u32),
    [found, change]: [&'static str; 2],
    bind: impl Fn(Query<'static>) -> Query<'static>,
) -> Result<ChangedJobs, StoreError> {
    let found = query(found).bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
    let (found, more) = find(store, bind(found), max).await?;
    if found.is_empty() {
        return Ok(ChangedJobs { jobs: 0, more });
    }
    let change = query(change).bind(store.clock_parameter()).bind(dialect::id_list(found));
    Ok(ChangedJobs { jobs: store.execute(bind(change)).await?, more })
}

fn ended(row: &Row) -> Result<EndedJob, StoreError> {
    let key: Option<&[u8]> = rows::get(row, "line_key")?;
    let key = key.map(|key| key.try_into().map_err(|error| rows::damaged("line_key", error)));
    Ok(EndedJob {
        id: rows::id(row, "id")?,
        state: rows::state(row)?,
        outcome: charges::outcome(row)?.0,
        finished_at: rows::time(row, "finished_at")?,
        custom_id: rows::get(row, "custom_id")?,
        line_key: key.transpose()?,
        line_shape: rows::get(row, "line_shape")?,
        repeated: rows::repeated(row)?,
    })
}

fn end(row: &Row) -> Result<JobEnd, StoreError> {
    let id = rows::id(row, "id")?;
    let mark = EndMark::new(rows::integer(row, "mark")?, id);
    Ok(JobEnd { id, state: rows::state(row)?, finished_at: rows::time(row, "finished_at")?, mark })
}

#[async_trait]
impl JobRanges for SqlStore {
    async fn range_progress(&self, ids: RangeInclusive<JobId>) -> Result<Progress, StoreError> {
        let (first, last) = (Uuid::from(*ids.start()), Uuid::from(*ids.end()));
        let counts = match dialect::RANGE_COUNTS_OF_MANY {
            Some([is_many, of_many]) => {
                let is_many = query(is_many).bind(first).bind(last);
                let is_many = self.fetch_optional(is_many).await?.is_some();
                if is_many { of_many } else { dialect::RANGE_COUNTS }
            }
            None => dialect::RANGE_COUNTS,
        };
        let counts = query(counts).bind(first).bind(last);
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
    ) -> Result<ChangedJobs, StoreError> {
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
        Ok(ChangedJobs { jobs, more: found.len() as u64 >= u64::from(max) })
    }

    async fn ended_in_range(
        &self,
        ids: RangeInclusive<JobId>,
    ) -> Result<Vec<EndedJob>, StoreError> {
        let found = query(
            "SELECT jobs.id, state, outcome, finished_at, custom_id, line_key, line_shape, charge,
                    currency, CASE WHEN line_shape = 'response' THEN job END AS repeating
             FROM jobs JOIN results ON results.job_id = jobs.id
                  AND results.job_id BETWEEN $1 AND $2
             WHERE jobs.id BETWEEN $1 AND $2 ORDER BY jobs.id",
        );
        let found = found.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        self.fetch_all(found).await?.iter().map(ended).collect()
    }

    async fn has_ended(&self, ids: RangeInclusive<JobId>) -> Result<bool, StoreError> {
        let found = query(
            "SELECT 1 AS found FROM jobs WHERE id BETWEEN $1 AND $2
                 AND state IN ('completed', 'failed', 'cancelled', 'expired') LIMIT 1",
        );
        let found = found.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        Ok(self.fetch_optional(found).await?.is_some())
    }

    async fn states_in_range(
        &self,
        ids: RangeInclusive<JobId>,
    ) -> Result<Vec<RangedJob>, StoreError> {
        let found = query(ranged_jobs!("")).bind(Uuid::from(*ids.start()));
        let found = self.fetch_all(found.bind(Uuid::from(*ids.end()))).await?;
        found.iter().map(ranged_job).collect()
    }

    async fn named_in_range(
        &self,
        ids: RangeInclusive<JobId>,
        custom_ids: &[String],
    ) -> Result<Vec<RangedJob>, StoreError> {
        let found = query(ranged_jobs!(concat!(" AND custom_id ", any_text!("$3"))));
        let found = found.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        let found = self.fetch_all(found.bind(dialect::text_list(custom_ids))).await?;
        found.iter().map(ranged_job).collect()
    }

    async fn hold_range(
        &self,
        ids: RangeInclusive<JobId>,
        running: bool,
        max: u32,
    ) -> Result<ChangedJobs, StoreError> {
        let found = query(concat!(
            "SELECT id FROM ",
            open_jobs!(),
            " WHERE id BETWEEN $1 AND $2 AND (",
            startable!("$3"),
            " OR (state = 'running' AND expires_at IS NOT NULL)) ORDER BY id LIMIT $4"
        ));
        let found = found.bind(Uuid::from(*ids.start())).bind(Uuid::from(*ids.end()));
        let (found, more) = find(self, found.bind(running), max).await?;
        if found.is_empty() {
            return Ok(ChangedJobs { jobs: 0, more });
        }
        let hold = concat!(
            "UPDATE ",
            open_jobs!(),
            " SET state = 'scheduled', run_at = NULL, expires_at = NULL, epoch = epoch + 1,
                  claim_id = NULL, owner = NULL, lease_until = NULL
             WHERE id ",
            any_of!("$1"),
            " AND ",
            startable!("$2")
        );
        let lift = concat!(
            "UPDATE ",
            open_jobs!(),
            " SET expires_at = NULL WHERE id ",
            any_of!("$1"),
            " AND state = 'running'"
        );
        let list = || dialect::id_list(found.iter().copied());
        let held = self.execute(query(hold).bind(list()).bind(running)).await?;
        if !running {
            self.execute(query(lift).bind(list())).await?;
        }
        Ok(ChangedJobs { jobs: held, more })
    }

    async fn release_range(
        &self,
        ids: RangeInclusive<JobId>,
        expires_at: Timestamp,
        max: u32,
    ) -> Result<ChangedJobs, StoreError> {
        let found = concat!(
            "SELECT id FROM ",
            open_jobs!(),
            " WHERE id BETWEEN $1 AND $2 AND ",
            other_deadline!(),
            " ORDER BY id LIMIT $4"
        );
        let release = concat!(
            "UPDATE ",
            open_jobs!(),
            " SET expires_at = $3, run_at = CASE WHEN state = 'scheduled' AND run_at IS NULL THEN ",
            now!(),
            " ELSE run_at END WHERE id ",
            any_of!("$2"),
            " AND ",
            other_deadline!()
        );
        change_found(self, (ids, max), [found, release], |query| query.bind(expires_at.0)).await
    }

    async fn move_range(
        &self,
        ids: RangeInclusive<JobId>,
        to: &QueueName,
        max: u32,
    ) -> Result<ChangedJobs, StoreError> {
        let found = concat!(
            "SELECT id FROM ",
            open_jobs!(),
            " WHERE id BETWEEN $1 AND $2 AND ",
            waits_elsewhere!(),
            " ORDER BY id LIMIT $5"
        );
        let change = concat!(
            "UPDATE ",
            open_jobs!(),
            " SET model = $3, format = $4, state = 'scheduled', run_at = ",
            now!(),
            ", epoch = epoch + 1, checkpoint = NULL WHERE id ",
            any_of!("$2"),
            " AND ",
            waits_elsewhere!()
        );
        let bind = |query: Query<'static>| query.bind(to.model.clone()).bind(to.format.clone());
        change_found(self, (ids, max), [found, change], bind).await
    }

    async fn ended(&self, ids: &[JobId]) -> Result<Vec<EndedJob>, StoreError> {
        let found = query(concat!(
            "SELECT jobs.id, state, outcome, finished_at, custom_id, line_key, line_shape, charge,
                    currency, CASE WHEN line_shape = 'response' THEN job END AS repeating
             FROM jobs JOIN results ON results.job_id = jobs.id AND results.job_id ",
            any_of!("$1"),
            " WHERE jobs.id ",
            any_of!("$1"),
            " ORDER BY jobs.id"
        ));
        let found = found.bind(dialect::id_list(ids.iter().copied()));
        self.fetch_all(found).await?.iter().map(ended).collect()
    }

    async fn ends_after(
        &self,
        ids: RangeInclusive<JobId>,
        mark: EndMark,
        max: u32,
    ) -> Result<JobEnds, StoreError> {
        // All that has ended now is before this mark, or in this page.
        let newest = match dialect::NEWEST_END {
            Some(newest) => Some(rows::integer(&self.fetch_one(query(newest)).await?, "mark")?),
            None => None,
        };
        // Beginning at the first end, a range has few ends; later, few ends come after the mark.
        let found = match mark == EndMark::default() {
            true => ends_after!("results.job_id", "jobs.id"),
            false => ends_after!(unindexed!("results.job_id"), unindexed!("jobs.id")),
        };
        let found = query(found);
        let (at, after) = mark.parts();
        let found = found
            .bind(Uuid::from(*ids.start()))
            .bind(Uuid::from(*ids.end()))
            .bind(at)
            .bind(Uuid::from(after))
            .bind(i64::from(max));
        let found = self.fetch_all(found).await?;
        let ends: Vec<JobEnd> = found.iter().map(end).collect::<Result<_, _>>()?;
        let last = ends.last().map_or(mark, |last| last.mark);
        let resume = match newest {
            Some(newest) if ends.len() < max as usize => {
                let seen = ends.last().map_or(newest, |last| newest.max(last.mark.parts().0));
                EndMark::before_all_of(mark.parts().0.max(seen + 1))
            }
            Some(_) => last,
            None if ends.is_empty() => mark,
            None => EndMark::before_all_of(last.parts().0 - dialect::ENDS_COMMITTED_LATE),
        };
        Ok(JobEnds { ends, resume })
    }

    async fn ids_in_range(
        &self,
        ids: RangeInclusive<JobId>,
        max: u32,
    ) -> Result<Vec<JobId>, StoreError> {
        let found = query(concat!(
            "SELECT id FROM ",
            all_jobs!(),
            " WHERE id BETWEEN $1 AND $2 ORDER BY id LIMIT $3"
        ));
        let (first, last) = (Uuid::from(*ids.start()), Uuid::from(*ids.end()));
        rows::ids(&self.fetch_all(found.bind(first).bind(last).bind(i64::from(max))).await?)
    }
}
