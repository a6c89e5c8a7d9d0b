//! Deletion of a tenant's jobs.

use super::{SqlStore, calls::query, claims, dialect::TENANT_SETTINGS, rows};
use crate::{
    job::Tenant,
    store::{
        StoreError,
        maintenance::{ERASED_MAX, ErasedJobs},
    },
};

/// Jobs deleted by one statement.
const CHUNK: i64 = 1000;

/// See [`Maintenance::erase_jobs`](crate::store::Maintenance::erase_jobs).
pub(crate) async fn erase_jobs(
    store: &SqlStore,
    tenant: &Tenant,
) -> Result<ErasedJobs, StoreError> {
    let mut erased = ErasedJobs::default();
    for statement in TENANT_SETTINGS {
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
