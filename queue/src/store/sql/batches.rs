//! Batches: one document each, and operations on the range of jobs that belong to a batch.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    SqlStore,
    calls::{Query, Row, query},
    claims, dialect, files, rows,
};
use crate::{
    job::Tenant,
    store::{
        Progress, Store, StoreError,
        batches::{Batch, BatchClaim, BatchId, BatchState, BatchWrites, Batches, FinishedLine},
        files::Page,
    },
};

fn batch(row: &Row) -> Result<Batch, StoreError> {
    rows::document(row, "batch")
}

/// Claims unclaimed batches: which ones, and in what order.
macro_rules! claim_sql {
    ($which:expr, $order:literal) => {
        concat!(
            "UPDATE batches SET epoch = epoch + 1, owner = $2, lease_until = ",
            now!(),
            " + $3 WHERE id IN (SELECT id FROM batches WHERE ",
            $which,
            " AND (lease_until IS NULL OR lease_until <= ",
            now!(),
            ") ORDER BY ",
            $order,
            " LIMIT $4",
            skip_locked!(),
            ") RETURNING epoch, CAST(batch AS text) AS batch"
        )
    };
}

/// A page of batches, in one direction.
macro_rules! page_sql {
    ($beyond:literal, $order:literal) => {
        concat!(
            "SELECT CAST(batch AS text) AS batch FROM batches
             WHERE tenant = $1 AND ($2 IS NULL OR id ",
            $beyond,
            " $2) ORDER BY id ",
            $order,
            " LIMIT $3"
        )
    };
}

impl SqlStore {
    async fn claim_by(
        &self,
        statement: &'static str,
        owner: &str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let claim = query(statement)
            .bind(self.clock_parameter())
            .bind(owner)
            .bind(rows::milliseconds(lease))
            .bind(i64::from(limit));
        let claimed = self.fetch_all(claim).await?;
        let mut claims = Vec::with_capacity(claimed.len());
        for row in &claimed {
            match batch(row) {
                Ok(batch) => claims.push(BatchClaim { batch, epoch: rows::integer(row, "epoch")? }),
                // Its lease expires, so that a process that can read the batch may claim it.
                Err(error) => tracing::error!(%error, "a claimed batch cannot be read"),
            }
        }
        Ok(claims)
    }

    async fn read_batches(&self, found: Query<'_>) -> Result<Vec<Batch>, StoreError> {
        self.fetch_all(found).await?.iter().map(batch).collect()
    }
}

#[async_trait]
impl Batches for SqlStore {
    async fn create_batch(&self, new: &Batch) -> Result<Option<Batch>, StoreError> {
        let insert = query(concat!(
            "INSERT INTO batches (id, tenant, state, input_file_id, batch, idempotency_key)
             VALUES ($1, $2, $3, $4, ",
            as_json!("$5"),
            ", $6)
             ON CONFLICT (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING",
        ))
        .bind(Uuid::from(new.id))
        .bind(&new.tenant.0)
        .bind(new.state.as_str())
        .bind(new.input.0)
        .bind(rows::to_json(new))
        .bind(&new.idempotency_key);
        if self.execute(insert).await? == 1 {
            return Ok(None);
        }
        let known = query(
            "SELECT CAST(batch AS text) AS batch FROM batches
             WHERE tenant = $1 AND idempotency_key = $2",
        );
        let known = known.bind(&new.tenant.0).bind(&new.idempotency_key);
        batch(&self.fetch_one(known).await?).map(Some)
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let found =
            query("SELECT CAST(batch AS text) AS batch FROM batches WHERE id = $1 AND tenant = $2");
        Ok(self.read_batches(found.bind(Uuid::from(id)).bind(&tenant.0)).await?.pop())
    }

    async fn batches(
        &self,
        tenant: &Tenant,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let found = if page.ascending { page_sql!(">", "ASC") } else { page_sql!("<", "DESC") };
        let found = query(found)
            .bind(&tenant.0)
            .bind(page.after.map(Uuid::from))
            .bind(i64::from(page.limit));
        self.read_batches(found).await
    }

    async fn latest_batches(&self, limit: u32) -> Result<Vec<Batch>, StoreError> {
        let found = "SELECT CAST(batch AS text) AS batch FROM batches ORDER BY id DESC LIMIT $1";
        self.read_batches(query(found).bind(i64::from(limit))).await
    }

    async fn cancel_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
    ) -> Result<Option<Batch>, StoreError> {
        let now = Store::now(self).await?;
        let found = concat!(
            "SELECT CAST(batch AS text) AS batch FROM batches WHERE id = $1 AND tenant = $2",
            for_update!()
        );
        let update = concat!(
            "UPDATE batches SET state = $2, batch = ",
            as_json!("$3"),
            ", epoch = epoch + 1, owner = NULL, lease_until = NULL WHERE id = $1"
        );
        self.within(async {
            let mut tx = self.begin().await?;
            let found = query(found).bind(Uuid::from(id)).bind(&tenant.0);
            let row = found.fetch_optional(&mut *tx).await?;
            let Some(mut found) = row.as_ref().map(batch).transpose()? else { return Ok(None) };
            if matches!(found.state, BatchState::Validating | BatchState::InProgress) {
                found.enter(BatchState::Cancelling, now);
                query(update)
                    .bind(Uuid::from(id))
                    .bind(found.state.as_str())
                    .bind(rows::to_json(&found))
                    .execute(&mut *tx)
                    .await?;
                tx.commit().await?;
            }
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
        let due = claim_sql!(concat!("webhook_due <= ", now!()), "webhook_due");
        self.claim_by(due, owner, lease, limit).await
    }

    async fn renew_batch(
        &self,
        id: BatchId,
        epoch: i64,
        lease: Duration,
    ) -> Result<bool, StoreError> {
        let renew = concat!(
            "UPDATE batches SET lease_until = ",
            now!(),
            " + $4 WHERE id = $2 AND epoch = $3"
        );
        let renew = query(renew)
            .bind(self.clock_parameter())
            .bind(Uuid::from(id))
            .bind(epoch)
            .bind(rows::milliseconds(lease));
        Ok(self.execute(renew).await? == 1)
    }

    async fn release_batch(&self, id: BatchId, epoch: i64) -> Result<(), StoreError> {
        let release = query(
            "UPDATE batches SET owner = NULL, lease_until = NULL, epoch = epoch + 1
             WHERE id = $1 AND epoch = $2",
        );
        self.execute(release.bind(Uuid::from(id)).bind(epoch)).await.map(drop)
    }

    async fn save_batch(
        &self,
        claim: &BatchClaim,
        writes: BatchWrites<'_>,
    ) -> Result<bool, StoreError> {
        let BatchClaim { batch, epoch } = claim;
        let update = concat!(
            "UPDATE batches SET state = $3, webhook_due = $5, batch = ",
            as_json!("$4"),
            " WHERE id = $1 AND epoch = $2"
        );
        self.within(async {
            let mut tx = self.begin().await?;
            let saved = query(update)
                .bind(Uuid::from(batch.id))
                .bind(epoch)
                .bind(batch.state.as_str())
                .bind(rows::to_json(batch))
                .bind(batch.webhook_due().map(|due| due.0))
                .execute(&mut *tx)
                .await?;
            if saved.rows_affected() == 0 {
                return Ok(false);
            }
            if !writes.jobs.is_empty() {
                claims::insert_jobs(&mut tx, writes.jobs, None, self.clock_parameter()).await?;
            }
            for (id, size_bytes, expires_at) in writes.files {
                files::complete(&mut tx, *id, *size_bytes, *expires_at).await?;
            }
            tx.commit().await?;
            Ok(true)
        })
        .await
    }

    async fn batch_progress(&self, id: BatchId) -> Result<Progress, StoreError> {
        let counts = query(
            "SELECT state, count(*) AS jobs FROM jobs WHERE id BETWEEN $1 AND $2 GROUP BY state",
        );
        let counts = counts.bind(Uuid::from(id.job(1))).bind(Uuid::from(id.job(u32::MAX)));
        let mut progress = Progress::default();
        for row in &self.fetch_all(counts).await? {
            *progress.counter(rows::state(row)?) = rows::count(row, "jobs")?;
        }
        Ok(progress)
    }

    async fn cancel_batch_jobs(&self, id: BatchId) -> Result<u64, StoreError> {
        /// Jobs cancelled by one call.
        const CHUNK: i64 = 10_000;
        let (mut after, last) = (Uuid::from(id.job(0)), Uuid::from(id.job(u32::MAX)));
        let mut cancelled = 0;
        loop {
            let found = query(
                "SELECT id FROM jobs WHERE id > $1 AND id <= $2
                   AND state IN ('scheduled', 'queued', 'running', 'retrying')
                 ORDER BY id LIMIT $3",
            );
            let found = self.fetch_all(found.bind(after).bind(last).bind(CHUNK)).await?;
            let page = rows::ids(&found)?;
            let Some(end) = page.last() else { return Ok(cancelled) };
            after = Uuid::from(*end);
            cancelled += claims::cancel(self, &page).await?.len() as u64;
        }
    }

    async fn finished_lines(
        &self,
        id: BatchId,
        first: u32,
        last: u32,
    ) -> Result<Vec<FinishedLine>, StoreError> {
        let found = query(
            "SELECT jobs.id, state, outcome, finished_at
             FROM jobs JOIN results ON results.job_id = jobs.id
                  AND results.job_id BETWEEN $1 AND $2
             WHERE jobs.id BETWEEN $1 AND $2 ORDER BY jobs.id",
        );
        let found = found.bind(Uuid::from(id.job(first))).bind(Uuid::from(id.job(last)));
        let found = self.fetch_all(found).await?;
        let mut lines = Vec::with_capacity(found.len());
        for row in &found {
            let Some(line) = id.line(rows::id(row, "id")?) else { continue };
            lines.push(FinishedLine {
                line,
                state: rows::state(row)?,
                outcome: dialect::outcome(row)?.0,
                finished_at: rows::time(row, "finished_at")?,
            });
        }
        Ok(lines)
    }
}
