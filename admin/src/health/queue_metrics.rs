//! Metrics of the queues, read from the store on each scrape; the same from every admin process.

use std::{borrow::Cow, fmt, time::Duration};

use futures_util::future::join_all;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use tokio::time::timeout;
use tritmill_queue::store::{
    history::{Histogram, Latencies},
    workers::Integrity,
};

use crate::{
    ApiError, App,
    operator::queues::{self, QueueLoad},
};

/// A metric's name, help text and type, and its values for a queue by label value.
type Row = (&'static str, &'static str, MetricType, fn(&Scraped) -> Vec<(&'static str, f64)>);

/// Longest wait for the dispatcher at a scrape; after it the metrics of its entries are left out.
const DISPATCHER_WAIT: Duration = Duration::from_secs(1);

/// A queue at a scrape.
#[derive(Debug)]
struct Scraped {
    load: QueueLoad,
    /// Entries that wait in the dispatcher; `None` if it did not answer.
    entries: Option<usize>,
}

impl Scraped {
    /// Jobs that the store has queued beyond the dispatcher's entries.
    fn missing_jobs(&self) -> Option<f64> {
        let depth = self.load.sampled.as_ref()?.depth;
        let entries = self.entries.filter(|_| !depth.or_more)?;
        Some(depth.queued as f64 - entries as f64)
    }

    /// Age of the oldest jobs that may be missing from the dispatcher.
    fn unannounced(&self) -> Duration {
        let since = self.load.depth().unannounced_since.zip(self.load.sampled_at);
        since.map_or(Duration::ZERO, |(since, at)| at.since(since))
    }
}

/// The state of all queues at a scrape.
#[derive(Debug)]
struct Scrape {
    queues: Vec<Scraped>,
    integrity: Integrity,
}

/// Label value of metrics without a `kind` label.
const PLAIN: &str = "";

#[rustfmt::skip]
const ROWS: [Row; 11] = [
    ("queue_depth", "Unfinished jobs, by state", MetricType::Gauge, |queue| {
        let depth = queue.load.depth();
        vec![("scheduled", depth.scheduled as f64), ("queued", depth.queued as f64),
             ("running", depth.running as f64), ("retrying", depth.retrying as f64)]
    }),
    ("queue_oldest_seconds", "Age of the oldest queued job", MetricType::Gauge,
        |queue| vec![(PLAIN, queue.load.oldest_queued().map_or(0.0, |age| age.as_secs_f64()))]),
    ("queue_entries", "Entries waiting in the dispatcher", MetricType::Gauge,
        |queue| queue.entries.map(|entries| (PLAIN, entries as f64)).into_iter().collect()),
    ("queue_missing_jobs", "Queued jobs at the last sample minus entries in the dispatcher now",
        MetricType::Gauge, |queue| queue.missing_jobs().map(|jobs| (PLAIN, jobs)).into_iter().collect()),
    ("queue_unannounced_seconds", "Age of the oldest jobs whose enqueueing is not confirmed",
        MetricType::Gauge, |queue| vec![(PLAIN, queue.unannounced().as_secs_f64())]),
    ("queue_sampled_timestamp_seconds", "Time of the last sample of the queues", MetricType::Gauge,
        |queue| queue.load.sampled_at.map(|at| (PLAIN, at.0 as f64 / 1000.0)).into_iter().collect()),
    ("queue_paused", "1 while the queue is paused", MetricType::Gauge,
        |queue| vec![(PLAIN, f64::from(u8::from(queue.load.settings.paused)))]),
    ("queue_workers", "Live workers", MetricType::Gauge,
        |queue| vec![(PLAIN, queue.load.workers as f64)]),
    ("queue_slots", "Jobs that the live workers can run at once", MetricType::Gauge,
        |queue| vec![(PLAIN, queue.load.slots as f64)]),
    ("queue_jobs", "Finished jobs, by state", MetricType::Counter, |queue| {
        let all = queue.load.totals();
        vec![("completed", all.completed as f64), ("failed", all.failed as f64),
             ("cancelled", all.cancelled as f64), ("expired", all.expired as f64)]
    }),
    ("queue_tokens", "Tokens of completed jobs", MetricType::Counter, |queue| {
        let all = queue.load.totals();
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
            for queue in &self.queues {
                let queue_name = queue.load.settings.queue.to_string();
                for (label, value) in values(queue) {
                    let mut labels = vec![("queue", queue_name.as_str())];
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
            for Scraped { load, .. } in &self.queues {
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

/// Asks the dispatcher for its entries of all queues at once.
async fn with_entries(app: &App, loads: Vec<QueueLoad>) -> Vec<Scraped> {
    let asked = loads.iter().map(|load| async {
        let asked = app.client.waiting_entries(&load.settings.queue);
        timeout(DISPATCHER_WAIT, asked).await.ok()?.ok()
    });
    let entries = join_all(asked).await;
    loads.into_iter().zip(entries).map(|(load, entries)| Scraped { load, entries }).collect()
}

/// A registry of the queues' current metrics.
pub(super) async fn registry(app: &App) -> Result<Registry, ApiError> {
    let queues = with_entries(app, queues::loads(app).await?).await;
    let integrity = app.store.integrity().await?;
    let mut registry = Registry::with_prefix("tritmill");
    registry.register_collector(Box::new(Scrape { queues, integrity }));
    Ok(registry)
}
