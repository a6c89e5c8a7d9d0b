//! Use of the connections to Postgres and Redis, read at each scrape.

use std::fmt;

use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, metrics::MetricType};

use super::{Row, encode_rows};
use crate::{
    dispatch::{BlockingConnections, RedisDispatcher},
    store::{PoolState, PostgresStore},
};

/// Connections of this process. The default has none.
#[derive(Debug, Clone, Default)]
pub struct ConnectionMetrics(Option<(PostgresStore, RedisDispatcher)>);

#[rustfmt::skip]
const POSTGRES: [Row<PoolState, u64>; 4] = [
    ("postgres_connections", "Open connections to Postgres", MetricType::Gauge,
        |pool| vec![(Some("idle"), pool.idle), (Some("in_use"), pool.in_use)]),
    ("postgres_connections_max", "Most connections to Postgres", MetricType::Gauge,
        |pool| vec![(None, pool.max)]),
    ("postgres_pool_waits", "Calls that began while every connection was in use",
        MetricType::Counter, |pool| vec![(None, pool.waits)]),
    ("postgres_pool_timeouts", "Calls that failed because no connection became free in time",
        MetricType::Counter, |pool| vec![(None, pool.timeouts)]),
];

#[rustfmt::skip]
const REDIS: [Row<BlockingConnections, u64>; 3] = [
    ("redis_connections", "Open connections to Redis for reads that wait", MetricType::Gauge,
        |all| vec![(Some("idle"), all.idle as u64), (Some("in_use"), all.in_use as u64)]),
    ("redis_connections_max", "Most connections to Redis for reads that wait", MetricType::Gauge,
        |all| vec![(None, all.max as u64)]),
    ("redis_connections_waiting", "Reads of Redis that wait for a connection now",
        MetricType::Gauge, |all| vec![(None, all.waiting as u64)]),
];

impl ConnectionMetrics {
    /// Metrics of the connections of a store and of a dispatcher.
    pub fn new(store: &PostgresStore, dispatcher: &RedisDispatcher) -> Self {
        Self(Some((store.clone(), dispatcher.clone())))
    }
}

impl Collector for ConnectionMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some((store, dispatcher)) = &self.0 else { return Ok(()) };
        let pools = store.pools();
        let pools = pools.each_ref().map(|pool| (Some(("pool", pool.name)), pool));
        encode_rows(&mut encoder, &POSTGRES, &pools, "state")?;
        let connections = dispatcher.blocking_connections();
        encode_rows(&mut encoder, &REDIS, &[(None, &connections)], "state")
    }
}
