//! [`Metrics`]: counters and gauges of this process.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

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
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("tritmill_admin");
        let (requests, batches_driven, streams) = <(Family<_, _>, Gauge, Gauge)>::default();
        registry.register("requests", "Requests answered", requests.clone());
        let help = "Batches that this process drives";
        registry.register("batches_driven", help, batches_driven.clone());
        registry.register("streams", "Responses that are streaming now", streams.clone());
        let http = tritmill_http::Metrics::default();
        http.register(&mut registry);
        Self { registry, requests, batches_driven, streams, http }
    }
}

impl Metrics {
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
