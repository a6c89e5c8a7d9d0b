//! The backlog of a queue, and its limits.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    time::Duration,
};

use super::Entry;
use crate::job::{Priority, QueueName, Tenant};

/// Limits of a queue's waiting entries. Delivered entries are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BacklogLimit {
    /// Maximum number of waiting entries; the same number may be delayed in addition.
    pub entries: usize,
    /// Maximum number of tokens that they are expected to use.
    pub tokens: u64,
}

impl Default for BacklogLimit {
    /// About 600 MB of memory in Redis.
    fn default() -> Self {
        Self { entries: 2_000_000, tokens: 10_000_000_000 }
    }
}

/// The limit that an enqueue would have exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// Number of entries.
    Entries(usize),
    /// Tokens of all entries.
    Tokens(u64),
    /// Tokens of one tenant's entries.
    Tenant(u64),
    /// Memory of the dispatcher.
    Memory,
    /// The job's deadline, which leaves this time to wait.
    Deadline(Duration),
    /// The longest wait that the queue's operator allows.
    MaxWait(Duration),
}

impl Limit {
    /// Returns its name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Entries(_) => "queue_entries",
            Self::Tokens(_) => "queue_tokens",
            Self::Tenant(_) => "tenant_tokens",
            Self::Memory => "dispatcher_memory",
            Self::Deadline(_) => "deadline",
            Self::MaxWait(_) => "max_wait",
        }
    }

    /// Returns why there is no room, as far as the limit alone says.
    pub const fn cause(self) -> Cause {
        match self {
            Self::Memory => Cause::Memory,
            _ => Cause::Backlog,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entries(entries) => write!(f, "{entries} entries"),
            Self::Tokens(tokens) => write!(f, "{tokens} tokens"),
            Self::Tenant(tokens) => write!(f, "its tenant's {tokens} tokens"),
            Self::Memory => f.write_str("the dispatcher's memory"),
            Self::Deadline(left) => {
                write!(f, "a deadline that leaves {:.1} s to wait", left.as_secs_f64())
            }
            Self::MaxWait(longest) => write!(f, "a wait of {:.1} s", longest.as_secs_f64()),
        }
    }
}

/// Why a queue takes no more jobs now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// Its workers on CPUs have no free slots.
    Cpu,
    /// Its workers on GPUs have no free slots.
    Gpu,
    /// Memory: the KV blocks of its workers, or Redis, is full.
    Memory,
    /// A limit of what may wait is reached.
    Backlog,
    /// No live worker serves it.
    NoWorker,
}

impl Cause {
    /// Returns its name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
            Self::Memory => "memory",
            Self::Backlog => "backlog",
            Self::NoWorker => "no_worker",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "its CPUs are busy",
            Self::Gpu => "its GPUs are busy",
            Self::Memory => "memory is full",
            Self::Backlog => "enough waits already",
            Self::NoWorker => "no worker serves it",
        })
    }
}

/// Limits set by operators: tokens that may wait in a queue, within the dispatcher's own limits, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Quotas {
    /// Quota of all tenants together; `None`: only the dispatcher's limit applies.
    pub tokens: Option<u64>,
    /// Quota of each tenant without a quota of its own; `None`: no quota.
    pub each_tenant: Option<u64>,
    /// Quotas of single tenants.
    pub tenants: HashMap<Tenant, u64>,
    /// Longest predicted wait of a new job; `None`: only its own deadline applies.
    pub max_wait: Option<Duration>,
}

impl Quotas {
    /// Returns the quota of a tenant.
    pub fn of_tenant(&self, tenant: &Tenant) -> Option<u64> {
        self.tenants.get(tenant).copied().or(self.each_tenant)
    }
}

/// What a submission adds to one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// The queue.
    pub queue: QueueName,
    /// Number of entries.
    pub entries: usize,
    /// Tokens that they are expected to use, by tenant.
    pub tokens: BTreeMap<Tenant, u64>,
    /// Percentage of each limit that may be filled.
    pub percent: u8,
}

/// Percentage of each limit that [`Demand::leaving_room`] may fill.
const PATIENT_PERCENT: u8 = 80;

impl Demand {
    /// Returns the demands of these entries, one per queue.
    pub fn by_queue(entries: &[Entry]) -> Vec<Self> {
        let mut demands: Vec<Self> = Vec::new();
        for entry in entries {
            let at = demands.iter().position(|demand| demand.queue == entry.queue);
            let at = at.unwrap_or_else(|| {
                let (queue, tokens) = (entry.queue.clone(), BTreeMap::new());
                demands.push(Self { queue, entries: 0, tokens, percent: 100 });
                demands.len() - 1
            });
            demands[at].entries += 1;
            let tokens = demands[at].tokens.entry(entry.tenant.clone()).or_default();
            *tokens += u64::from(entry.cost);
        }
        demands
    }

    /// Returns the demand of a batch: it leaves a fifth of each limit free for interactive requests,
    /// which a batch larger than the queue would otherwise block.
    #[must_use]
    pub fn leaving_room(self) -> Self {
        Self { percent: PATIENT_PERCENT, ..self }
    }

    /// Returns the tenant and its tokens, if there is only one.
    pub(super) fn only_tenant(&self) -> Option<(&Tenant, u64)> {
        let mut tenants = self.tokens.iter().map(|(tenant, tokens)| (tenant, *tokens));
        tenants.next().filter(|_| tenants.next().is_none())
    }

    /// Returns whether this is the demand of a batch.
    pub fn is_patient(&self) -> bool {
        self.percent < 100
    }

    /// Returns the part of a longest wait that applies to this demand.
    pub fn part_of_wait(&self, longest: Duration) -> Duration {
        longest * u32::from(self.percent) / 100
    }

    /// Returns the part of a limit that applies to this demand.
    pub(super) fn part_of(&self, bound: u64) -> u64 {
        (u128::from(bound) * u128::from(self.percent) / 100).try_into().unwrap_or(bound)
    }

    /// Returns the part of a limit on entries.
    pub(super) fn entries_of(&self, bound: usize) -> usize {
        usize::try_from(self.part_of(bound as u64)).unwrap_or(bound)
    }
}

/// Queued jobs of a store that its dispatcher lacks; the default is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Missing {
    /// Number of jobs.
    pub entries: u64,
    /// Tokens that they are expected to use.
    pub tokens: u64,
    /// Whether the refill has not reached the end yet, so that there may be more.
    pub refilling: bool,
}

/// The entries that wait in a queue, and the rate at which it is drained.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Backlog {
    /// Entries ready for a consumer.
    pub entries: usize,
    /// Tokens that they are expected to use.
    pub tokens: u64,
    /// Age of the oldest entry.
    pub oldest_ms: Option<u64>,
    /// Entries that are not due yet.
    pub delayed: usize,
    /// Recently acknowledged tokens per second; unknown before the first acknowledgement and after
    /// minutes without any.
    pub drain_rate: Option<f64>,
}

impl Backlog {
    /// Estimated wait of an entry that arrives now, at the current rate.
    pub fn estimated_wait(&self) -> Option<Duration> {
        if self.entries == 0 {
            return Some(Duration::ZERO);
        }
        let rate = self.drain_rate.filter(|rate| *rate > 0.0)?;
        Duration::try_from_secs_f64(self.tokens as f64 / rate).ok()
    }
}

/// What waits of one priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PriorityBacklog {
    /// Entries.
    pub entries: u64,
    /// Tokens that they are expected to use.
    pub tokens: u64,
    /// Tokens of these that are served before a new entry of the demand's tenant. Fewer than all of them where
    /// tenants share a priority fairly and another tenant has more waiting.
    pub before: u64,
}

/// The turns that a demand of a single tenant takes in a priority.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns {
    /// Tenants with waiting entries.
    pub tenants: u64,
    /// Waiting tokens of the demand's tenant.
    pub waiting: u64,
    /// Tokens that it asks for.
    pub asked: u64,
}

impl PriorityBacklog {
    /// What waits of a priority, before a demand that takes these turns. Demands of several tenants wait for all of it.
    pub(super) fn of(entries: u64, tokens: u64, turns: Option<Turns>) -> Self {
        let mut part = Self { entries, tokens, before: tokens };
        if let Some(Turns { tenants, waiting, asked }) = turns {
            // Its turn comes when each of the others was served as much as it, or one entry.
            let each = waiting as f64 + part.mean().max(asked as f64);
            part.before = tokens.min((tenants as f64 * each) as u64);
        }
        part
    }

    /// Mean number of tokens of an entry.
    fn mean(&self) -> f64 {
        self.tokens as f64 / self.entries.max(1) as f64
    }
}

/// What waits in a queue, by priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BacklogByPriority {
    /// The parts, in the order of [`Priority::ALL`].
    pub parts: [PriorityBacklog; 3],
}

impl BacklogByPriority {
    /// Returns the part of a priority.
    pub fn part_mut(&mut self, priority: Priority) -> &mut PriorityBacklog {
        &mut self.parts[priority as usize]
    }

    /// Returns the entries of all priorities.
    pub fn entries(&self) -> u64 {
        self.parts.iter().map(|part| part.entries).sum()
    }

    /// Adds what waits in another shard of the queue.
    pub(super) fn merge(&mut self, other: &Self) {
        for (part, other) in self.parts.iter_mut().zip(&other.parts) {
            part.entries += other.entries;
            part.tokens += other.tokens;
            part.before += other.before;
        }
    }

    /// Returns the tokens that are served before a new entry of this priority: all of the higher ones, what is
    /// before it in its own, and of the lower ones the share that their weight gives them meanwhile.
    pub fn tokens_before(&self, priority: Priority) -> f64 {
        let own = self.parts[priority as usize];
        // Entries of its own priority that go first, with the new one.
        let turns = own.before as f64 / own.mean().max(1.0) + 1.0;
        let tokens = Priority::ALL.into_iter().zip(&self.parts).map(|(other, part)| {
            if other == priority {
                return part.before as f64;
            }
            if other < priority {
                return part.tokens as f64;
            }
            let share = f64::from(other.weight()) / f64::from(priority.weight());
            // Less than a whole turn is none.
            (turns * share).floor().min(part.entries as f64) * part.mean()
        });
        tokens.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(entries: u64, tokens: u64) -> PriorityBacklog {
        PriorityBacklog { entries, tokens, before: tokens }
    }

    fn check(parts: [(u64, u64); 3], expected: [u64; 3]) {
        let backlog =
            BacklogByPriority { parts: parts.map(|(entries, tokens)| part(entries, tokens)) };
        for (priority, expected) in Priority::ALL.into_iter().zip(expected) {
            let tokens = backlog.tokens_before(priority);
            assert!(
                (tokens - expected as f64).abs() < 0.01,
                "{priority:?}: {tokens} of {backlog:?}"
            );
        }
    }

    #[test]
    fn higher_priorities_go_first_and_lower_ones_get_their_share() {
        check([(0, 0), (0, 0), (0, 0)], [0, 0, 0]);
        check([(3, 300), (0, 0), (0, 0)], [300, 300, 300]);
        // One entry of priority normal for four of priority high, one of low for sixteen.
        check([(15, 1500), (100, 1000), (100, 5000)], [1500 + 40 + 50, 1500 + 1000 + 1250, 7500]);
        check([(0, 0), (100, 1000), (2, 5000)], [0, 1000 + 5000, 6000]);
        check([(2, 200), (100, 1000), (100, 5000)], [200, 200 + 1000 + 1250, 6200]);
    }

    #[test]
    fn others_of_a_fair_priority_go_first_only_in_part() {
        let mut backlog = BacklogByPriority::default();
        *backlog.part_mut(Priority::Normal) =
            PriorityBacklog { entries: 1000, tokens: 100_000, before: 300 };
        *backlog.part_mut(Priority::Low) = part(10, 50);
        assert!((backlog.tokens_before(Priority::Normal) - 305.0).abs() < 0.01);
    }
}
