//! Queries of operators about jobs.

use std::collections::HashMap;

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    SqlStore,
    calls::{Row, query},
    dialect::{self, METADATA_HAS},
    rows,
    store::records,
};
use crate::{
    job::{JobId, JobState, QueueName, Tenant},
    outcome::Outcome,
    store::{
        Page, StoreError,
        job_queries::{
            Attempt, AttemptEnd, AttemptFailure, Count, DeadLetterGroup, DeadLetterGroups,
            JobFilter, JobHistory, JobPage, JobQueries, JobSummary, SCAN_MAX,
        },
        job_query::JobQuery,
    },
};

#[async_trait]
impl JobQueries for SqlStore {
    async fn jobs(&self, filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError> {
        let filtered = JobQuery::new(
            filter,
            page.after,
            dialect::tables_of(filter.queried_state()),
            METADATA_HAS,
        );
        let mut sql = filtered.page(page.limit);
        let found = self.fetch_all(sql.build()).await?;
        let next = match found.last() {
            Some(last) if found.len() >= page.limit as usize => Some(rows::id(last, "id")?),
            // Fewer jobs than requested: the scan reached its end or its limit.
            _ => {
                let mut sql = filtered.scan_end();
                let end = self.fetch_optional(sql.build()).await?;
                end.as_ref().map(|row| rows::id(row, "id")).transpose()?
            }
        };
        let mut jobs = found.iter().map(summary).collect::<Result<Vec<_>, _>>()?;
        let ends = query(concat!(
            "SELECT job_id, finished_at, prompt_tokens, completion_tokens FROM results
             WHERE job_id ",
            any_of!("$1")
        ));
        let ends = ends.bind(dialect::id_list(jobs.iter().map(|job| job.id)));
        let ends = self.fetch_all(ends).await?;
        let mut end_of: HashMap<JobId, &Row> = HashMap::with_capacity(ends.len());
        for row in &ends {
            end_of.insert(rows::id(row, "job_id")?, row);
        }
        for job in &mut jobs {
            if let Some(row) = end_of.get(&job.id) {
                job.finished_at = Some(rows::time(row, "finished_at")?);
                job.prompt_tokens = rows::count(row, "prompt_tokens")?;
                job.completion_tokens = rows::count(row, "completion_tokens")?;
            }
        }
        Ok(JobPage { jobs, next })
    }

    async fn count_jobs(&self, filter: &JobFilter) -> Result<Count, StoreError> {
        let tables = dialect::tables_of(filter.queried_state());
        let mut sql = JobQuery::new(filter, None, tables, METADATA_HAS).count();
        let row = self.fetch_one(sql.build()).await?;
        let (scanned, jobs) = (rows::count(&row, "scanned")?, rows::count(&row, "jobs")?);
        let most = u64::from(SCAN_MAX);
        Ok(Count { jobs: jobs.min(most), or_more: scanned > most })
    }

    async fn job_history(&self, id: JobId) -> Result<Option<JobHistory>, StoreError> {
        let Some(record) = records(self, &[id]).await?.pop() else { return Ok(None) };
        let found = query(concat!(
            "SELECT submitted_at, started_at, run_at, lease_until, replay_of, owner, claimed_at,
                    epoch, state, claim_epoch, claim_owner, claim_at, first_token_ms, finished_at
             FROM ",
            all_jobs!(),
            " AS jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id = $1
             WHERE id = $1"
        ));
        let row = self.fetch_optional(found.bind(Uuid::from(id))).await?;
        // The job may have been purged since the read above.
        let Some(row) = row else { return Ok(None) };
        let errors = query(
            "SELECT epoch, owner, claimed_at, at, error FROM attempt_errors WHERE job_id = $1
             ORDER BY epoch",
        );
        let errors = self.fetch_all(errors.bind(Uuid::from(id))).await?;
        let mut attempts = Vec::with_capacity(errors.len() + 1);
        for row in &errors {
            attempts.push(Attempt {
                epoch: rows::integer(row, "epoch")?,
                owner: rows::get(row, "owner")?,
                claimed_at: rows::time_or_none(row, "claimed_at")?,
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
            started_at: rows::time_or_none(&row, "started_at")?,
            run_at: rows::time_or_none(&row, "run_at")?,
            lease_until: rows::time_or_none(&row, "lease_until")?,
            attempts,
        }))
    }

    async fn dead_letter_groups(
        &self,
        queue: Option<&QueueName>,
    ) -> Result<DeadLetterGroups, StoreError> {
        let filter = JobFilter::dead_letters(queue);
        let mut sql =
            JobQuery::new(&filter, None, &["jobs"], METADATA_HAS).groups(dialect::ID_TEXT);
        let found = self.fetch_all(sql.build()).await?;
        let group = |row| {
            Ok(DeadLetterGroup {
                queue: rows::queue(row)?,
                error_code: rows::get(row, "error_code")?,
                error_signature: rows::get(row, "error_signature")?,
                jobs: rows::count(row, "jobs")?,
                first: rows::word(row, "first")?,
                last: rows::word(row, "last")?,
            })
        };
        let groups = found.iter().map(group).collect::<Result<_, StoreError>>()?;
        Ok(DeadLetterGroups::from_groups(groups))
    }

    async fn worker_failures(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<AttemptFailure>, StoreError> {
        let found = query(
            "SELECT job_id, at, error FROM (
                 SELECT job_id, epoch, at, error, owner FROM attempt_errors
                 ORDER BY job_id DESC, epoch DESC LIMIT $3
             ) AS latest
             WHERE owner = $1 ORDER BY job_id DESC, epoch DESC LIMIT $2",
        );
        let found = found.bind(owner).bind(i64::from(limit)).bind(i64::from(SCAN_MAX));
        let failure = |row| {
            let (id, at) = (rows::id(row, "job_id")?, rows::time(row, "at")?);
            Ok(AttemptFailure { id, at, error: rows::attempt_error(row)? })
        };
        self.fetch_all(found).await?.iter().map(failure).collect()
    }

    async fn job_tenants(
        &self,
        after: Option<&Tenant>,
        limit: u32,
    ) -> Result<Vec<Tenant>, StoreError> {
        let after = after.map_or("", |tenant| tenant.0.as_str());
        let found = query(dialect::JOB_TENANTS).bind(after).bind(i64::from(limit));
        let name = |row| Ok(Tenant(rows::get(row, "tenant")?));
        self.fetch_all(found).await?.iter().map(name).collect()
    }
}

fn summary(row: &Row) -> Result<JobSummary, StoreError> {
    Ok(JobSummary {
        id: rows::id(row, "id")?,
        tenant: Tenant(rows::get(row, "tenant")?),
        queue: rows::queue(row)?,
        priority: rows::word(row, "priority")?,
        state: rows::state(row)?,
        attempts: rows::attempts(row, "attempts")?,
        custom_id: rows::get(row, "custom_id")?,
        owner: rows::get(row, "owner")?,
        error_code: rows::get(row, "error_code")?,
        submitted_at: rows::time(row, "submitted_at")?,
        started_at: rows::time_or_none(row, "started_at")?,
        finished_at: None,
        prompt_tokens: 0,
        completion_tokens: 0,
    })
}

/// Returns the running attempt, or the one that ended without an error.
fn last_attempt(row: &Row, outcome: Option<&Outcome>) -> Result<Option<Attempt>, StoreError> {
    let is_running = rows::state(row)? == JobState::Running;
    let end = match outcome {
        _ if is_running => AttemptEnd::Running,
        Some(Outcome::Completed(_)) => AttemptEnd::Completed,
        Some(Outcome::Expired) => AttemptEnd::Expired,
        // Errors are in their own table; a cancel ends no attempt.
        Some(Outcome::Error(_)) | None => return Ok(None),
    };
    let claim_epoch: Option<i64> = rows::get(row, "claim_epoch")?;
    if claim_epoch.is_none() && end == AttemptEnd::Expired {
        // The job expired before it was claimed.
        return Ok(None);
    }
    let (owner, claimed_at) =
        if is_running { ("owner", "claimed_at") } else { ("claim_owner", "claim_at") };
    let first_token: Option<i64> = rows::get(row, "first_token_ms")?;
    Ok(Some(Attempt {
        epoch: claim_epoch.map_or_else(|| rows::integer(row, "epoch"), Ok)?,
        owner: rows::get(row, owner)?,
        claimed_at: rows::time_or_none(row, claimed_at)?,
        first_token: first_token.map(rows::duration),
        ended_at: rows::time_or_none(row, "finished_at")?,
        end,
    }))
}
