//! Deletion of a tenant's data.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant, store::Maintenance as _};

use super::{SqlStore, query};
use crate::store::tenants::{Erased, Tenants};

#[async_trait]
impl Tenants for SqlStore {
    /// Keys go first, so that no more requests are accepted; then batches, which submit jobs.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        let mut erased = Erased::default();
        for (statement, count) in [
            ("DELETE FROM api_keys WHERE tenant = $1", &mut erased.keys),
            ("DELETE FROM batches WHERE tenant = $1", &mut erased.batches),
            ("DELETE FROM files WHERE tenant = $1", &mut erased.files),
        ] {
            *count = self.execute(query(statement).bind(&tenant.0)).await?;
        }
        let turns = "DELETE FROM batch_turns WHERE tenant = $1";
        self.execute(query(turns).bind(&tenant.0)).await?;
        let jobs = self.erase_jobs(tenant).await?;
        (erased.jobs, erased.done) = (jobs.jobs, jobs.done);
        Ok(erased)
    }
}
