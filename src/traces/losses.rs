//! Spans that did not reach the collector: dropped when the queue is full, or lost with a failed request.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use opentelemetry::Context;
use opentelemetry_otlp::SpanExporter as Exporter;
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor},
};
use parking_lot::Mutex;

/// Least time between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// Counts of spans, for the log.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Spans in the queue.
    waiting: AtomicUsize,
    /// Lost spans that were not logged yet.
    lost: AtomicU64,
    /// Why the last request failed, and when that was logged.
    log: Mutex<(Option<String>, Option<Instant>)>,
}

impl Losses {
    /// Notes why a request failed. It may be repeated.
    pub fn set_reason(&self, reason: String) {
        self.log.lock().0 = Some(reason);
    }

    /// Forgets why earlier requests failed, unless spans were lost meanwhile and this was not logged yet.
    fn forget_reason(&self) {
        if self.lost.load(Ordering::Relaxed) == 0 {
            self.log.lock().0 = None;
        }
    }

    /// Logs lost spans, unless it did so a moment ago. Only the thread of the SDK calls this: logging inside
    /// `on_end` could end further spans and recurse.
    fn log(&self) {
        let mut log = self.log.lock();
        let (reason, logged_at) = &mut *log;
        let is_due = logged_at.is_none_or(|at| at.elapsed() >= LOG_EVERY);
        if !is_due || self.lost.load(Ordering::Relaxed) == 0 {
            return;
        }
        let reason = reason.take().unwrap_or_else(|| "more spans end than it takes".to_owned());
        *logged_at = Some(Instant::now());
        let spans = self.lost.swap(0, Ordering::Relaxed);
        drop(log);
        tracing::warn!(spans, reason, "spans did not reach the collector; jobs are not affected");
    }
}

/// Drops spans that end while the queue is full.
#[derive(Debug)]
pub(super) struct Bounded {
    pub next: BatchSpanProcessor,
    pub queue_max: usize,
    pub losses: Arc<Losses>,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.next.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.losses.waiting.fetch_add(1, Ordering::Relaxed) < self.queue_max {
            return self.next.on_end(span);
        }
        self.losses.waiting.fetch_sub(1, Ordering::Relaxed);
        self.losses.lost.fetch_add(1, Ordering::Relaxed);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.next.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.next.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.next.set_resource(resource);
    }
}

/// Counts the spans of requests that fail.
#[derive(Debug)]
pub(super) struct Counted {
    pub exporter: Exporter,
    pub losses: Arc<Losses>,
}

impl SpanExporter for Counted {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.losses.waiting.fetch_sub(spans, Ordering::Relaxed);
        let result = self.exporter.export(batch).await;
        match result {
            Ok(()) => self.losses.forget_reason(),
            Err(_) => {
                self.losses.lost.fetch_add(spans as u64, Ordering::Relaxed);
            }
        }
        self.losses.log();
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_forgotten_when_a_repetition_succeeds_and_kept_until_losses_are_logged() {
        let losses = Losses::default();
        let reason = || losses.log.lock().0.clone();
        losses.set_reason("503".to_owned());
        losses.forget_reason();
        assert_eq!(reason(), None);
        losses.set_reason("503".to_owned());
        losses.lost.store(7, Ordering::Relaxed);
        losses.forget_reason();
        assert_eq!(reason().as_deref(), Some("503"));
        losses.log();
        assert_eq!(reason(), None);
        assert_eq!(losses.lost.load(Ordering::Relaxed), 0);
    }
}
