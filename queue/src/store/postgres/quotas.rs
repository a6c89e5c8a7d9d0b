//! How much may wait in a queue, and of each tenant's.

use sqlx::PgPool;

use super::{rows, unavailable};
use crate::{
    dispatch::Quotas,
    job::{QueueName, Tenant},
    store::StoreError,
};

pub(super) async fn read(pool: &PgPool, queue: &QueueName) -> Result<Quotas, StoreError> {
    // The queue's own row has no tenant.
    let found = sqlx::query(
        "SELECT NULL AS tenant, limit_tokens, tenant_limit_tokens FROM queues
         WHERE model = $1 AND format = $2
         UNION ALL
         SELECT tenant, limit_tokens, NULL FROM tenant_quotas WHERE model = $1 AND format = $2",
    )
    .bind(&queue.model)
    .bind(&queue.format)
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    let mut quotas = Quotas::default();
    for row in &found {
        let tokens = |column| Ok(rows::get::<Option<i64>>(row, column)?.map(i64::unsigned_abs));
        match rows::get::<Option<String>>(row, "tenant")? {
            Some(tenant) => {
                quotas.tenants.extend(tokens("limit_tokens")?.map(|limit| (Tenant(tenant), limit)));
            }
            None => {
                quotas.tokens = tokens("limit_tokens")?;
                quotas.each_tenant = tokens("tenant_limit_tokens")?;
            }
        }
    }
    Ok(quotas)
}

pub(super) async fn set(
    pool: &PgPool,
    queue: &QueueName,
    tenant: Option<&Tenant>,
    limit_tokens: Option<u64>,
) -> Result<(), StoreError> {
    rows::storable("tenant", tenant.map_or("", |tenant| &tenant.0))?;
    let limit = limit_tokens.map(|tokens| i64::try_from(tokens).unwrap_or(i64::MAX));
    let query = match (tenant, limit) {
        (None, _) => sqlx::query(
            "INSERT INTO queues (model, format, tenant_limit_tokens) VALUES ($1, $2, $3)
             ON CONFLICT (model, format)
             DO UPDATE SET tenant_limit_tokens = excluded.tenant_limit_tokens",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(limit),
        (Some(tenant), None) => sqlx::query(
            "DELETE FROM tenant_quotas WHERE model = $1 AND format = $2 AND tenant = $3",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(&tenant.0),
        (Some(tenant), Some(limit)) => sqlx::query(
            "INSERT INTO tenant_quotas (model, format, tenant, limit_tokens)
             VALUES ($1, $2, $3, $4)
             ON CONFLICT (model, format, tenant) DO UPDATE SET limit_tokens = excluded.limit_tokens",
        )
        .bind(&queue.model)
        .bind(&queue.format)
        .bind(&tenant.0)
        .bind(limit),
    };
    query.execute(pool).await.map_err(unavailable)?;
    Ok(())
}
