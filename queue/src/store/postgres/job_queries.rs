//! What operators look at.

use std::collections::HashMap;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::{PostgresStore, batches, reads, rows, sampler, unavailable, workers};
use crate::{
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

#[async_trait]
impl JobQueries for PostgresStore {
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError> {
        self.within(jobs(self, filter, page)).await
    }

    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError> {
        self.within(async {
            let mut query = JobQuery::new(filter, None, Uuid::from).count();
            let row = query.build().fetch_one(&self.pool).await.map_err(unavailable)?;
            let (scanned, jobs) = (rows::count(&row, "scanned")?, rows::count(&row, "jobs")?);
            let most = u64::from(SCAN_MAX);
            Ok(Count { jobs: jobs.min(most), or_more: scanned > most })
        })
        .await
    }

    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError> {
        self.within(history(self, id)).await
    }

    async fn dead_letter_groups(
        &self,
        queue: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError> {
        self.within(groups(self, queue)).await
    }

    async fn snapshot(&self) -> Result<Option<Snapshot>, StoreError> {
        self.within(sampler::sampled(&self.pool)).await
    }

    async fn samples(
        &self,
        queue: Option<&QueueName>,
        period: Period,
        from: Timestamp,
        to: Timestamp,
    ) -> Result<Vec<Point>, StoreError> {
        self.within(sampler::read(&self.pool, queue, period, from, to)).await
    }

    async fn latest_batches(&self, limit: u32) -> Result<Vec<Batch>, StoreError> {
        self.within(async {
            let found = sqlx::query("SELECT batch::text FROM batches ORDER BY id DESC LIMIT $1")
                .bind(i64::from(limit))
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
            found.iter().map(batches::batch).collect()
        })
        .await
    }

    async fn integrity(&self) -> Result<Integrity, StoreError> {
        self.within(workers::integrity(&self.pool)).await
    }
}

async fn jobs(
    store: &PostgresStore,
    filter: &JobFilter,
    page: Page<JobId>,
) -> Result<JobPage, StoreError> {
    let query = JobQuery::new(filter, page.after, Uuid::from);
    let mut sql = query.page(page.limit);
    let found = sql.build().fetch_all(&store.pool).await.map_err(unavailable)?;
    let next = match found.last() {
        Some(last) if found.len() >= page.limit as usize => Some(rows::id(last, "id")?),
        // Fewer than asked for: the walk is at its end, or was long enough.
        _ => {
            let mut sql = query.scan_end();
            let end = sql.build().fetch_optional(&store.pool).await.map_err(unavailable)?;
            end.as_ref().map(|row| rows::id(row, "id")).transpose()?
        }
    };
    let ids: Vec<Uuid> = found.iter().map(|row| rows::get(row, "id")).collect::<Result<_, _>>()?;
    let ended = sqlx::query(
        "SELECT job_id, finished_at, prompt_tokens, completion_tokens FROM results
         WHERE job_id = ANY($1)",
    )
    .bind(ids)
    .fetch_all(&store.pool)
    .await
    .map_err(unavailable)?;
    let mut ends = HashMap::with_capacity(ended.len());
    for row in &ended {
        let tokens = (rows::count(row, "prompt_tokens")?, rows::count(row, "completion_tokens")?);
        ends.insert(rows::id(row, "job_id")?, (rows::time(row, "finished_at")?, tokens));
    }
    let summary = |row| {
        let mut summary = summary(row)?;
        if let Some((at, tokens)) = ends.get(&summary.id) {
            summary.finished_at = Some(*at);
            (summary.prompt_tokens, summary.completion_tokens) = *tokens;
        }
        Ok(summary)
    };
    Ok(JobPage { jobs: found.iter().map(summary).collect::<Result<_, StoreError>>()?, next })
}

fn summary(row: &PgRow) -> Result<JobSummary, StoreError> {
    Ok(JobSummary {
        id: rows::id(row, "id")?,
        tenant: Tenant(rows::get(row, "tenant")?),
        queue: rows::queue(row)?,
        priority: rows::priority(row)?,
        state: rows::state(row)?,
        attempts: rows::attempts(row)?,
        custom_id: rows::get(row, "custom_id")?,
        owner: rows::get(row, "owner")?,
        error_code: rows::get(row, "error_code")?,
        submitted_at: rows::time(row, "submitted_at")?,
        started_at: time_or_none(row, "started_at")?,
        finished_at: None,
        prompt_tokens: 0,
        completion_tokens: 0,
    })
}

fn time_or_none(row: &PgRow, column: &str) -> Result<Option<Timestamp>, StoreError> {
    Ok(rows::get::<Option<i64>>(row, column)?.map(Timestamp))
}

async fn history(store: &PostgresStore, id: JobId) -> Result<Option<JobHistory>, StoreError> {
    let Some(record) = reads::records(&store.pool, &[id]).await?.pop() else { return Ok(None) };
    let row = sqlx::query(
        "SELECT submitted_at, started_at, run_at, lease_until, replay_of, owner, claimed_at, epoch,
                state, claim_epoch, claim_owner, claim_at, first_token_ms, finished_at
         FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id = $1
         WHERE id = $1",
    )
    .bind(Uuid::from(id))
    .fetch_optional(&store.pool)
    .await
    .map_err(unavailable)?;
    // Purged in between.
    let Some(row) = row else { return Ok(None) };
    let errors = sqlx::query(
        "SELECT epoch, owner, claimed_at, at, error FROM attempt_errors WHERE job_id = $1
         ORDER BY epoch",
    )
    .bind(Uuid::from(id))
    .fetch_all(&store.pool)
    .await
    .map_err(unavailable)?;
    let mut attempts = Vec::with_capacity(errors.len() + 1);
    for row in &errors {
        attempts.push(Attempt {
            epoch: rows::integer(row, "epoch")?,
            owner: rows::get(row, "owner")?,
            claimed_at: time_or_none(row, "claimed_at")?,
            first_token: None,
            ended_at: Some(rows::time(row, "at")?),
            end: AttemptEnd::Error(rows::attempt_error(row)?),
        });
    }
    attempts.extend(last_attempt(&row, record.outcome.as_ref())?);
    let replay_of: Option<Uuid> = rows::get(&row, "replay_of")?;
    Ok(Some(JobHistory {
        record,
        replay_of: replay_of.map(JobId::from),
        submitted_at: rows::time(&row, "submitted_at")?,
        started_at: time_or_none(&row, "started_at")?,
        run_at: time_or_none(&row, "run_at")?,
        lease_until: time_or_none(&row, "lease_until")?,
        attempts,
    }))
}

/// The attempt that runs, or that ended without an error.
fn last_attempt(row: &PgRow, outcome: Option<&Outcome>) -> Result<Option<Attempt>, StoreError> {
    let is_running = rows::state(row)? == JobState::Running;
    let end = match outcome {
        _ if is_running => AttemptEnd::Running,
        Some(Outcome::Completed(_)) => AttemptEnd::Completed,
        Some(Outcome::Expired) => AttemptEnd::Expired,
        // Errors are among the others; a cancel ends no attempt.
        Some(Outcome::Error(_)) | None => return Ok(None),
    };
    let of_end: Option<i64> = rows::get(row, "claim_epoch")?;
    if of_end.is_none() && end == AttemptEnd::Expired {
        // While it waited.
        return Ok(None);
    }
    let (owner, claimed_at) =
        if is_running { ("owner", "claimed_at") } else { ("claim_owner", "claim_at") };
    let first_token: Option<i64> = rows::get(row, "first_token_ms")?;
    Ok(Some(Attempt {
        epoch: of_end.map_or_else(|| rows::integer(row, "epoch"), Ok)?,
        owner: rows::get(row, owner)?,
        claimed_at: time_or_none(row, claimed_at)?,
        first_token: first_token.map(rows::duration),
        ended_at: time_or_none(row, "finished_at")?,
        end,
    }))
}

async fn groups(
    store: &PostgresStore,
    queue: Option<&QueueName>,
) -> Result<DeadLetterGroups, StoreError> {
    let filter = JobFilter::dead_letters(queue);
    let mut sql = JobQuery::new(&filter, None, Uuid::from).groups("id::text");
    let found = sql.build().fetch_all(&store.pool).await.map_err(unavailable)?;
    let mut groups = Vec::with_capacity(found.len());
    for row in &found {
        // There is no least of UUIDs before Postgres 18; as text they are in the same order.
        let id = |column| -> Result<JobId, StoreError> {
            let text: &str = rows::get(row, column)?;
            text.parse().map_err(|error| rows::damaged("id", error))
        };
        groups.push(DeadLetterGroup {
            queue: rows::queue(row)?,
            error_code: rows::get(row, "error_code")?,
            error_signature: rows::get(row, "error_signature")?,
            jobs: rows::count(row, "jobs")?,
            first: id("first")?,
            last: id("last")?,
        });
    }
    Ok(DeadLetterGroups::of(groups))
}
