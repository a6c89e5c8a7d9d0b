//! Metrics of the engines by device, and latencies. The names are those of common inference servers, so
//! that their dashboards work.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tritmill_engine::EngineStats;

/// Counts of the steps so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Steps {
    /// The engine's own counts.
    pub stats: EngineStats,
    /// Sequences that took part, summed over all steps.
    pub sequences: u64,
    /// Time of all steps.
    pub busy: Duration,
    /// Requests that had their first step.
    pub started: u64,
    /// Time that they waited for it.
    pub waited: Duration,
}

impl Steps {
    /// Adds the counts of another device.
    fn merge(&mut self, other: &Self) {
        let (a, b) = (&self.stats, &other.stats);
        self.stats = EngineStats {
            running: a.running + b.running,
            pending: a.pending + b.pending,
            blocks_used: a.blocks_used + b.blocks_used,
            blocks_cached: a.blocks_cached + b.blocks_cached,
            blocks_total: a.blocks_total + b.blocks_total,
            bytes_used: a.bytes_used + b.bytes_used,
            bytes_total: a.bytes_total + b.bytes_total,
            // All devices of a process share the tiers, and each tells what they were when it ran a step.
            tiers: a.tiers.into_iter().chain(b.tiers).max_by_key(|tiers| tiers.hits + tiers.misses),
            prefix_hit_tokens: a.prefix_hit_tokens + b.prefix_hit_tokens,
            prefix_miss_tokens: a.prefix_miss_tokens + b.prefix_miss_tokens,
            steps: a.steps + b.steps,
            failed_steps: a.failed_steps + b.failed_steps,
            disk_tokens: a.disk_tokens + b.disk_tokens,
            prefill_tokens: a.prefill_tokens + b.prefill_tokens,
            decode_tokens: a.decode_tokens + b.decode_tokens,
            drafted_tokens: a.drafted_tokens + b.drafted_tokens,
            accepted_tokens: a.accepted_tokens + b.accepted_tokens,
            undecided_draws: a.undecided_draws + b.undecided_draws,
            generated_tokens: a.generated_tokens + b.generated_tokens,
            preemptions: a.preemptions + b.preemptions,
            finished: a.finished + b.finished,
            failed: a.failed + b.failed,
        };
        self.sequences += other.sequences;
        self.busy += other.busy;
        self.started += other.started;
        self.waited += other.waited;
    }

    /// Returns the rows of all steps.
    pub fn rows(&self) -> u64 {
        self.stats.prefill_tokens + self.stats.decode_tokens
    }
}

/// The label of a metric.
#[derive(Debug, Clone, EncodeLabelSet)]
struct DeviceLabel {
    device: String,
}

/// Steps by device. The engine threads write them.
#[derive(Debug, Clone, Default)]
pub(super) struct EngineSteps(Arc<Mutex<Vec<(String, Steps)>>>);

impl EngineSteps {
    pub fn set_devices(&self, names: Vec<String>) {
        *self.0.lock() = names.into_iter().map(|name| (name, Steps::default())).collect();
    }

    pub fn devices(&self) -> Vec<String> {
        self.0.lock().iter().map(|(name, _)| name.clone()).collect()
    }

    pub fn add(&self, device: usize, sequences: usize, took: Duration, stats: EngineStats) {
        let (_, steps) = &mut self.0.lock()[device];
        // What follows the last end of a request is no step.
        if sequences > 0 {
            steps.busy += took;
        }
        steps.stats = stats;
        steps.sequences += sequences as u64;
    }

    pub fn add_wait(&self, device: usize, wait: Duration) {
        let (_, steps) = &mut self.0.lock()[device];
        steps.started += 1;
        steps.waited += wait;
    }

    pub fn sum(&self) -> Steps {
        let mut sum = Steps::default();
        self.0.lock().iter().for_each(|(_, steps)| sum.merge(steps));
        sum
    }
}

/// A metric's name, its help and its value.
type Row<T> = (&'static str, &'static str, fn(&EngineStats) -> T);

const GAUGES: [Row<f64>; 3] = [
    ("num_requests_running", "Sequences that hold KV blocks", |stats| stats.running as f64),
    ("num_requests_waiting", "Sequences that wait for KV blocks", |stats| stats.pending as f64),
    ("kv_cache_usage_ratio", "Share of the KV blocks that sequences hold", |stats| {
        stats.blocks_used as f64 / stats.blocks_total.max(1) as f64
    }),
];

const COUNTERS: [Row<u64>; 11] = [
    ("prefix_cache_hits", "Prompt tokens found in the cache", |stats| stats.prefix_hit_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the cache", |stats| {
        stats.prefix_hit_tokens + stats.prefix_miss_tokens
    }),
    ("kv_disk_tokens", "Tokens read from --kv-cache-dir instead of computed", |stats| {
        stats.disk_tokens
    }),
    ("prefill_tokens", "Prompt tokens computed", |stats| stats.prefill_tokens),
    ("generation_tokens", "Tokens generated", |stats| stats.generated_tokens),
    ("draft_tokens", "Drafts computed: tokens that may follow, beside the newest one", |stats| {
        stats.drafted_tokens
    }),
    ("accepted_draft_tokens", "Drafts that were drawn: each saved a decode", |stats| {
        stats.accepted_tokens
    }),
    (
        "undecided_draws",
        "Draws for which all logits had to be computed though their parameters need fewer",
        |stats| stats.undecided_draws,
    ),
    ("num_preemptions", "Sequences preempted because KV blocks ran out", |stats| stats.preemptions),
    ("engine_steps", "Forward passes", |stats| stats.steps),
    ("engine_rows", "Rows of forward passes: tokens of prompts and of decodes", |stats| {
        stats.prefill_tokens + stats.decode_tokens
    }),
];

impl Collector for EngineSteps {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let devices = self.0.lock().clone();
        let of = |device: &String| DeviceLabel { device: device.clone() };
        for (name, help, value) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (device, steps) in &devices {
                let gauge = ConstGauge::new(value(&steps.stats));
                gauge.encode(family.encode_family(&of(device))?)?;
            }
        }
        for (name, help, value) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (device, steps) in &devices {
                let counter = ConstCounter::new(value(&steps.stats));
                counter.encode(family.encode_family(&of(device))?)?;
            }
        }
        let (name, help) = ("engine_busy_seconds", "Time in which forward passes ran");
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (device, steps) in &devices {
            let counter = ConstCounter::new(steps.busy.as_secs_f64());
            counter.encode(family.encode_family(&of(device))?)?;
        }
        Ok(())
    }
}

/// How long answers take, in seconds.
#[derive(Debug)]
pub(super) struct Latencies {
    first_token: Histogram,
    request: Histogram,
    per_token: Histogram,
    wait: Histogram,
}

impl Latencies {
    /// Registers the histograms.
    pub fn register(registry: &mut Registry) -> Self {
        let mut histogram = |name: &str, help: &str, first: f64| {
            // Four buckets per factor of ten, over five factors.
            let bounds = (0..20).map(move |step| first * 10f64.powf(f64::from(step) / 4.0));
            let histogram = Histogram::new(bounds);
            registry.register(name, help, histogram.clone());
            histogram
        };
        Self {
            first_token: histogram(
                "time_to_first_token_seconds",
                "From the claim of an answered job to its first token",
                0.001,
            ),
            request: histogram(
                "e2e_request_latency_seconds",
                "From the claim of an answered job to its last token",
                0.01,
            ),
            per_token: histogram(
                "time_per_output_token_seconds",
                "Mean time between two tokens of an answered job",
                0.0001,
            ),
            wait: histogram(
                "engine_wait_seconds",
                "From a request's arrival in the engine to its first forward pass",
                0.0001,
            ),
        }
    }

    /// Records how long a request waited for its first step.
    pub fn record_wait(&self, wait: Duration) {
        self.wait.observe(wait.as_secs_f64());
    }

    /// Records the latencies of one answer.
    pub fn record(&self, first_token: Option<Duration>, took: Duration, tokens: u64) {
        self.request.observe(took.as_secs_f64());
        let Some(first_token) = first_token else { return };
        self.first_token.observe(first_token.as_secs_f64());
        if tokens > 1 {
            let rest = took.saturating_sub(first_token).as_secs_f64();
            self.per_token.observe(rest / (tokens - 1) as f64);
        }
    }
}
