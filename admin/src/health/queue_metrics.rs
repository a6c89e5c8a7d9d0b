//! Metrics of the queues, read from the store on each scrape; the same from every admin process.

use std::{borrow::Cow, fmt};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use tritmill_queue::store::{
    history::{Histogram, Latencies},
    workers::Integrity,
};

use crate::{
    ApiError, App,
    operator::queues::{self, QueueLoad},
};

/// A metric's name, help text and type, and its values for a queue by label value.
type Row = (&'static str, &'static str, MetricType, fn(&QueueLoad) -> Vec<(&'static str, f64)>);

/// The state of all queues at a scrape.
#[derive(Debug)]
struct Scrape {
    loads: Vec<QueueLoad>,
    integrity: Integrity,
}

/// Label value of metrics without a `kind` label.
const PLAIN: &str = "";

#[rustfmt::skip]
const ROWS: [Row; 7] = [
    ("queue_depth", "Unfinished jobs, by state", MetricType::Gauge, |load| {
        let depth = load.depth();
        vec![("scheduled", depth.scheduled as f64), ("queued", depth.queued as f64),
             ("running", depth.running as f64), ("retrying", depth.retrying as f64)]
    }),
    ("queue_oldest_seconds", "Age of the oldest queued job", MetricType::Gauge,
        |load| vec![(PLAIN, load.oldest_queued().map_or(0.0, |age| age.as_secs_f64()))]),
    ("queue_paused", "1 while the queue is paused", MetricType::Gauge,
        |load| vec![(PLAIN, f64::from(u8::from(load.settings.paused)))]),
    ("queue_workers", "Live workers", MetricType::Gauge,
        |load| vec![(PLAIN, load.workers as f64)]),
    ("queue_slots", "Jobs that the live workers can run at once", MetricType::Gauge,
        |load| vec![(PLAIN, load.slots as f64)]),
    ("queue_jobs", "Finished jobs, by state", MetricType::Counter, |load| {
        let all = load.totals();
        vec![("completed", all.completed as f64), ("failed", all.failed as f64),
             ("cancelled", all.cancelled as f64), ("expired", all.expired as f64)]
    }),
    ("queue_tokens", "Tokens of completed jobs", MetricType::Counter, |load| {
        let all = load.totals();
        vec![("prompt", all.prompt_tokens as f64), ("completion", all.completion_tokens as f64)]
    }),
];

type Latency = (&'static str, &'static str, fn(&Latencies) -> &Histogram);

const LATENCIES: [Latency; 3] = [
    ("queue_wait_seconds", "From submission to the first claim", |all| &all.start),
    ("queue_run_seconds", "From the last claim to the end of completed jobs", |all| &all.run),
    ("queue_first_token_seconds", "From submission to the first token", |all| &all.first_token),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, kind, values) in ROWS {
            let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
            for load in &self.loads {
                let queue = load.settings.queue.to_string();
                for (label, value) in values(load) {
                    let mut labels = vec![("queue", queue.as_str())];
                    labels.extend((label != PLAIN).then_some(("kind", label)));
                    let family = metric.encode_family(&labels)?;
                    match kind {
                        MetricType::Counter => ConstCounter::new(value).encode(family)?,
                        _ => ConstGauge::new(value).encode(family)?,
                    }
                }
            }
        }
        for (name, help, latency) in LATENCIES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            for load in &self.loads {
                let Some(sampled) = &load.sampled else { continue };
                let histogram = latency(&sampled.latencies);
                let bound = |ms: Option<i64>| ms.map_or(f64::INFINITY, |ms| ms as f64 / 1000.0);
                let buckets: Vec<(f64, u64)> =
                    histogram.buckets().map(|(ms, count)| (bound(ms), count)).collect();
                let labels = [("queue", load.settings.queue.to_string())];
                let sum = histogram.sum().as_secs_f64();
                metric.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                    sum,
                    histogram.count(),
                    &buckets,
                    None,
                )?;
            }
        }
        for (name, count) in self.integrity.named() {
            let name: Cow<'static, str> = format!("integrity_{name}").into();
            let help = "Faults detected and corrected by all workers";
            let metric = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            ConstCounter::new(count).encode(metric)?;
        }
        Ok(())
    }
}

/// A registry of the queues' current metrics.
pub(super) async fn registry(app: &App) -> Result<Registry, ApiError> {
    let loads = queues::loads(app).await?;
    let integrity = app.store.integrity().await?;
    let mut registry = Registry::with_prefix("tritmill");
    registry.register_collector(Box::new(Scrape { loads, integrity }));
    Ok(registry)
}
