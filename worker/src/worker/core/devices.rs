//! The devices of a worker: which one runs a job, and which are suspended because they fail.
//!
//! The worker pulls jobs for all devices together, and every claim stays with the device it was given
//! to. A device that fails repeatedly gets no jobs for a while; one that is lost or hangs ends the
//! worker, which hands its claims back.

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use super::{
    breaker::{Allowance, Breaker},
    in_flight::{InFlight, Load},
};

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
    pub all: Vec<Device>,
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

/// How often the steps of the engines are checked.
pub(in crate::worker) fn check_interval(step_limit: Duration) -> Duration {
    (step_limit / super::watchdog::CHECKS).max(Duration::from_millis(1))
}
