//! Budgets of tenants and API keys.

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant};
use uuid::Uuid;

use super::{Row, SqlStore, query, rows, storable};
use crate::store::budgets::{Budget, BudgetOf, Budgets};

fn key_text(key: Option<Uuid>) -> String {
    key.map_or_else(String::new, |key| key.to_string())
}

fn budget(row: &Row) -> Result<Budget, StoreError> {
    let key = match rows::get::<&str>(row, "api_key")? {
        "" => None,
        _ => Some(rows::word(row, "api_key")?),
    };
    let of = BudgetOf {
        tenant: Tenant(rows::get(row, "tenant")?),
        key,
        period: rows::word(row, "period")?,
    };
    Ok(Budget {
        of,
        currency: rows::word(row, "currency")?,
        soft: rows::get(row, "soft")?,
        hard: rows::get(row, "hard")?,
        set_at: rows::time(row, "set_at")?,
    })
}

#[async_trait]
impl Budgets for SqlStore {
    async fn budgets(&self, tenant: Option<&Tenant>) -> Result<Vec<Budget>, StoreError> {
        let found = "SELECT tenant, api_key, period, currency, soft, hard, set_at FROM budgets
             WHERE $1 IS NULL OR tenant = $1 ORDER BY tenant, api_key, period";
        let found = query(found).bind(tenant.map(|tenant| &tenant.0));
        self.fetch_all(found).await?.iter().map(budget).collect()
    }

    async fn set_budget(&self, budget: &Budget) -> Result<(), StoreError> {
        storable("tenant", &budget.of.tenant.0)?;
        let set = "INSERT INTO budgets (tenant, api_key, period, currency, soft, hard, set_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (tenant, api_key, period) DO UPDATE SET
                 currency = excluded.currency, soft = excluded.soft, hard = excluded.hard,
                 set_at = excluded.set_at";
        let set = query(set)
            .bind(&budget.of.tenant.0)
            .bind(key_text(budget.of.key))
            .bind(budget.of.period.as_str())
            .bind(budget.currency.as_str())
            .bind(budget.soft)
            .bind(budget.hard)
            .bind(budget.set_at.0);
        self.execute(set).await.map(drop)
    }

    async fn delete_budget(&self, of: &BudgetOf) -> Result<bool, StoreError> {
        let delete = "DELETE FROM budgets WHERE tenant = $1 AND api_key = $2 AND period = $3";
        let delete = query(delete).bind(&of.tenant.0).bind(key_text(of.key));
        Ok(self.execute(delete.bind(of.period.as_str())).await? > 0)
    }
}
