//! Budgets: bounds of what tenants and API keys may be charged.

use std::str::FromStr;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tritmill_queue::{StoreError, Tenant, Timestamp, billing::Currency, job::UnknownWord};
use uuid::Uuid;

/// The time that a budget is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BudgetPeriod {
    /// A day, in UTC.
    Day,
    /// A calendar month, in UTC.
    Month,
}

impl BudgetPeriod {
    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
        }
    }
}

impl FromStr for BudgetPeriod {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = [Self::Day, Self::Month].into_iter().find(|period| period.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "period", word: word.to_owned() })
    }
}

/// To which charges a budget applies. Each has one budget of a period.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BudgetOf {
    /// The tenant.
    pub tenant: Tenant,
    /// One of its API keys; `None` is all of the tenant's work.
    pub key: Option<Uuid>,
    /// The period.
    pub period: BudgetPeriod,
}

/// Bounds of charges in a currency, in 10⁻⁹ of its unit. Charges in other currencies do not count.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Budget {
    /// To which charges it applies.
    pub of: BudgetOf,
    /// The currency.
    pub currency: Currency,
    /// From here on it is reported as nearly spent.
    pub soft: Option<i64>,
    /// From here on new work is refused. Work that was accepted goes on.
    pub hard: Option<i64>,
    /// Since when it has these bounds.
    pub set_at: Timestamp,
}

/// Budgets in a store.
#[async_trait]
pub trait Budgets: Send + Sync {
    /// Returns the budgets of a tenant and of its keys; of all tenants without one. By tenant, key and period.
    async fn budgets(&self, tenant: Option<&Tenant>) -> Result<Vec<Budget>, StoreError>;

    /// Sets a budget.
    async fn set_budget(&self, budget: &Budget) -> Result<(), StoreError>;

    /// Deletes a budget; returns whether there was one.
    async fn delete_budget(&self, of: &BudgetOf) -> Result<bool, StoreError>;
}
