//! How leases are kept, and when this worker last did what only one worker does.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tritmill_queue::QueueName;

/// Upper bounds of the buckets of lease margins, in seconds: fine around what is left of a lease of 15 s.
const MARGINS: [f64; 14] =
    [0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 10.0, 15.0, 30.0, 60.0, 600.0];

/// A time of this machine's clock, in milliseconds; 0 until it is set.
#[derive(Debug, Default)]
struct Time(AtomicI64);

impl Time {
    fn set_now(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.0.store(i64::try_from(now.as_millis()).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    fn get_seconds(&self) -> Option<f64> {
        let ms = self.0.load(Ordering::Relaxed);
        (ms > 0).then(|| ms as f64 / 1000.0)
    }
}

/// Times of the last rounds. A worker that never led has none.
#[derive(Debug, Default)]
struct Times {
    store_reconciled: Time,
    store_maintained: Time,
    queue_reconciled: Time,
    queue: OnceLock<String>,
}

/// Metrics of leases and of the work of leaders.
#[derive(Debug, Clone)]
pub(crate) struct Upkeep {
    lease_margin: Histogram,
    times: Arc<Times>,
}

impl Upkeep {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let upkeep = Self { lease_margin: Histogram::new(MARGINS), times: Arc::default() };
        registry.register(
            "lease_margin_seconds",
            "Time that was left of the shortest lease when leases were renewed",
            upkeep.lease_margin.clone(),
        );
        registry.register_collector(Box::new(upkeep.clone()));
        upkeep
    }

    /// Records what was left of the shortest lease at a renewal.
    pub fn record_margin(&self, left: Duration) {
        self.lease_margin.observe(left.as_secs_f64());
    }

    /// Notes that due changes were applied to the jobs of all queues.
    pub fn store_reconciled(&self) {
        self.times.store_reconciled.set_now();
    }

    /// Notes that the dispatcher was compared with the store's jobs of a queue.
    pub fn queue_reconciled(&self, queue: &QueueName) {
        self.times.queue.get_or_init(|| queue.to_string());
        self.times.queue_reconciled.set_now();
    }

    /// Notes that the tables of the store were maintained.
    pub fn store_maintained(&self) {
        self.times.store_maintained.set_now();
    }
}

impl Collector for Upkeep {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Times { store_reconciled, store_maintained, queue_reconciled, queue } = &*self.times;
        let queue = queue.get().map(|queue| [("queue", queue.as_str())]);
        for (name, help, time, labels) in [
            (
                "store_reconciled_timestamp_seconds",
                "Last time this worker queued due jobs and jobs with an expired lease",
                store_reconciled,
                None,
            ),
            (
                "store_maintained_timestamp_seconds",
                "Last time this worker maintained the tables of the store",
                store_maintained,
                None,
            ),
            (
                "queue_reconciled_timestamp_seconds",
                "Last time this worker gave the dispatcher the entries that it lacked",
                queue_reconciled,
                queue,
            ),
        ] {
            let Some(seconds) = time.get_seconds() else { continue };
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            let gauge = ConstGauge::new(seconds);
            match labels {
                Some(labels) => gauge.encode(metric.encode_family(&labels)?)?,
                None => gauge.encode(metric)?,
            }
        }
        Ok(())
    }
}
