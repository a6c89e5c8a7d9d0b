//! [`Metrics`]: counters and gauges of this process.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use tritmill_queue::{
    Timestamp,
    metrics::{CallMetrics, ConnectionMetrics},
};

use crate::{
    refusals::Refusals,
    store::notices::{Channel, NoticeCounts, Outcome},
};

/// Labels of an answered request. Both come from small sets, whatever callers send.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

/// Labels of an attempt to deliver a notice.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NoticeLabels {
    channel: &'static str,
    result: &'static str,
}

/// Counters and gauges of this process.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    /// Batches that this process drives.
    pub batches_driven: Gauge,
    /// Responses that are streaming now.
    pub streams: Gauge,
    notices: Family<NoticeLabels, Counter>,
    notices_pending: Gauge,
    notices_oldest: Gauge,
    receivers_failing: Gauge,
    receivers_resting: Gauge,
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
        let notices = Family::<NoticeLabels, Counter>::default();
        let help = "Attempts to deliver a notice, by channel and result";
        of_admin.register("notice_attempts", help, notices.clone());
        let gauges = [
            ("notices_pending", "Notices that wait for an attempt, of all processes"),
            ("notices_oldest_seconds", "Age of the earliest event of these"),
            ("notice_receivers_failing", "Receivers that failed at the last attempt"),
            ("notice_receivers_resting", "Those of them that are left alone, or want no more"),
        ];
        let [notices_pending, notices_oldest, receivers_failing, receivers_resting] =
            gauges.map(|(name, help)| {
                let gauge = Gauge::default();
                of_admin.register(name, help, gauge.clone());
                gauge
            });
        let http = tritmill_http::Metrics::default();
        http.register(of_admin);
        let refusals = Refusals::default();
        refusals.register(of_admin);
        Self {
            registry,
            requests,
            batches_driven,
            streams,
            notices,
            notices_pending,
            notices_oldest,
            receivers_failing,
            receivers_resting,
            http,
            calls,
            refusals,
        }
    }

    /// Counts an answered request.
    pub fn count_request(&self, route: &str, status: u16) {
        let route = route.to_owned();
        self.requests.get_or_create(&RequestLabels { route, status }).inc();
    }

    /// Counts an attempt to deliver a notice.
    pub fn count_notice(&self, channel: Channel, outcome: &Outcome) {
        let result = match outcome {
            Outcome::Delivered => "delivered",
            Outcome::Failed(_) => "failed",
            Outcome::Refused(_) => "refused",
            Outcome::Gone(_) => "gone",
        };
        self.notices.get_or_create(&NoticeLabels { channel: channel.as_str(), result }).inc();
    }

    /// Sets what the store counted of notices.
    pub fn set_notices(&self, counts: &NoticeCounts, now: Timestamp) {
        let set = |gauge: &Gauge, value| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        set(&self.notices_pending, counts.pending);
        set(&self.notices_oldest, counts.oldest.map_or(0, |oldest| now.since(oldest).as_secs()));
        set(&self.receivers_failing, counts.failing);
        set(&self.receivers_resting, counts.resting);
    }

    /// Writes all values in OpenMetrics text format.
    pub fn encode(&self, out: &mut String) -> fmt::Result {
        text::encode_registry(out, &self.registry)
    }
}
