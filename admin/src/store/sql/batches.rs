//! Batches: one document each.

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::{
    Store, StoreError, Tenant, Timestamp,
    store::{JobRanges as _, Maintenance, Page, job_queries::SCAN_MAX},
};

use super::{Query, Row, SqlStore, batch_changes, notices, query, rows};
use crate::store::{
    batch_changes::{BatchChange, Changed},
    batches::{
        Batch, BatchDeletion, BatchFilter, BatchId, BatchSearch, BatchState, Batches, Creation,
    },
};

/// Jobs and ends that are deleted at once.
const ERASE_JOBS: u32 = 1000;
const ERASE_ENDS: i64 = 10_000;

/// Returns the document of a batch.
pub(super) fn batch(row: &Row) -> Result<Batch, StoreError> {
    rows::document(row, "batch")
}

/// Returns a batch with the lines that were added to it.
pub(super) fn counted(row: &Row) -> Result<Batch, StoreError> {
    let added = rows::tokens(row, "added_lines")?.unwrap_or_default();
    Ok(Batch { added, ..batch(row)? })
}

/// Returns a batch from its [`columns`].
pub(super) fn whole(row: &Row) -> Result<Batch, StoreError> {
    let archived_at = rows::time_or_none(row, "archived_at")?;
    let told: Option<&str> = rows::get(row, "told")?;
    let told = told.map(serde_json::from_str).transpose();
    let told = told.map_err(|error| rows::damaged("told", error))?;
    Ok(Batch { archived_at, told, ..counted(row)? })
}

/// The columns of a batch, with the delivery of the latest event to its webhook.
macro_rules! columns {
    () => {
        concat!(
            "id, CAST(batch AS text) AS batch, archived_at, added_lines, input_file_id, (SELECT CAST(",
            json_object!(),
            "('attempts', attempts, 'due_at', due_at, 'ended_at', ended_at, 'error', error) AS text)
             FROM notices WHERE batch_id = batches.id AND channel = 'webhook'
             ORDER BY notices.id DESC LIMIT 1) AS told"
        )
    };
}
pub(super) use columns;

/// Batches that match the conditions on columns, in one direction.
macro_rules! listed {
    ($beyond:literal, $order:literal, $archived:literal) => {
        concat!(
            "SELECT ",
            columns!(),
            " FROM batches
             WHERE ($1 IS NULL OR tenant = $1) AND ($2 IS NULL OR state = $2)
               AND ($3 IS NULL OR id ",
            $beyond,
            " $3) AND ($4 IS NULL OR id >= $4) AND ($5 IS NULL OR id < $5)",
            $archived,
            " ORDER BY id ",
            $order
        )
    };
}

/// The statements that list and that search, in one direction.
macro_rules! both {
    ($beyond:literal, $order:literal, $archived:literal) => {
        [
            concat!(listed!($beyond, $order, $archived), " LIMIT $6"),
            concat!(
                "SELECT batch, archived_at, added_lines, told FROM (",
                listed!($beyond, $order, $archived),
                " LIMIT $7) AS latest WHERE ",
                has_metadata!("$8"),
                " AND ($9 IS NULL OR ",
                has_model!("$9"),
                ") AND ($10 IS NULL OR ",
                has_text!(batch_name!(), "$10"),
                " OR EXISTS (SELECT 1 FROM files WHERE files.id = latest.input_file_id AND ",
                has_text!("filename", "$10"),
                ")) AND ($11 IS NULL OR ",
                endpoint!(),
                " = $11) ORDER BY id ",
                $order,
                " LIMIT $6"
            ),
        ]
    };
}

/// Returns the statement that lists, or the one that searches.
fn list_sql(ascending: bool, archived: Option<bool>, is_search: bool) -> &'static str {
    let both = match (ascending, archived) {
        (false, None) => both!("<", "DESC", ""),
        (false, Some(false)) => both!("<", "DESC", " AND archived_at IS NULL"),
        (false, Some(true)) => both!("<", "DESC", " AND archived_at IS NOT NULL"),
        (true, None) => both!(">", "ASC", ""),
        (true, Some(false)) => both!(">", "ASC", " AND archived_at IS NULL"),
        (true, Some(true)) => both!(">", "ASC", " AND archived_at IS NOT NULL"),
    };
    both[usize::from(is_search)]
}

async fn read(store: &SqlStore, found: Query<'_>) -> Result<Vec<Batch>, StoreError> {
    store.fetch_all(found).await?.iter().map(whole).collect()
}

/// Inserts a batch if the tenant has the earlier one, which is not deleted meanwhile. Returns the number of inserted rows; `None`
/// without an earlier one.
async fn insert_after(
    store: &SqlStore,
    new: &Batch,
    earlier: BatchId,
    insert: Query<'_>,
) -> Result<Option<u64>, StoreError> {
    let found = concat!("SELECT id FROM batches WHERE id = $1 AND tenant = $2", for_update!());
    let mut tx = store.begin().await?;
    let found = query(found).bind(Uuid::from(earlier)).bind(&new.tenant.0);
    if found.fetch_optional(&mut *tx).await?.is_none() {
        return Ok(None);
    }
    let inserted = insert.execute(&mut *tx).await?.rows_affected();
    tx.commit().await?;
    Ok(Some(inserted))
}

#[async_trait]
impl Batches for SqlStore {
    async fn create_batch(&self, new: &Batch, open_max: u32) -> Result<Creation, StoreError> {
        let insert = query(concat!(
            "INSERT INTO batches (id, tenant, state, input_file_id, batch, idempotency_key,
                                  added_lines, after_id, next_at)
             SELECT $2, $3, $4, $5, ",
            as_json!("$6"),
            ", $7, CAST($9 AS bigint), $10, ",
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
        .bind(i64::from(open_max))
        .bind(new.is_open.then_some(0_i64))
        .bind(new.awaited().map(Uuid::from));
        let inserted = match new.awaited() {
            None => Some(self.execute(insert).await?),
            Some(earlier) => self.within(insert_after(self, new, earlier, insert)).await?,
        };
        if inserted == Some(1) {
            return Ok(Creation::New);
        }
        let known = match &new.idempotency_key {
            Some(key) => self.keyed_batch(&new.tenant, key).await?,
            None => None,
        };
        let none = if inserted.is_some() { Creation::Full } else { Creation::NoEarlier };
        Ok(known.map_or(none, |known| Creation::Known(Box::new(known))))
    }

    async fn keyed_batch(&self, tenant: &Tenant, key: &str) -> Result<Option<Batch>, StoreError> {
        let found = concat!(
            "SELECT ",
            columns!(),
            " FROM batches WHERE tenant = $1 AND idempotency_key = $2"
        );
        Ok(read(self, query(found).bind(&tenant.0).bind(key)).await?.pop())
    }

    async fn batch(&self, tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let found = concat!("SELECT ", columns!(), " FROM batches WHERE id = $1 AND tenant = $2");
        Ok(read(self, query(found).bind(Uuid::from(id)).bind(&tenant.0)).await?.pop())
    }

    async fn batch_of_any_tenant(&self, id: BatchId) -> Result<Option<Batch>, StoreError> {
        let found = concat!("SELECT ", columns!(), " FROM batches WHERE id = $1");
        Ok(read(self, query(found).bind(Uuid::from(id))).await?.pop())
    }

    async fn find_batches(
        &self,
        filter: &BatchFilter,
        page: Page<BatchId>,
    ) -> Result<Vec<Batch>, StoreError> {
        let BatchFilter { tenant, state, archived, created: (from, to), search } = filter;
        let is_search = *search != BatchSearch::default();
        let first_of = |at: &Timestamp| Uuid::from(BatchId::first_of(*at));
        let mut found = query(list_sql(page.ascending, *archived, is_search))
            .bind(tenant.as_ref().map(|tenant| &tenant.0))
            .bind(state.map(BatchState::as_str))
            .bind(page.after.map(Uuid::from))
            .bind(from.as_ref().map(first_of))
            .bind(to.as_ref().map(first_of))
            .bind(i64::from(page.limit));
        if is_search {
            let pairs =
                search.metadata.iter().map(|(name, value)| (name.clone(), value.clone().into()));
            let pairs: serde_json::Map<String, serde_json::Value> = pairs.collect();
            found = found.bind(i64::from(SCAN_MAX)).bind(rows::to_json(&pairs));
            found = found.bind(&search.model).bind(&search.text).bind(&search.endpoint);
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

    async fn archive_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
        archived: bool,
    ) -> Result<Option<Batch>, StoreError> {
        let update = concat!(
            "UPDATE batches SET archived_at = CASE WHEN $4 THEN coalesce(archived_at, ",
            now!(),
            ") END WHERE id = $2 AND tenant = $3
               AND state IN ('completed', 'failed', 'expired', 'cancelled')"
        );
        let update = query(update).bind(self.clock_parameter()).bind(Uuid::from(id));
        self.execute(update.bind(&tenant.0).bind(archived)).await?;
        self.batch(tenant, id).await
    }

    async fn delete_batch(
        &self,
        tenant: &Tenant,
        id: BatchId,
    ) -> Result<BatchDeletion, StoreError> {
        let found = concat!(
            "SELECT CAST(batch AS text) AS batch FROM batches WHERE id = $1 AND tenant = $2",
            for_update!()
        );
        let delete_files = "DELETE FROM files WHERE tenant = $1 AND (id = $2 OR id = $3 OR (id = $4 AND NOT EXISTS (
                 SELECT 1 FROM batches WHERE input_file_id = files.id)))";
        self.within(async {
            let mut tx = self.begin().await?;
            let found = query(found).bind(Uuid::from(id)).bind(&tenant.0);
            let row = found.fetch_optional(&mut *tx).await?;
            let Some(found) = row.as_ref().map(batch).transpose()? else {
                return Ok(BatchDeletion::NotFound);
            };
            if !found.state.is_terminal() {
                return Ok(BatchDeletion::Unfinished(found.state));
            }
            let waiting = query("SELECT id FROM batches WHERE after_id = $1 ORDER BY id LIMIT 1");
            let waiting = waiting.bind(Uuid::from(id)).fetch_optional(&mut *tx).await?;
            if let Some(row) = waiting {
                return Ok(BatchDeletion::Awaited(BatchId::of_column(rows::get(&row, "id")?)));
            }
            for statement in [
                "INSERT INTO deleted_batches (id) VALUES ($1) ON CONFLICT (id) DO NOTHING",
                "DELETE FROM batches WHERE id = $1",
            ] {
                query(statement).bind(Uuid::from(id)).execute(&mut *tx).await?;
            }
            notices::leave_batch(&mut tx, id).await?;
            query(delete_files)
                .bind(&tenant.0)
                .bind(found.output.map(|file| file.0))
                .bind(found.error_file.map(|file| file.0))
                .bind(found.input.0)
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(BatchDeletion::Deleted)
        })
        .await
    }

    async fn erase_deleted_batches(&self) -> Result<bool, StoreError> {
        let next = query("SELECT id FROM deleted_batches ORDER BY id LIMIT 1");
        let Some(row) = self.fetch_optional(next).await? else { return Ok(false) };
        let id = BatchId::of_column(rows::get(&row, "id")?);
        let jobs = self.ids_in_range(id.all_jobs(), ERASE_JOBS).await?;
        if !jobs.is_empty() {
            Maintenance::delete_jobs(self, &jobs).await?;
            return Ok(true);
        }
        let ends = "DELETE FROM batch_ends WHERE batch_id = $1 AND line IN
             (SELECT line FROM batch_ends WHERE batch_id = $1 LIMIT $2)";
        if self.execute(query(ends).bind(Uuid::from(id)).bind(ERASE_ENDS)).await? == 0 {
            let done = query("DELETE FROM deleted_batches WHERE id = $1").bind(Uuid::from(id));
            self.execute(done).await?;
        }
        Ok(true)
    }
}
