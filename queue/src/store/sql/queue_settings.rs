//! Settings of queues.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{Encode, Type};

use super::{
    SqlStore,
    calls::{Row, query},
    dialect::{self, Db, storable},
    queues, rows,
};
use crate::{
    dispatch::Quotas,
    job::{QueueName, Tenant},
    store::{
        StoreError,
        queue_settings::{QueueOverview, QueueSettings, QueueState},
    },
};

/// Begins a query for [`settings`]. It names the columns: Postgres refuses a prepared `SELECT *` once a migration
/// has added one.
macro_rules! select_settings {
    ($rest:literal) => {
        concat!(
            "SELECT model, format, paused, limit_tokens, max_wait_ms, numerics_class, allowed_classes
             FROM queues ",
            $rest
        )
    };
}

pub(crate) fn settings(row: &Row) -> Result<QueueState, StoreError> {
    Ok(QueueState {
        queue: rows::queue(row)?,
        paused: rows::get(row, "paused")?,
        limit_tokens: rows::tokens(row, "limit_tokens")?,
        max_wait: rows::duration_or_none(row, "max_wait_ms")?,
        class: rows::get(row, "numerics_class")?,
        allowed_classes: dialect::texts(row, "allowed_classes")?,
    })
}

impl SqlStore {
    /// Sets one column of a queue's row.
    async fn set<'q, T>(
        &self,
        statement: &'static str,
        queue: &'q QueueName,
        value: T,
    ) -> Result<(), StoreError>
    where
        T: Encode<'q, Db> + Type<Db> + Send + 'q,
    {
        let set = query(statement).bind(&queue.model).bind(&queue.format).bind(value);
        self.execute(set).await.map(drop)
    }
}

#[async_trait]
impl QueueSettings for SqlStore {
    async fn queue_state(&self, queue: &QueueName) -> Result<QueueState, StoreError> {
        let found = query(select_settings!("WHERE model = $1 AND format = $2"));
        let row = self.fetch_optional(found.bind(&queue.model).bind(&queue.format)).await?;
        row.as_ref().map_or_else(|| Ok(QueueState::with_defaults(queue.clone())), settings)
    }

    async fn queue_states(&self) -> Result<Vec<QueueState>, StoreError> {
        let found = query(select_settings!("ORDER BY model, format"));
        self.fetch_all(found).await?.iter().map(settings).collect()
    }

    async fn queues(&self) -> Result<Vec<QueueOverview>, StoreError> {
        queues::overviews(self).await
    }

    async fn set_paused(&self, queue: &QueueName, paused: bool) -> Result<(), StoreError> {
        let statement = "INSERT INTO queues (model, format, paused) VALUES ($1, $2, $3)
             ON CONFLICT (model, format) DO UPDATE SET paused = excluded.paused";
        self.set(statement, queue, paused).await
    }

    async fn set_limit(
        &self,
        queue: &QueueName,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        let statement = "INSERT INTO queues (model, format, limit_tokens) VALUES ($1, $2, $3)
             ON CONFLICT (model, format) DO UPDATE SET limit_tokens = excluded.limit_tokens";
        self.set(statement, queue, limit_tokens.map(rows::stored)).await
    }

    async fn set_max_wait(
        &self,
        queue: &QueueName,
        max_wait: Option<Duration>,
    ) -> Result<(), StoreError> {
        let statement = "INSERT INTO queues (model, format, max_wait_ms) VALUES ($1, $2, $3)
             ON CONFLICT (model, format) DO UPDATE SET max_wait_ms = excluded.max_wait_ms";
        self.set(statement, queue, max_wait.map(rows::milliseconds)).await
    }

    async fn quotas(&self, queue: &QueueName) -> Result<Quotas, StoreError> {
        // The first row is the queue's own and has no tenant.
        let found = query(
            "SELECT NULL AS tenant, limit_tokens, tenant_limit_tokens, max_wait_ms FROM queues
             WHERE model = $1 AND format = $2
             UNION ALL
             SELECT tenant, limit_tokens, NULL, NULL FROM tenant_quotas WHERE model = $1 AND format = $2",
        );
        let mut quotas = Quotas::default();
        for row in &self.fetch_all(found.bind(&queue.model).bind(&queue.format)).await? {
            let limit = rows::tokens(row, "limit_tokens")?;
            match rows::get::<Option<String>>(row, "tenant")? {
                Some(tenant) => {
                    quotas.tenants.extend(limit.map(|limit| (Tenant(tenant), limit)));
                }
                None => {
                    quotas.tokens = limit;
                    quotas.each_tenant = rows::tokens(row, "tenant_limit_tokens")?;
                    quotas.max_wait = rows::duration_or_none(row, "max_wait_ms")?;
                }
            }
        }
        Ok(quotas)
    }

    async fn set_quota(
        &self,
        queue: &QueueName,
        tenant: Option<&Tenant>,
        limit_tokens: Option<u64>,
    ) -> Result<(), StoreError> {
        let limit = limit_tokens.map(rows::stored);
        let Some(tenant) = tenant else {
            let statement = "INSERT INTO queues (model, format, tenant_limit_tokens)
                 VALUES ($1, $2, $3) ON CONFLICT (model, format)
                 DO UPDATE SET tenant_limit_tokens = excluded.tenant_limit_tokens";
            return self.set(statement, queue, limit).await;
        };
        storable("tenant", &tenant.0)?;
        let statement = match limit {
            None => "DELETE FROM tenant_quotas WHERE model = $1 AND format = $2 AND tenant = $3",
            Some(_) => {
                "INSERT INTO tenant_quotas (model, format, tenant, limit_tokens)
                 VALUES ($1, $2, $3, $4) ON CONFLICT (model, format, tenant)
                 DO UPDATE SET limit_tokens = excluded.limit_tokens"
            }
        };
        let mut set = query(statement).bind(&queue.model).bind(&queue.format).bind(&tenant.0);
        if let Some(limit) = limit {
            set = set.bind(limit);
        }
        self.execute(set).await.map(drop)
    }
}
