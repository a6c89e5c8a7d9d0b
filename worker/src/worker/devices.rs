//! The devices of a worker: an engine on a thread of its own each, and which of them a job goes to.
//!
//! Claims are the worker's, whichever device runs them: one pull loop asks for what fits all of them, and
//! every claim stays with the device that it was given to. A device that fails again and again is left
//! alone by itself; one that is lost, or hangs, ends the worker, whose claims are handed back.

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

/// An engine, and what people call the device that it runs on.
#[derive(Debug)]
pub struct Device {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// The engine; engines of one worker are of one numerics class.
    pub engine: Engine,
}

/// A device at work.
pub(super) struct RunningDevice {
    pub name: String,
    pub thread: EngineThread,
    /// Whether it is left alone.
    pub breaker: Breaker,
}

/// See the module. A device goes by its place.
pub(super) struct Devices {
    all: Vec<RunningDevice>,
    /// Choices that each one holds.
    slots: usize,
}

impl Devices {
    /// Moves every engine to a thread of its own.
    pub fn start(devices: Vec<Device>, slots: usize, metrics: &Arc<Metrics>) -> io::Result<Self> {
        assert!(!devices.is_empty(), "a worker has a device");
        metrics.set_devices(devices.iter().map(|device| device.name.clone()).collect());
        let start = |(place, Device { name, engine })| {
            let thread = EngineThread::start(engine, place, Arc::clone(metrics))?;
            Ok(RunningDevice { name, thread, breaker: Breaker::default() })
        };
        let all = devices.into_iter().enumerate().map(start).collect::<io::Result<_>>()?;
        Ok(Self { all, slots })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// One of them.
    pub fn at(&mut self, place: usize) -> &mut RunningDevice {
        &mut self.all[place]
    }

    /// The next report and whose it is; none of a device whose thread is dead. May be dropped at any
    /// time.
    pub async fn next_report(&mut self) -> (usize, Option<Report>) {
        poll_fn(|context| {
            for (place, device) in self.all.iter_mut().enumerate() {
                if let Poll::Ready(report) = device.thread.reports.poll_recv(context) {
                    return Poll::Ready((place, report));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// A report that is there already, of any device.
    pub fn waiting_report(&mut self) -> Option<(usize, Report)> {
        let take = |(place, device): (usize, &mut RunningDevice)| {
            device.thread.reports.try_recv().ok().map(|report| (place, report))
        };
        self.all.iter_mut().enumerate().find_map(take)
    }

    /// The numbers of the steps that run at this moment, by device.
    pub fn running_steps(&self) -> Vec<Option<u64>> {
        self.all.iter().map(|device| device.thread.running_step()).collect()
    }

    /// Jobs that there is room for.
    pub fn room(&mut self, in_flight: &InFlight) -> usize {
        (0..self.count()).map(|place| self.room_at(place, in_flight.load(place))).sum()
    }

    fn room_at(&mut self, place: usize, load: Load) -> usize {
        let free = self.slots.saturating_sub(load.choices);
        match self.all[place].breaker.allows() {
            Allowance::All => free,
            Allowance::Probe if load.claims == 0 => free.min(1),
            Allowance::Probe | Allowance::Nothing => 0,
        }
    }

    /// Where one more job goes: to a device that is to be tried again, else to the one with the most
    /// room, the first of equals.
    pub fn place(&mut self, in_flight: &InFlight) -> usize {
        let count = self.count();
        let rank = |place: &usize| {
            let load = in_flight.load(*place);
            let works = self.room_at(*place, load) > 0;
            let on_trial = self.all[*place].breaker.allows() == Allowance::Probe;
            Reverse((works && on_trial, works, Reverse(load.choices)))
        };
        // A worker has a device.
        (0..count).min_by_key(rank).unwrap_or_default()
    }

    /// When the first of those that are left alone may be tried again.
    pub fn retry_at(&self) -> Option<Instant> {
        self.all.iter().filter_map(|device| device.breaker.until()).min()
    }
}
