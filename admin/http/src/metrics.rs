//! [`Metrics`]: open connections, and what was refused.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// A limit that a client exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Connections at once.
    Connections,
    /// Connections of one address that wait for their client.
    AddressConnections,
    /// Time for a TLS handshake.
    HandshakeTime,
    /// Time for the first request of a connection.
    HeadTime,
    /// Time for the body of a request.
    BodyTime,
    /// Time for the client to read.
    ReadTime,
    /// Requests of one address without a valid key, per second.
    StrangerRate,
    /// Memory for request bodies.
    RequestMemory,
}

impl Limit {
    /// Returns the value of the label `limit`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::AddressConnections => "address_connections",
            Self::HandshakeTime => "handshake_time",
            Self::HeadTime => "head_time",
            Self::BodyTime => "body_time",
            Self::ReadTime => "read_time",
            Self::StrangerRate => "stranger_rate",
            Self::RequestMemory => "request_memory",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    limit: &'static str,
}

/// Metrics of a server. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Open connections.
    pub(crate) connections: Gauge,
    /// Bytes of request bodies in memory.
    pub(crate) request_bytes: Gauge,
    refusals: Family<Labels, Counter>,
}

impl Metrics {
    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        registry.register("http_connections", "Open HTTP connections", self.connections.clone());
        let help = "Bytes of request bodies in memory";
        registry.register("http_request_bytes", help, self.request_bytes.clone());
        let help = "Requests refused and connections closed, by limit";
        registry.register("http_refusals", help, self.refusals.clone());
    }

    /// Counts a request that was refused, or a connection that was closed.
    pub fn refuse(&self, limit: Limit) {
        self.refusals.get_or_create(&Labels { limit: limit.as_str() }).inc();
    }

    /// Returns the number of refusals by a limit.
    pub fn refusals(&self, limit: Limit) -> u64 {
        self.refusals.get_or_create(&Labels { limit: limit.as_str() }).get()
    }
}
