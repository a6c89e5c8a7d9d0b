//! [`Throttle`]: limits how often something happens per address or key.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Most keys in memory.
const KEYS_MAX: usize = 16_384;
/// Shortest time between two removals of keys that need not be in memory.
const SWEEP_WAIT: Duration = Duration::from_millis(100);

/// Counts by key: each key has `burst` tries and regains one every `refill`. The map holds the time when a
/// key has all its tries again.
pub(crate) struct Throttle<K> {
    burst: u32,
    refill: Duration,
    times: Mutex<Times<K>>,
}

/// What is left of a key's tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Left {
    /// Tries that the key has when all are back.
    pub most: u32,
    /// Tries that it has now.
    pub tries: u32,
    /// Time until it has all of them.
    pub full_in: Duration,
}

struct Times<K> {
    full_at: HashMap<K, Instant>,
    swept: Option<Instant>,
}

impl<K: Eq + Hash> Throttle<K> {
    /// Allows `burst` tries at once and one more every `refill`.
    pub fn new(burst: u32, refill: Duration) -> Self {
        let times = Mutex::new(Times { full_at: HashMap::new(), swept: None });
        Self { burst, refill, times }
    }

    /// Allows this many tries per second, and those of some seconds at once.
    pub fn per_second(rate: u32, seconds: u32) -> Self {
        Self::new(rate.saturating_mul(seconds), Duration::from_secs(1) / rate.max(1))
    }

    /// Counts a try, or returns how long to wait for the next one.
    pub fn admit(&self, key: K, now: Instant) -> Result<(), Duration> {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let Times { full_at, swept } = &mut *times;
        if full_at.len() >= KEYS_MAX && swept.is_none_or(|at| now >= at + SWEEP_WAIT) {
            full_at.retain(|_, at| *at > now);
            *swept = Some(now);
        }
        // Each try moves the time of the full count further away.
        let at = full_at.get(&key).copied().unwrap_or(now).max(now) + self.refill;
        let wait = at.saturating_duration_since(now + self.refill * self.burst);
        if !wait.is_zero() {
            return Err(wait);
        }
        // While the map is full, new keys are neither stored nor limited.
        if full_at.len() < KEYS_MAX || full_at.contains_key(&key) {
            full_at.insert(key, at);
        }
        Ok(())
    }

    /// Returns what is left of a key's tries.
    pub fn left(&self, key: &K, now: Instant) -> Left {
        let times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        let full_at = times.full_at.get(key).copied().unwrap_or(now);
        let full_in = full_at.saturating_duration_since(now);
        let used = full_in.as_nanos().div_ceil(self.refill.as_nanos().max(1));
        let tries = self.burst.saturating_sub(u32::try_from(used).unwrap_or(u32::MAX));
        Left { most: self.burst, tries, full_in }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn address_regains_its_tries_over_time() {
        let (burst, refill) = (20, Duration::from_secs(3));
        let (throttle, now) = (Throttle::new(burst, refill), Instant::now());
        let (one, two) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        for _ in 0..burst {
            assert_eq!(throttle.admit(one, now), Ok(()));
        }
        assert_eq!(throttle.admit(one, now), Err(refill));
        let left = Left { most: burst, tries: 0, full_in: refill * burst };
        assert_eq!(throttle.left(&one, now), left);
        let left = Left { tries: 1, full_in: refill * (burst - 1), ..left };
        assert_eq!(throttle.left(&one, now + refill), left);
        let left = Left { tries: burst, full_in: Duration::ZERO, ..left };
        assert_eq!(throttle.left(&two, now), left);
        assert_eq!(throttle.admit(two, now), Ok(()), "another address is not limited");
        assert_eq!(throttle.admit(one, now + refill), Ok(()));
        assert_eq!(throttle.admit(one, now + refill), Err(refill));
    }

    #[test]
    fn memory_is_bounded() {
        let (throttle, now) = (Throttle::per_second(1, 1), Instant::now());
        let size = || throttle.times.lock().expect("no panic").full_at.len();
        for key in 0..KEYS_MAX + 100 {
            assert_eq!(throttle.admit(key, now), Ok(()));
        }
        assert_eq!(size(), KEYS_MAX);
        assert!(throttle.admit(0, now).is_err(), "known keys are still limited");
        assert_eq!(throttle.admit(0, now + Duration::from_secs(2)), Ok(()));
        assert_eq!(size(), 1);
    }
}
