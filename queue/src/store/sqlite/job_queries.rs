//! What operators look at.

use std::{collections::HashMap, time::Duration};

use async_trait::async_trait;
use sqlx::{Row as _, sqlite::SqliteRow};

use super::{
    SqliteStore, batches,
    rows::{self, from_json, integer, text},
    sampler, unavailable, workers,
};
use crate::{
    Store as _,
    job::{JobId, JobState, QueueName, Tenant, Timestamp},
    outcome::Outcome,
    store::{
        Batch, Page, StoreError,
        history::{Period, Point, Snapshot},
        job_queries::{
            Attempt, AttemptEnd, Count, DeadLetterGroup, DeadLetterGroups, JobFilter, JobHistory,
            JobPage, JobQueries, JobSummary, SCAN_MAX,
        },
        job_query::JobQuery,
        operations::Integrity,
    },
};

fn id_bytes(id: JobId) -> Vec<u8> {
    id.as_bytes().to_vec()
}

pub(super) fn time(row: &SqliteRow, column: &'static str) -> Result<Timestamp, StoreError> {
    integer(row, column).map(Timestamp)
}

pub(super) fn time_or_none(row: &SqliteRow, column: &str) -> Result<Option<Timestamp>, StoreError> {
    Ok(row.try_get::<Option<i64>, _>(column).map_err(unavailable)?.map(Timestamp))
}

pub(super) fn count(row: &SqliteRow, column: &'static str) -> Result<u64, StoreError> {
    let value = integer(row, column)?;
    u64::try_from(value).map_err(|_| rows::damaged(column, value))
}

pub(super) fn queue(row: &SqliteRow) -> Result<QueueName, StoreError> {
    Ok(QueueName { model: text(row, "model")?, format: text(row, "format")? })
}

#[async_trait]
impl JobQueries for SqliteStore {
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError> {
        let query = JobQuery::new(filter, page.after, id_bytes);
        let mut sql = query.page(page.limit);
        let found = sql.build().fetch_all(&self.pool).await.map_err(unavailable)?;
        let next = match found.last() {
            Some(last) if found.len() >= page.limit as usize => Some(rows::id(last, "id")?),
            // Fewer than asked for: the walk is at its end, or was long enough.
            _ => {
                let mut sql = query.scan_end();
                let end = sql.build().fetch_optional(&self.pool).await.map_err(unavailable)?;
                end.as_ref().map(|row| rows::id(row, "id")).transpose()?
            }
        };
        let mut jobs = found.iter().map(summary).collect::<Result<Vec<_>, _>>()?;
        let ended = sqlx::query(
            "SELECT job_id, finished_at, prompt_tokens, completion_tokens
             FROM json_each(?1) AS wanted JOIN results ON job_id = unhex(wanted.value)",
        )
        .bind(rows::ids_json(jobs.iter().map(|job| &job.id)))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut ends: HashMap<JobId, &SqliteRow> = HashMap::with_capacity(ended.len());
        for row in &ended {
            ends.insert(rows::id(row, "job_id")?, row);
        }
        for job in &mut jobs {
            if let Some(row) = ends.get(&job.id) {
                job.finished_at = Some(time(row, "finished_at")?);
                job.prompt_tokens = count(row, "prompt_tokens")?;
                job.completion_tokens = count(row, "completion_tokens")?;
            }
        }
        Ok(JobPage { jobs, next })
    }

    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError> {
        let mut query = JobQuery::new(filter, None, id_bytes).count();
        let row = query.build().fetch_one(&self.pool).await.map_err(unavailable)?;
        let (scanned, jobs) = (count(&row, "scanned")?, count(&row, "jobs")?);
        let most = u64::from(SCAN_MAX);
        Ok(Count { jobs: jobs.min(most), or_more: scanned > most })
    }

    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError> {
        let Some(record) = self.job(id).await? else { return Ok(None) };
        let row = sqlx::query(
            "SELECT submitted_at, started_at, run_at, lease_until, replay_of, owner, claimed_at,
                    epoch, state, claim_epoch, claim_owner, claim_at, first_token_ms, finished_at
             FROM jobs LEFT JOIN results ON results.job_id = jobs.id WHERE id = ?1",
        )
        .bind(id_bytes(id))
        .fetch_optional(&self.pool)
        .await
        .map_err(unavailable)?;
        // Purged in between.
        let Some(row) = row else { return Ok(None) };
        let errors = sqlx::query(
            "SELECT epoch, owner, claimed_at, at, error FROM attempt_errors WHERE job_id = ?1
             ORDER BY epoch",
        )
        .bind(id_bytes(id))
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut attempts = Vec::with_capacity(errors.len() + 1);
        for row in &errors {
            attempts.push(Attempt {
                epoch: integer(row, "epoch")?,
                owner: row.try_get("owner").map_err(unavailable)?,
                claimed_at: time_or_none(row, "claimed_at")?,
                first_token: None,
                ended_at: Some(time(row, "at")?),
                end: AttemptEnd::Error(from_json("attempt error", &text(row, "error")?)?),
            });
        }
        attempts.extend(last_attempt(&row, record.outcome.as_ref())?);
        let replay_of: Option<Vec<u8>> = row.try_get("replay_of").map_err(unavailable)?;
        Ok(Some(JobHistory {
            record,
            replay_of: replay_of.and_then(|bytes| JobId::from_bytes(&bytes)),
            submitted_at: time(&row, "submitted_at")?,
            started_at: time_or_none(&row, "started_at")?,
            run_at: time_or_none(&row, "run_at")?,
            lease_until: time_or_none(&row, "lease_until")?,
            attempts,
        }))
    }

    async fn dead_letter_groups(
        &self,
        of: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError> {
        let filter = JobFilter::dead_letters(of);
        let mut sql = JobQuery::new(&filter, None, id_bytes).groups("hex(id)");
        let found = sql.build().fetch_all(&self.pool).await.map_err(unavailable)?;
        let id = |row: &SqliteRow, column| -> Result<JobId, StoreError> {
            text(row, column)?.parse().map_err(|error| rows::damaged("id", error))
        };
        let group = |row: &SqliteRow| {
            Ok(DeadLetterGroup {
                queue: queue(row)?,
                error_code: text(row, "error_code")?,
                error_signature: text(row, "error_signature")?,
                jobs: count(row, "jobs")?,
                first: id(row, "first")?,
                last: id(row, "last")?,
            })
        };
        let groups = found.iter().map(group).collect::<Result<Vec<_>, StoreError>>()?;
        Ok(DeadLetterGroups::of(groups))
    }

    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError> {
        sampler::sampled(&self.pool).await
    }

    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError> {
        sampler::read(&self.pool, queue, period, from, to).await
    }

    async fn latest_batches(&self, limit: u32) -> Result<Vec<Batch>, StoreError> {
        let found = sqlx::query("SELECT batch FROM batches ORDER BY id DESC LIMIT ?1")
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(batches::batch).collect()
    }

    async fn integrity(&self) -> Result<Integrity, StoreError> {
        workers::integrity(&self.pool).await
    }
}

fn summary(row: &SqliteRow) -> Result<JobSummary, StoreError> {
    Ok(JobSummary {
        id: rows::id(row, "id")?,
        tenant: Tenant(text(row, "tenant")?),
        queue: queue(row)?,
        priority: text(row, "priority")?
            .parse()
            .map_err(|error| rows::damaged("priority", error))?,
        state: rows::state(row)?,
        attempts: rows::count(row, "attempts")?,
        custom_id: row.try_get("custom_id").map_err(unavailable)?,
        owner: row.try_get("owner").map_err(unavailable)?,
        error_code: row.try_get("error_code").map_err(unavailable)?,
        submitted_at: time(row, "submitted_at")?,
        started_at: time_or_none(row, "started_at")?,
        finished_at: None,
        prompt_tokens: 0,
        completion_tokens: 0,
    })
}

/// The attempt that runs, or that ended without an error.
fn last_attempt(row: &SqliteRow, outcome: Option<&Outcome>) -> Result<Option<Attempt>, StoreError> {
    let is_running = rows::state(row)? == JobState::Running;
    let end = match outcome {
        _ if is_running => AttemptEnd::Running,
        Some(Outcome::Completed(_)) => AttemptEnd::Completed,
        Some(Outcome::Expired) => AttemptEnd::Expired,
        // Errors are among the others; a cancel ends no attempt.
        Some(Outcome::Error(_)) | None => return Ok(None),
    };
    let of_end: Option<i64> = row.try_get("claim_epoch").map_err(unavailable)?;
    if of_end.is_none() && end == AttemptEnd::Expired {
        // While it waited.
        return Ok(None);
    }
    let (owner, claimed_at) =
        if is_running { ("owner", "claimed_at") } else { ("claim_owner", "claim_at") };
    let first_token: Option<i64> = row.try_get("first_token_ms").map_err(unavailable)?;
    Ok(Some(Attempt {
        epoch: of_end.map_or_else(|| integer(row, "epoch"), Ok)?,
        owner: row.try_get(owner).map_err(unavailable)?,
        claimed_at: time_or_none(row, claimed_at)?,
        first_token: first_token.map(|ms| Duration::from_millis(ms.unsigned_abs())),
        ended_at: time_or_none(row, "finished_at")?,
        end,
    }))
}
