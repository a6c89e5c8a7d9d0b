//! When leases are renewed.

use std::time::{Duration, Instant};

use tritmill_queue::ClaimRef;

/// When to renew, and the renewal without an answer.
#[derive(Debug)]
pub(super) struct Renewals {
    pub period: Duration,
    pub due_at: Instant,
    /// The claims that are being renewed, in ascending order, and the time of the call.
    pub call: Option<(Vec<ClaimRef>, Instant)>,
}

impl Renewals {
    /// Leases start with their claims, so the first renewal is due a period from `now`.
    pub fn new(lease: Duration, now: Instant) -> Self {
        let period = period(lease);
        Self { period, due_at: now + period, call: None }
    }

    /// Returns the time of the next renewal.
    pub fn due_at(&self) -> Instant {
        self.due_at
    }
}

/// Returns the time between two renewals; an answer is useless after it.
pub(in crate::worker) fn period(lease: Duration) -> Duration {
    (lease / 3).max(Duration::from_millis(1))
}
