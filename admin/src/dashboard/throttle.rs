//! How often somebody may try to log in.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Attempts at once from one address, and until there is one more.
const BURST: u32 = 20;
const REFILL: Duration = Duration::from_secs(3);
/// Addresses that are remembered.
const ADDRESSES_MAX: usize = 4096;

/// Attempts by address: each has [`BURST`], and gets one back every [`REFILL`].
#[derive(Default)]
pub(super) struct Throttle(Mutex<HashMap<IpAddr, Instant>>);

impl Throttle {
    /// Takes an attempt, or says when there is one.
    ///
    /// # Errors
    /// How long to wait.
    pub fn admit(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let mut full_at = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if full_at.len() >= ADDRESSES_MAX {
            full_at.retain(|_, at| *at > now);
        }
        // Kept is when an address has all its attempts again: each takes that further away.
        let at = full_at.get(&address).copied().unwrap_or(now).max(now) + REFILL;
        let wait = at.saturating_duration_since(now + REFILL * BURST);
        if !wait.is_zero() {
            return Err(wait);
        }
        // Where everybody tries at once nobody new is remembered, nor held up.
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
    fn an_address_has_so_many_attempts_and_gets_them_back() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let (one, two) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        for _ in 0..BURST {
            assert_eq!(throttle.admit(one, now), Ok(()));
        }
        assert_eq!(throttle.admit(one, now), Err(REFILL));
        assert_eq!(throttle.admit(two, now), Ok(()), "another is not held up");
        assert_eq!(throttle.admit(one, now + REFILL), Ok(()));
        assert_eq!(throttle.admit(one, now + REFILL), Err(REFILL));
    }
}
