//! [`Lane`]: the entries of one priority, in turns of their tenants.
//!
//! The tenant that was served the fewest tokens is next: a deficit round robin without a quantum, fair to within one entry.
//! A tenant that comes begins with what the least served one has. One that leaves keeps what it was served beyond
//! that as its debt, until the others have caught up. `pull.lua` and `queue.lua` do the same in Redis.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::{
    dispatch::Entry,
    job::{JobId, Tenant, Timestamp},
};

/// An entry that waits, or that is delivered.
#[derive(Debug)]
pub(super) struct Waiting {
    pub entry: Entry,
    pub deliveries: u32,
}

/// Where among its tenant's entries an entry is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Before all others.
    Returned,
    /// After those that were handed back and those that are first ([`Entry::is_first`]), in order of age.
    Requeued,
    /// At the end, or among those that are first.
    Fresh,
}

/// Entries and their tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Count {
    pub entries: u64,
    pub tokens: u64,
}

impl Count {
    fn add(&mut self, entry: &Entry) {
        self.entries += 1;
        self.tokens += u64::from(entry.cost);
    }

    fn remove(&mut self, entry: &Entry) {
        self.entries = self.entries.saturating_sub(1);
        self.tokens = self.tokens.saturating_sub(u64::from(entry.cost));
    }
}

/// What waits of one tenant.
#[derive(Debug, Default)]
struct OfTenant {
    /// Handed back, in their old order.
    returned: VecDeque<Waiting>,
    /// Those that are first, then requeued ones, each in order of age.
    front: BTreeMap<(bool, JobId), Waiting>,
    fresh: VecDeque<Waiting>,
    all: Count,
    /// Tokens that it was served so far.
    served: u64,
}

impl OfTenant {
    fn pop(&mut self) -> Option<Waiting> {
        let returned = self.returned.pop_front();
        let front = || self.front.pop_first().map(|(_, waiting)| waiting);
        let waiting = returned.or_else(front).or_else(|| self.fresh.pop_front())?;
        self.all.remove(&waiting.entry);
        Some(waiting)
    }
}

/// The entries of one priority.
#[derive(Debug, Default)]
pub(super) struct Lane {
    tenants: HashMap<Tenant, OfTenant>,
    /// Tenants with waiting entries, by tokens that were served so far.
    turns: BTreeSet<(u64, Tenant)>,
    /// Tenants without waiting entries that were served more than others, by tokens that were served so far.
    owed: BTreeSet<(u64, Tenant)>,
    debts: HashMap<Tenant, u64>,
    all: Count,
}

impl Lane {
    /// Returns what waits.
    pub fn count(&self) -> Count {
        self.all
    }

    /// Returns what waits of a tenant.
    pub fn count_of(&self, tenant: &Tenant) -> Count {
        self.tenants.get(tenant).map_or_else(Count::default, |of_tenant| of_tenant.all)
    }

    /// Returns the number of tenants with waiting entries.
    pub fn tenants(&self) -> usize {
        self.tenants.len()
    }

    pub fn push(&mut self, waiting: Waiting, place: Place) {
        let Entry { id, tenant, is_first, .. } = &waiting.entry;
        let (id, is_first) = (*id, *is_first);
        if !self.tenants.contains_key(tenant) {
            let least = self.turns.first().map_or(0, |(served, _)| *served);
            let debt = self.debts.remove(tenant);
            if let Some(debt) = debt {
                self.owed.remove(&(debt, tenant.clone()));
            }
            let served = least.max(debt.unwrap_or(0));
            self.turns.insert((served, tenant.clone()));
            self.tenants.insert(tenant.clone(), OfTenant { served, ..OfTenant::default() });
        }
        let of_tenant = self.tenants.entry(tenant.clone()).or_default();
        self.all.add(&waiting.entry);
        of_tenant.all.add(&waiting.entry);
        match place {
            Place::Returned => of_tenant.returned.push_front(waiting),
            Place::Fresh if !is_first => of_tenant.fresh.push_back(waiting),
            Place::Fresh | Place::Requeued => {
                of_tenant.front.insert((!is_first, id), waiting);
            }
        }
    }

    /// Takes the next entry, and counts its tokens at this time in the turns of its tenant.
    pub fn pop(&mut self, now: Timestamp) -> Option<Waiting> {
        let (_, tenant) = self.turns.pop_first()?;
        let of_tenant = self.tenants.get_mut(&tenant)?;
        let waiting = of_tenant.pop()?;
        self.all.remove(&waiting.entry);
        // At least one token, or entries without cost would always be served first.
        of_tenant.served = of_tenant.served.saturating_add(waiting.entry.turn_tokens(now).max(1));
        let (served, is_empty) = (of_tenant.served, of_tenant.all.entries == 0);
        if is_empty {
            self.tenants.remove(&tenant);
            self.leave(tenant, served);
        } else {
            self.turns.insert((served, tenant));
        }
        Some(waiting)
    }

    /// Keeps the debt of a tenant without entries, and forgets those that others have caught up with.
    fn leave(&mut self, tenant: Tenant, served: u64) {
        let Some(least) = self.turns.first().map(|(served, _)| *served) else {
            self.owed.clear();
            self.debts.clear();
            return;
        };
        self.owed.insert((served, tenant.clone()));
        self.debts.insert(tenant, served);
        while self.owed.first().is_some_and(|(served, _)| *served <= least) {
            if let Some((_, tenant)) = self.owed.pop_first() {
                self.debts.remove(&tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Priority, QueueName};

    /// Entries of `cost` tokens that a tenant submitted at time 0.
    fn entry(tenant: &str, number: u32, cost: u32, expires_at: Option<i64>) -> Waiting {
        let entry = Entry {
            id: uuid::Uuid::from_u128(u128::from(number) + 1).into(),
            queue: QueueName { model: "m".to_owned(), format: "i2_s".to_owned() },
            priority: Priority::Normal,
            tenant: Tenant(tenant.to_owned()),
            cost,
            shard_key: 0,
            is_first: false,
            expires_at: expires_at.map(Timestamp),
        };
        Waiting { entry, deliveries: 0 }
    }

    /// Serves entries of tenants that always have some, from one time to another, 100 tokens a millisecond. Returns the tokens
    /// of each.
    fn serve(lane: &mut Lane, expires_at: Option<i64>, times: std::ops::Range<i64>) -> [u64; 3] {
        let (mut served, mut clock, mut number) = ([0; 3], times.start as f64, 0);
        while (clock as i64) < times.end {
            for (tenant, cost) in [("due", 32), ("b", 10), ("c", 90)] {
                // One that is served waits with another one, so that its tenant stays.
                while lane.count_of(&Tenant(tenant.to_owned())).entries < 2 {
                    let expires_at = expires_at.filter(|_| tenant == "due");
                    lane.push(entry(tenant, number, cost, expires_at), Place::Fresh);
                    number += 1;
                }
            }
            let taken = lane.pop(Timestamp(clock as i64)).expect("entries wait").entry;
            let index = ["due", "b", "c"].iter().position(|name| **name == *taken.tenant.0);
            served[index.expect("one of them")] += u64::from(taken.cost);
            clock += f64::from(taken.cost) / 100.0;
        }
        served
    }

    fn shares(served: [u64; 3]) -> [f64; 3] {
        let all = served.iter().sum::<u64>() as f64;
        served.map(|tokens| tokens as f64 / all)
    }

    #[test]
    fn a_share_rises_toward_the_deadline_and_others_keep_equal_parts_of_the_rest() {
        const DEADLINE: i64 = 100_000;
        let mut lane = Lane::default();
        let close = |found: [f64; 3], expected: [f64; 3]| {
            let all = found.iter().zip(expected);
            assert!(all.into_iter().all(|(a, b)| (a - b).abs() < 0.01), "{found:?}, {expected:?}");
        };
        // A quarter of the time before the deadline nothing has changed.
        close(shares(serve(&mut lane, Some(DEADLINE), 0..75_000)), [1.0 / 3.0; 3]);
        // The tokens of an entry count a half a third of the way.
        let third = shares(serve(&mut lane, Some(DEADLINE), 83_000..83_700));
        close(third, [0.5, 0.25, 0.25]);
        // At the deadline, and after it, a quarter.
        for times in [99_500..100_000, 100_000..101_000] {
            close(
                shares(serve(&mut lane, Some(DEADLINE), times)),
                [4.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0],
            );
        }
        // Work that comes later has no debt, and no credit.
        while lane.pop(Timestamp(0)).is_some() {}
        close(shares(serve(&mut lane, None, 0..10_000)), [1.0 / 3.0; 3]);
    }

    #[test]
    fn a_batch_that_equal_turns_would_fail_ends_in_time() {
        // It needs 38 % of all tokens until its deadline, which is more than a third.
        const DEADLINE: i64 = 100_000;
        let needed = 100 * DEADLINE as u64 * 38 / 100;
        let with_deadline = serve(&mut Lane::default(), Some(DEADLINE), 0..DEADLINE)[0];
        let without = serve(&mut Lane::default(), None, 0..DEADLINE)[0];
        assert!(without < needed && with_deadline >= needed, "{without}, {with_deadline}");
    }

    #[test]
    fn a_tenant_that_leaves_keeps_its_debt_until_others_have_caught_up() {
        let mut lane = Lane::default();
        let tenant_of = |waiting: Option<Waiting>| waiting.map(|waiting| waiting.entry.tenant.0);
        lane.push(entry("large", 0, 100, None), Place::Fresh);
        for number in 1..=30 {
            lane.push(entry("small", number, 10, None), Place::Fresh);
        }
        assert_eq!(tenant_of(lane.pop(Timestamp(0))).as_deref(), Some("large"));
        for round in 0..2 {
            // It is back at once, and waits until the other was served as much.
            lane.push(entry("large", 100 + round, 100, None), Place::Fresh);
            for _ in 0..10 {
                assert_eq!(tenant_of(lane.pop(Timestamp(0))).as_deref(), Some("small"), "{round}");
            }
            assert_eq!(tenant_of(lane.pop(Timestamp(0))).as_deref(), Some("large"), "{round}");
        }
        assert_eq!((lane.tenants(), lane.count().entries, lane.owed.len()), (1, 10, 1));
        while lane.pop(Timestamp(0)).is_some() {}
        assert!(lane.owed.is_empty() && lane.debts.is_empty() && lane.count().tokens == 0);
    }
}
