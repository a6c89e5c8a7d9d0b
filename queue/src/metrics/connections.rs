//! Use of the connections to Postgres and Redis, read at each scrape.

use std::fmt;

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::{
    dispatch::RedisDispatcher,
    store::{PoolState, PostgresStore},
};

/// Connections of this process. The default has none.
#[derive(Debug, Clone, Default)]
pub struct ConnectionMetrics {
    postgres: Option<PostgresStore>,
    redis: Option<RedisDispatcher>,
}

/// A metric's name, its help, whether it is a counter, and its values by state.
type Row = (&'static str, &'static str, MetricType, fn(&PoolState) -> Vec<(&'static str, u64)>);

/// Label value of metrics without a `state` label.
const PLAIN: &str = "";

const POOLS: [Row; 4] = [
    ("postgres_connections", "Open connections to Postgres", MetricType::Gauge, |pool| {
        vec![("idle", pool.idle), ("in_use", pool.in_use)]
    }),
    ("postgres_connections_max", "Most connections to Postgres", MetricType::Gauge, |pool| {
        vec![(PLAIN, pool.max)]
    }),
    (
        "postgres_pool_waits",
        "Calls that began while every connection was in use",
        MetricType::Counter,
        |pool| vec![(PLAIN, pool.waits)],
    ),
    (
        "postgres_pool_timeouts",
        "Calls that failed because no connection became free in time",
        MetricType::Counter,
        |pool| vec![(PLAIN, pool.timeouts)],
    ),
];

impl ConnectionMetrics {
    /// Metrics of the connections of a store and of a dispatcher.
    pub fn new(postgres: Option<&PostgresStore>, redis: Option<&RedisDispatcher>) -> Self {
        Self { postgres: postgres.cloned(), redis: redis.cloned() }
    }

    fn encode_postgres(
        &self,
        store: &PostgresStore,
        encoder: &mut DescriptorEncoder<'_>,
    ) -> fmt::Result {
        let pools = store.pools();
        for (name, help, kind, values) in POOLS {
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            for pool in &pools {
                for (state, value) in values(pool) {
                    let mut labels = vec![("pool", pool.name)];
                    labels.extend((state != PLAIN).then_some(("state", state)));
                    let family = metric.encode_family(&labels)?;
                    match kind {
                        MetricType::Counter => ConstCounter::new(value).encode(family)?,
                        _ => ConstGauge::new(value).encode(family)?,
                    }
                }
            }
        }
        Ok(())
    }

    fn encode_redis(
        &self,
        dispatcher: &RedisDispatcher,
        encoder: &mut DescriptorEncoder<'_>,
    ) -> fmt::Result {
        let blocking = dispatcher.blocking_connections();
        let help = "Open connections to Redis for reads that wait";
        let mut metric =
            encoder.encode_descriptor("redis_connections", help, None, MetricType::Gauge)?;
        for (state, value) in [("idle", blocking.idle), ("in_use", blocking.in_use)] {
            ConstGauge::new(value as u64).encode(metric.encode_family(&[("state", state)])?)?;
        }
        for (name, help, value) in [
            (
                "redis_connections_max",
                "Most connections to Redis for reads that wait",
                blocking.max,
            ),
            ("redis_waits", "Reads of Redis that wait for a connection now", blocking.waiting),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(value as u64).encode(metric)?;
        }
        Ok(())
    }
}

impl Collector for ConnectionMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        if let Some(store) = &self.postgres {
            self.encode_postgres(store, &mut encoder)?;
        }
        match &self.redis {
            Some(dispatcher) => self.encode_redis(dispatcher, &mut encoder),
            None => Ok(()),
        }
    }
}
