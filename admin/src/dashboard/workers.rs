//! Workers: who they are, what they do, and asking them to drain.

use std::time::Duration;

use askama::Template;
use axum::{Form, extract::rejection::FormRejection, response::Response};
use serde::Deserialize;
use serde_json::json;
use tritmill_queue::store::operations::Worker;

use super::{
    filters::{self, scaled},
    page::{PageError, View, Visit},
    session::percent_encoded,
};
use crate::{app::App, error::ApiError};

/// A worker as pages show it.
pub(super) struct Shown {
    pub worker: Worker,
}

impl Shown {
    /// A class of the stylesheet, and words.
    pub fn state(&self) -> (&'static str, &'static str) {
        match &self.worker {
            worker if !worker.is_alive() => ("silent", "silent"),
            worker if worker.heartbeat.draining || worker.drain_requested => {
                ("draining", "draining")
            }
            worker if worker.heartbeat.running > 0 => ("running", "working"),
            _ => ("alive", "ready"),
        }
    }

    pub fn may_drain(&self) -> bool {
        self.worker.is_alive() && !self.worker.heartbeat.draining && !self.worker.drain_requested
    }

    pub fn queue_href(&self) -> String {
        format!("/dashboard/queues/{}", percent_encoded(&self.worker.heartbeat.queue.to_string()))
    }

    /// Percent of the KV blocks that are in use.
    pub fn kv(&self) -> f64 {
        let measured = &self.worker.heartbeat.metrics;
        percent(measured.kv_blocks_used, measured.kv_blocks_total)
    }

    /// Percent of the prompt tokens that were found in the cache.
    pub fn hits(&self) -> f64 {
        let measured = &self.worker.heartbeat.metrics;
        percent(
            measured.prefix_hit_tokens,
            measured.prefix_hit_tokens + measured.prefix_miss_tokens,
        )
    }

    /// Where it computes.
    pub fn device(&self) -> String {
        let measured = &self.worker.heartbeat.metrics;
        let known = [&measured.device, &measured.isa];
        known.into_iter().filter(|word| !word.is_empty()).cloned().collect::<Vec<_>>().join(" ")
    }

    pub fn prefill(&self) -> String {
        scaled(self.worker.heartbeat.metrics.prefill_tokens_per_s, "")
    }

    pub fn decode(&self) -> String {
        scaled(self.worker.heartbeat.metrics.decode_tokens_per_s, "")
    }

    pub fn lease_age(&self) -> Option<Duration> {
        self.worker.heartbeat.metrics.lease_age_ms.map(Duration::from_millis)
    }

    pub fn read_age(&self) -> Option<Duration> {
        self.worker.heartbeat.metrics.read_age_ms.map(Duration::from_millis)
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

#[derive(Template)]
#[template(path = "workers.html")]
struct List {
    workers: Vec<Shown>,
}

impl View for List {
    fn title(&self) -> String {
        "Workers".to_owned()
    }
}

/// Every worker that was heard of lately.
pub(crate) async fn list(visit: Visit) -> Result<Response, PageError> {
    visit.show(|app, _| look(app)).await
}

async fn look(app: App) -> Result<List, PageError> {
    let workers = app.store().workers().await?;
    let mut workers: Vec<Shown> = workers.into_iter().map(|worker| Shown { worker }).collect();
    // Those that live first; otherwise by name, as they come.
    workers.sort_by_key(|shown| !shown.worker.is_alive());
    Ok(List { workers })
}

/// Who is to drain.
#[derive(Deserialize)]
pub(crate) struct Whom {
    owner: String,
}

/// Asks a worker to drain.
pub(crate) async fn drain(
    visit: Visit,
    whom: Result<Form<Whom>, FormRejection>,
) -> Result<Response, PageError> {
    let Form(Whom { owner }) =
        whom.map_err(|error| ApiError::invalid("invalid_form", error.body_text()))?;
    visit.note("worker.drain", &owner, json!({})).await?;
    if !visit.app.store().request_drain(&owner).await? {
        return Err(ApiError::not_found("worker", &owner).into());
    }
    Ok(visit.done(
        "/dashboard/workers",
        "The worker finishes what it has, hands back the rest and ends.",
    ))
}
