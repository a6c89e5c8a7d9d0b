//! [`Refusals`]: what was refused to tenants, by limit and cause. Refusals of strangers have no tenant;
//! [`tritmill_http::Metrics`] counts them.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

use axum::response::Response;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tritmill_queue::{
    Tenant,
    dispatch::{self, Cause},
};

use crate::ApiError;

/// Tenants with counters of their own. Others share those of [`OTHERS`].
const TENANTS_MAX: usize = 200;
/// Label of the tenants above [`TENANTS_MAX`].
const OTHERS: &str = "other";

/// A limit for which a request with a valid key was answered with status 429 or 403, or for which a line of a
/// batch waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Requests of one key per second.
    KeyRate,
    /// Requests of one key at once.
    KeyRequests,
    /// Requests of all keys at once.
    Connections,
    /// Streams at once.
    Streams,
    /// Dashboard pages that update live, at once.
    LivePages,
    /// Unfinished batches of the tenant.
    OpenBatches,
    /// Bytes of the tenant's files.
    FileBytes,
    /// API keys of the tenant.
    Keys,
    /// Money of the tenant or of one of its API keys.
    Budget,
    /// What waits in the queue, and why no more may.
    Queue(dispatch::Limit, Cause),
}

impl Limit {
    /// Returns the value of the label `limit`.
    const fn as_str(self) -> &'static str {
        match self {
            Self::KeyRate => "key_rate",
            Self::KeyRequests => "key_requests",
            Self::Connections => "connections",
            Self::Streams => "streams",
            Self::LivePages => "live_pages",
            Self::OpenBatches => "open_batches",
            Self::FileBytes => "file_bytes",
            Self::Keys => "keys",
            Self::Budget => "budget",
            Self::Queue(limit, _) => limit.as_str(),
        }
    }

    /// Returns the value of the label `cause`.
    const fn cause(self) -> &'static str {
        match self {
            Self::Queue(_, cause) => cause.as_str(),
            _ => "caller",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    limit: &'static str,
    cause: &'static str,
    tenant: String,
}

/// Counters by limit, cause and tenant.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    counters: Family<Labels, Counter>,
    /// Tenants with counters.
    tenants: Mutex<HashSet<Tenant>>,
}

impl Refusals {
    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Requests with a valid key, and steps of batches, that a limit refused";
        registry.register("refusals", help, self.counters.clone());
    }

    /// Counts a refusal.
    pub fn count(&self, limit: Limit, tenant: &Tenant) {
        let tenant = self.label(tenant).to_owned();
        let labels = Labels { limit: limit.as_str(), cause: limit.cause(), tenant };
        self.counters.get_or_create(&labels).inc();
    }

    /// Counts an error if it refuses a request for a limit.
    pub fn count_error(&self, error: &ApiError, tenant: &Tenant) {
        if let Some(limit) = error.limit() {
            self.count(limit, tenant);
        }
    }

    /// Counts a response if it refuses its request for a limit, which is then one of its extensions.
    pub fn count_response(&self, response: &Response, tenant: &Tenant) {
        if let Some(limit) = response.extensions().get::<Limit>() {
            self.count(*limit, tenant);
        }
    }

    fn label<'a>(&self, tenant: &'a Tenant) -> &'a str {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if !tenants.contains(tenant) {
            if tenants.len() >= TENANTS_MAX {
                return OTHERS;
            }
            tenants.insert(tenant.clone());
        }
        &tenant.0
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;

    use super::*;

    #[test]
    fn number_of_tenants_in_labels_is_bounded() {
        let refusals = Refusals::default();
        let tenant = |number: usize| Tenant(format!("t{number}"));
        for round in 0..2 {
            (0..TENANTS_MAX + 7).for_each(|number| {
                let limit = Limit::Queue(dispatch::Limit::Tokens(7), Cause::Gpu);
                refusals.count(limit, &tenant(number));
            });
            let known = refusals.tenants.lock().expect("no panic").len();
            assert_eq!(known, TENANTS_MAX, "round {round}");
        }
        let (mut registry, mut out) = (Registry::default(), String::new());
        refusals.register(&mut registry);
        text::encode(&mut out, &registry).expect("a string takes everything");
        let line = |tenant| {
            format!("refusals_total{{limit=\"queue_tokens\",cause=\"gpu\",tenant=\"{tenant}\"}}")
        };
        for (tenant, count) in [("t0", 2), ("t199", 2), (OTHERS, 14)] {
            assert!(out.contains(&format!("{} {count}\n", line(tenant))), "{tenant}: {out}");
        }
        assert!(!out.contains(&line("t200")));
    }
}
