//! Submission under an idempotency key: the same request twice is one submission.

use std::collections::HashSet;

use sqlx::{PgConnection, postgres::PgRow};
use uuid::Uuid;

use super::{PostgresStore, calls::query, claims, dialect::storable, rows};
use crate::{
    job::{Job, JobId, Tenant},
    store::StoreError,
};

/// Keys looked at by one statement.
const FORGET_CHUNK: i64 = 1000;

/// The first submission under a key.
const FIND: &str = "SELECT request_hash, job_ids FROM idempotency WHERE tenant = $1 AND key = $2";

/// Result of a submission under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Submission {
    /// The first one under its key; its jobs were recorded.
    New,
    /// A repetition: the first request became these jobs, and nothing was recorded now.
    Known(Vec<JobId>),
}

/// An idempotency key was used for two different requests.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("idempotency key '{key}' was used for another request")]
pub struct Conflict {
    /// The key.
    pub key: String,
}

/// A submission under a key failed; nothing was recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The key was used for another request.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PostgresStore {
    /// Records jobs unless `tenant` has submitted under `key` before. `request_hash` is a hash of the
    /// request as the client sent it; it distinguishes a repetition from another request under the
    /// same key. Keys are kept as long as jobs.
    ///
    /// # Errors
    /// [`SubmitError::Conflict`] when the key belongs to another request.
    pub async fn submit_idempotent(
        &self,
        tenant: &Tenant,
        key: &str,
        request_hash: &[u8],
        jobs: &[Job],
    ) -> Result<Submission, SubmitError> {
        storable("tenant", &tenant.0)?;
        storable("idempotency key", key)?;
        let submitted = self.within(self.submit_first(tenant, key, request_hash, jobs)).await?;
        submitted.map_or(Ok(Submission::New), |first| known(&first, key, request_hash))
    }

    /// Records jobs under a key, or returns the row of the key's first submission.
    async fn submit_first(
        &self,
        tenant: &Tenant,
        key: &str,
        request_hash: &[u8],
        jobs: &[Job],
    ) -> Result<Option<PgRow>, StoreError> {
        let mut tx = self.begin().await?;
        // Waits for a submission in progress under the same key.
        let insert = query(
            "INSERT INTO idempotency (tenant, key, request_hash, job_ids, created_at)
             VALUES ($2, $3, $4, $5, store_now_ms($1)) ON CONFLICT DO NOTHING",
        )
        .bind(self.clock_parameter())
        .bind(&tenant.0)
        .bind(key)
        .bind(request_hash)
        .bind(jobs.iter().map(|job| Uuid::from(job.id)).collect::<Vec<_>>());
        if insert.execute(&mut *tx).await?.rows_affected() == 0 {
            // The row is missing only if maintenance has deleted it since: the caller then repeats
            // the call, which counts as the first.
            let first = query(FIND).bind(&tenant.0).bind(key).fetch_one(&mut *tx).await?;
            return Ok(Some(first));
        }
        claims::insert_jobs(self, &mut tx, jobs, None).await?;
        tx.commit().await?;
        Ok(None)
    }
}

/// Returns the result of the first submission under a key, from its row.
fn known(first: &PgRow, key: &str, request_hash: &[u8]) -> Result<Submission, SubmitError> {
    if rows::get::<&[u8]>(first, "request_hash")? != request_hash {
        return Err(Conflict { key: key.to_owned() }.into());
    }
    let ids: Vec<Uuid> = rows::get(first, "job_ids")?;
    Ok(Submission::Known(ids.into_iter().map(JobId::from).collect()))
}

/// Deletes keys that were used before a time and have no jobs left. Looks up the jobs of some keys at a time,
/// by their ids: a join would read the partitions of all days.
pub(super) async fn forget(connection: &mut PgConnection, before: i64) -> Result<(), StoreError> {
    let (mut tenant, mut key) = (String::new(), String::new());
    loop {
        let found = query(
            "SELECT tenant, key, job_ids FROM idempotency
             WHERE created_at < $1 AND (tenant, key) > ($2, $3) ORDER BY tenant, key LIMIT $4",
        );
        let found = found.bind(before).bind(&tenant).bind(&key).bind(FORGET_CHUNK);
        let found = found.fetch_all(&mut *connection).await?;
        let Some(last) = found.last() else { return Ok(()) };
        (tenant, key) = (rows::get(last, "tenant")?, rows::get(last, "key")?);
        let mut keys: Vec<(&str, &str, Vec<Uuid>)> = Vec::with_capacity(found.len());
        for row in &found {
            keys.push((
                rows::get(row, "tenant")?,
                rows::get(row, "key")?,
                rows::get(row, "job_ids")?,
            ));
        }
        let ids: Vec<Uuid> = keys.iter().flat_map(|(_, _, ids)| ids).copied().collect();
        let kept = query("SELECT id FROM all_jobs WHERE id = ANY($1)").bind(ids);
        let kept = rows::ids(&kept.fetch_all(&mut *connection).await?)?;
        let kept: HashSet<Uuid> = kept.into_iter().map(Uuid::from).collect();
        keys.retain(|(_, _, ids)| ids.iter().all(|id| !kept.contains(id)));
        let (tenants, keys): (Vec<&str>, Vec<&str>) =
            keys.into_iter().map(|(tenant, key, _)| (tenant, key)).unzip();
        query(
            "DELETE FROM idempotency USING UNNEST($1::text[], $2::text[]) AS gone (tenant, key)
             WHERE idempotency.tenant = gone.tenant AND idempotency.key = gone.key",
        )
        .bind(tenants)
        .bind(keys)
        .execute(&mut *connection)
        .await?;
    }
}
