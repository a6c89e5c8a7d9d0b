//! Statements about idempotency keys of calls.

use async_trait::async_trait;
use tritmill_queue::{JobId, StoreError, Tenant};
use uuid::Uuid;

use super::{Query, Row, SqlStore, query, rows, storable};
use crate::store::call_keys::{CallKey, CallKeys, KEPT, KeyedCall};

/// Gives a job a key, unless another one has it. A conflict writes the row as it is, so that it is returned.
pub(super) fn claim<'q>(
    store: &SqlStore,
    tenant: &'q Tenant,
    CallKey { key, request_hash }: CallKey<'q>,
    job: JobId,
) -> Result<Query<'q>, StoreError> {
    storable("Idempotency-Key", key)?;
    let claim = query(concat!(
        "INSERT INTO call_keys (tenant, key, request_hash, job_id, created_at) VALUES ($2, $3, $4, $5, ",
        now!(),
        ") ON CONFLICT (tenant, key) DO UPDATE SET key = excluded.key RETURNING request_hash, job_id"
    ));
    Ok(claim
        .bind(store.clock_parameter())
        .bind(&tenant.0)
        .bind(key)
        .bind(request_hash.as_slice())
        .bind(Uuid::from(job)))
}

/// Reads who has a key.
pub(super) fn keyed(row: &Row, request_hash: &[u8; 32]) -> Result<KeyedCall, StoreError> {
    let is_same = rows::get::<Vec<u8>>(row, "request_hash")? == request_hash;
    Ok(KeyedCall { job: rows::id(row, "job_id")?, is_same })
}

#[async_trait]
impl CallKeys for SqlStore {
    async fn claim_call(
        &self,
        tenant: &Tenant,
        key: CallKey<'_>,
        job: JobId,
    ) -> Result<KeyedCall, StoreError> {
        keyed(&self.fetch_one(claim(self, tenant, key, job)?).await?, key.request_hash)
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

    async fn has_call(
        &self,
        tenant: &Tenant,
        CallKey { key, request_hash }: CallKey<'_>,
    ) -> Result<bool, StoreError> {
        let found = query(
            "SELECT 1 AS found FROM call_keys WHERE tenant = $1 AND key = $2 AND request_hash = $3",
        );
        let found = found.bind(&tenant.0).bind(key).bind(request_hash.as_slice());
        Ok(self.fetch_optional(found).await?.is_some())
    }

    async fn sweep_calls(&self) -> Result<u64, StoreError> {
        let sweep = concat!("DELETE FROM call_keys WHERE created_at < ", now!(), " - $2");
        let kept = rows::milliseconds(KEPT);
        self.execute(query(sweep).bind(self.clock_parameter()).bind(kept)).await
    }
}
