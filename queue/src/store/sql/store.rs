//! The [`Store`] trait.

use std::{collections::HashMap, time::Duration};

use async_trait::async_trait;
use uuid::Uuid;

use super::{SqlStore, announcements, calls::query, charges, claims, dialect, reconcile, rows};
use crate::{
    dispatch::{Entry, Missing},
    job::{Job, JobId, JobState, QueueName, Timestamp},
    outcome::{JobError, Outcome},
    store::{
        Claim, ClaimRef, Claimant, FinishedAttempt, FinishedJob, JobRecord, Progress, Reconciled,
        Settled, Store, StoreError, Unannounced, attempts::LOSSES_MAX,
    },
};

#[async_trait]
impl Store for SqlStore {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        self.within(async {
            let mut connection = self.acquire().await?;
            let recorded = claims::insert_jobs(self, &mut connection, jobs, None).await;
            self.release(connection, recorded)
        })
        .await
    }

    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        claims::claim(self, ids, by).await
    }

    async fn renew(
        &self,
        claims: &[ClaimRef],
        lease: Duration,
    ) -> Result<Vec<ClaimRef>, StoreError> {
        claims::renew(self, claims, lease).await
    }

    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        claims::checkpoint(self, saved).await
    }

    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        claims::finish(self, finished).await
    }

    async fn hand_back(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        claims::hand_back(self, claims, 0).await
    }

    async fn hand_back_suspects(&self, claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        claims::hand_back(self, claims, LOSSES_MAX).await
    }

    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        claims::cancel(self, ids).await
    }

    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        self.within(reconcile::reconcile(self)).await
    }

    fn announced(&self, entries: &[Entry]) {
        announcements::announced(self, entries);
    }

    async fn unannounced(&self, queue: &QueueName) -> Result<Unannounced, StoreError> {
        announcements::unannounced(self, queue).await
    }

    async fn forget_announcements(&self, done: &Unannounced) -> Result<(), StoreError> {
        announcements::forget(self, done).await
    }

    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        let found = query(dialect::QUEUED)
            .bind(&queue.model)
            .bind(&queue.format)
            .bind(after.map_or_else(Uuid::nil, Uuid::from))
            .bind(i64::from(limit));
        self.fetch_all(found).await?.iter().map(|row| rows::entry(row, queue.clone())).collect()
    }

    async fn queued_heads(
        &self,
        queue: &QueueName,
        each: u32,
        limit: u32,
    ) -> Result<(Missing, Vec<Entry>), StoreError> {
        // Reads all queued jobs of the queue: only for a dispatcher that lost its data.
        let found = query(concat!(
            "SELECT id, tenant, priority, cost, shard_key, expires_at, tier, jobs, tokens
             FROM (SELECT id, tenant, priority, cost, shard_key, expires_at, tier,
                          row_number() OVER (PARTITION BY priority, tenant ORDER BY id) AS turn,
                          count(*) OVER () AS jobs, CAST(sum(cost) OVER () AS bigint) AS tokens
                   FROM (SELECT id, tenant, priority, ",
            entry_columns!(),
            " FROM ",
            open_jobs!(),
            "        WHERE model = $1 AND format = $2 AND state = 'queued') AS waiting
                  ) AS line
             WHERE turn <= $3
             ORDER BY CASE priority WHEN 'high' THEN 0 WHEN 'normal' THEN 1 ELSE 2 END, turn, id
             LIMIT $4"
        ))
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(i64::from(each))
        .bind(i64::from(limit));
        let found = self.fetch_all(found).await?;
        let total = match found.first() {
            Some(row) => {
                let (entries, tokens) = (rows::count(row, "jobs")?, rows::count(row, "tokens")?);
                Missing { entries, tokens, refilling: false }
            }
            None => Missing::default(),
        };
        let heads = found.iter().map(|row| rows::entry(row, queue.clone()));
        Ok((total, heads.collect::<Result<_, _>>()?))
    }

    async fn now(&self) -> Result<Timestamp, StoreError> {
        let now = concat!("SELECT ", now!(), " AS now");
        rows::time(&self.fetch_one(query(now).bind(self.clock_parameter())).await?, "now")
    }

    async fn state(&self, id: JobId) -> Result<Option<JobState>, StoreError> {
        let found = concat!("SELECT state FROM ", all_jobs!(), " WHERE id = $1");
        let found = query(found).bind(Uuid::from(id));
        self.fetch_optional(found).await?.as_ref().map(rows::state).transpose()
    }

    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        Ok(records(self, &[id]).await?.pop())
    }

    /// Leaves out a job with an outcome written by a later release: a process of that release returns
    /// it.
    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        let found = query(concat!(
            "SELECT id, state, outcome, charge, currency
             FROM jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id ",
            any_of!("$1"),
            " WHERE state IN ('completed', 'failed', 'cancelled', 'expired') AND id ",
            any_of!("$1")
        ));
        let found = self.fetch_all(found.bind(dialect::id_list(ids.iter().copied()))).await?;
        let mut finished = Vec::with_capacity(found.len());
        for row in &found {
            let (id, (outcome, is_later)) = (rows::id(row, "id")?, charges::outcome(row)?);
            match outcome {
                Some(Outcome::Error(error)) if is_later => {
                    tracing::warn!(job = %id, %error, "an outcome of a later release");
                }
                outcome => finished.push(FinishedJob { id, state: rows::state(row)?, outcome }),
            }
        }
        Ok(finished)
    }

    /// Counts once along each partial index.
    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        let count = query(concat!(
            "SELECT (SELECT count(*) FROM ",
            open_jobs!(),
            " WHERE state = 'queued' AND model = $1 AND format = $2)
                 + (SELECT count(*) FROM ",
            open_jobs!(),
            " WHERE state = 'running' AND model = $1 AND format = $2)
                 + (SELECT count(*) FROM ",
            open_jobs!(),
            " WHERE state IN ('scheduled', 'retrying') AND model = $1 AND format = $2)
                 AS jobs",
        ));
        let row = self.fetch_one(count.bind(&queue.model).bind(&queue.format)).await?;
        rows::count(&row, "jobs")
    }

    /// Reads every job.
    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        let (model, format) = queue.map_or((None, None), |q| (Some(&q.model), Some(&q.format)));
        let counts = query(concat!(
            "SELECT state, count(*) AS jobs FROM ",
            all_jobs!(),
            " WHERE ($1 IS NULL OR (model = $1 AND format = $2)) GROUP BY state"
        ));
        let mut progress = Progress::default();
        for row in &self.fetch_all(counts.bind(model).bind(format)).await? {
            *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
        }
        let tokens = query(dialect::TOKENS).bind(model).bind(format);
        let row = self.fetch_one(tokens).await?;
        progress.prompt_tokens = rows::count(&row, "prompt")?;
        progress.completion_tokens = rows::count(&row, "completion")?;
        Ok(progress)
    }
}

/// Returns the records of the jobs that are known, in order of id.
pub(super) async fn records(store: &SqlStore, ids: &[JobId]) -> Result<Vec<JobRecord>, StoreError> {
    let ids = dialect::id_list(ids.iter().copied());
    let found = query(concat!(
        "SELECT id, jobs.model, jobs.format, jobs.tenant, priority, attempts_max, job, state, epoch,
                attempts, outcome, finished_at, charge, currency
         FROM ",
        all_jobs!(),
        " AS jobs LEFT JOIN results ON results.job_id = jobs.id AND results.job_id ",
        any_of!("$1"),
        " WHERE id ",
        any_of!("$1"),
        " ORDER BY id"
    ));
    let found = store.fetch_all(found.bind(&ids)).await?;
    let errors = query(concat!(
        "SELECT job_id, error FROM attempt_errors WHERE job_id ",
        any_of!("$1"),
        " ORDER BY job_id, epoch"
    ));
    let mut errors_of: HashMap<JobId, Vec<JobError>> = HashMap::new();
    for row in &store.fetch_all(errors.bind(&ids)).await? {
        errors_of.entry(rows::id(row, "job_id")?).or_default().push(rows::attempt_error(row)?);
    }
    let record = |row| {
        let mut errors = errors_of.remove(&rows::id(row, "id")?).unwrap_or_default();
        let (job, unreadable) = rows::job(row)?;
        // Not added again if the last attempt ended with the same error.
        errors.extend(unreadable.filter(|error| errors.last() != Some(error)));
        Ok(JobRecord {
            job,
            state: rows::state(row)?,
            epoch: rows::integer(row, "epoch")?,
            attempts: rows::attempts(row, "attempts")?,
            outcome: charges::outcome(row)?.0,
            finished_at: rows::time_or_none(row, "finished_at")?,
            errors,
        })
    };
    found.iter().map(record).collect()
}
