//! Steps of batches: fair claims, and transactions under their epoch.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use tritmill_queue::{JobId, StoreError, store::Claimant};

use super::{
    ADD_CUSTOM_IDS, Connection, Query, SqlStore, batch_claims, batch_ends, batches::counted,
    bytes_list, files, id_list, notices, query, rows,
};
use crate::store::{
    batch_steps::{
        BatchClaim, BatchStart, BatchSteps, BatchWrites, CLAIM_WINDOW, Claimable, CustomIdHash,
        NamedLine,
    },
    batches::BatchId,
    events::Event,
};

/// Delay of a batch that cannot be read: a process of a later release may be able to.
const UNREADABLE: Duration = Duration::from_secs(60);
/// Hashes deleted by one statement of the sweep.
const SWEEP_CHUNK: i64 = 10_000;
/// Age of a turn at which it is deleted.
const TURN_KEPT: Duration = Duration::from_secs(7 * 86_400);

/// Makes the next steps of the batches due that wait for one. The claim of a process that looked at it before ends, so that it
/// does not release the batch with a later time.
const WAKE: &str =
    "UPDATE batches SET epoch = epoch + 1, owner = NULL, lease_until = NULL, next_at = 0
    WHERE after_id = $1 AND state = 'validating'";

/// See [`BatchSteps::save_batch`].
async fn save_within(
    store: &SqlStore,
    tx: &mut Connection,
    claim: &BatchClaim,
    writes: BatchWrites<'_>,
) -> Result<bool, StoreError> {
    let BatchClaim { batch, epoch, .. } = claim;
    let update = concat!(
        "UPDATE batches SET state = $3, lost_leases = 0, hung_steps = 0, batch = ",
        as_json!("$4"),
        ", input_file_id = $5, after_id = $6 WHERE id = $1 AND epoch = $2"
    );
    let saved = query(update)
        .bind(Uuid::from(batch.id))
        .bind(epoch)
        .bind(batch.state.as_str())
        .bind(rows::to_json(batch))
        .bind(batch.input.0)
        .bind(batch.awaited().map(Uuid::from))
        .execute(&mut *tx)
        .await?;
    if saved.rows_affected() == 0 {
        return Ok(false);
    }
    if !writes.again.is_empty() {
        store.delete_ended(tx, writes.again).await?;
    }
    if !writes.jobs.is_empty() {
        store.insert_jobs(tx, writes.jobs).await?;
    }
    if batch.reopened > 0 {
        batch_ends::forget(tx, batch, writes.jobs).await?;
    }
    batch_ends::add(tx, batch, writes.ends).await?;
    write(tx, batch.id, writes).await?;
    if batch.state.is_terminal() {
        query(WAKE).bind(Uuid::from(batch.id)).execute(&mut *tx).await?;
    }
    if let Some(event) = Event::of_end(batch) {
        notices::add(store, tx, &event, &batch.receivers(event.kind)).await?;
    }
    Ok(true)
}

/// Runs a claim, then records the tenants' turns.
async fn claim_by(store: &SqlStore, claim: Query<'_>) -> Result<Vec<BatchClaim>, StoreError> {
    let claimed = store.fetch_all(claim).await?;
    if claimed.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<JobId> = rows::ids(&claimed)?;
    let turn = query(batch_claims::STEP_TURNS).bind(store.clock_parameter()).bind(id_list(ids));
    // Only the order of the next claims depends on it.
    if let Err(error) = store.execute(turn).await {
        tracing::debug!(%error, "cannot record the turns of tenants");
    }
    let mut claims = Vec::with_capacity(claimed.len());
    for row in &claimed {
        let (epoch, failures) = (rows::integer(row, "epoch")?, rows::count(row, "failures")?);
        match counted(row) {
            Ok(batch) => claims.push(BatchClaim { batch, epoch, failures }),
            Err(error) => {
                tracing::error!(%error, "a claimed batch cannot be read");
                let id = Uuid::from(rows::id(row, "id")?);
                release(store, batch_claims::RELEASE, id, epoch, UNREADABLE).await?;
            }
        }
    }
    Ok(claims)
}

async fn release(
    store: &SqlStore,
    statement: &'static str,
    id: Uuid,
    epoch: i64,
    after: Duration,
) -> Result<(), StoreError> {
    let release = query(statement).bind(store.clock_parameter()).bind(id).bind(epoch);
    store.execute(release.bind(rows::milliseconds(after))).await.map(drop)
}

/// Saves the hashes of `custom_id`s that are new.
pub(super) async fn add_custom_ids(
    connection: &mut Connection,
    id: BatchId,
    lines: &[NamedLine],
) -> Result<(), StoreError> {
    let hex =
        |line: &NamedLine| (rows::hex(&line.name), line.line, line.key.map(|key| rows::hex(&key)));
    let all: Vec<(String, u32, Option<String>)> = lines.iter().map(hex).collect();
    let insert = query(ADD_CUSTOM_IDS);
    insert.bind(Uuid::from(id)).bind(rows::to_json(&all)).execute(connection).await.map(drop)?;
    Ok(())
}

/// Writes what belongs to a saved batch.
async fn write(
    connection: &mut Connection,
    id: BatchId,
    writes: BatchWrites<'_>,
) -> Result<(), StoreError> {
    for chunk in writes.chunks {
        if !files::put(connection, chunk.file, chunk.number, chunk.content).await? {
            let problem = "it no longer exists".to_owned();
            return Err(StoreError::InvalidValue { what: "output file", problem });
        }
    }
    for (file, size_bytes, expires_at) in writes.files {
        files::complete(*file, *size_bytes, *expires_at).execute(&mut *connection).await?;
    }
    for file in writes.replaced {
        // It may be large, and other calls wait for this transaction: the sweep deletes it in parts.
        let expire = query("UPDATE files SET expires_at = 0 WHERE id = $1");
        expire.bind(file.0).execute(&mut *connection).await?;
    }
    if !writes.custom_ids.is_empty() {
        add_custom_ids(connection, id, writes.custom_ids).await?;
    }
    Ok(())
}

#[async_trait]
impl BatchSteps for SqlStore {
    async fn claim_batches(
        &self,
        which: Claimable,
        by: Claimant<'_>,
        max: u32,
    ) -> Result<Vec<BatchClaim>, StoreError> {
        let claim = match which {
            Claimable::Released => batch_claims::CLAIM_RELEASED,
            Claimable::Suspect => batch_claims::CLAIM_SUSPECT,
        };
        let claim = query(claim)
            .bind(self.clock_parameter())
            .bind(by.owner)
            .bind(rows::milliseconds(by.lease))
            .bind(i64::from(max))
            .bind(i64::from(CLAIM_WINDOW));
        claim_by(self, claim).await
    }

    async fn has_suspect_batches(&self) -> Result<bool, StoreError> {
        let found = query(batch_claims::FIND_SUSPECT);
        Ok(self.fetch_optional(found.bind(self.clock_parameter())).await?.is_some())
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

    async fn release_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError> {
        release(self, batch_claims::RELEASE, id.into(), epoch, after).await
    }

    async fn charge_batch(
        &self,
        id: BatchId,
        epoch: i64,
        after: Duration,
    ) -> Result<(), StoreError> {
        release(self, batch_claims::CHARGE, id.into(), epoch, after).await
    }

    async fn start_batch(
        &self,
        claim: &BatchClaim,
        active_max: u32,
    ) -> Result<BatchStart, StoreError> {
        // The claim of the batch made this row.
        let lock = concat!("SELECT tenant FROM batch_turns WHERE tenant = $1", for_update!());
        let active = query(
            "SELECT count(*) AS active FROM (
                 SELECT 1 FROM batches WHERE tenant = $1 AND state = 'in_progress' LIMIT $2) AS found",
        );
        self.within(async {
            let (mut tx, tenant) = (self.begin().await?, &claim.batch.tenant.0);
            query(lock).bind(tenant).fetch_optional(&mut *tx).await?;
            let active = active.bind(tenant).bind(i64::from(active_max));
            let active = rows::small(&active.fetch_one(&mut *tx).await?, "active")?;
            if active >= active_max {
                return Ok(BatchStart::Full);
            }
            if !save_within(self, &mut tx, claim, BatchWrites::default()).await? {
                return Ok(BatchStart::Fenced);
            }
            tx.commit().await?;
            Ok(BatchStart::Started)
        })
        .await
    }

    async fn save_batch(
        &self,
        claim: &BatchClaim,
        writes: BatchWrites<'_>,
    ) -> Result<bool, StoreError> {
        self.within(async {
            let mut tx = self.begin().await?;
            let saved = save_within(self, &mut tx, claim, writes).await?;
            tx.commit().await?;
            Ok(saved)
        })
        .await
    }

    async fn known_custom_ids(
        &self,
        id: BatchId,
        hashes: &[CustomIdHash],
    ) -> Result<Vec<(CustomIdHash, u32)>, StoreError> {
        let found = query(concat!(
            "SELECT custom_id, line FROM batch_custom_ids WHERE batch_id = $1 AND custom_id ",
            any_of!("$2")
        ));
        let found = found.bind(Uuid::from(id)).bind(bytes_list(hashes));
        let found = self.fetch_all(found).await?;
        let mut known = Vec::with_capacity(found.len());
        for row in &found {
            let bytes: &[u8] = rows::get(row, "custom_id")?;
            let hash = bytes.try_into().map_err(|error| rows::damaged("custom_id", error))?;
            known.push((hash, rows::small(row, "line")?));
        }
        Ok(known)
    }

    async fn forget_custom_ids(&self, id: BatchId, max: u32) -> Result<u64, StoreError> {
        let forget = query(
            "DELETE FROM batch_custom_ids WHERE batch_id = $1 AND custom_id IN
                 (SELECT custom_id FROM batch_custom_ids WHERE batch_id = $1 LIMIT $2)",
        );
        self.execute(forget.bind(Uuid::from(id)).bind(i64::from(max))).await
    }

    async fn sweep_batches(&self) -> Result<(), StoreError> {
        let forget = "DELETE FROM batch_custom_ids WHERE (batch_id, custom_id) IN (
                SELECT batch_id, custom_id FROM batch_custom_ids AS kept WHERE NOT EXISTS (
                    SELECT 1 FROM batches WHERE id = kept.batch_id AND (state IN ('validating', 'paused')
                        OR (state = 'in_progress' AND added_lines IS NOT NULL)))
                LIMIT $1)";
        while self.execute(query(forget).bind(SWEEP_CHUNK)).await? > 0 {}
        let forget = concat!(
            "DELETE FROM batch_turns WHERE served_at < ",
            now!(),
            " - $2 AND called_at < ",
            now!(),
            " - $2"
        );
        let forget = query(forget).bind(self.clock_parameter());
        self.execute(forget.bind(rows::milliseconds(TURN_KEPT))).await.map(drop)
    }
}
