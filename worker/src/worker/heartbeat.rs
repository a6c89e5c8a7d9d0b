//! Reports the state of the worker to operators and receives their directives.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tritmill_queue::{
    Operations,
    store::workers::{Directive, Heartbeat, Leadership, TierReport, WorkReport, WorkerMetrics},
};

use super::{
    config::WorkerConfig,
    drain_rate::{Done, DrainRate},
    setup::Worker,
};
use crate::{
    machine,
    metrics::{Metrics, Steps},
};

const INTERVAL: Duration = Duration::from_secs(2);
/// Time of steps between two heartbeats from which they show how fast steps can be.
const FASTEST_FROM_S: f64 = 0.5;

/// Returns the directive before the first answer: a worker with operators waits for it, since its
/// queue may be paused; others start at once.
pub(super) fn initial_directive(has_operations: bool) -> Directive {
    let leads = if has_operations { Leadership::default() } else { Leadership::ALL };
    Directive { drain: false, paused: has_operations, leads }
}

/// The task's state.
pub(super) struct HeartbeatTask {
    operations: Arc<dyn Operations>,
    metrics: Arc<Metrics>,
    config: WorkerConfig,
    numerics_class: String,
    directive: watch::Sender<Directive>,
}

impl HeartbeatTask {
    pub fn new(
        worker: &Worker,
        operations: Arc<dyn Operations>,
        directive: watch::Sender<Directive>,
    ) -> Self {
        Self {
            operations,
            metrics: Arc::clone(&worker.metrics),
            config: worker.config.clone(),
            numerics_class: worker.served.numerics_class().to_owned(),
            directive,
        }
    }

    /// Runs until it is aborted.
    pub async fn run(self) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut then, mut tokens) = (Instant::now(), self.metrics.completion_tokens());
        let (mut steps, mut answered) = (self.metrics.steps(), self.metrics.answered());
        let (mut drain, mut was_busy) = (DrainRate::default(), false);
        // When the last heartbeat that was recorded was sent.
        let mut heard_at = then;
        let mut fastest = 0.0;
        loop {
            ticks.tick().await;
            let (now, total) = (Instant::now(), self.metrics.completion_tokens());
            let seconds = now.duration_since(then).as_secs_f64().max(0.001);
            #[expect(clippy::cast_precision_loss, reason = "a rate for display")]
            let tokens_per_s = (total - tokens) as f64 / seconds;
            let before = std::mem::replace(&mut steps, self.metrics.steps());
            let mut measured = self.measured(before, steps, seconds);
            measured.report = self.report(before, steps, seconds, &mut fastest);
            let slots = self.config.slots.saturating_mul(self.metrics.devices().len());
            let running = u32::try_from(self.metrics.running()).unwrap_or(u32::MAX);
            let is_busy = running as usize * 2 >= slots;
            let more = self.metrics.answered();
            drain.record(Done {
                elapsed: now.duration_since(then),
                was_busy: std::mem::replace(&mut was_busy, is_busy) && is_busy,
                computed: computed(&steps) - computed(&before).min(computed(&steps)),
                answered_cost: more.cost - answered.cost,
                answered_tokens: more.tokens - answered.tokens,
            });
            (then, tokens, answered) = (now, total, more);
            let heartbeat = Heartbeat {
                owner: self.config.owner.clone(),
                queue: self.config.queue.clone(),
                host: machine::host_name(),
                pid: std::process::id(),
                running,
                slots: u32::try_from(slots).unwrap_or(u32::MAX),
                draining: self.metrics.is_draining(),
                tokens_per_s,
                // A model that is not loaded drains nothing.
                metrics: WorkerMetrics {
                    drain_tokens_per_s: drain.tokens_per_s().filter(|_| slots > 0),
                    ..measured
                },
            };
            match self.operations.heartbeat(&heartbeat).await {
                Ok(directive) => {
                    heard_at = now;
                    self.metrics.heartbeat_recorded();
                    self.directive
                        .send_if_modified(|old| std::mem::replace(old, directive) != directive);
                }
                Err(error) => {
                    tracing::warn!(%error, "heartbeat not recorded");
                    if heard_at.elapsed() >= Leadership::LEASE {
                        // Another worker leads by now.
                        self.directive.send_if_modified(|directive| {
                            std::mem::take(&mut directive.leads) != Leadership::default()
                        });
                    }
                }
            }
        }
    }

    /// Rates since the last heartbeat and current values.
    #[expect(clippy::cast_precision_loss, reason = "rates for display")]
    fn measured(&self, before: Steps, now: Steps, seconds: f64) -> WorkerMetrics {
        let since = |count: fn(&Steps) -> u64| count(&now).saturating_sub(count(&before)) as f64;
        let steps = since(|steps| steps.stats.steps);
        WorkerMetrics {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            device: self.metrics.devices().join(","),
            isa: self.config.isa.clone(),
            numerics_class: self.numerics_class.clone(),
            batch_size: since(|steps| steps.sequences) / steps.max(1.0),
            prefill_tokens_per_s: since(|steps| steps.stats.prefill_tokens) / seconds,
            decode_tokens_per_s: since(|steps| steps.stats.decode_tokens) / seconds,
            drain_tokens_per_s: None,
            kv_blocks_used: now.stats.blocks_used as u64,
            kv_blocks_total: now.stats.blocks_total as u64,
            kv_blocks_cached: now.stats.blocks_cached as u64,
            kv_bytes_used: now.stats.bytes_used,
            kv_bytes_total: now.stats.bytes_total,
            tiers: now.stats.tiers.map(|tiers| TierReport {
                hits: tiers.hits,
                memory_hits: tiers.host_hits,
                peer_hits: tiers.remote_hits,
                misses: tiers.misses,
                memory_bytes: tiers.host_bytes,
                disk_blocks: tiers.usage.blocks,
                disk_bytes: tiers.usage.bytes,
            }),
            prefix_hit_tokens: now.stats.prefix_hit_tokens,
            prefix_miss_tokens: now.stats.prefix_miss_tokens,
            lease_age_ms: self.metrics.lease_age_ms(),
            read_age_ms: self.metrics.read_age_ms(),
            report: WorkReport::default(),
            integrity: self.metrics.integrity(),
        }
    }

    /// Returns what the engines did between two counts. `fastest` has the most rows per second of steps so far.
    #[expect(clippy::cast_precision_loss, reason = "rates for display")]
    fn report(&self, before: Steps, now: Steps, seconds: f64, fastest: &mut f64) -> WorkReport {
        let since = |count: fn(&Steps) -> u64| count(&now).saturating_sub(count(&before)) as f64;
        let (steps, rows) = (since(|steps| steps.stats.steps), since(Steps::rows));
        let busy = now.busy.saturating_sub(before.busy).as_secs_f64();
        let speed = (busy > 0.0).then(|| rows / busy);
        // Few steps say little about how fast steps can be.
        if busy >= FASTEST_FROM_S {
            *fastest = speed.map_or(*fastest, |speed| speed.max(*fastest));
        }
        let started = since(|steps| steps.started);
        let waited = now.waited.saturating_sub(before.waited).as_secs_f64();
        let ended = since(|steps| steps.stats.finished + steps.stats.failed);
        WorkReport {
            requests_per_s: ended / seconds,
            steps_per_s: steps / seconds,
            rows_per_step: rows / steps.max(1.0),
            utilisation: (busy / seconds / self.metrics.devices().len().max(1) as f64).min(1.0),
            wait_ms: (started > 0.0).then(|| waited * 1000.0 / started),
            efficiency: speed.filter(|_| *fastest > 0.0).map(|speed| (speed / *fastest).min(1.0)),
        }
    }
}

/// Returns the tokens that the engines computed for prompts and generated.
fn computed(steps: &Steps) -> u64 {
    steps.stats.prefill_tokens + steps.stats.generated_tokens
}
