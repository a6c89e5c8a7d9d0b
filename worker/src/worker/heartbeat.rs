//! Says every few seconds that the worker lives, and hears what operators want of it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tritmill_queue::{
    Operations,
    store::operations::{Directive, Heartbeat, WorkerMetrics},
};

use super::WorkerConfig;
use crate::{
    machine,
    metrics::{Metrics, Steps},
};

const INTERVAL: Duration = Duration::from_secs(2);

/// How often the store is kept in order; every worker does it, and most find nothing to do.
const MAINTAIN_INTERVAL: Duration = Duration::from_secs(3600);

/// What a worker does before it has heard anything: one that nobody directs goes on, one that may
/// have been told to pause waits to hear it.
pub(super) fn initial_directive(directed: bool) -> Directive {
    Directive { drain: false, paused: directed }
}

/// The task's state.
pub(super) struct HeartbeatTask {
    pub operations: Arc<dyn Operations>,
    pub metrics: Arc<Metrics>,
    pub config: WorkerConfig,
    pub numerics_class: String,
    pub directive: watch::Sender<Directive>,
}

impl HeartbeatTask {
    /// Beats until it is aborted.
    pub async fn run(self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut maintain_at = Instant::now();
        let (mut then, mut tokens) = (Instant::now(), self.metrics.completion_tokens());
        let mut steps = self.metrics.steps();
        loop {
            ticks.tick().await;
            let (now, total) = (Instant::now(), self.metrics.completion_tokens());
            let seconds = now.duration_since(then).as_secs_f64().max(0.001);
            #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
            let tokens_per_s = (total - tokens) as f64 / seconds;
            let before = std::mem::replace(&mut steps, self.metrics.steps());
            let measured = self.measured(before, steps, seconds);
            (then, tokens) = (now, total);
            let heartbeat = Heartbeat {
                owner: self.config.owner.clone(),
                queue: self.config.queue.clone(),
                host: machine::host_name(),
                pid: std::process::id(),
                running: u32::try_from(self.metrics.running()).unwrap_or(u32::MAX),
                slots: u32::try_from(
                    self.config.slots.saturating_mul(self.metrics.devices().len()),
                )
                .unwrap_or(u32::MAX),
                draining: self.metrics.is_draining(),
                tokens_per_s,
                metrics: measured,
            };
            match self.operations.heartbeat(&heartbeat).await {
                Ok(directive) => {
                    self.directive
                        .send_if_modified(|old| std::mem::replace(old, directive) != directive);
                }
                Err(error) => tracing::warn!(%error, "heartbeat not recorded"),
            }
            if let Err(error) = self.operations.sample().await {
                tracing::warn!(%error, "queues not sampled");
            }
            if Instant::now() >= maintain_at {
                maintain_at = Instant::now() + MAINTAIN_INTERVAL;
                let operations = self.operations.clone();
                // Beside the beats: dropping a day of jobs may take a while.
                tokio::spawn(async move {
                    if let Err(error) = operations.maintain().await {
                        tracing::warn!(%error, "store not kept in order, trying again in an hour");
                    }
                });
            }
        }
    }

    /// What happened since the last beat, and what there is now.
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    fn measured(&self, before: Steps, now: Steps, seconds: f64) -> WorkerMetrics {
        let since = |count: fn(&Steps) -> u64| count(&now).saturating_sub(count(&before)) as f64;
        let steps = since(|steps| steps.stats.steps);
        WorkerMetrics {
            device: self.metrics.devices().join(","),
            isa: self.config.isa.clone(),
            numerics_class: self.numerics_class.clone(),
            batch_size: since(|steps| steps.sequences) / steps.max(1.0),
            prefill_tokens_per_s: since(|steps| steps.stats.prefill_tokens) / seconds,
            decode_tokens_per_s: since(|steps| steps.stats.decode_tokens) / seconds,
            kv_blocks_used: now.stats.blocks_used as u64,
            kv_blocks_total: now.stats.blocks_total as u64,
            prefix_hit_tokens: now.stats.prefix_hit_tokens,
            prefix_miss_tokens: now.stats.prefix_miss_tokens,
            lease_age_ms: self.metrics.lease_age_ms(),
            read_age_ms: self.metrics.read_age_ms(),
            integrity: self.metrics.integrity(),
        }
    }
}
