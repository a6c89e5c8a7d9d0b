//! Statements about idempotency keys of calls.

use async_trait::async_trait;
use tritmill_queue::{JobId, StoreError, Tenant};
use uuid::Uuid;

use super::{SqlStore, query, rows, storable};
use crate::store::call_keys::{CallKey, CallKeys, KEPT, KeyedCall};

#[async_trait]
impl CallKeys for SqlStore {
    async fn claim_call(
        &self,
        tenant: &Tenant,
        CallKey { key, request_hash }: CallKey<'_>,
        job: JobId,
    ) -> Result<KeyedCall, StoreError> {
        storable("Idempotency-Key", key)?;
        // A conflict writes the row as it is, so that it is returned.
        let claim = query(concat!(
            "INSERT INTO call_keys (tenant, key, request_hash, job_id, created_at) VALUES ($2, $3, $4, $5, ",
            now!(),
            ") ON CONFLICT (tenant, key) DO UPDATE SET key = excluded.key RETURNING request_hash, job_id"
        ))
        .bind(self.clock_parameter())
        .bind(&tenant.0)
        .bind(key)
        .bind(request_hash.as_slice())
        .bind(Uuid::from(job));
        let row = self.fetch_one(claim).await?;
        let is_same = rows::get::<Vec<u8>>(&row, "request_hash")? == request_hash;
        Ok(KeyedCall { job: rows::id(&row, "job_id")?, is_same })
    }

    async fn replace_call(
        &self,
        tenant: &Tenant,
        key: &str,
        (from, to): (JobId, JobId),
    ) -> Result<bool, StoreError> {
        let replace = query(
            "UPDATE call_keys SET job_id = $4 WHERE tenant = $1 AND key = $2 AND job_id = $3",
        );
        let replace = replace.bind(&tenant.0).bind(key).bind(Uuid::from(from)).bind(Uuid::from(to));
        Ok(self.execute(replace).await? == 1)
    }

    async fn sweep_calls(&self) -> Result<u64, StoreError> {
        let sweep = concat!("DELETE FROM call_keys WHERE created_at < ", now!(), " - $2");
        let kept = rows::milliseconds(KEPT);
        self.execute(query(sweep).bind(self.clock_parameter()).bind(kept)).await
    }
}
