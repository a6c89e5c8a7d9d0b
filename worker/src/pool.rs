//! The resource pool: several models in one process, which share devices and one memory budget.
//!
//! Each model on each kind of device is a [`PoolUnit`] with its own queue and worker. All of them take part from the
//! start: they are listed, and keep their queues' entries complete. A model is loaded when its queue has work, and
//! unloaded when another one needs the memory; then its worker drains first. [`core`] decides, and this module does
//! it. With one model, that is loaded at the start and stays.

mod core;
mod dispatcher;
mod pages;
#[cfg(test)]
mod simulation;
mod status;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{JoinError, JoinSet},
    time::{Instant, MissedTickBehavior, interval},
};

use tritmill_queue::QueueName;

pub use self::pages::Pages;
use self::{
    core::{Action, Core},
    status::{Phase, Status},
};
use crate::{
    engine_thread::Turns,
    worker::{Device, Presence, Stop, Worker, WorkerError},
};

/// Time between two looks at the queues.
const TICK: Duration = Duration::from_millis(250);

/// The reason why a model cannot be loaded.
pub type LoadFailure = Box<dyn std::error::Error + Send + Sync>;
/// Loads a model: returns an engine for each device. May take minutes, and may be called again.
pub type Loader = Arc<dyn Fn() -> Result<Vec<Device>, LoadFailure> + Send + Sync>;

/// A model on the devices of one kind.
pub struct PoolUnit {
    /// Its worker, in [`Mode::Service`](crate::Mode::Service).
    pub worker: Worker,
    /// Kind of its devices, if its queue has several: distinguishes its metrics.
    pub kind: Option<String>,
    /// Memory of the process that it takes while it is loaded, in bytes; at most the budget.
    pub memory_bytes: u64,
    /// Loads it.
    pub load: Loader,
}

/// A pool ended before it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// No model could be loaded at the start.
    #[error(transparent)]
    Load(LoadFailure),
    /// A worker ended; the others were drained.
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// Models that are ready to be served.
pub struct Pool {
    units: Vec<PoolUnit>,
    status: Arc<Status>,
}

impl Pool {
    /// Makes a pool of at least one unit. `memory_bytes` is what all loaded models may take together; `None` without
    /// a limit.
    pub fn new(units: Vec<PoolUnit>, memory_bytes: Option<u64>) -> Self {
        let label = |unit: &PoolUnit| {
            let queue = unit.worker.config.queue.to_string();
            status::Labels { queue, kind: unit.kind.clone() }
        };
        let known = units.iter().map(|unit| (label(unit), unit.memory_bytes)).collect();
        Self { status: Arc::new(Status::new(known, memory_bytes)), units }
    }

    /// Returns the owner and the queue of each worker.
    pub fn workers(&self) -> Vec<(String, QueueName)> {
        let configs = self.units.iter().map(|unit| &unit.worker.config);
        configs.map(|config| (config.owner.clone(), config.queue.clone())).collect()
    }

    /// Returns the health and metrics pages of the process.
    pub fn pages(&self) -> Pages {
        let metrics = self.units.iter().map(|unit| Arc::clone(&unit.worker.metrics)).collect();
        Pages::new(Arc::clone(&self.status), metrics)
    }

    /// Runs until `stop` asks for a drain, or an operator drains one of the workers. Sends to `loaded` when the first
    /// model is loaded. Leases of claims that a failed worker still holds expire.
    ///
    /// # Errors
    /// If no model can be loaded at the start, or a worker ends with an error.
    pub async fn run(
        self,
        mut stop: watch::Receiver<Stop>,
        loaded: oneshot::Sender<()>,
    ) -> Result<(), PoolError> {
        let mut shell = Shell::new(self, loaded);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A request may have come before this.
        stop.mark_changed();
        loop {
            shell.look();
            if shell.is_over() {
                return shell.finish().await;
            }
            tokio::select! {
                biased;
                Ok(()) = stop.changed() => {
                    if *stop.borrow_and_update() == Stop::Drain {
                        shell.end(Ok(()));
                    }
                }
                Some(ended) = shell.working.join_next() => shell.worker_ended(ended),
                Some((unit, devices)) = shell.loads.recv() => shell.load_ended(unit, devices),
                _ = ticks.tick() => {}
            }
        }
    }
}

/// A unit and what is running of it.
struct Slot {
    presence: Presence,
    load: Loader,
    /// Drains its worker, while that runs.
    stop: Option<watch::Sender<Stop>>,
    was_tried: bool,
}

type LoadEnd = (usize, Result<Vec<Device>, LoadFailure>);

/// The running pool.
struct Shell {
    core: Core,
    slots: Vec<Slot>,
    turns: Turns,
    status: Arc<Status>,
    started: Instant,
    working: JoinSet<(usize, Result<(), WorkerError>)>,
    loads: mpsc::Receiver<LoadEnd>,
    load_ended: mpsc::Sender<LoadEnd>,
    /// Taken when the first model is loaded.
    loaded: Option<oneshot::Sender<()>>,
    first_failure: Option<LoadFailure>,
    /// How the pool ends, once it ends.
    result: Option<Result<(), PoolError>>,
}

impl Shell {
    fn new(Pool { units, status }: Pool, loaded: oneshot::Sender<()>) -> Self {
        let turns = if units.len() > 1 { Turns::shared() } else { Turns::default() };
        let bytes: Vec<u64> = units.iter().map(|unit| unit.memory_bytes).collect();
        let slot = |PoolUnit { worker, load, .. }| Slot {
            presence: worker.appear(),
            load,
            stop: None,
            was_tried: false,
        };
        let (load_ended, loads) = mpsc::channel(1);
        Self {
            core: Core::new(status.limit_bytes().unwrap_or(u64::MAX), bytes),
            slots: units.into_iter().map(slot).collect(),
            turns,
            status,
            started: Instant::now(),
            working: JoinSet::new(),
            loads,
            load_ended,
            loaded: Some(loaded),
            first_failure: None,
            result: None,
        }
    }

    fn queue(&self, unit: usize) -> String {
        self.slots[unit].presence.worker().config.queue.to_string()
    }

    /// Looks at the queues and the directives, and does what is decided.
    fn look(&mut self) {
        if self.result.is_some() {
            return;
        }
        let now = self.started.elapsed();
        for (unit, Slot { presence, .. }) in self.slots.iter().enumerate() {
            let directive = presence.directive();
            if directive.drain {
                return self.end(Ok(()));
            }
            let metrics = &presence.worker().metrics;
            let has_work =
                if directive.paused { metrics.running() > 0 } else { metrics.has_work() };
            self.core.set_work(now, unit, has_work);
        }
        for action in self.core.decide(now) {
            match action {
                Action::Load(unit) => self.load(unit),
                Action::Unload(unit) => self.unload(unit),
            }
        }
    }

    fn load(&mut self, unit: usize) {
        self.status.set(unit, Phase::Loading);
        let slot = &mut self.slots[unit];
        slot.was_tried = true;
        let (load, ended) = (Arc::clone(&slot.load), self.load_ended.clone());
        // A thread of its own: the process does not wait for it at its end.
        let body = move || {
            let devices = catch_unwind(AssertUnwindSafe(|| load()));
            let devices = devices.unwrap_or_else(|_| Err("loading the model panicked".into()));
            // Fails if the pool has ended.
            let _ = ended.blocking_send((unit, devices));
        };
        if let Err(error) = thread::Builder::new().name("load".to_owned()).spawn(body) {
            self.load_ended(unit, Err(error.into()));
        }
    }

    fn load_ended(&mut self, unit: usize, devices: Result<Vec<Device>, LoadFailure>) {
        if self.result.is_some() {
            return;
        }
        let (now, queue) = (self.started.elapsed(), self.queue(unit));
        match devices {
            Ok(devices) => {
                self.core.loaded(now, unit);
                self.status.set(unit, Phase::Loaded);
                let slot = &mut self.slots[unit];
                let (stop, stopped) = watch::channel(Stop::No);
                slot.stop = Some(stop);
                let work = slot.presence.work(devices, &self.turns, stopped);
                self.working.spawn(async move { (unit, work.await) });
                tracing::info!(queue, "model is served");
                if let Some(loaded) = self.loaded.take() {
                    // The receiver may not care.
                    let _ = loaded.send(());
                }
            }
            Err(error) => {
                let retry_after_s = self.core.load_failed(now, unit).as_secs();
                self.status.set(unit, Phase::Failed(crate::served::chain(error.as_ref())));
                let any_left = self.slots.iter().any(|slot| !slot.was_tried);
                if self.slots.len() > 1 {
                    tracing::error!(queue, %error, retry_after_s, "model cannot be loaded");
                }
                let first = self.first_failure.take().unwrap_or(error);
                match self.loaded.is_some() && !any_left {
                    true => self.end(Err(PoolError::Load(first))),
                    false => self.first_failure = Some(first),
                }
            }
        }
    }

    fn unload(&mut self, unit: usize) {
        self.status.set(unit, Phase::Unloading);
        tracing::info!(queue = self.queue(unit), "model makes room for another one");
        // Running jobs end first: one that cannot be resumed would begin again each time.
        self.stop(unit, Stop::Finish);
    }

    fn stop(&self, unit: usize, how: Stop) {
        if let Some(stop) = &self.slots[unit].stop {
            // Fails if the worker has just ended.
            let _ = stop.send(how);
        }
    }

    fn worker_ended(&mut self, ended: Result<(usize, Result<(), WorkerError>), JoinError>) {
        let (unit, result) = match ended {
            Ok(ended) => ended,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return,
        };
        self.slots[unit].stop = None;
        self.core.unloaded(self.started.elapsed(), unit);
        if let Err(error) = result {
            return self.end(Err(error.into()));
        }
        if self.status.is_unloading(unit) {
            self.slots[unit].presence.worker().metrics.unloaded();
            self.status.set(unit, Phase::Unloaded);
        } else {
            // An operator drained it, and with it the process.
            self.end(Ok(()));
        }
    }

    /// Drains all workers; the first reason counts.
    fn end(&mut self, result: Result<(), PoolError>) {
        if let Err(error) = &result
            && !self.working.is_empty()
        {
            tracing::error!(%error, "a worker failed: draining the others");
        }
        self.result.get_or_insert(result);
        self.status.set_draining();
        (0..self.slots.len()).for_each(|unit| self.stop(unit, Stop::Drain));
    }

    fn is_over(&self) -> bool {
        self.result.is_some() && self.working.is_empty()
    }

    async fn finish(self) -> Result<(), PoolError> {
        let leaving: JoinSet<()> =
            self.slots.into_iter().map(|slot| slot.presence.leave()).collect();
        leaving.join_all().await;
        self.result.unwrap_or(Ok(()))
    }
}
