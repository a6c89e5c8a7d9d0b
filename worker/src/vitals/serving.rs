//! How the engine serves: what it holds and how long answers take, under the names that dashboards of
//! serving engines know.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge, histogram::Histogram},
    registry::Registry,
};
use tritmill_engine::EngineStats;

/// What the steps so far were.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Steps {
    /// The engine's own counts.
    pub stats: EngineStats,
    /// Sequences that took part, summed over all steps.
    pub sequences: u64,
}

/// Shared by the engine's thread, which writes, and whoever reads.
#[derive(Debug, Clone, Default)]
pub(super) struct LatestSteps(Arc<Mutex<Steps>>);

impl LatestSteps {
    pub fn add(&self, sequences: usize, stats: EngineStats) {
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        steps.stats = stats;
        steps.sequences += sequences as u64;
    }

    pub fn read(&self) -> Steps {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for LatestSteps {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.read().stats;
        let usage = stats.blocks_used as f64 / stats.blocks_total.max(1) as f64;
        let gauges = [
            ("num_requests_running", "Sequences that hold KV blocks", stats.running as f64),
            ("num_requests_waiting", "Sequences in line for KV blocks", stats.waiting as f64),
            ("kv_cache_usage_ratio", "Share of the KV blocks that sequences hold", usage),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
        }
        let lookups = stats.prefix_hit_tokens + stats.prefix_miss_tokens;
        let counts = [
            ("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hit_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache", lookups),
            ("prefill_tokens", "Prompt tokens computed", stats.prefill_tokens),
            ("generation_tokens", "Tokens drawn", stats.generated_tokens),
            ("num_preemptions", "Sequences sent back for want of KV blocks", stats.preemptions),
            ("engine_steps", "Forward passes", stats.steps),
        ];
        for (name, help, value) in counts {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
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
}

impl Latencies {
    /// Registers them.
    pub fn of(registry: &mut Registry) -> Self {
        let mut histogram = |name: &str, help: &str, first: f64| {
            // Four to the factor of ten, over five of them.
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
                "From token to token of an answered job, in the mean",
                0.0001,
            ),
        }
    }

    /// One answer.
    pub fn answered(&self, first_token: Option<Duration>, took: Duration, tokens: u64) {
        self.request.observe(took.as_secs_f64());
        let Some(first_token) = first_token else { return };
        self.first_token.observe(first_token.as_secs_f64());
        if tokens > 1 {
            let rest = took.saturating_sub(first_token).as_secs_f64();
            self.per_token.observe(rest / (tokens - 1) as f64);
        }
    }
}
