//! Limits of tenants, what they use, and deletion of a tenant's data.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant, store::Maintenance as _};

use super::{Row, SqlStore, notices, query, rows, storable};
use crate::store::{
    tenants::{Erased, StoredFiles, TenantAccount, TenantLimits, TenantUse, Tenants},
    webhooks::{Webhook, WebhookSecret},
};

/// Selects accounts of the tenants that a subquery names `wanted`.
macro_rules! select_accounts {
    ($wanted:literal, $order:literal) => {
        concat!(
            "SELECT wanted.tenant, file_bytes, open_batches, keys,
                (SELECT CAST(coalesce(sum(size_bytes), 0) AS bigint) FROM files
                 WHERE files.tenant = wanted.tenant AND size_bytes IS NOT NULL
                   AND (expires_at IS NULL OR expires_at > ",
            now!(),
            ")) AS used_file_bytes,
                (SELECT count(*) FROM batches WHERE batches.tenant = wanted.tenant AND ",
            unfinished!(),
            ") AS used_open_batches,
                (SELECT count(*) FROM api_keys
                 WHERE api_keys.tenant = wanted.tenant AND ",
            super::keys::valid_key!(),
            ") AS used_keys
             FROM ",
            $wanted,
            " AS wanted LEFT JOIN tenant_limits ON tenant_limits.tenant = wanted.tenant",
            $order
        )
    };
}

fn limits(row: &Row) -> Result<TenantLimits, StoreError> {
    let small = |column| {
        let count = rows::tokens(row, column)?;
        Ok::<_, StoreError>(count.map(|count| u32::try_from(count).unwrap_or(u32::MAX)))
    };
    Ok(TenantLimits {
        file_bytes: rows::tokens(row, "file_bytes")?,
        open_batches: small("open_batches")?,
        keys: small("keys")?,
    })
}

fn account(row: &Row) -> Result<TenantAccount, StoreError> {
    let limits = limits(row)?;
    let used = TenantUse {
        file_bytes: rows::count(row, "used_file_bytes")?,
        open_batches: rows::count(row, "used_open_batches")?,
        keys: rows::count(row, "used_keys")?,
    };
    Ok(TenantAccount { tenant: Tenant(rows::get(row, "tenant")?), limits, used })
}

#[async_trait]
impl Tenants for SqlStore {
    async fn tenant_limits(&self, tenant: &Tenant) -> Result<TenantLimits, StoreError> {
        let found = "SELECT file_bytes, open_batches, keys FROM tenant_limits WHERE tenant = $1";
        let row = self.fetch_optional(query(found).bind(&tenant.0)).await?;
        row.as_ref().map_or_else(|| Ok(TenantLimits::default()), limits)
    }

    async fn tenant_account(&self, tenant: &Tenant) -> Result<TenantAccount, StoreError> {
        let found = query(select_accounts!("(SELECT CAST($2 AS text) AS tenant)", ""));
        account(&self.fetch_one(found.bind(self.clock_parameter()).bind(&tenant.0)).await?)
    }

    async fn limited_tenants(&self) -> Result<Vec<TenantAccount>, StoreError> {
        let found = query(select_accounts!("(SELECT tenant FROM tenant_limits)", " ORDER BY 1"));
        self.fetch_all(found.bind(self.clock_parameter())).await?.iter().map(account).collect()
    }

    async fn set_tenant_limits(
        &self,
        tenant: &Tenant,
        limits: TenantLimits,
    ) -> Result<(), StoreError> {
        storable("tenant", &tenant.0)?;
        if limits == TenantLimits::default() {
            let delete = query("DELETE FROM tenant_limits WHERE tenant = $1");
            return self.execute(delete.bind(&tenant.0)).await.map(drop);
        }
        let set = "INSERT INTO tenant_limits (tenant, file_bytes, open_batches, keys)
             VALUES ($1, $2, $3, $4) ON CONFLICT (tenant) DO UPDATE SET
                 file_bytes = excluded.file_bytes, open_batches = excluded.open_batches,
                 keys = excluded.keys";
        let set = query(set)
            .bind(&tenant.0)
            .bind(limits.file_bytes.map(rows::stored))
            .bind(limits.open_batches.map(i64::from))
            .bind(limits.keys.map(i64::from));
        self.execute(set).await.map(drop)
    }

    async fn tenant_webhook(&self, tenant: &Tenant) -> Result<Option<Webhook>, StoreError> {
        let found = query("SELECT url, secret, events FROM tenant_webhooks WHERE tenant = $1");
        let found = self.fetch_optional(found.bind(&tenant.0)).await?;
        let webhook = |row: &Row| {
            let (url, secret) = (rows::get(row, "url")?, rows::get(row, "secret")?);
            let events: Option<&str> = rows::get(row, "events")?;
            let events = events.map(serde_json::from_str).transpose();
            let events = events.map_err(|error| rows::damaged("events", error))?;
            let (secret, events) = (WebhookSecret(secret), events.unwrap_or_default());
            Ok(Webhook { url, secret, is_of_tenant: true, events })
        };
        found.as_ref().map(webhook).transpose()
    }

    async fn set_tenant_webhook(
        &self,
        tenant: &Tenant,
        webhook: Option<&Webhook>,
    ) -> Result<(), StoreError> {
        storable("tenant", &tenant.0)?;
        let Some(webhook) = webhook else {
            let delete = query("DELETE FROM tenant_webhooks WHERE tenant = $1");
            return self.execute(delete.bind(&tenant.0)).await.map(drop);
        };
        let set =
            "INSERT INTO tenant_webhooks (tenant, url, secret, events) VALUES ($1, $2, $3, $4)
             ON CONFLICT (tenant) DO UPDATE SET url = excluded.url, secret = excluded.secret,
                 events = excluded.events";
        let events = (!webhook.events.is_empty()).then(|| rows::to_json(&webhook.events));
        let set = query(set).bind(&tenant.0).bind(&webhook.url).bind(&webhook.secret.0);
        self.execute(set.bind(events)).await?;
        notices::forget_failures(self, tenant, &webhook.url).await
    }

    /// Keys go first, so that no more requests are accepted; then batches, which submit jobs.
    async fn erase_tenant(&self, tenant: &Tenant) -> Result<Erased, StoreError> {
        let mut erased = Erased::default();
        let ends =
            "DELETE FROM batch_ends WHERE batch_id IN (SELECT id FROM batches WHERE tenant = $1)";
        self.execute(query(ends).bind(&tenant.0)).await?;
        for (statement, count) in [
            ("DELETE FROM api_keys WHERE tenant = $1", &mut erased.keys),
            ("DELETE FROM batches WHERE tenant = $1", &mut erased.batches),
            ("DELETE FROM files WHERE tenant = $1", &mut erased.files),
        ] {
            *count = self.execute(query(statement).bind(&tenant.0)).await?;
        }
        for rest in [
            "DELETE FROM batch_turns WHERE tenant = $1",
            "DELETE FROM tenant_limits WHERE tenant = $1",
            "DELETE FROM call_keys WHERE tenant = $1",
            "DELETE FROM schedules WHERE tenant = $1",
            "DELETE FROM tenant_webhooks WHERE tenant = $1",
            "DELETE FROM notices WHERE tenant = $1",
            "DELETE FROM notice_receivers WHERE tenant = $1",
            "DELETE FROM budgets WHERE tenant = $1",
            "DELETE FROM charges WHERE tenant = $1",
        ] {
            self.execute(query(rest).bind(&tenant.0)).await?;
        }
        let jobs = self.erase_jobs(tenant).await?;
        (erased.jobs, erased.done) = (jobs.jobs, jobs.done);
        Ok(erased)
    }

    async fn stored_files(&self, tenant: &Tenant) -> Result<StoredFiles, StoreError> {
        let sums = query(
            "SELECT count(*) AS files, CAST(coalesce(sum(size_bytes), 0) AS bigint) AS size_bytes
             FROM files WHERE tenant = $1 AND size_bytes IS NOT NULL",
        );
        let row = self.fetch_one(sums.bind(&tenant.0)).await?;
        let (files, size_bytes) = (rows::count(&row, "files")?, rows::count(&row, "size_bytes")?);
        Ok(StoredFiles { files, size_bytes })
    }
}
