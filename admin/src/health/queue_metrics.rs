//! Metrics of the queues, read from the store on each scrape; the same from every admin process.

use std::{borrow::Cow, fmt, time::Duration};

use futures_util::future::join_all;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter},
    registry::Registry,
};
use tokio::time::timeout;
use tritmill_queue::{
    metrics::{Row, Values, encode_rows},
    store::{
        history::{Histogram, Latencies},
        workers::Integrity,
    },
};

use crate::{
    ApiError, App,
    operator::queues::{self, QueueLoad},
};

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
}

/// The state of all queues at a scrape.
#[derive(Debug)]
struct Scrape {
    queues: Vec<Scraped>,
    integrity: Integrity,
}

/// Returns the value of a metric without a `kind` label, if there is one.
fn plain(value: impl Into<Option<f64>>) -> Values<f64> {
    value.into().map(|value| (None, value)).into_iter().collect()
}

/// Returns the values of a metric by kind.
fn kinds<const N: usize>(values: [(&'static str, u64); N]) -> Values<f64> {
    values.map(|(kind, value)| (Some(kind), value as f64)).into()
}

#[rustfmt::skip]
const ROWS: [Row<Scraped, f64>; 11] = [
    ("queue_depth", "Unfinished jobs, by state", MetricType::Gauge, |queue| {
        let depth = queue.load.depth();
        kinds([("scheduled", depth.scheduled), ("queued", depth.queued),
               ("running", depth.running), ("retrying", depth.retrying)])
    }),
    ("queue_oldest_seconds", "Age of the oldest queued job", MetricType::Gauge,
        |queue| plain(queue.load.oldest_queued().unwrap_or_default().as_secs_f64())),
    ("queue_entries", "Entries waiting in the dispatcher", MetricType::Gauge,
        |queue| plain(queue.entries.map(|entries| entries as f64))),
    ("queue_missing_jobs", "Queued jobs at the last sample minus entries in the dispatcher now",
        MetricType::Gauge, |queue| plain(queue.missing_jobs())),
    ("queue_unannounced_seconds", "Age of the oldest job without confirmed enqueueing",
        MetricType::Gauge,
        |queue| plain(queue.load.oldest_unannounced().unwrap_or_default().as_secs_f64())),
    ("queue_sampled_timestamp_seconds", "Time of the last sample of the queues", MetricType::Gauge,
        |queue| plain(queue.load.sampled_at.map(|at| at.0 as f64 / 1000.0))),
    ("queue_paused", "1 while the queue is paused", MetricType::Gauge,
        |queue| plain(f64::from(u8::from(queue.load.settings.paused)))),
    ("queue_workers", "Live workers", MetricType::Gauge,
        |queue| plain(queue.load.workers as f64)),
    ("queue_slots", "Jobs that the live workers can run at once", MetricType::Gauge,
        |queue| plain(queue.load.slots as f64)),
    ("queue_jobs", "Finished jobs, by state", MetricType::Counter, |queue| {
        let all = queue.load.totals();
        kinds([("completed", all.completed), ("failed", all.failed),
               ("cancelled", all.cancelled), ("expired", all.expired)])
    }),
    ("queue_tokens", "Tokens of completed jobs", MetricType::Counter, |queue| {
        let all = queue.load.totals();
        kinds([("prompt", all.prompt_tokens), ("completion", all.completion_tokens)])
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
        let named = |queue: &Scraped| queue.load.settings.queue.to_string();
        let names: Vec<String> = self.queues.iter().map(named).collect();
        let labels = names.iter().map(|name| Some(("queue", name.as_str())));
        let queues: Vec<_> = labels.zip(&self.queues).collect();
        encode_rows(&mut encoder, &ROWS, &queues, "kind")?;
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
    let loads = queues::loads(app).await?;
    let (queues, integrity) = tokio::join!(with_entries(app, loads), app.store.integrity());
    let integrity = integrity?;
    let mut registry = Registry::with_prefix("tritmill");
    registry.register_collector(Box::new(Scrape { queues, integrity }));
    Ok(registry)
}
