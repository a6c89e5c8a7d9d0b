//! Batches: a document each, and moves of the ranges of jobs that belong to them.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::{PostgresStore, claims, files, milliseconds, rows, unavailable};
use crate::{
    job::{JobId, Tenant},
    store::{
        Progress, StoreError,
        batches::{Batch, BatchClaim, BatchId, BatchState, BatchWrites, Batches, FinishedLine},
        files::Page,
    },
};

pub(super) fn batch(row: &PgRow) -> Result<Batch, StoreError> {
    let text: &str = rows::get(row, "batch")?;
    serde_json::from_str(text).map_err(|error| rows::damaged("batch", error))
}

fn document(batch: &Batch) -> String {
    serde_json::to_string(batch).expect("a batch has nothing that JSON lacks")
}

/// A claim of those batches that nobody holds: which, and in what order.
macro_rules! claim_sql {
    ($which:literal, $order:literal) => {
        concat!(
            "WITH clock AS (SELECT store_now_ms($1) AS now)
             UPDATE batches SET epoch = epoch + 1, owner = $2,
                                lease_until = (SELECT now FROM clock) + $3
             WHERE id IN (
                 SELECT id FROM batches
                 WHERE ",
            $which,
            " AND (lease_until IS NULL OR lease_until <= (SELECT now FROM clock))
                 ORDER BY ",
            $order,
            " LIMIT $4 FOR UPDATE SKIP LOCKED)
             RETURNING epoch, batch::text"
        )
    };
}

impl PostgresStore {
    async fn claim_by(
        &self,
        statement: &'static str,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        self.within(async {
            let claimed = sqlx::query(statement)
                .bind(self.given_now())
                .bind(owner)
                .bind(milliseconds(lease))
                .bind(i64::from(limit))
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
            held(&claimed)
        })
        .await
    }
}

/// Batches that were claimed.
fn held(claimed: &[PgRow]) -> Result<Vec<BatchClaim>, StoreError> {
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

/// The ids of all jobs that a batch may have.
fn jobs(id: BatchId) -> (Uuid, Uuid) {
    (id.job(1).into(), id.job(u32::MAX).into())
}

#[async_trait]
impl Batches for PostgresStore {
    async fn create_batch(&self, new: &Batch) -> Result<Option<Batch>, StoreError> {
        self.within(async {
            let created = sqlx::query(
                "INSERT INTO batches (id, tenant, state, input_file_id, batch, idempotency_key)
                 VALUES ($1, $2, $3, $4, $5::text::jsonb, $6)
                 ON CONFLICT (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING",
            )
            .bind(Uuid::from(new.id))
            .bind(&new.tenant.0)
            .bind(new.state.as_str())
            .bind(new.input.0)
            .bind(document(new))
            .bind(&new.idempotency_key)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            if created.rows_affected() == 1 {
                return Ok(None);
            }
            let known = sqlx::query(
                "SELECT batch::text FROM batches WHERE tenant = $1 AND idempotency_key = $2",
            )
            .bind(&new.tenant.0)
            .bind(&new.idempotency_key)
            .fetch_one(&self.pool)
            .await
            .map_err(unavailable)?;
            batch(&known).map(Some)
        })
        .await
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        self.within(async {
            let row = sqlx::query("SELECT batch::text FROM batches WHERE id = $1 AND tenant = $2")
                .bind(Uuid::from(id))
                .bind(&tenant.0)
                .fetch_optional(&self.pool)
                .await
                .map_err(unavailable)?;
            row.as_ref().map(batch).transpose()
        })
        .await
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let query = match page.ascending {
            true => sqlx::query(
                "SELECT batch::text FROM batches
                 WHERE tenant = $1 AND ($2::uuid IS NULL OR id > $2) ORDER BY id LIMIT $3",
            ),
            false => sqlx::query(
                "SELECT batch::text FROM batches
                 WHERE tenant = $1 AND ($2::uuid IS NULL OR id < $2) ORDER BY id DESC LIMIT $3",
            ),
        };
        self.within(async {
            let found = query
                .bind(&tenant.0)
                .bind(page.after.map(Uuid::from))
                .bind(i64::from(page.limit))
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
            found.iter().map(batch).collect()
        })
        .await
    }

    async fn cancel_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
    ) -> Result<Option<Batch>, StoreError> {
        let now = crate::store::Store::now(self).await?;
        self.within(async {
            let mut tx = self.pool.begin().await.map_err(unavailable)?;
            let row = sqlx::query(
                "SELECT batch::text FROM batches WHERE id = $1 AND tenant = $2 FOR UPDATE",
            )
            .bind(Uuid::from(id))
            .bind(&tenant.0)
            .fetch_optional(&mut *tx)
            .await
            .map_err(unavailable)?;
            let Some(mut found) = row.as_ref().map(batch).transpose()? else { return Ok(None) };
            if !matches!(found.state, BatchState::Validating | BatchState::InProgress) {
                return Ok(Some(found));
            }
            found.enter(BatchState::Cancelling, now);
            sqlx::query(
                "UPDATE batches SET state = $2, batch = $3::text::jsonb, epoch = epoch + 1,
                                    owner = NULL, lease_until = NULL
                 WHERE id = $1",
            )
            .bind(Uuid::from(id))
            .bind(found.state.as_str())
            .bind(document(&found))
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
            tx.commit().await.map_err(unavailable)?;
            Ok(Some(found))
        })
        .await
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
        let due = claim_sql!("webhook_due <= (SELECT now FROM clock)", "webhook_due");
        self.claim_by(due, owner, lease, limit).await
    }

    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        self.within(async {
            let done = sqlx::query(
                "UPDATE batches SET lease_until = store_now_ms($1) + $4
                 WHERE id = $2 AND epoch = $3",
            )
            .bind(self.given_now())
            .bind(Uuid::from(id))
            .bind(epoch)
            .bind(milliseconds(lease))
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }

    async fn release_batch(&self, id: BatchId, epoch: i64) -> Result<(), StoreError> {
        self.within(async {
            sqlx::query(
                "UPDATE batches SET owner = NULL, lease_until = NULL, epoch = epoch + 1
                 WHERE id = $1 AND epoch = $2",
            )
            .bind(Uuid::from(id))
            .bind(epoch)
            .execute(&self.pool)
            .await
            .map_err(unavailable)?;
            Ok(())
        })
        .await
    }

    async fn save_batch(
        &self,
        held: &BatchClaim,
        along: BatchWrites<'_>,
    ) -> Result<bool, StoreError> {
        self.within(async {
            let mut tx = self.pool.begin().await.map_err(unavailable)?;
            let saved = sqlx::query(
                "UPDATE batches SET state = $3, batch = $4::text::jsonb, webhook_due = $5
                 WHERE id = $1 AND epoch = $2",
            )
            .bind(Uuid::from(held.batch.id))
            .bind(held.epoch)
            .bind(held.batch.state.as_str())
            .bind(document(&held.batch))
            .bind(held.batch.webhook_due().map(|due| due.0))
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
            if saved.rows_affected() == 0 {
                return Ok(false);
            }
            if !along.jobs.is_empty() {
                claims::insert_jobs(&mut tx, along.jobs, None, self.given_now()).await?;
            }
            for (id, size_bytes, expires_at) in along.files {
                files::complete(&mut tx, *id, *size_bytes, *expires_at).await?;
            }
            tx.commit().await.map_err(unavailable)?;
            Ok(true)
        })
        .await
    }

    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError> {
        let (first, last) = jobs(id);
        self.within(async {
            let found = sqlx::query(
                "SELECT state, count(*) AS jobs FROM jobs WHERE id BETWEEN $1 AND $2
                 GROUP BY state",
            )
            .bind(first)
            .bind(last)
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
            let mut progress = Progress::default();
            for row in &found {
                *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
            }
            Ok(progress)
        })
        .await
    }

    async fn cancel_batch_jobs(&self, id: BatchId) -> Result<u64, StoreError> {
        /// Jobs withdrawn by one statement.
        const TOGETHER: i64 = 10_000;
        let (mut after, last) = (Uuid::from(id.job(0)), jobs(id).1);
        let mut withdrawn = 0;
        loop {
            let page = self.within(async {
                let found = sqlx::query(
                    "SELECT id FROM jobs WHERE id > $1 AND id <= $2
                       AND state IN ('scheduled', 'queued', 'running', 'retrying')
                     ORDER BY id LIMIT $3",
                )
                .bind(after)
                .bind(last)
                .bind(TOGETHER)
                .fetch_all(&self.pool)
                .await
                .map_err(unavailable)?;
                rows::ids(&found)
            });
            let page: Vec<JobId> = page.await?;
            let Some(end) = page.last() else { return Ok(withdrawn) };
            after = Uuid::from(*end);
            let cancelled =
                self.within(claims::cancel(&self.pool, &page, self.given_now())).await?;
            withdrawn += cancelled.len() as u64;
        }
    }

    async fn finished_lines(
        &self,
        id: BatchId,
        first: u32,
        last: u32,
    ) -> Result<Vec<FinishedLine>, StoreError> {
        self.within(async {
            let found = sqlx::query(
                "SELECT jobs.id, state, outcome, finished_at
                 FROM jobs JOIN results ON results.job_id = jobs.id
                      AND results.job_id BETWEEN $1 AND $2
                 WHERE jobs.id BETWEEN $1 AND $2 ORDER BY jobs.id",
            )
            .bind(Uuid::from(id.job(first)))
            .bind(Uuid::from(id.job(last)))
            .fetch_all(&self.pool)
            .await
            .map_err(unavailable)?;
            let mut ends = Vec::with_capacity(found.len());
            for row in &found {
                let Some(line) = id.line(rows::id(row, "id")?) else { continue };
                ends.push(FinishedLine {
                    line,
                    state: rows::state(row)?,
                    outcome: rows::outcome(row)?.0,
                    finished_at: rows::time(row, "finished_at")?,
                });
            }
            Ok(ends)
        })
        .await
    }
}
