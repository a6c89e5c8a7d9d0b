//! The waiting entries of one queue: a lane for each priority, with counts, so that no submission reads them all.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::{
    dispatch::{BacklogByPriority, Entry, Missing, PriorityBacklog},
    job::{JobId, Priority, Tenant},
};

/// An entry that waits, or that is delivered.
#[derive(Debug)]
pub(super) struct Waiting {
    pub entry: Entry,
    pub deliveries: u32,
}

/// Where in its lane an entry is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Before all others.
    Returned,
    /// After those that were handed back, in order of age.
    Requeued,
    /// At the end.
    Fresh,
}

/// Entries and their tokens.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    entries: u64,
    tokens: u64,
}

/// The entries of one priority.
#[derive(Debug, Default)]
struct Lane {
    /// Handed back, in their old order.
    returned: VecDeque<Waiting>,
    /// Requeued, in order of age.
    front: BTreeMap<JobId, Waiting>,
    fresh: VecDeque<Waiting>,
    all: Count,
    by_tenant: HashMap<Tenant, Count>,
}

impl Lane {
    fn push(&mut self, waiting: Waiting, place: Place) {
        let Entry { id, tenant, cost, .. } = &waiting.entry;
        let of_tenant = self.by_tenant.entry(tenant.clone()).or_default();
        for count in [&mut self.all, of_tenant] {
            count.entries += 1;
            count.tokens += u64::from(*cost);
        }
        match place {
            Place::Returned => self.returned.push_front(waiting),
            Place::Requeued => drop(self.front.insert(*id, waiting)),
            Place::Fresh => self.fresh.push_back(waiting),
        }
    }

    fn pop(&mut self) -> Option<Waiting> {
        let returned = self.returned.pop_front();
        let front = || self.front.pop_first().map(|(_, waiting)| waiting);
        let waiting = returned.or_else(front).or_else(|| self.fresh.pop_front())?;
        let Entry { tenant, cost, .. } = &waiting.entry;
        let less = |count: &mut Count| {
            count.entries = count.entries.saturating_sub(1);
            count.tokens = count.tokens.saturating_sub(u64::from(*cost));
            count.entries
        };
        less(&mut self.all);
        if self.by_tenant.get_mut(tenant).map(less) == Some(0) {
            self.by_tenant.remove(tenant);
        }
        Some(waiting)
    }
}

/// One queue's priorities.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: [Lane; 3],
    /// Smooth weighted round robin credit per lane.
    credit: [i64; 3],
    /// What the store has in addition; `None` until the first report.
    pub missing: Option<Missing>,
}

impl Lanes {
    pub fn len(&self) -> usize {
        let entries: u64 = self.lanes.iter().map(|lane| lane.all.entries).sum();
        usize::try_from(entries).unwrap_or(usize::MAX)
    }

    /// Returns the number of entries that the store has in addition.
    pub fn missing_entries(&self) -> usize {
        self.missing.map_or(0, |missing| missing.entries.try_into().unwrap_or(usize::MAX))
    }

    /// Returns the waiting tokens, with those that the store has in addition.
    pub fn tokens(&self) -> u64 {
        let missing = self.missing.map_or(0, |missing| missing.tokens);
        self.lanes.iter().fold(missing, |sum, lane| sum.saturating_add(lane.all.tokens))
    }

    /// Returns the waiting tokens of a tenant.
    pub fn tokens_of(&self, tenant: &Tenant) -> u64 {
        self.lanes
            .iter()
            .filter_map(|lane| lane.by_tenant.get(tenant))
            .map(|count| count.tokens)
            .sum()
    }

    /// Returns what waits by priority. Tenants do not take turns here, so everything goes before a new entry.
    pub fn backlog(&self) -> BacklogByPriority {
        let part = |Lane { all: Count { entries, tokens }, .. }: &Lane| PriorityBacklog {
            entries: *entries,
            tokens: *tokens,
            before: *tokens,
        };
        let mut backlog =
            BacklogByPriority { parts: [0, 1, 2].map(|lane: usize| part(&self.lanes[lane])) };
        let missing = self.missing.unwrap_or_default();
        let lowest = backlog.part_mut(Priority::Low);
        lowest.entries = lowest.entries.saturating_add(missing.entries);
        lowest.tokens = lowest.tokens.saturating_add(missing.tokens);
        lowest.before = lowest.tokens;
        backlog
    }

    pub fn push(&mut self, waiting: Waiting, place: Place) {
        self.lanes[waiting.entry.priority as usize].push(waiting, place);
    }

    /// Takes the next entry, of one priority alone if it is given.
    pub fn pop(&mut self, only: Option<Priority>) -> Option<Waiting> {
        if let Some(only) = only {
            return self.lanes[only as usize].pop();
        }
        let mut total = 0;
        let mut best: Option<usize> = None;
        for (lane, priority) in Priority::ALL.into_iter().enumerate() {
            if self.lanes[lane].all.entries == 0 {
                self.credit[lane] = 0;
                continue;
            }
            let weight = i64::from(priority.weight());
            self.credit[lane] += weight;
            total += weight;
            if best.is_none_or(|best| self.credit[lane] > self.credit[best]) {
                best = Some(lane);
            }
        }
        let lane = best?;
        self.credit[lane] -= total;
        self.lanes[lane].pop()
    }
}
