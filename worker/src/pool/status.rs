//! What the pool shows of its models: which are loaded, and how often that changed.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

/// Whether a model can answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Unloaded,
    Loading,
    Loaded,
    Unloading,
    /// It could not be loaded, because of this, and is tried again.
    Failed(String),
}

/// The labels of a unit's metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Labels {
    pub queue: String,
    /// Kind of its devices, if its queue has several.
    pub kind: Option<String>,
}

impl Labels {
    /// Returns names and values.
    pub fn pairs(&self) -> Vec<(&'static str, &str)> {
        let kind = self.kind.as_deref().map(|kind| ("kind", kind));
        [("queue", self.queue.as_str())].into_iter().chain(kind).collect()
    }
}

#[derive(Debug, Clone)]
struct Unit {
    labels: Labels,
    memory_bytes: u64,
    phase: Phase,
    loads: u64,
    unloads: u64,
    failures: u64,
}

/// The models of a pool.
#[derive(Debug)]
pub(super) struct Status {
    units: Mutex<Vec<Unit>>,
    limit_bytes: Option<u64>,
    draining: AtomicBool,
}

impl Status {
    /// Units that are not loaded, each with its memory.
    pub fn new(units: Vec<(Labels, u64)>, limit_bytes: Option<u64>) -> Self {
        let unit = |(labels, memory_bytes)| {
            let phase = Phase::Unloaded;
            Unit { labels, memory_bytes, phase, loads: 0, unloads: 0, failures: 0 }
        };
        let units = Mutex::new(units.into_iter().map(unit).collect());
        Self { units, limit_bytes, draining: AtomicBool::new(false) }
    }

    /// Returns the memory budget in bytes, if there is one.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.limit_bytes
    }

    /// Sets the phase of a unit, and counts it.
    pub fn set(&self, unit: usize, phase: Phase) {
        let unit = &mut self.units.lock()[unit];
        match phase {
            Phase::Loaded => unit.loads += 1,
            Phase::Unloading => unit.unloads += 1,
            Phase::Failed(_) => unit.failures += 1,
            Phase::Unloaded | Phase::Loading => {}
        }
        unit.phase = phase;
    }

    pub fn is_unloading(&self, unit: usize) -> bool {
        self.units.lock()[unit].phase == Phase::Unloading
    }

    pub fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Returns the labels and the phase of each unit.
    pub fn phases(&self) -> Vec<(Labels, Phase)> {
        let units = self.units.lock();
        units.iter().map(|unit| (unit.labels.clone(), unit.phase.clone())).collect()
    }
}

/// A metric's name, its help and its value.
type Row<T> = (&'static str, &'static str, fn(&Unit) -> T);

const GAUGES: [Row<u64>; 2] = [
    ("pool_model_loaded", "Whether a model is in memory", |unit| u64::from(unit.holds_memory())),
    ("pool_model_memory_bytes", "Memory that a model takes while it is loaded", |unit| {
        unit.memory_bytes
    }),
];

const COUNTERS: [Row<u64>; 3] = [
    ("pool_loads", "Times that a model was loaded", |unit| unit.loads),
    ("pool_unloads", "Times that a model made room for another one", |unit| unit.unloads),
    ("pool_load_failures", "Times that a model could not be loaded", |unit| unit.failures),
];

impl Unit {
    fn holds_memory(&self) -> bool {
        !matches!(self.phase, Phase::Unloaded | Phase::Failed(_))
    }
}

/// The metrics of a [`Status`].
#[derive(Debug)]
pub(super) struct StatusMetrics(pub std::sync::Arc<Status>);

impl Collector for StatusMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let units = self.0.units.lock().clone();
        let used: u64 =
            units.iter().filter(|unit| unit.holds_memory()).map(|unit| unit.memory_bytes).sum();
        let limit = self.0.limit_bytes.map(|limit| {
            ("pool_memory_limit_bytes", "Memory that all loaded models may take together", limit)
        });
        let used = ("pool_memory_used_bytes", "Memory of the models that are loaded", used);
        for (name, help, bytes) in [used].into_iter().chain(limit) {
            let gauge = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(bytes).encode(gauge)?;
        }
        for (name, help, value) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for unit in &units {
                ConstGauge::new(value(unit)).encode(family.encode_family(&unit.labels.pairs())?)?;
            }
        }
        for (name, help, value) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for unit in &units {
                ConstCounter::new(value(unit))
                    .encode(family.encode_family(&unit.labels.pairs())?)?;
            }
        }
        Ok(())
    }
}
