//! What a worker does whether it has engines or not: it is listed, follows its operators' directives, and does its
//! part of the work for all workers.

use std::sync::Arc;

use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Duration, timeout},
};
use tritmill_queue::store::workers::Directive;

use super::{
    config::{Mode, Stop},
    error::WorkerError,
    heartbeat::{self, HeartbeatTask},
    maintenance,
    reconciler::Reconciler,
    sampling,
    setup::{Device, Worker},
    shell::Shell,
};
use crate::engine_thread::Turns;

/// Limit for removing the worker from the list at its end.
const FORGET_LIMIT: Duration = Duration::from_secs(2);

/// A worker that takes part, with engines or without.
pub(crate) struct Presence {
    worker: Arc<Worker>,
    directive: watch::Receiver<Directive>,
    /// Aborted when this is dropped.
    tasks: JoinSet<()>,
}

impl Presence {
    /// Starts the worker's tasks.
    pub fn start(worker: Worker) -> Self {
        let mut tasks = JoinSet::new();
        let first = heartbeat::initial_directive(worker.operations.is_some());
        let (directive_sender, directive) = watch::channel(first);
        if worker.config.mode == Mode::Service {
            tasks.spawn(Reconciler::new(&worker, directive.clone()).run());
        }
        if let Some(operations) = &worker.operations {
            let heartbeat = HeartbeatTask::new(&worker, Arc::clone(operations), directive_sender);
            tasks.spawn(heartbeat.run());
            tasks.spawn(sampling::run(Arc::clone(operations), directive.clone()));
            let metrics = Arc::clone(&worker.metrics);
            tasks.spawn(maintenance::run(Arc::clone(operations), metrics, directive.clone()));
        }
        Self { worker: Arc::new(worker), directive, tasks }
    }

    /// Returns the worker.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Returns the last directive.
    pub fn directive(&self) -> Directive {
        *self.directive.borrow()
    }

    /// Runs jobs on these devices until `stop` or a directive asks for a drain. The devices are dropped before it
    /// returns.
    pub fn work(
        &self,
        devices: Vec<Device>,
        turns: &Turns,
        stop: watch::Receiver<Stop>,
    ) -> impl Future<Output = Result<(), WorkerError>> + Send + use<> {
        let turns = devices.iter().map(|device| turns.turn(&device.name)).collect();
        Shell::run(Arc::clone(&self.worker), devices, turns, stop, self.directive.clone())
    }

    /// Ends the tasks and removes the worker from the list.
    pub async fn leave(self) {
        let Self { worker, tasks, .. } = self;
        drop(tasks);
        if let Some(operations) = &worker.operations {
            // If this fails, the worker is listed as silent for a while.
            let forgotten = operations.forget_worker(&worker.config.owner);
            let _ = timeout(FORGET_LIMIT, forgotten).await;
        }
    }
}
