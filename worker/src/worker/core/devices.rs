//! The devices of a worker: which one runs a job, and which are suspended because they fail.
//!
//! The worker pulls jobs for all devices together, and every claim stays with the device it was given
//! to. A device that fails repeatedly gets no jobs for a while; one that is lost or hangs ends the
//! worker, which hands its claims back.

use std::{
    cmp::Reverse,
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_engine::{FinishReason, Output, RequestError, backend::StepError};
use tritmill_queue::{ErrorKind, JobError, Outcome};

use super::{
    Core,
    breaker::{Allowance, Breaker},
    in_flight::{Disposition, InFlight, Load},
    io::Command,
};
use crate::{engine_thread::End, served::chain, worker::WorkerError};

/// A device as the core sees it.
#[derive(Debug)]
pub(super) struct Device {
    /// `cpu`, `cuda:0`.
    pub name: String,
    pub breaker: Breaker,
}

/// All devices of a worker, by index.
#[derive(Debug)]
pub(super) struct Devices {
    all: Vec<Device>,
    /// Choices that each device holds at most.
    slots: usize,
    /// Additional slots of each device for jobs of priority high.
    reserved: usize,
}

impl Devices {
    /// Creates the devices with these names, at least one.
    pub fn new(names: Vec<String>, slots: usize, reserved: usize) -> Self {
        assert!(!names.is_empty(), "a worker has a device");
        let device = |name| Device { name, breaker: Breaker::default() };
        Self { all: names.into_iter().map(device).collect(), slots, reserved }
    }

    /// Returns the device with this index.
    pub fn get(&mut self, index: usize) -> &mut Device {
        &mut self.all[index]
    }

    /// Returns the number of slots of all devices.
    pub fn all_slots(&self) -> usize {
        self.slots * self.all.len()
    }

    /// Returns the number of jobs that all devices have room for.
    pub fn free_slots(&mut self, in_flight: &InFlight, now: Instant) -> usize {
        self.free_of(self.slots, in_flight, now)
    }

    /// Returns the number of jobs of priority high that all devices have room for.
    pub fn free_slots_for_high(&mut self, in_flight: &InFlight, now: Instant) -> usize {
        self.free_of(self.slots + self.reserved, in_flight, now)
    }

    fn free_of(&mut self, slots: usize, in_flight: &InFlight, now: Instant) -> usize {
        let count = self.all.len();
        (0..count).map(|index| self.free_of_one(slots, index, in_flight.load(index), now)).sum()
    }

    fn free_of_one(&mut self, slots: usize, index: usize, load: Load, now: Instant) -> usize {
        let free = slots.saturating_sub(load.choices);
        match self.all[index].breaker.allowance(now) {
            Allowance::All => free,
            Allowance::Probe if load.claims == 0 => free.min(1),
            Allowance::Probe | Allowance::Nothing => 0,
        }
    }

    /// Returns whether a device may begin another job that was claimed for it.
    pub fn takes_another(&mut self, index: usize, in_flight: &InFlight, now: Instant) -> bool {
        match self.all[index].breaker.allowance(now) {
            Allowance::All => true,
            Allowance::Probe => {
                !in_flight.running().any(|(_, claim)| claim.device == index && claim.submitted)
            }
            Allowance::Nothing => false,
        }
    }

    /// Returns the device for one more job: a device to probe after failures, else the device with
    /// the most room (the first if several have it).
    pub fn choose(&mut self, in_flight: &InFlight, now: Instant) -> usize {
        let count = self.all.len();
        let rank = |index: &usize| {
            let load = in_flight.load(*index);
            let slots = self.slots + self.reserved;
            let has_room = self.free_of_one(slots, *index, load, now) > 0;
            let is_probe = self.all[*index].breaker.allowance(now) == Allowance::Probe;
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

impl Core {
    /// Records the end of a request as a success or failure of its device.
    pub(super) fn record_device_result(&mut self, device: usize, end: &End) {
        if !self.policy.suspends_devices {
            return;
        }
        match end {
            End::Failed(error) => self.record_device_failure(device, error),
            End::Finished(output) if is_answer(output) => self.record_device_success(device),
            End::Finished(_) | End::Refused(_) => {}
        }
    }

    fn record_device_failure(&mut self, device: usize, error: &RequestError) {
        let (now, known) = (self.now, self.devices.get(device));
        let before = known.breaker.failures();
        let opened = known.breaker.record_failure(error, now);
        if known.breaker.failures() > before {
            self.metrics.device_failed();
        }
        if opened {
            self.suspend_device(device, &chain(error));
        }
        if let RequestError::Step(step) = error
            && matches!(**step, StepError::DeviceLost(_))
        {
            tracing::error!(why = chain(error), "the device is lost: this worker ends");
            let device = self.devices.get(device).name.clone();
            self.close(Err(WorkerError::DeviceLost { device, error: Arc::clone(step) }));
        }
    }

    /// Records that a request on the device got tokens.
    pub(super) fn record_device_success(&mut self, device: usize) {
        let known = self.devices.get(device);
        if known.breaker.record_success() {
            tracing::warn!(device = known.name, "the device works again");
            self.metrics.set_device_failure(device, None);
        }
    }

    /// Takes no jobs for a device for a while, and hands back what it holds.
    fn suspend_device(&mut self, device: usize, why: &str) {
        let known = self.devices.get(device);
        let (failures, name) = (known.breaker.failures(), known.name.clone());
        tracing::error!(
            device = name,
            failures,
            why,
            "the device fails repeatedly: it gets no jobs for now"
        );
        let why = format!("{name} failed {failures} times in a row, the last time: {why}");
        self.metrics.set_device_failure(device, Some(why));
        // The current pull requests more jobs than there is room for now.
        self.cancel_pull();
        for held in self.in_flight.running_on(device) {
            if let Some(claim) = self.in_flight.get_mut(held) {
                claim.hand_back = true;
            }
            self.stop_work(held);
        }
    }

    /// Checks whether a step of an engine does not end.
    pub(super) fn check_steps(&mut self, running: &[Option<u64>]) {
        if let Some(device) = self.watchdog.check(running) {
            self.commands.push(Command::Abandon(device));
            let (name, limit) = (self.devices.get(device).name.clone(), self.step_limit);
            self.end_broken_device(device, WorkerError::EngineHangs { device: name, limit });
        }
    }

    /// Ends the worker because the engine of a device hangs or has died. The cause is one of the jobs
    /// in its engine, or the device. A job that ran alone is charged an attempt; several are handed
    /// back as suspects, and each of them runs alone from now on.
    pub(super) fn end_broken_device(&mut self, device: usize, error: WorkerError) {
        for held in self.in_flight.running_on(device) {
            let Some(claim) = self.in_flight.get(held) else { continue };
            let disposition = match (claim.submitted, claim.is_alone) {
                (false, _) => Disposition::HandBack,
                (true, false) => Disposition::HandBackSuspect,
                (true, true) => {
                    let message = format!("it ran alone when {error}");
                    let error = JobError::new(ErrorKind::Engine, "engine_broken", message);
                    Disposition::Record(Outcome::Error(error))
                }
            };
            self.in_flight.end(held, disposition, self.now);
        }
        self.close(Err(error));
    }
}

fn is_answer(output: &Output) -> bool {
    let complete = |reason| matches!(reason, FinishReason::Stop | FinishReason::Length);
    output.completion_tokens > 0
        && output.choices.iter().all(|choice| complete(choice.finish_reason))
}

/// How often the steps of the engines are checked.
pub(in crate::worker) fn check_interval(step_limit: Duration) -> Duration {
    (step_limit / super::watchdog::CHECKS).max(Duration::from_millis(1))
}
