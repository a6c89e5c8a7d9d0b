//! [`BudgetChecks`]: whether callers may submit more work, by the budgets of their tenant and key.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::{
    StoreError, Tenant,
    billing::Charge,
    store::charges::{ChargeFilter, ChargeGroups, Day, day_of},
};

use crate::{
    ApiError, App, Caller,
    days::{day_text, month_of_day},
    store::{
        FrontStore,
        budgets::{Budget, BudgetPeriod},
    },
};

/// How long what a tenant has spent is remembered. Charges are added up every few seconds, too.
const FRESH_FOR: Duration = Duration::from_secs(2);
/// Tenants that are remembered.
const TENANTS_MAX: usize = 10_000;

/// A budget with what is spent of it in the present period.
#[derive(Debug, Clone)]
pub struct BudgetState {
    /// The budget.
    pub budget: Budget,
    /// In the budget's currency, in 10⁻⁹ of its unit.
    pub spent: i64,
    /// First day of the period, and the first day after it.
    pub period: (Day, Day),
}

impl BudgetState {
    /// Whether the soft bound is reached.
    pub fn is_nearly_spent(&self) -> bool {
        self.budget.soft.is_some_and(|soft| self.spent >= soft)
    }

    /// Whether the hard bound is reached.
    pub fn is_spent(&self) -> bool {
        self.budget.hard.is_some_and(|hard| self.spent >= hard)
    }

    /// Returns an amount in its currency.
    pub fn charge(&self, nanounits: i64) -> Charge {
        Charge { currency: self.budget.currency.clone(), nanounits }
    }
}

/// Returns the budgets of a tenant, or of all, with what is spent.
///
/// # Errors
/// If the store fails.
pub async fn states(
    store: &dyn FrontStore,
    tenant: Option<&Tenant>,
) -> Result<Vec<BudgetState>, StoreError> {
    let budgets = store.budgets(tenant).await?;
    if budgets.is_empty() {
        return Ok(Vec::new());
    }
    let today = day_of(store.now().await?);
    let mut states = Vec::with_capacity(budgets.len());
    for budget in budgets {
        let period = period_of(budget.of.period, today);
        states.push(state(store, budget, period).await?);
    }
    Ok(states)
}

/// Returns the period of a day: its first day, and the first day after it.
pub(crate) fn period_of(period: BudgetPeriod, day: Day) -> (Day, Day) {
    match period {
        BudgetPeriod::Day => (day, day + 1),
        BudgetPeriod::Month => month_of_day(day),
    }
}

/// Returns a budget with what is spent of it in a period.
///
/// # Errors
/// If the store fails.
pub(crate) async fn state(
    store: &dyn FrontStore,
    budget: Budget,
    period: (Day, Day),
) -> Result<BudgetState, StoreError> {
    let filter = ChargeFilter {
        tenant: Some(budget.of.tenant.clone()),
        key: budget.of.key.map(|key| key.to_string()),
        model: None,
        from: period.0,
        to: period.1,
    };
    const CURRENCIES_MAX: u32 = 1000;
    let sums = store.charges(&filter, ChargeGroups::default(), CURRENCIES_MAX).await?;
    let charges = sums.iter().filter_map(|sum| sum.charge.as_ref());
    let spent = charges.filter(|charge| charge.currency == budget.currency);
    let spent = spent.map(|charge| charge.nanounits).sum();
    Ok(BudgetState { budget, spent, period })
}

/// The tenants that were checked a moment ago.
#[derive(Debug, Default)]
pub(crate) struct BudgetChecks(Mutex<HashMap<Tenant, (Instant, Vec<BudgetState>)>>);

impl BudgetChecks {
    /// Checks that a caller may submit more work.
    ///
    /// # Errors
    /// Names the budget that is spent.
    pub async fn check(&self, app: &App, caller: &Caller) -> Result<(), ApiError> {
        let known = self.fresh(&caller.tenant);
        let states = match known {
            Some(states) => states,
            None => {
                let states = states(app.store.as_ref(), Some(&caller.tenant)).await?;
                self.remember(&caller.tenant, states.clone());
                states
            }
        };
        let applies =
            |state: &&BudgetState| state.budget.of.key.is_none_or(|key| key == caller.key);
        match states.iter().filter(applies).find(|state| state.is_spent()) {
            None => Ok(()),
            Some(state) => {
                let owner = if state.budget.of.key.is_some() { "API key" } else { "tenant" };
                let hard = state.charge(state.budget.hard.unwrap_or_default());
                let spent = state.charge(state.spent);
                let next = day_text(state.period.1);
                Err(ApiError::budget_spent(&format!(
                    "the {owner} has spent {spent} of its budget of {hard} for this {}: it begins anew on {next}",
                    state.budget.of.period.as_str()
                )))
            }
        }
    }

    fn fresh(&self, tenant: &Tenant) -> Option<Vec<BudgetState>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, states) = known.get(tenant)?;
        (at.elapsed() < FRESH_FOR).then(|| states.clone())
    }

    fn remember(&self, tenant: &Tenant, states: Vec<BudgetState>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= TENANTS_MAX {
            known.retain(|_, (at, _)| at.elapsed() < FRESH_FOR);
        }
        known.insert(tenant.clone(), (Instant::now(), states));
    }
}
