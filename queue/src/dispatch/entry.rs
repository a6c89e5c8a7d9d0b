//! [`Entry`], [`Delivery`] and [`Pull`]: what goes into a dispatcher, what comes out, and how to ask for it.

use std::time::Duration;

use crate::{
    job::{Job, JobId, Priority, QueueName, Tenant},
    prefix_key,
};

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
        }
    }

    /// Returns the entries of jobs that arrived together. Those with prompts that begin alike follow each other.
    pub fn entries<'a>(jobs: impl IntoIterator<Item = &'a Self>) -> Vec<Entry> {
        let mut jobs: Vec<&Self> = jobs.into_iter().collect();
        jobs.sort_by_cached_key(|job| prefix_key::order(&job.prompt));
        jobs.into_iter().map(Self::entry).collect()
    }
}
