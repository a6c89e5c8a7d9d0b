//! [`BudgetLook`]: finds budgets of which a bound is reached.
//!
//! What is spent is a sum of recorded answers, which workers add to. So a reached bound is derived from the sums:
//! the event has an id made of the budget, its bound and the period, and the store writes it once, however many
//! processes look and however often. Charges of the last minutes of a period may be found in the next one, so the period
//! before is looked at too, for as long as that can be.

use std::{collections::HashSet, time::Duration};

use sha2::{Digest as _, Sha256};
use tritmill_queue::{
    StoreError, Timestamp,
    store::charges::{Day, day_of},
};

use crate::{
    App,
    budgets::{self, BudgetState},
    store::{
        budgets::Budget,
        events::{Event, NoticeKind, SpentBudget, Subject},
        notices::Receiver,
    },
};

/// How long into a period the one before is looked at. At its first look, a process looks there in any case.
const LATE: Duration = Duration::from_secs(600);
/// Events that are remembered as told; then all are forgotten, and told once more, without an effect.
const TOLD_MAX: usize = 100_000;
const DAY_MS: i64 = 86_400_000;

/// Looks at budgets again and again.
#[derive(Debug, Default)]
pub(super) struct BudgetLook {
    /// Ids of events that are written.
    told: HashSet<String>,
    /// Time of the last look.
    last: Option<Timestamp>,
}

impl BudgetLook {
    /// Writes the events of bounds that are reached.
    ///
    /// # Errors
    /// If the store fails: the rest is written at the next call.
    pub async fn tell(&mut self, app: &App) -> Result<(), StoreError> {
        let budgets = app.store.budgets(None).await?;
        if budgets.is_empty() {
            return Ok(());
        }
        let now = app.store.now().await?;
        let today = day_of(now);
        for budget in budgets {
            let period = budgets::period_of(budget.of.period, today);
            let mut periods = vec![period];
            let begins = Timestamp(period.0 * DAY_MS);
            let was_before = budget.set_at < begins;
            if was_before && self.last.is_none_or(|last| last < begins.after(LATE)) {
                periods.insert(0, budgets::period_of(budget.of.period, period.0 - 1));
            }
            for period in periods {
                let ids =
                    bounds(&budget).map(|(kind, bound)| (kind, id(&budget, kind, bound, period)));
                let open: Vec<_> = ids.filter(|(_, id)| !self.told.contains(id)).collect();
                if open.is_empty() {
                    continue;
                }
                let state = budgets::state(app.store.as_ref(), budget.clone(), period).await?;
                for (kind, id) in open {
                    self.tell_one(app, (kind, id), &state, now).await?;
                }
            }
        }
        self.last = Some(now);
        Ok(())
    }

    async fn tell_one(
        &mut self,
        app: &App,
        (kind, id): (NoticeKind, String),
        state: &BudgetState,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let is_reached = match kind {
            NoticeKind::BudgetSpent => state.is_spent(),
            _ => state.is_nearly_spent(),
        };
        if !is_reached {
            return Ok(());
        }
        let BudgetState { budget, spent, period } = state.clone();
        let tenant = budget.of.tenant.clone();
        let subject = Subject::Budget(Box::new(SpentBudget { budget, spent, period }));
        let webhook = app.store.tenant_webhook(&tenant).await?;
        let webhook = webhook.map(|own| Receiver::Webhook { url: own.url, secret: own.secret });
        let mails = app.mail_receivers(&tenant).into_iter().map(Receiver::Mail);
        let to: Vec<Receiver> = webhook.into_iter().chain(mails).collect();
        if to.is_empty() {
            // It may get one: then it is told.
            return Ok(());
        }
        let event = Event { id: id.clone(), tenant, kind, at: now, subject };
        app.store.add_event(&event, &to).await?;
        if self.told.len() >= TOLD_MAX {
            self.told.clear();
        }
        self.told.insert(id);
        Ok(())
    }
}

/// Returns the bounds of a budget.
fn bounds(budget: &Budget) -> impl Iterator<Item = (NoticeKind, i64)> {
    let soft = budget.soft.map(|bound| (NoticeKind::BudgetSoftReached, bound));
    let hard = budget.hard.map(|bound| (NoticeKind::BudgetSpent, bound));
    soft.into_iter().chain(hard)
}

/// Returns the id of the event that a bound of a budget is reached in a period. With another bound it is another event.
fn id(budget: &Budget, kind: NoticeKind, bound: i64, (first, _): (Day, Day)) -> String {
    let of = &budget.of;
    let key = of.key.map(|key| key.to_string()).unwrap_or_default();
    let named = serde_json::json!([
        of.tenant.0,
        key,
        of.period.as_str(),
        budget.currency.as_str(),
        kind.as_str(),
        bound,
        first
    ]);
    let hash = Sha256::digest(named.to_string().as_bytes());
    let digits: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("evt_{digits}")
}

#[cfg(test)]
mod tests {
    use tritmill_queue::Tenant;

    use super::*;
    use crate::store::budgets::{BudgetOf, BudgetPeriod};

    #[test]
    fn each_bound_has_one_event_in_a_period() {
        let of = BudgetOf { tenant: Tenant("a".into()), key: None, period: BudgetPeriod::Day };
        let currency = "EUR".parse().expect("a currency");
        let budget = Budget { of, currency, soft: Some(5), hard: Some(9), set_at: Timestamp(0) };
        let ids = |budget: &Budget, day| -> Vec<String> {
            bounds(budget).map(|(kind, bound)| id(budget, kind, bound, (day, day + 1))).collect()
        };
        let first = ids(&budget, 7);
        assert_eq!(first, ids(&Budget { set_at: Timestamp(8), ..budget.clone() }, 7));
        let raised = Budget { hard: Some(10), ..budget.clone() };
        let all: HashSet<String> =
            [first, ids(&budget, 8), ids(&raised, 7)].into_iter().flatten().collect();
        assert_eq!(all.len(), 5, "the soft bound is the same: {all:?}");
    }
}
