//! Lives of a pool from a seed: work comes and goes, loads and drains take time, and loads fail.

use std::time::Duration;

use super::core::{Action, Core, TURN};

const SEEDS: u64 = 300;
const MODELS: u64 = 6;
const SECONDS: u64 = 3000;
/// Longest load and longest drain.
const LOAD_S: u64 = 20;
const DRAIN_S: u64 = 30;
/// Longest time with work until a model is loaded: each other one may have its turn before, in the worst case one
/// after the other.
const WAIT_S: u64 = MODELS * (2 * TURN.as_secs() + LOAD_S + DRAIN_S);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Unloaded,
    LoadsUntil(u64, bool),
    LoadedAt(u64),
    DrainsUntil(u64),
}

struct Model {
    bytes: u64,
    phase: Phase,
    jobs: u64,
    waits_since: Option<u64>,
}

struct World {
    random: fastrand::Rng,
    seed: u64,
    budget: u64,
    core: Core,
    models: Vec<Model>,
    /// Share of loads that fail, in percent.
    failing: u64,
    /// Longest time with work until a model is loaded.
    wait_s: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let budget = random.u64(10..40);
        let count = random.u64(1..=MODELS);
        let bytes: Vec<u64> = (0..count).map(|_| random.u64(1..=budget)).collect();
        let failing = if random.bool() { 0 } else { random.u64(1..50) };
        let model = |&bytes| Model { bytes, phase: Phase::Unloaded, jobs: 0, waits_since: None };
        let models = bytes.iter().map(model).collect();
        let wait_s = if failing == 0 { WAIT_S } else { 4 * WAIT_S };
        Self { seed, budget, core: Core::new(budget, bytes), models, failing, wait_s, random }
    }

    fn second(&mut self, now: u64, may_submit: bool) {
        let time = Duration::from_secs(now);
        for (index, model) in self.models.iter_mut().enumerate() {
            if may_submit && self.random.u64(..100) == 0 {
                model.jobs += self.random.u64(1..200);
            }
            match model.phase {
                Phase::LoadsUntil(until, true) if until <= now => {
                    model.phase = Phase::LoadedAt(now);
                    self.core.loaded(time, index);
                }
                Phase::LoadsUntil(until, false) if until <= now => {
                    model.phase = Phase::Unloaded;
                    self.core.load_failed(time, index);
                }
                Phase::DrainsUntil(until) if until <= now => {
                    model.phase = Phase::Unloaded;
                    self.core.unloaded(time, index);
                }
                Phase::LoadedAt(_) => model.jobs = model.jobs.saturating_sub(self.random.u64(1..4)),
                _ => {}
            }
            self.core.set_work(time, index, model.jobs > 0);
        }
        for action in self.core.decide(time) {
            self.act(now, action);
        }
        self.check(now);
    }

    fn act(&mut self, now: u64, action: Action) {
        let (failing, seed) = (self.failing, self.seed);
        match action {
            Action::Load(index) => {
                let succeeds = self.random.u64(..100) >= failing;
                let until = now + self.random.u64(1..=LOAD_S);
                assert_eq!(self.models[index].phase, Phase::Unloaded, "seed {seed}, {now} s");
                self.models[index].phase = Phase::LoadsUntil(until, succeeds);
            }
            Action::Unload(index) => {
                let until = now + self.random.u64(1..=DRAIN_S);
                let model = &mut self.models[index];
                let Phase::LoadedAt(at) = model.phase else {
                    panic!("seed {seed}, {now} s: model {index} is not loaded")
                };
                let had_turn = now - at >= TURN.as_secs();
                assert!(model.jobs == 0 || had_turn, "seed {seed}, {now} s: model {index}");
                model.phase = Phase::DrainsUntil(until);
            }
        }
    }

    fn check(&mut self, now: u64) {
        let held = self.models.iter().filter(|model| model.phase != Phase::Unloaded);
        let held: u64 = held.map(|model| model.bytes).sum();
        assert!(held <= self.budget, "seed {}, {now} s: {held} of {}", self.seed, self.budget);
        for (index, model) in self.models.iter_mut().enumerate() {
            let waits = model.jobs > 0 && !matches!(model.phase, Phase::LoadedAt(_));
            model.waits_since = waits.then(|| model.waits_since.unwrap_or(now));
            let waited = model.waits_since.map_or(0, |since| now - since);
            assert!(waited <= self.wait_s, "seed {}, {now} s: {index} waits {waited} s", self.seed);
        }
    }
}

#[test]
fn budget_is_kept_turns_are_kept_and_every_model_is_served() {
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        (0..SECONDS).for_each(|now| world.second(now, true));
        // Without new jobs and failures, all are answered.
        world.failing = 0;
        let mut now = SECONDS;
        while world.models.iter().any(|model| model.jobs > 0) {
            world.second(now, false);
            now += 1;
            assert!(now < 20 * SECONDS, "seed {seed}: jobs are left");
        }
    }
}
