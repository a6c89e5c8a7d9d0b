//! [`Throttle`]: limits login attempts per address.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Attempts that an address may make at once, and the time until it may make one more.
const BURST: u32 = 20;
const REFILL: Duration = Duration::from_secs(3);
/// Most addresses in memory.
const ADDRESSES_MAX: usize = 4096;

/// Login attempts by address: each address has [`BURST`] attempts and regains one every [`REFILL`]. The map
/// holds the time when an address has all its attempts again.
#[derive(Default)]
pub(crate) struct Throttle(Mutex<HashMap<IpAddr, Instant>>);

impl Throttle {
    /// Counts an attempt, or returns how long to wait for the next one.
    pub fn admit(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut full_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if full_at.len() >= ADDRESSES_MAX {
            full_at.retain(|_, at| *at > now);
        }
        // Each attempt moves the time of the full count further away.
        let at = full_at.get(&address).copied().unwrap_or(now).max(now) + REFILL;
        let wait = at.saturating_duration_since(now + REFILL * BURST);
        if !wait.is_zero() {
            return Err(wait);
        }
        // While the map is full, new addresses are neither stored nor limited.
        if full_at.len() < ADDRESSES_MAX || full_at.contains_key(&address) {
            full_at.insert(address, at);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_regains_its_attempts_over_time() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let (one, two) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        for _ in 0..BURST {
            assert_eq!(throttle.admit(one, now), Ok(()));
        }
        assert_eq!(throttle.admit(one, now), Err(REFILL));
        assert_eq!(throttle.admit(two, now), Ok(()), "another address is not limited");
        assert_eq!(throttle.admit(one, now + REFILL), Ok(()));
        assert_eq!(throttle.admit(one, now + REFILL), Err(REFILL));
    }
}
