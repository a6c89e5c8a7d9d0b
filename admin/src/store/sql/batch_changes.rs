//! Changes of batches on request, each in one transaction.

use tritmill_queue::{JobId, StoreError, Tenant, Timestamp};
use uuid::Uuid;

use super::{Connection, SqlStore, batches::whole, call_keys, notices, query, rows};
use crate::store::{
    batch_changes::{Applied, BatchChange, Changed, RetryKey},
    batches::{Batch, BatchId},
    events::Event,
};

/// See [`Batches::change_batch`](crate::store::Batches::change_batch). When it returns, the row is no longer locked, also where nothing
/// was changed.
pub(super) async fn change(
    store: &SqlStore,
    of: (&Tenant, BatchId),
    change: &BatchChange,
    now_and_max: (Timestamp, u32),
) -> Result<Option<Changed>, StoreError> {
    let mut tx = store.begin().await?;
    match try_change(store, &mut tx, of, change, now_and_max).await {
        Ok(Attempt::Changed(batch)) => {
            tx.commit().await?;
            Ok(Some(Changed::Done(batch)))
        }
        Ok(Attempt::Unchanged(answer)) => {
            tx.rollback().await?;
            Ok(answer)
        }
        Err(error) => Err(error),
    }
}

/// What a change did in its transaction.
enum Attempt {
    /// It is written.
    Changed(Box<Batch>),
    /// Nothing is to be written.
    Unchanged(Option<Changed>),
}

async fn try_change(
    store: &SqlStore,
    tx: &mut Connection,
    (tenant, id): (&Tenant, BatchId),
    change: &BatchChange,
    (now, open_max): (Timestamp, u32),
) -> Result<Attempt, StoreError> {
    let unchanged = |answer| Ok(Attempt::Unchanged(Some(answer)));
    let found = concat!(
        "SELECT ",
        super::batches::columns!(),
        " FROM batches WHERE id = $1 AND tenant = $2",
        for_update!()
    );
    let found = query(found).bind(Uuid::from(id)).bind(&tenant.0);
    let Some(row) = found.fetch_optional(&mut *tx).await? else {
        return Ok(Attempt::Unchanged(None));
    };
    let before = whole(&row)?;
    let mut changed = before.clone();
    if let Some(key) = change.key() {
        match take_key(store, tx, tenant, key).await? {
            Taken::New => {}
            Taken::Again => return unchanged(Changed::Done(Box::new(before))),
            Taken::Other => return unchanged(Changed::KeyConflict),
        }
    }
    match change.apply(&mut changed, now) {
        Applied::Changed => {}
        Applied::Unchanged => return unchanged(Changed::Done(Box::new(before))),
        Applied::Refused => return unchanged(Changed::Refused(Box::new(before))),
        Applied::ManyRetries => return unchanged(Changed::ManyRetries),
    }
    if before.state.is_terminal() && open_batches(tx, tenant, open_max).await? >= open_max {
        return unchanged(Changed::Full);
    }
    write(tx, &changed).await?;
    if let Some(event) = Event::of_change(&before, &changed, now) {
        notices::add(store, tx, &event, &changed.receivers(event.kind)).await?;
    }
    Ok(Attempt::Changed(Box::new(changed)))
}

/// Who has an idempotency key.
enum Taken {
    /// This request, from now on.
    New,
    /// An earlier request that asked the same.
    Again,
    /// A different request.
    Other,
}

async fn take_key(
    store: &SqlStore,
    tx: &mut Connection,
    tenant: &Tenant,
    key: &RetryKey,
) -> Result<Taken, StoreError> {
    // Tells this request from an earlier one.
    let own = JobId::generate();
    let claim = call_keys::claim(store, tenant, key.as_call(), own)?;
    let known = call_keys::keyed(&claim.fetch_one(tx).await?, &key.request_hash)?;
    Ok(match known.is_same {
        true if known.job == own => Taken::New,
        true => Taken::Again,
        false => Taken::Other,
    })
}

/// Counts the unfinished batches of a tenant, up to a maximum.
async fn open_batches(tx: &mut Connection, tenant: &Tenant, max: u32) -> Result<u32, StoreError> {
    let count = concat!(
        "SELECT count(*) AS open FROM (SELECT 1 FROM batches WHERE tenant = $1 AND ",
        unfinished!(),
        " LIMIT $2) AS found"
    );
    let count = query(count).bind(&tenant.0).bind(i64::from(max));
    rows::small(&count.fetch_one(tx).await?, "open")
}

/// Writes a batch, ends the claim of its driver, and makes its next step due. It is not archived any more.
pub(super) async fn write(tx: &mut Connection, batch: &Batch) -> Result<(), StoreError> {
    let update = concat!(
        "UPDATE batches SET state = $2, batch = ",
        as_json!("$3"),
        ", epoch = epoch + 1, owner = NULL, lease_until = NULL, next_at = 0, lost_leases = 0,
           hung_steps = 0, archived_at = NULL, after_id = $4 WHERE id = $1"
    );
    query(update)
        .bind(Uuid::from(batch.id))
        .bind(batch.state.as_str())
        .bind(rows::to_json(batch))
        .bind(batch.awaited().map(Uuid::from))
        .execute(tx)
        .await?;
    Ok(())
}
