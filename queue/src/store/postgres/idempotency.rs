//! Submitting under a key: the same request twice is one submission.

use sqlx::PgConnection;
use uuid::Uuid;

use super::{PostgresStore, claims, rows, unavailable};
use crate::{
    job::{Job, JobId, Tenant},
    store::StoreError,
};

/// What became of a submission under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Submission {
    /// It was the first; its jobs are recorded.
    New,
    /// The same request came before and became these jobs; nothing was recorded now.
    Known(Vec<JobId>),
}

/// A key that its tenant used for another request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("idempotency key '{key}' was used for another request")]
pub struct Conflict {
    /// The key.
    pub key: String,
}

/// A submission under a key that did not happen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The caller's mistake.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The store did not answer; the same call may be repeated.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PostgresStore {
    /// Records jobs, unless `tenant` has submitted under `key` before. `request_hash` is of the
    /// request as the caller sent it: it tells a repetition from another request under the same
    /// key. Keys are kept as long as jobs are.
    ///
    /// # Errors
    /// [`SubmitError::Conflict`] when the key named another request; then nothing was recorded.
    pub async fn submit_idempotent(
        &self,
        tenant: &Tenant,
        key: &str,
        request_hash: &[u8],
        jobs: &[Job],
    ) -> Result<Submission, SubmitError> {
        rows::storable("tenant", &tenant.0)?;
        rows::storable("idempotency key", key)?;
        let mut tx = self.pool.begin().await.map_err(unavailable)?;
        let ids: Vec<Uuid> = jobs.iter().map(|job| Uuid::from(job.id)).collect();
        // Waits for a submission in progress under the same key.
        let first = sqlx::query(
            "INSERT INTO idempotency (tenant, key, request_hash, job_ids, created_at)
             VALUES ($1, $2, $3, $4, store_now_ms($5)) ON CONFLICT DO NOTHING",
        )
        .bind(&tenant.0)
        .bind(key)
        .bind(request_hash)
        .bind(ids)
        .bind(self.given_now())
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        if first.rows_affected() == 0 {
            return known(&mut tx, tenant, key, request_hash).await;
        }
        claims::insert_jobs(&mut tx, jobs, None, self.given_now()).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Submission::New)
    }
}

/// The jobs of the submission that used the key first.
async fn known(
    tx: &mut PgConnection,
    tenant: &Tenant,
    key: &str,
    request_hash: &[u8],
) -> Result<Submission, SubmitError> {
    let row =
        sqlx::query("SELECT request_hash, job_ids FROM idempotency WHERE tenant = $1 AND key = $2")
            .bind(&tenant.0)
            .bind(key)
            .fetch_one(tx)
            .await
            // Missing only if retention took it since: the caller repeats and is the first.
            .map_err(unavailable)?;
    if rows::get::<&[u8]>(&row, "request_hash")? != request_hash {
        return Err(Conflict { key: key.to_owned() }.into());
    }
    let ids: Vec<Uuid> = rows::get(&row, "job_ids")?;
    Ok(Submission::Known(ids.into_iter().map(JobId::from).collect()))
}
