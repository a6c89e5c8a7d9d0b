//! The pages of a process: its metrics as one text, and whether it is ready.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use prometheus_client::{encoding::text, registry::Registry};
use tritmill_queue::{dispatch::RedisDispatcher, metrics::ConnectionMetrics, store::PostgresStore};

use super::{
    dispatcher::DispatcherCounters,
    status::{Labels, Phase, Status, StatusMetrics},
};
use crate::metrics::Metrics;

/// The last line of the OpenMetrics text format.
const END: &str = "# EOF\n";

/// Health and metrics of all models of a process.
#[derive(Debug)]
pub struct Pages {
    status: Arc<Status>,
    /// Of each unit.
    workers: Vec<Arc<Metrics>>,
    /// What the process has once.
    registry: Registry,
    /// Connections of these pages, and refusals.
    pub(crate) http: tritmill_http::Metrics,
}

impl Pages {
    pub(super) fn new(status: Arc<Status>, workers: Vec<Arc<Metrics>>) -> Self {
        let mut registry = Registry::with_prefix("tritmill");
        let http = tritmill_http::Metrics::default();
        http.register(registry.sub_registry_with_prefix("worker"));
        registry.register_collector(Box::new(StatusMetrics(Arc::clone(&status))));
        Self { status, workers, registry, http }
    }

    /// Adds the counters of this dispatcher, and the connections of both servers.
    #[must_use]
    pub fn with_servers(mut self, dispatcher: &RedisDispatcher, database: &PostgresStore) -> Self {
        let connections = ConnectionMetrics::new(database, dispatcher);
        self.registry.register_collector(Box::new(connections));
        let of_worker = self.registry.sub_registry_with_prefix("worker");
        of_worker.register_collector(Box::new(DispatcherCounters(dispatcher.clone())));
        self
    }

    /// Returns all metrics in the OpenMetrics text format. With several models, each one's have its queue as a label.
    pub fn encode(&self) -> String {
        let mut of_process = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut of_process, &self.registry);
        let mut families = Families::default();
        let units = self.status.phases();
        for ((labels, _), metrics) in units.iter().zip(&self.workers) {
            families.add(&metrics.encode(), (units.len() > 1).then(|| labels_text(labels)));
        }
        families.add(&of_process, None);
        families.text()
    }

    /// Returns the reasons why the process is not ready; `None` if it is ready. A model that waits for memory is not
    /// a reason.
    pub fn not_ready_reason(&self) -> Option<String> {
        if self.status.is_draining() {
            return Some("draining".to_owned());
        }
        let units = self.status.phases();
        let is_alone = units.len() == 1;
        let reason = |((labels, phase), metrics): ((Labels, Phase), &Arc<Metrics>)| {
            let why = match phase {
                Phase::Loaded => metrics.not_ready_reason()?,
                Phase::Failed(why) => format!("cannot be loaded: {why}"),
                Phase::Unloaded | Phase::Loading | Phase::Unloading => return None,
            };
            Some(if is_alone { why } else { format!("{}: {why}", labels.queue) })
        };
        let reasons: Vec<String> =
            units.into_iter().zip(&self.workers).filter_map(reason).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// Returns the labels of a unit as in a line of metrics.
fn labels_text(labels: &Labels) -> String {
    let pair = |(name, value): (&str, &str)| {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{name}=\"{value}\"")
    };
    labels.pairs().into_iter().map(pair).collect::<Vec<_>>().join(",")
}

/// Metrics of several registries by family: a family may appear once in a text.
#[derive(Default)]
struct Families {
    order: Vec<String>,
    /// The lines about each family, then its lines with values.
    lines: BTreeMap<String, [String; 2]>,
}

impl Families {
    /// Adds the lines of a registry, with these labels in addition.
    fn add(&mut self, text: &str, labels: Option<String>) {
        let mut family = String::new();
        for line in text.trim_end_matches(END).lines() {
            if let Some(about) = line.strip_prefix("# ") {
                let name = about.split(' ').nth(1).unwrap_or_default();
                if name != family {
                    name.clone_into(&mut family);
                    if !self.lines.contains_key(name) {
                        self.order.push(family.clone());
                    }
                }
                let [abouts, _] = self.lines.entry(family.clone()).or_default();
                if !abouts.lines().any(|known| known == line) {
                    let _ = writeln!(abouts, "{line}");
                }
                continue;
            }
            let [_, values] = self.lines.entry(family.clone()).or_default();
            let _ = match &labels {
                Some(labels) => writeln!(values, "{}", with_labels(line, labels)),
                None => writeln!(values, "{line}"),
            };
        }
    }

    fn text(self) -> String {
        let parts = self.order.iter().filter_map(|name| self.lines.get(name));
        let text: String = parts.flatten().map(String::as_str).collect();
        text + END
    }
}

/// Returns a line of metrics with these labels in addition. A line that names its queue has them already.
fn with_labels(line: &str, labels: &str) -> String {
    let end_of_name = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(end_of_name);
    match rest.strip_prefix('{') {
        Some(others) if others.starts_with("queue=\"") => line.to_owned(),
        Some(others) if others.starts_with('}') => format!("{name}{{{labels}{others}"),
        Some(others) => format!("{name}{{{labels},{others}"),
        None => format!("{name}{{{labels}}}{rest}"),
    }
}

#[cfg(test)]
mod tests {
    use tritmill_queue::QueueName;

    use super::*;

    fn pages(models: &[&str]) -> Pages {
        let labels = |model: &&str| {
            let queue = QueueName { model: (*model).to_owned(), format: "tl2".into() };
            (Labels { queue: queue.to_string(), kind: None }, 10)
        };
        let status = Status::new(models.iter().map(labels).collect(), Some(15));
        Pages::new(Arc::new(status), models.iter().map(|_| Arc::default()).collect())
    }

    #[test]
    fn several_models_have_labels_and_one_has_those_of_its_own() {
        let one = pages(&["a"]).encode();
        assert!(one.contains("\ntritmill_worker_jobs_completed_total 0\n"), "{one}");
        let two = pages(&["a", "b\"c"]);
        two.workers[0].set_devices(vec!["cpu".to_owned()]);
        two.workers[1]
            .upkeep
            .queue_reconciled(&QueueName { model: "b".into(), format: "f".into() });
        let text = two.encode();
        for line in [
            "tritmill_worker_jobs_completed_total{queue=\"a@tl2\"} 0",
            "tritmill_worker_jobs_completed_total{queue=\"b\\\"c@tl2\"} 0",
            "tritmill_engine_steps_total{queue=\"a@tl2\",device=\"cpu\"} 0",
            "tritmill_e2e_request_latency_seconds_bucket{queue=\"a@tl2\",le=\"+Inf\"} 0",
            "tritmill_pool_memory_limit_bytes 15",
            "tritmill_pool_model_loaded{queue=\"a@tl2\"} 0",
        ] {
            assert!(text.lines().any(|known| known == line), "{line} in {text}");
        }
        assert!(text.contains("_timestamp_seconds{queue=\"b@f\"}"), "{text}");
        assert!(text.ends_with("\n# EOF\n") && text.matches("# EOF").count() == 1);
        let mut types: Vec<&str> = text.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count, "a family appears once: {text}");
    }

    #[test]
    fn kinds_of_devices_of_one_queue_are_told_apart() {
        let labels =
            |kind: &str| (Labels { queue: "a@tl2".to_owned(), kind: Some(kind.to_owned()) }, 10);
        let status = Status::new(vec![labels("cpu"), labels("cuda")], None);
        let text = Pages::new(Arc::new(status), vec![Arc::default(), Arc::default()]).encode();
        for name in ["tritmill_worker_jobs_completed_total", "tritmill_pool_loads_total"] {
            for kind in ["cpu", "cuda"] {
                let line = format!("{name}{{queue=\"a@tl2\",kind=\"{kind}\"}} 0");
                assert!(text.lines().any(|known| known == line), "{line} in {text}");
            }
        }
    }

    #[test]
    fn failures_of_any_model_are_shown_and_waiting_ones_are_none() {
        let pages = pages(&["a", "b"]);
        assert_eq!(pages.not_ready_reason(), None, "both wait for work");
        pages.status.set(0, Phase::Loaded);
        let reason = pages.not_ready_reason().expect("it has not read its queue");
        assert!(reason.starts_with("a@tl2: has not"), "{reason}");
        pages.workers[0].queue_read();
        assert_eq!(pages.not_ready_reason(), None);
        pages.status.set(1, Phase::Failed("no such file".to_owned()));
        let reason = pages.not_ready_reason();
        assert_eq!(reason.as_deref(), Some("b@tl2: cannot be loaded: no such file"));
        assert!(pages.encode().contains("tritmill_pool_load_failures_total{queue=\"b@tl2\"} 1"));
        pages.status.set_draining();
        assert_eq!(pages.not_ready_reason().as_deref(), Some("draining"));
    }
}
