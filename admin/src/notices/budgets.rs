//! [`BudgetLook`]: finds budgets of which a bound is reached.
//!
//! What is spent is a sum of recorded answers, which workers add to. So a reached bound is derived from the sums:
//! the event has an id made of the budget, its bound and the period, and the store writes it once, however many
//! processes look and however often. Charges of the last minutes of a period may be found in the next one, so the period
//! before is looked at too, for as long as that can be, and for a day by a process that starts.

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

/// How long into a period the one before is looked at: again and again, and at the first look of a process.
const LATE: Duration = Duration::from_secs(600);
const LATE_AT_START: Duration = Duration::from_secs(86_400);
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
        let mut told = Ok(());
        for budget in budgets {
            // One that fails keeps no other from being told.
            told = self.tell_budget(app, &budget, now).await.and(told);
        }
        if told.is_ok() {
            self.last = Some(now);
        }
        told
    }

    async fn tell_budget(
        &mut self,
        app: &App,
        budget: &Budget,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        for period in periods(budget, now, self.last) {
            let ids = bounds(budget).map(|(kind, bound)| (kind, id(budget, kind, bound, period)));
            let open: Vec<_> = ids.filter(|(_, id)| !self.told.contains(id)).collect();
            if open.is_empty() {
                continue;
            }
            let state = budgets::state(app.store.as_ref(), budget.clone(), period).await?;
            for (kind, id) in open {
                self.tell_one(app, (kind, id), &state, now).await?;
            }
        }
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
        let webhook = app.store.tenant_webhook(&tenant).await?.filter(|own| own.wants(kind));
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

/// Returns the periods of a budget to look at, after the last look: the present one, and maybe the one before.
fn periods(budget: &Budget, now: Timestamp, last: Option<Timestamp>) -> Vec<(Day, Day)> {
    let period = budgets::period_of(budget.of.period, day_of(now));
    let begins = Timestamp(period.0 * DAY_MS);
    let is_late = match last {
        Some(last) => last < begins.after(LATE),
        None => now < begins.after(LATE_AT_START),
    };
    // Its bounds did not count before.
    let had_bounds = budget.set_at < begins;
    let before = budgets::period_of(budget.of.period, period.0 - 1);
    (is_late && had_bounds).then_some(before).into_iter().chain([period]).collect()
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

    fn budget() -> Budget {
        let of = BudgetOf { tenant: Tenant("a".into()), key: None, period: BudgetPeriod::Day };
        let currency = "EUR".parse().expect("a currency");
        Budget { of, currency, soft: Some(5), hard: Some(9), set_at: Timestamp(0) }
    }

    #[test]
    fn each_bound_has_one_event_in_a_period() {
        let budget = budget();
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

    #[test]
    fn charges_that_come_late_count_for_the_day_before() {
        let budget = budget();
        let at = |day: i64, seconds: i64| Timestamp(day * DAY_MS + seconds * 1000);
        let look = |budget: &Budget, now, last| periods(budget, now, last);
        let (today, both) = (vec![(7, 8)], vec![(6, 7), (7, 8)]);
        assert_eq!(look(&budget, at(7, 5), Some(at(6, 86_395))), both);
        assert_eq!(look(&budget, at(7, 500), Some(at(7, 495))), both);
        assert_eq!(look(&budget, at(7, 700), Some(at(7, 695))), today);
        assert_eq!(look(&budget, at(7, 80_000), None), both, "the process was away");
        let new = Budget { set_at: at(7, 1), ..budget.clone() };
        assert_eq!(look(&new, at(7, 5), None), today);
        let monthly = BudgetOf { period: BudgetPeriod::Month, ..budget.of.clone() };
        let monthly = Budget { of: monthly, ..budget };
        // From 1970-02-08, a process that starts does not look at January.
        assert_eq!(look(&monthly, at(38, 5), None), [(31, 59)]);
    }
}
