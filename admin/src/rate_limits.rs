//! [`RateLimiter`]: limits on callers: requests of strangers per second, requests of a key.
//!
//! A caller is a stranger until its key or session was found in the store. Strangers are limited by
//! address, before the store is asked. A key that was valid a moment ago passes this limit, so that
//! strangers cannot use up the limit of an address that they share with callers, such as that of a proxy.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Extension,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use tritmill_http::{Exchange, Metrics, NotAdmitted, Peer};
use uuid::Uuid;

use crate::{
    ApiError, App, dashboard::view, refusals::Limit, store::keys::KeyHash, throttle::Throttle,
};

/// Seconds of a rate that a caller may use at once.
const BURST_S: u32 = 5;
/// How long a secret counts as valid for the limit on strangers. The store is asked every time.
const KNOWN_FOR: Duration = Duration::from_secs(60);
/// Most secrets in memory.
const KNOWN_MAX: usize = 16_384;

/// Headers with the rate of a key's requests, named as OpenAI names them.
pub(crate) const RATE_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];

/// Limits on callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallerLimits {
    /// Requests per second of one address without a valid key.
    pub stranger_rate: u32,
    /// Requests of one key at once.
    pub requests_per_key: usize,
    /// Requests of one key per second; `None` is unlimited.
    pub key_rate: Option<u32>,
}

impl CallerLimits {
    /// Defaults for a service with this many connections.
    pub const fn of_connections(connections: usize) -> Self {
        Self { stranger_rate: 100, requests_per_key: connections / 4 * 3, key_rate: None }
    }
}

/// Counts requests of callers against their limits.
pub(crate) struct RateLimiter {
    limits: CallerLimits,
    metrics: Metrics,
    strangers: Throttle<IpAddr>,
    keys: Option<Throttle<Uuid>>,
    running: Arc<Mutex<HashMap<Uuid, usize>>>,
    known: Mutex<HashMap<KeyHash, Instant>>,
}

/// A running request of a key.
struct Running {
    key: Uuid,
    counts: Arc<Mutex<HashMap<Uuid, usize>>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

impl RateLimiter {
    pub fn new(limits: CallerLimits, metrics: Metrics) -> Self {
        Self {
            limits,
            metrics,
            strangers: Throttle::per_second(limits.stranger_rate, BURST_S),
            keys: limits.key_rate.map(|rate| Throttle::per_second(rate, BURST_S)),
            running: Arc::default(),
            known: Mutex::default(),
        }
    }

    /// Counts a request of a stranger.
    pub fn admit_stranger(&self, peer: Peer) -> Result<(), ApiError> {
        self.strangers.admit(peer.network(), Instant::now()).map_err(|wait| {
            self.metrics.refuse(tritmill_http::Limit::StrangerRate);
            let message = "too many requests without a valid API key from this address";
            ApiError::rate_limited(message, wait)
        })
    }

    /// Counts a request with a secret that was not looked up yet, unless it was valid a moment ago.
    pub fn admit_secret(&self, secret: &KeyHash, peer: Peer) -> Result<(), ApiError> {
        let now = Instant::now();
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(secret).copied();
        match known.is_some_and(|until| now < until) {
            true => Ok(()),
            false => self.admit_stranger(peer),
        }
    }

    /// Counts a request of a key that was found by this secret, until its response ends.
    pub fn admit(&self, secret: KeyHash, key: Uuid, exchange: &Exchange) -> Result<(), ApiError> {
        let now = Instant::now();
        self.remember(secret, now);
        if let Some(Err(wait)) = self.keys.as_ref().map(|keys| keys.admit(key, now)) {
            let message = "too many requests per second of this API key";
            return Err(ApiError::rate_limited(message, wait).by(Limit::KeyRate));
        }
        let running = self.run(key).ok_or_else(|| {
            let limit = self.limits.requests_per_key;
            ApiError::busy(format!(
                "this API key has {limit} requests running, the most it may have"
            ))
            .by(Limit::KeyRequests)
        })?;
        exchange.admit(running).map_err(|why| {
            let busy = ApiError::busy("the service has too many requests running: try again later");
            match why {
                NotAdmitted::Full => busy.by(Limit::Connections),
                // Its client gets no answer; the close was counted.
                NotAdmitted::Closed => busy,
            }
        })
    }

    /// Adds to a response how many requests a key may send at once, how many of them are left, and when all will
    /// be, if its rate is limited.
    pub fn describe(&self, key: Uuid, headers: &mut HeaderMap) {
        let Some(keys) = &self.keys else { return };
        let left = keys.left(&key, Instant::now());
        let texts = [left.most.to_string(), left.tries.to_string(), duration_text(left.full_in)];
        for (name, text) in RATE_HEADERS.into_iter().zip(texts) {
            let value = HeaderValue::try_from(text).expect("digits and units are visible ASCII");
            headers.insert(name, value);
        }
    }

    fn remember(&self, secret: KeyHash, now: Instant) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN_MAX && !known.contains_key(&secret) {
            known.retain(|_, until| now < *until);
        }
        if known.len() < KNOWN_MAX || known.contains_key(&secret) {
            known.insert(secret, now + KNOWN_FOR);
        }
    }

    /// Forgets a secret that is not valid any more.
    pub fn forget(&self, secret: &KeyHash) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(secret);
    }

    fn run(&self, key: Uuid) -> Option<Running> {
        let mut counts = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(key).or_default();
        // A limit above zero: an entry at the limit is one that is running.
        if *count >= self.limits.requests_per_key.max(1) {
            return None;
        }
        *count += 1;
        Some(Running { key, counts: Arc::clone(&self.running) })
    }
}

/// Writes a duration as OpenAI does: `20ms`, `1s`, `6m0s`. Rounds up.
fn duration_text(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    if ms < 1000 {
        return format!("{ms}ms");
    }
    match ms.div_ceil(1000) {
        seconds @ ..60 => format!("{seconds}s"),
        seconds => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

/// Passes a request of a stranger on, at a limited rate.
pub(crate) async fn limit_strangers(
    State((app, is_page)): State<(App, bool)>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    match app.rate_limiter.admit_stranger(peer) {
        Ok(()) => next.run(request).await,
        Err(error) if is_page => view::error(None, &error),
        Err(error) => error.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(stranger_rate: u32, requests_per_key: usize) -> RateLimiter {
        let limits = CallerLimits { stranger_rate, requests_per_key, key_rate: None };
        RateLimiter::new(limits, Metrics::default())
    }

    #[test]
    fn valid_secret_passes_where_strangers_are_limited() {
        let gate = gate(1, 9);
        let peer = Peer { ip: [10, 0, 0, 1].into(), is_secure: false };
        let (valid, other) = ([1; 32], [2; 32]);
        gate.remember(valid, Instant::now());
        for _ in 0..BURST_S {
            assert_eq!(gate.admit_secret(&other, peer), Ok(()));
        }
        let refused = gate.admit_secret(&other, peer).expect_err("over the rate");
        assert_eq!(refused.status().as_u16(), 429);
        assert_eq!(gate.admit_secret(&valid, peer), Ok(()));
        gate.forget(&valid);
        assert!(gate.admit_secret(&valid, peer).is_err());
        assert_eq!(gate.metrics.refusals(tritmill_http::Limit::StrangerRate), 2);
    }

    #[test]
    fn durations_have_the_form_of_openai() {
        let check = |ms, text| assert_eq!(duration_text(Duration::from_millis(ms)), text);
        check(0, "0ms");
        check(20, "20ms");
        check(999, "999ms");
        check(1000, "1s");
        check(1001, "2s");
        check(360_000, "6m0s");
        assert_eq!(duration_text(Duration::from_nanos(1)), "1ms");
    }

    #[test]
    fn requests_of_a_key_are_counted_until_they_end() {
        let gate = gate(1, 2);
        let (one, two) = (Uuid::from_u128(1), Uuid::from_u128(2));
        let first = gate.run(one).expect("the first");
        let second = gate.run(one).expect("the second");
        assert!(gate.run(one).is_none());
        assert!(gate.run(two).is_some(), "another key is not limited");
        drop(first);
        assert!(gate.run(one).is_some());
        drop(second);
        assert!(gate.running.lock().expect("no panic").is_empty());
    }

    #[test]
    fn memory_of_secrets_is_bounded() {
        let (gate, now) = (gate(1, 9), Instant::now());
        let secret = |number: usize| {
            let mut secret = [0; 32];
            secret[..8].copy_from_slice(&number.to_le_bytes());
            secret
        };
        let size = || gate.known.lock().expect("no panic").len();
        (0..KNOWN_MAX + 9).for_each(|number| gate.remember(secret(number), now));
        assert_eq!(size(), KNOWN_MAX);
        gate.remember(secret(KNOWN_MAX + 9), now + KNOWN_FOR);
        assert_eq!(size(), 1);
    }
}
