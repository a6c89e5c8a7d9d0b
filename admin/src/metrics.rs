//! [`Metrics`]: counters and gauges of this process.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tritmill_queue::metrics::{CallMetrics, ConnectionMetrics};

use crate::refusals::Refusals;

/// Labels of an answered request. Both come from small sets, whatever callers send.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

/// Counters and gauges of this process.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    /// Batches that this process drives.
    pub batches_driven: Gauge,
    /// Responses that are streaming now.
    pub streams: Gauge,
    /// Connections and refusals.
    pub http: tritmill_http::Metrics,
    /// Times of the calls of store and dispatcher.
    pub calls: CallMetrics,
    /// What was refused to tenants.
    pub refusals: Refusals,
}

impl Metrics {
    /// Metrics of a process with these connections to Postgres and Redis.
    pub fn new(connections: ConnectionMetrics) -> Self {
        // Workers export the same metrics under this prefix.
        let mut registry = Registry::with_prefix("tritmill");
        let calls = CallMetrics::default();
        calls.register(&mut registry);
        registry.register_collector(Box::new(connections));
        let of_admin = registry.sub_registry_with_prefix("admin");
        let (requests, batches_driven, streams) = <(Family<_, _>, Gauge, Gauge)>::default();
        of_admin.register("requests", "Requests answered", requests.clone());
        let help = "Batches that this process drives";
        of_admin.register("batches_driven", help, batches_driven.clone());
        of_admin.register("streams", "Responses that are streaming now", streams.clone());
        let http = tritmill_http::Metrics::default();
        http.register(of_admin);
        let refusals = Refusals::default();
        refusals.register(of_admin);
        Self { registry, requests, batches_driven, streams, http, calls, refusals }
    }

    /// Counts an answered request.
    pub fn count_request(&self, route: &str, status: u16) {
        let route = route.to_owned();
        self.requests.get_or_create(&RequestLabels { route, status }).inc();
    }

    /// Writes all values in OpenMetrics text format.
    pub fn encode(&self, out: &mut String) -> fmt::Result {
        text::encode_registry(out, &self.registry)
    }
}
