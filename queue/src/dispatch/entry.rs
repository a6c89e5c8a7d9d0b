//! [`Entry`], [`Delivery`] and [`Pull`]: what goes into a dispatcher, what comes out, and how to ask for it.

use std::time::Duration;

use crate::{
    billing::Tier,
    job::{Job, JobId, Priority, QueueName, Tenant, Timestamp},
    prefix_key,
};

/// The part of an entry's time, at its end, in which its tenant's share grows: a quarter.
const NEAR_PART: i64 = 4;
/// How many times as large the share is at the deadline.
const NEAR_SHARE: f64 = 4.0;

/// A job as a dispatcher keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The job.
    pub id: JobId,
    /// Its queue.
    pub queue: QueueName,
    /// Its priority.
    pub priority: Priority,
    /// Its tenant.
    pub tenant: Tenant,
    /// Tokens it is expected to use, for fairness between tenants and for admission.
    pub cost: u32,
    /// Hash of the begin of the job's prompt; decides about the shard of its queue.
    pub shard_key: u16,
    /// Whether it goes before those of its tenant and priority that do not: a request of the tier `priority`.
    pub is_first: bool,
    /// The deadline of its job.
    pub expires_at: Option<Timestamp>,
}

impl Entry {
    /// Returns the tokens that count in its tenant's turns when the entry is served at `now`: its cost, which is divided by
    /// 1 to 4 in the last quarter of the time between its submission and its deadline. So the share of a tenant grows, up to
    /// four times, while its deadlines come near, and others keep theirs of the rest. `pull.lua` has the same formula.
    pub fn turn_tokens(&self, now: Timestamp) -> u64 {
        let cost = u64::from(self.cost);
        let Some(Timestamp(expires_at)) = self.expires_at else { return cost };
        let near = expires_at.saturating_sub(self.id.generated_at().0) / NEAR_PART;
        let begin = expires_at.saturating_sub(near);
        if near <= 0 || now.0 <= begin {
            return cost;
        }
        let passed = (now.0.saturating_sub(begin) as f64 / near as f64).min(1.0);
        (cost as f64 / (1.0 + (NEAR_SHARE - 1.0) * passed)) as u64
    }
}

/// An entry handed to a consumer until it is acknowledged or handed back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The job.
    pub id: JobId,
    /// Identifies this delivery to the dispatcher (a stream key and entry id).
    pub receipt: String,
    /// How often the entry was delivered, including this time. Not the number of attempts.
    pub deliveries: u32,
}

/// A request for entries.
#[derive(Debug, Clone)]
pub struct Pull<'a> {
    /// The queue to take from.
    pub queue: &'a QueueName,
    /// Name of the process incarnation.
    pub consumer: &'a str,
    /// Maximum number of entries to take.
    pub max: usize,
    /// Longest wait for the first entry.
    pub wait: Duration,
    /// The only priority to take, without a wait; `None` for all priorities.
    pub only: Option<Priority>,
}

impl Job {
    /// Returns the entry for a dispatcher.
    pub fn entry(&self) -> Entry {
        Entry {
            id: self.id,
            queue: self.queue.clone(),
            priority: self.priority,
            tenant: self.tenant.clone(),
            cost: self.cost(),
            shard_key: prefix_key::shard(&self.prompt),
            is_first: self.billing.tier == Tier::Priority,
            expires_at: self.expires_at,
        }
    }

    /// Returns the entries of jobs that arrived together. Those with prompts that begin alike follow each other.
    pub fn entries<'a>(jobs: impl IntoIterator<Item = &'a Self>) -> Vec<Entry> {
        let mut jobs: Vec<&Self> = jobs.into_iter().collect();
        jobs.sort_by_cached_key(|job| prefix_key::order(&job.prompt));
        jobs.into_iter().map(Self::entry).collect()
    }
}
