//! The waiting entries of one queue: a lane for each priority.

use super::tenants::{Lane, Place, Waiting};
use crate::{
    dispatch::{BacklogByPriority, Demand, Missing, PriorityBacklog, backlog::Turns},
    job::{Priority, Tenant, Timestamp},
};

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
        let entries: u64 = self.lanes.iter().map(|lane| lane.count().entries).sum();
        usize::try_from(entries).unwrap_or(usize::MAX)
    }

    /// Returns the number of entries that the store has in addition.
    pub fn missing_entries(&self) -> usize {
        self.missing.map_or(0, |missing| missing.entries.try_into().unwrap_or(usize::MAX))
    }

    /// Returns the waiting tokens, with those that the store has in addition.
    pub fn tokens(&self) -> u64 {
        let missing = self.missing.map_or(0, |missing| missing.tokens);
        self.lanes.iter().fold(missing, |sum, lane| sum.saturating_add(lane.count().tokens))
    }

    /// Returns the waiting tokens of a tenant.
    pub fn tokens_of(&self, tenant: &Tenant) -> u64 {
        self.lanes.iter().map(|lane| lane.count_of(tenant).tokens).sum()
    }

    /// Returns what waits by priority, before a demand.
    pub fn backlog(&self, demand: &Demand) -> BacklogByPriority {
        let part = |lane: &Lane| {
            let of_demand = demand.only_tenant().map(|(tenant, tokens)| {
                let turns = lane.tenants() as u64;
                Turns { tenants: turns, waiting: lane.count_of(tenant).tokens, asked: tokens }
            });
            PriorityBacklog::of(lane.count().entries, lane.count().tokens, of_demand)
        };
        let mut backlog = BacklogByPriority { parts: self.lanes.each_ref().map(part) };
        let missing = self.missing.unwrap_or_default();
        let lowest = backlog.part_mut(Priority::Low);
        lowest.entries = lowest.entries.saturating_add(missing.entries);
        lowest.tokens = lowest.tokens.saturating_add(missing.tokens);
        lowest.before = lowest.before.saturating_add(missing.tokens);
        backlog
    }

    pub fn push(&mut self, waiting: Waiting, place: Place) {
        self.lanes[waiting.entry.priority as usize].push(waiting, place);
    }

    /// Takes the next entry, of one priority alone if it is given.
    pub fn pop(&mut self, only: Option<Priority>, now: Timestamp) -> Option<Waiting> {
        if let Some(only) = only {
            return self.lanes[only as usize].pop(now);
        }
        let mut total = 0;
        let mut best: Option<usize> = None;
        for (lane, priority) in Priority::ALL.into_iter().enumerate() {
            if self.lanes[lane].count().entries == 0 {
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
        self.lanes[lane].pop(now)
    }
}
