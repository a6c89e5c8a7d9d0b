//! The devices of a worker, each with an engine on a thread of its own, and which device gets a job.
//!
//! The worker pulls jobs for all devices together, and every claim stays with the device it was given
//! to. A device that fails repeatedly gets no jobs for a while; one that is lost or hangs ends the
//! worker, which hands its claims back.

use std::{cmp::Reverse, future::poll_fn, io, sync::Arc, task::Poll};

use tokio::time::Instant;
use tritmill_engine::Engine;

use super::{
    breaker::{Allowance, Breaker},
    in_flight::{InFlight, Load},
};
use crate::{
    engine_thread::{EngineThread, Report},
    metrics::Metrics,
};

/// An engine and the name of its device.
#[derive(Debug)]
pub struct Device {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// The engine; all engines of a worker have the same numerics class.
    pub engine: Engine,
}

/// A device with a running engine thread.
pub(super) struct RunningDevice {
    pub name: String,
    pub thread: EngineThread,
    pub breaker: Breaker,
}

/// All devices of a worker, by index.
pub(super) struct Devices {
    all: Vec<RunningDevice>,
    /// Choices that each device holds at most.
    slots: usize,
}

impl Devices {
    /// Moves every engine to a thread of its own.
    pub fn start(devices: Vec<Device>, slots: usize, metrics: &Arc<Metrics>) -> io::Result<Self> {
        assert!(!devices.is_empty(), "a worker has a device");
        metrics.set_devices(devices.iter().map(|device| device.name.clone()).collect());
        let start = |(index, Device { name, engine })| {
            let thread = EngineThread::start(engine, index, Arc::clone(metrics))?;
            Ok(RunningDevice { name, thread, breaker: Breaker::default() })
        };
        let all = devices.into_iter().enumerate().map(start).collect::<io::Result<_>>()?;
        Ok(Self { all, slots })
    }

    /// Returns the number of devices.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Returns the device with this index.
    pub fn get(&mut self, index: usize) -> &mut RunningDevice {
        &mut self.all[index]
    }

    /// Returns the next report and the index of its device; `None` if the device's thread is dead.
    /// Dropping the future loses nothing.
    pub async fn next_report(&mut self) -> (usize, Option<Report>) {
        poll_fn(|context| {
            for (index, device) in self.all.iter_mut().enumerate() {
                if let Poll::Ready(report) = device.thread.reports.poll_recv(context) {
                    return Poll::Ready((index, report));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns a report that is available now.
    pub fn try_next_report(&mut self) -> Option<(usize, Report)> {
        let take = |(index, device): (usize, &mut RunningDevice)| {
            device.thread.reports.try_recv().ok().map(|report| (index, report))
        };
        self.all.iter_mut().enumerate().find_map(take)
    }

    /// Returns the numbers of the steps that are running now, by device.
    pub fn running_steps(&self) -> Vec<Option<u64>> {
        self.all.iter().map(|device| device.thread.running_step()).collect()
    }

    /// Returns the number of jobs that all devices have room for.
    pub fn free_slots(&mut self, in_flight: &InFlight) -> usize {
        (0..self.count()).map(|index| self.free_slots_of(index, in_flight.load(index))).sum()
    }

    fn free_slots_of(&mut self, index: usize, load: Load) -> usize {
        let free = self.slots.saturating_sub(load.choices);
        match self.all[index].breaker.allowance() {
            Allowance::All => free,
            Allowance::Probe if load.claims == 0 => free.min(1),
            Allowance::Probe | Allowance::Nothing => 0,
        }
    }

    /// Returns the device for one more job: a device to probe after failures, else the device with
    /// the most room (the first if several have it).
    pub fn choose(&mut self, in_flight: &InFlight) -> usize {
        let count = self.count();
        let rank = |index: &usize| {
            let load = in_flight.load(*index);
            let has_room = self.free_slots_of(*index, load) > 0;
            let is_probe = self.all[*index].breaker.allowance() == Allowance::Probe;
            Reverse((has_room && is_probe, has_room, Reverse(load.choices)))
        };
        // A worker has a device.
        (0..count).min_by_key(rank).unwrap_or_default()
    }

    /// Returns the time at which the first suspended device may be tried again.
    pub fn retry_at(&self) -> Option<Instant> {
        self.all.iter().filter_map(|device| device.breaker.retry_at()).min()
    }
}
