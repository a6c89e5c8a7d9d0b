//! Batches: one document each.

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::{
    Store, StoreError, Tenant,
    store::{Page, job_queries::SCAN_MAX},
};

use super::{Query, Row, SqlStore, batch_changes, query, rows};
use crate::store::{
    batch_changes::{BatchChange, Changed},
    batches::{Batch, BatchFilter, BatchId, BatchState, Batches, Creation},
};

pub(super) fn batch(row: &Row) -> Result<Batch, StoreError> {
    rows::document(row, "batch")
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

/// Batches that match a tenant and a state, the newest first.
macro_rules! latest_sql {
    () => {
        "SELECT id, CAST(batch AS text) AS batch FROM batches
         WHERE ($1 IS NULL OR tenant = $1) AND ($2 IS NULL OR state = $2)
           AND ($3 IS NULL OR id < $3) ORDER BY id DESC"
    };
}

async fn read(store: &SqlStore, found: Query<'_>) -> Result<Vec<Batch>, StoreError> {
    store.fetch_all(found).await?.iter().map(batch).collect()
}

#[async_trait]
impl Batches for SqlStore {
    async fn create_batch(&self, new: &Batch, open_max: u32) -> Result<Creation, StoreError> {
        let insert = query(concat!(
            "INSERT INTO batches (id, tenant, state, input_file_id, batch, idempotency_key, next_at)
             SELECT $2, $3, $4, $5, ",
            as_json!("$6"),
            ", $7, ",
            now!(),
            " WHERE (SELECT count(*) FROM (SELECT 1 FROM batches WHERE tenant = $3 AND ",
            unfinished!(),
            " LIMIT $8) AS open) < $8
             ON CONFLICT (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING",
        ))
        .bind(self.clock_parameter())
        .bind(Uuid::from(new.id))
        .bind(&new.tenant.0)
        .bind(new.state.as_str())
        .bind(new.input.0)
        .bind(rows::to_json(new))
        .bind(&new.idempotency_key)
        .bind(i64::from(open_max));
        if self.execute(insert).await? == 1 {
            return Ok(Creation::New);
        }
        let known = query(
            "SELECT CAST(batch AS text) AS batch FROM batches
             WHERE tenant = $1 AND idempotency_key = $2",
        );
        let known = known.bind(&new.tenant.0).bind(&new.idempotency_key);
        let known = self.fetch_optional(known).await?.as_ref().map(batch).transpose()?;
        Ok(known.map_or(Creation::Full, |known| Creation::Known(Box::new(known))))
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let found =
            query("SELECT CAST(batch AS text) AS batch FROM batches WHERE id = $1 AND tenant = $2");
        Ok(read(self, found.bind(Uuid::from(id)).bind(&tenant.0)).await?.pop())
    }

    async fn batch_of_any_tenant(&self, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let found = query("SELECT CAST(batch AS text) AS batch FROM batches WHERE id = $1");
        Ok(read(self, found.bind(Uuid::from(id))).await?.pop())
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
        read(self, found).await
    }

    async fn find_batches(
        &self,
        filter: &BatchFilter,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let found = match filter.metadata {
            None => concat!(latest_sql!(), " LIMIT $4"),
            Some(_) => concat!(
                "SELECT batch FROM (",
                latest_sql!(),
                " LIMIT $5) AS latest WHERE ",
                has_metadata!("batch", "$6", "$7"),
                " ORDER BY id DESC LIMIT $4"
            ),
        };
        let mut found = query(found)
            .bind(filter.tenant.as_ref().map(|tenant| &tenant.0))
            .bind(filter.state.map(BatchState::as_str))
            .bind(page.after.map(Uuid::from))
            .bind(i64::from(page.limit));
        if let Some((name, value)) = &filter.metadata {
            found = found.bind(i64::from(SCAN_MAX)).bind(name).bind(value);
        }
        read(self, found).await
    }

    async fn change_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
        change: &BatchChange,
        open_max: u32,
    ) -> Result<Option<Changed>, StoreError> {
        let now = Store::now(self).await?;
        self.within(batch_changes::change(self, (tenant, id), change, (now, open_max))).await
    }
}
