//! How long to wait after something failed.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::time::Instant;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(5);

/// Waits that double with each failure in a row, with a jitter so that workers do not come back
/// together.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// Notes a failure.
    pub fn failed(&mut self) {
        let doubled = FIRST.saturating_mul(1 << self.failures.min(10)).min(LONGEST);
        self.failures += 1;
        // A fresh hasher is keyed at random: as good a die as is needed here.
        let die = RandomState::new().hash_one(self.failures) % 1024;
        #[expect(clippy::cast_precision_loss, reason = "below 1024")]
        let jitter = 0.5 + die as f64 / 2048.0;
        self.until = Some(Instant::now() + doubled.mul_f64(jitter));
    }

    /// Notes a success.
    pub fn worked(&mut self) {
        *self = Self::default();
    }

    /// When to try again, if that is not now.
    pub fn until(&self) -> Option<Instant> {
        self.until.filter(|until| *until > Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_start_over_after_a_success() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.until(), None);
        let wait = |backoff: &mut Backoff| {
            let before = Instant::now();
            backoff.failed();
            backoff.until.expect("it waits") - before
        };
        let waits: Vec<Duration> = (0..20).map(|_| wait(&mut backoff)).collect();
        let slack = Duration::from_secs(1);
        assert!(waits[0] >= FIRST / 2 && waits[0] <= FIRST + slack);
        assert!(waits[19] >= LONGEST / 2);
        assert!(waits.iter().all(|wait| *wait <= LONGEST + slack));
        backoff.worked();
        assert_eq!(backoff.until(), None);
        assert!(wait(&mut backoff) <= FIRST + slack);
    }
}
