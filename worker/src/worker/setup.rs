//! What a worker works with.

use std::sync::Arc;

use tokio::sync::mpsc;
use tritmill_engine::Engine;
use tritmill_queue::{
    Dispatcher, Operations, Store,
    events::Events,
    metrics::{MeasuredDispatcher, MeasuredStore},
};

use super::{committed::Committed, config::WorkerConfig};
use crate::{metrics::Metrics, served::ServedModel};

/// An engine and the name of its device.
#[derive(Debug)]
pub struct Device {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// The engine; all engines of a worker have the same numerics class.
    pub engine: Engine,
}

/// A worker, ready to run.
pub struct Worker {
    /// The durable state of all jobs.
    pub store: Arc<dyn Store>,
    /// Delivers the jobs to run.
    pub dispatcher: Arc<dyn Dispatcher>,
    /// Receives heartbeats and answers with directives; `None` for an embedded worker.
    pub operations: Option<Arc<dyn Operations>>,
    /// Receives the events of streaming jobs.
    pub events: Option<Arc<dyn Events>>,
    /// The model that answers.
    pub served: Arc<ServedModel>,
    /// The configuration.
    pub config: WorkerConfig,
    /// Receives every commit. While it is full, further results wait for their commit.
    pub committed: Option<mpsc::Sender<Committed>>,
    /// Metrics, updated while the worker runs.
    pub metrics: Arc<Metrics>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Worker {
    /// Records the time of every call from here on.
    pub(super) fn measure_calls(&mut self) {
        let calls = &self.metrics.calls;
        self.store = Arc::new(MeasuredStore::new(Arc::clone(&self.store), calls));
        self.dispatcher = Arc::new(MeasuredDispatcher::new(Arc::clone(&self.dispatcher), calls));
        if let Some(operations) = &mut self.operations {
            *operations = Arc::new(MeasuredStore::new(Arc::clone(operations), calls));
        }
    }
}
