//! How much waits, and how much may.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    time::Duration,
};

use super::{DispatchError, Entry};
use crate::job::{QueueName, Tenant};

/// Bounds of a queue's waiting entries. Delivered ones are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BacklogLimit {
    /// Entries that may wait; as many again may be delayed.
    pub entries: usize,
    /// Tokens that they may be expected to take.
    pub tokens: u64,
}

impl Default for BacklogLimit {
    /// Some 600 MB of Redis's memory.
    fn default() -> Self {
        Self { entries: 2_000_000, tokens: 10_000_000_000 }
    }
}

impl BacklogLimit {
    /// What a script's refusal means: which bound, and when to come back.
    pub(crate) fn busy(self, queue: &QueueName, which: u8, retry_ms: u64) -> DispatchError {
        let limit = match which {
            1 => Limit::Entries(self.entries),
            _ => Limit::Tokens(self.tokens),
        };
        let retry_after = Duration::from_millis(retry_ms);
        DispatchError::Busy { queue: queue.clone(), limit, retry_after }
    }
}

/// The bound that an enqueue would have passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// So many entries.
    Entries(usize),
    /// Entries worth so many tokens.
    Tokens(u64),
    /// Entries of one tenant worth so many tokens.
    Tenant(u64),
    /// The dispatcher's memory.
    Memory,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entries(entries) => write!(f, "{entries} entries"),
            Self::Tokens(tokens) => write!(f, "{tokens} tokens"),
            Self::Tenant(tokens) => write!(f, "its tenant's {tokens} tokens"),
            Self::Memory => f.write_str("the dispatcher's memory"),
        }
    }
}

/// What operators allow to wait in a queue, in tokens, within the dispatcher's own bounds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Quotas {
    /// All tenants together; none: as much as the dispatcher takes.
    pub tokens: Option<u64>,
    /// Every tenant that has no quota of its own; none: no quota.
    pub each_tenant: Option<u64>,
    /// Tenants that have.
    pub tenants: HashMap<Tenant, u64>,
}

impl Quotas {
    /// What may wait of one tenant's.
    pub fn of(&self, tenant: &Tenant) -> Option<u64> {
        self.tenants.get(tenant).copied().or(self.each_tenant)
    }
}

/// How much is to be put into one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// The queue.
    pub queue: QueueName,
    /// Entries.
    pub entries: usize,
    /// Tokens that they are expected to take, by tenant.
    pub tokens: BTreeMap<Tenant, u64>,
    /// How much of each bound may be filled, in hundredths.
    pub percent: u8,
}

/// What [`Demand::leaving_room`] may fill of each bound, in hundredths.
const PATIENT_PERCENT: u8 = 80;

impl Demand {
    /// What these entries ask of each of their queues.
    pub fn of(entries: &[Entry]) -> Vec<Self> {
        let mut demands: Vec<Self> = Vec::new();
        for entry in entries {
            let at = demands.iter().position(|demand| demand.queue == entry.queue);
            let at = at.unwrap_or_else(|| {
                let (queue, tokens) = (entry.queue.clone(), BTreeMap::new());
                demands.push(Self { queue, entries: 0, tokens, percent: 100 });
                demands.len() - 1
            });
            demands[at].entries += 1;
            match demands[at].tokens.get_mut(&entry.tenant) {
                Some(tokens) => *tokens += u64::from(entry.cost),
                None => {
                    demands[at].tokens.insert(entry.tenant.clone(), u64::from(entry.cost));
                }
            }
        }
        demands
    }

    /// The same of somebody with patience, as a batch: a fifth of each bound stays free for those who
    /// wait for their answers, who would else be refused as long as a batch is larger than its queue.
    #[must_use]
    pub fn leaving_room(self) -> Self {
        Self { percent: PATIENT_PERCENT, ..self }
    }

    /// What of a bound counts for this demand.
    pub(super) fn part_of(&self, bound: u64) -> u64 {
        (u128::from(bound) * u128::from(self.percent) / 100).try_into().unwrap_or(bound)
    }

    /// The same of a bound of entries.
    pub(super) fn entries_of(&self, bound: usize) -> usize {
        usize::try_from(self.part_of(bound as u64)).unwrap_or(bound)
    }
}

/// What waits in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Backlog {
    /// Entries ready for a consumer.
    pub entries: usize,
    /// Tokens that they are expected to take.
    pub tokens: u64,
    /// For how long the oldest of them has waited.
    pub oldest_ms: Option<u64>,
    /// Entries that are not due yet.
    pub delayed: usize,
    /// Tokens that consumers acknowledged per second lately; unknown until the first, and again
    /// after minutes without any.
    pub drain_rate: Option<f64>,
}

impl Backlog {
    /// How long an entry that arrives now will wait at the present rate.
    pub fn estimated_wait(&self) -> Option<Duration> {
        if self.entries == 0 {
            return Some(Duration::ZERO);
        }
        let rate = self.drain_rate.filter(|rate| *rate > 0.0)?;
        Duration::try_from_secs_f64(self.tokens as f64 / rate).ok()
    }
}
