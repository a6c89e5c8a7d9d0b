//! Page of workers: state, load and draining.

use std::time::Duration;

use askama::Template;
use serde::Deserialize;
use tritmill_queue::store::workers::{WorkReport, Worker, WorkerMetrics};

use super::{
    Content, PageError, PageForm, PageResult, Visit,
    filters::{self, scaled},
    percent_encoded,
};
use crate::{App, operator::workers::drain_worker};

/// A worker in a table.
pub(super) struct WorkerRow {
    pub worker: Worker,
}

impl WorkerRow {
    /// Class in the stylesheet, and word, for the worker's state.
    pub fn state(&self) -> (&'static str, &'static str) {
        match &self.worker {
            worker if !worker.is_alive() => ("silent", "offline"),
            worker if worker.heartbeat.draining || worker.drain_requested => {
                ("draining", "draining")
            }
            worker if worker.heartbeat.running > 0 => ("running", "busy"),
            _ => ("alive", "ready"),
        }
    }

    pub fn may_drain(&self) -> bool {
        self.worker.is_alive() && !self.worker.heartbeat.draining && !self.worker.drain_requested
    }

    pub fn queue_href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.worker.heartbeat.queue.to_string()))
    }

    /// URL of the worker's page.
    pub fn href(&self) -> String {
        format!("/dashboard/workers/{}", percent_encoded(&self.worker.heartbeat.owner))
    }

    fn metrics(&self) -> &WorkerMetrics {
        &self.worker.heartbeat.metrics
    }

    pub fn report(&self) -> &WorkReport {
        &self.metrics().report
    }

    /// Mean time of a request before its first step.
    pub fn wait(&self) -> Option<Duration> {
        self.report().wait_ms.map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1000.0))
    }

    /// Percentage of KV blocks in use.
    pub fn kv_usage(&self) -> f64 {
        percent(self.metrics().kv_blocks_used, self.metrics().kv_blocks_total)
    }

    /// Percentage of prompt tokens found in the prefix cache.
    pub fn cache_hits(&self) -> f64 {
        let hits = self.metrics().prefix_hit_tokens;
        percent(hits, hits + self.metrics().prefix_miss_tokens)
    }

    /// Percentage of looked up blocks that a tier had; `None` before the first.
    pub fn tier_hits(&self) -> Option<f64> {
        let tiers = self.metrics().tiers?;
        let all = tiers.hits + tiers.misses;
        (all > 0).then(|| percent(tiers.hits, all))
    }

    /// Device and instruction set.
    pub fn device(&self) -> String {
        let known = [&self.metrics().device, &self.metrics().isa];
        known.into_iter().filter(|word| !word.is_empty()).cloned().collect::<Vec<_>>().join(" ")
    }

    pub fn prefill(&self) -> String {
        scaled(self.metrics().prefill_tokens_per_s, "")
    }

    pub fn decode(&self) -> String {
        scaled(self.metrics().decode_tokens_per_s, "")
    }

    /// Time since the worker renewed its lease.
    pub fn lease_age(&self) -> Option<Duration> {
        self.metrics().lease_age_ms.map(Duration::from_millis)
    }

    /// Time since the worker read its queue.
    pub fn read_age(&self) -> Option<Duration> {
        self.metrics().read_age_ms.map(Duration::from_millis)
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

#[derive(Template)]
#[template(path = "workers.html")]
struct WorkersView {
    workers: Vec<WorkerRow>,
}

/// Shows the workers that sent a heartbeat within a day.
pub(crate) async fn list(visit: Visit) -> PageResult {
    visit.show(|app, _| load(app)).await
}

async fn load(app: App) -> Result<Content, PageError> {
    let workers = app.store.workers().await?;
    let mut workers: Vec<_> = workers.into_iter().map(|worker| WorkerRow { worker }).collect();
    // Live workers first; otherwise by name, as the store returns them.
    workers.sort_by_key(|row| !row.worker.is_alive());
    Ok(Content::new("Workers", &WorkersView { workers }))
}

/// The form to drain a worker.
#[derive(Deserialize)]
pub(crate) struct DrainForm {
    owner: String,
}

/// Asks a worker to drain.
pub(crate) async fn drain(
    visit: Visit,
    PageForm(DrainForm { owner }): PageForm<DrainForm>,
) -> PageResult {
    drain_worker(&visit.app, &visit.caller, &owner).await?;
    Ok(visit.done(
        "/dashboard/workers",
        "The worker finishes what it can, returns its other jobs to the queue and exits.",
    ))
}
