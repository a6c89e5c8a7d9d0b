//! Batches: a document each, and moves of the ranges of jobs that belong to them.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{Row as _, SqliteConnection, sqlite::SqliteRow};
use uuid::Uuid;

use super::{
    SqliteStore, claims, files,
    rows::{self, from_json, to_json},
    unavailable,
};
use crate::{
    job::{JobId, Tenant, Timestamp},
    store::{
        Progress, StoreError,
        batches::{Batch, BatchClaim, BatchId, BatchState, BatchWrites, Batches, FinishedLine},
        files::Page,
    },
};

pub(super) fn batch(row: &SqliteRow) -> Result<Batch, StoreError> {
    from_json("batch", &rows::text(row, "batch")?)
}

/// Batches that were claimed.
fn held(claimed: &[SqliteRow]) -> Result<Vec<BatchClaim>, StoreError> {
    let mut held = Vec::with_capacity(claimed.len());
    for row in claimed {
        match batch(row) {
            Ok(batch) => held.push(BatchClaim { batch, epoch: rows::integer(row, "epoch")? }),
            // Its lease runs out, for a process that can read it.
            Err(error) => tracing::error!(%error, "a claimed batch cannot be read"),
        }
    }
    Ok(held)
}

/// A claim of those batches that nobody holds: which, and in what order.
macro_rules! claim_sql {
    ($which:literal, $order:literal) => {
        concat!(
            "UPDATE batches SET epoch = epoch + 1, owner = ?1, lease_until = ?2
             WHERE id IN (
                 SELECT id FROM batches
                 WHERE ",
            $which,
            " AND (lease_until IS NULL OR lease_until <= ?3) ORDER BY ",
            $order,
            " LIMIT ?4)
             RETURNING epoch, batch"
        )
    };
}

impl SqliteStore {
    async fn claim_by(
        &self,
        statement: &'static str,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let now = self.now();
        let claimed = sqlx::query(statement)
            .bind(owner)
            .bind(now.after(lease).0)
            .bind(now.0)
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        held(&claimed)
    }
}

/// A batch of a tenant, within a transaction.
async fn find(
    connection: &mut SqliteConnection,
    tenant: &Tenant,
    id: BatchId,
) -> Result<Option<Batch>, StoreError> {
    let row = sqlx::query("SELECT batch FROM batches WHERE id = ?1 AND tenant = ?2")
        .bind(Uuid::from(id))
        .bind(&tenant.0)
        .fetch_optional(connection)
        .await
        .map_err(unavailable)?;
    row.as_ref().map(batch).transpose()
}

#[async_trait]
impl Batches for SqliteStore {
    async fn create_batch(&self, new: &Batch) -> Result<Option<Batch>, StoreError> {
        let created = sqlx::query(
            "INSERT INTO batches (id, tenant, state, input_file_id, batch, idempotency_key)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING",
        )
        .bind(Uuid::from(new.id))
        .bind(&new.tenant.0)
        .bind(new.state.as_str())
        .bind(new.input.0)
        .bind(to_json(new)?)
        .bind(&new.idempotency_key)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        if created.rows_affected() == 1 {
            return Ok(None);
        }
        let known =
            sqlx::query("SELECT batch FROM batches WHERE tenant = ?1 AND idempotency_key = ?2")
                .bind(&new.tenant.0)
                .bind(&new.idempotency_key)
                .fetch_one(&self.pool)
                .await
                .map_err(unavailable)?;
        batch(&known).map(Some)
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let mut connection = self.pool.acquire().await.map_err(unavailable)?;
        find(&mut connection, tenant, id).await
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let query = match page.ascending {
            true => sqlx::query(
                "SELECT batch FROM batches WHERE tenant = ?1 AND (?2 IS NULL OR id > ?2)
                 ORDER BY id LIMIT ?3",
            ),
            false => sqlx::query(
                "SELECT batch FROM batches WHERE tenant = ?1 AND (?2 IS NULL OR id < ?2)
                 ORDER BY id DESC LIMIT ?3",
            ),
        };
        let found = query
            .bind(&tenant.0)
            .bind(page.after.map(Uuid::from))
            .bind(page.limit)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
        found.iter().map(batch).collect()
    }

    async fn cancel_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
    ) -> Result<Option<Batch>, StoreError> {
        let mut tx = self.begin().await?;
        let Some(mut found) = find(&mut tx, tenant, id).await? else { return Ok(None) };
        if !matches!(found.state, BatchState::Validating | BatchState::InProgress) {
            return Ok(Some(found));
        }
        found.enter(BatchState::Cancelling, self.now());
        sqlx::query(
            "UPDATE batches SET state = ?2, batch = ?3, epoch = epoch + 1, owner = NULL,
                                lease_until = NULL
             WHERE id = ?1",
        )
        .bind(Uuid::from(id))
        .bind(found.state.as_str())
        .bind(to_json(&found)?)
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Some(found))
    }

    async fn claim_batches(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let unfinished =
            claim_sql!("state IN ('validating', 'in_progress', 'finalizing', 'cancelling')", "id");
        self.claim_by(unfinished, owner, lease, limit).await
    }

    async fn claim_webhooks(
        &self,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        self.claim_by(claim_sql!("webhook_due <= ?3", "webhook_due"), owner, lease, limit).await
    }

    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query("UPDATE batches SET lease_until = ?3 WHERE id = ?1 AND epoch = ?2")
            .bind(Uuid::from(id))
            .bind(epoch)
            .bind(self.now().after(lease).0)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
        Ok(done.rows_affected() == 1)
    }

    async fn release_batch(&self, id: BatchId, epoch: i64) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE batches SET owner = NULL, lease_until = NULL, epoch = epoch + 1
             WHERE id = ?1 AND epoch = ?2",
        )
        .bind(Uuid::from(id))
        .bind(epoch)
        .execute(&self.pool)
        .await
        .map_err(unavailable)?;
        Ok(())
    }

    async fn save_batch(
        &self,
        held: &BatchClaim,
        along: BatchWrites<'_>,
    ) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        let saved = sqlx::query(
            "UPDATE batches SET state = ?3, batch = ?4, webhook_due = ?5 WHERE id = ?1 AND epoch = ?2",
        )
        .bind(Uuid::from(held.batch.id))
        .bind(held.epoch)
        .bind(held.batch.state.as_str())
        .bind(to_json(&held.batch)?)
        .bind(held.batch.webhook_due().map(|due| due.0))
        .execute(&mut *tx)
        .await
        .map_err(unavailable)?;
        if saved.rows_affected() == 0 {
            return Ok(false);
        }
        if !along.jobs.is_empty() {
            claims::insert_jobs(&mut tx, along.jobs, None, self.now()).await?;
        }
        for (id, size_bytes, expires_at) in along.files {
            files::complete(&mut tx, *id, *size_bytes, *expires_at).await?;
        }
        tx.commit().await.map_err(unavailable)?;
        Ok(true)
    }

    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError> {
        let found = sqlx::query(
            "SELECT state, count(*) AS jobs FROM jobs WHERE id BETWEEN ?1 AND ?2 GROUP BY state",
        )
        .bind(id.job(1).as_bytes().as_slice())
        .bind(id.job(u32::MAX).as_bytes().as_slice())
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut progress = Progress::default();
        for row in &found {
            *progress.counter(rows::state(row)?) = rows::integer(row, "jobs")?.unsigned_abs();
        }
        Ok(progress)
    }

    async fn cancel_batch_jobs(&self, id: BatchId) -> Result<u64, StoreError> {
        /// Jobs withdrawn by one transaction.
        const TOGETHER: u32 = 10_000;
        let mut withdrawn = 0;
        loop {
            let mut tx = self.begin().await?;
            let found = sqlx::query(
                "SELECT id FROM jobs WHERE id BETWEEN ?1 AND ?2
                   AND state IN ('scheduled', 'queued', 'running', 'retrying')
                 ORDER BY id LIMIT ?3",
            )
            .bind(id.job(1).as_bytes().as_slice())
            .bind(id.job(u32::MAX).as_bytes().as_slice())
            .bind(TOGETHER)
            .fetch_all(&mut *tx)
            .await
            .map_err(unavailable)?;
            let page: Vec<JobId> = rows::ids(&found)?.into_iter().collect();
            if page.is_empty() {
                return Ok(withdrawn);
            }
            withdrawn += claims::cancel(&mut tx, &page, self.now()).await?.len() as u64;
            tx.commit().await.map_err(unavailable)?;
        }
    }

    async fn finished_lines(
        &self,
        id: BatchId,
        first: u32,
        last: u32,
    ) -> Result<Vec<FinishedLine>, StoreError> {
        let found = sqlx::query(
            "SELECT jobs.id, state, outcome, finished_at FROM jobs
             JOIN results ON results.job_id = jobs.id
             WHERE jobs.id BETWEEN ?1 AND ?2 ORDER BY jobs.id",
        )
        .bind(id.job(first).as_bytes().as_slice())
        .bind(id.job(last).as_bytes().as_slice())
        .fetch_all(&self.pool)
        .await
        .map_err(unavailable)?;
        let mut ends = Vec::with_capacity(found.len());
        for row in &found {
            let Some(line) = id.line(rows::id(row, "id")?) else { continue };
            let outcome: Option<String> = row.try_get("outcome").map_err(unavailable)?;
            ends.push(FinishedLine {
                line,
                state: rows::state(row)?,
                outcome: outcome.map(|json| from_json("outcome", &json)).transpose()?,
                finished_at: Timestamp(rows::integer(row, "finished_at")?),
            });
        }
        Ok(ends)
    }
}
