//! Deletion of a tenant's data.

use super::{SqlStore, calls::query, claims, dialect::TENANT_SETTINGS, rows};
use crate::{
    job::Tenant,
    store::{
        StoreError,
        maintenance::{ERASED_MAX, Erased},
    },
};

/// Jobs deleted by one statement.
const CHUNK: i64 = 1000;

/// Deletes everything of a tenant. Keys go first, so that no more requests are accepted; then batches,
/// which submit jobs.
pub(crate) async fn erase(store: &SqlStore, tenant: &Tenant) -> Result<Erased, StoreError> {
    let mut erased = Erased::default();
    for (statement, count) in [
        ("DELETE FROM api_keys WHERE tenant = $1", &mut erased.keys),
        ("DELETE FROM batches WHERE tenant = $1", &mut erased.batches),
        ("DELETE FROM files WHERE tenant = $1", &mut erased.files),
    ] {
        *count = store.execute(query(statement).bind(&tenant.0)).await?;
    }
    let turns = "DELETE FROM batch_turns WHERE tenant = $1";
    for statement in TENANT_SETTINGS.into_iter().chain([turns]) {
        store.execute(query(statement).bind(&tenant.0)).await?;
    }
    while erased.jobs < ERASED_MAX {
        let found = query(concat!(
            "SELECT id FROM ",
            all_jobs!(),
            " WHERE tenant = $1 ORDER BY id LIMIT $2"
        ));
        let ids = rows::ids(&store.fetch_all(found.bind(&tenant.0).bind(CHUNK)).await?)?;
        if ids.is_empty() {
            erased.done = true;
            break;
        }
        erased.jobs += claims::delete(store, &ids).await?;
    }
    Ok(erased)
}
