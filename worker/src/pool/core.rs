//! The pool's decisions, without I/O: which models to load and to unload, as a function of time, of the work of
//! each model's queue, and of one memory budget.
//!
//! - A model with work that fits the free memory is loaded. One model loads at a time.
//! - If it does not fit, models without work make room: those that were idle for longest first.
//! - A model that has waited for a [`TURN`] also gets the room of models with work that have been loaded for a turn,
//!   those loaded for longest first. From then on no other model takes memory before it.
//! - A model without work is loaded once, at the start, if it fits; it stays until another one needs its memory.

use std::time::Duration;

/// A model with work keeps its memory for at least this long.
pub(super) const TURN: Duration = Duration::from_secs(60);
/// A model whose queue is empty keeps its memory for this long, since more jobs often follow.
pub(super) const IDLE_MIN: Duration = Duration::from_secs(5);
/// Time until a model that could not be loaded is tried again; doubled with each failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(300);

const _: () = assert!(IDLE_MIN.as_secs() < TURN.as_secs(), "an idle model yields first");

/// Whether a model is in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unloaded,
    Loading,
    /// Since when.
    Loaded(Duration),
    /// It finishes its jobs.
    Unloading,
}

/// A model.
#[derive(Debug)]
struct Unit {
    bytes: u64,
    state: State,
    has_work: bool,
    /// When `has_work` changed, or the model was loaded or unloaded.
    since: Duration,
    /// It was never loaded.
    is_fresh: bool,
    failures: u32,
    retry_at: Duration,
}

impl Unit {
    fn can_load(&self, now: Duration) -> bool {
        self.state == State::Unloaded && self.retry_at <= now
    }
}

/// What the pool is to do with the model of this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Load(usize),
    Unload(usize),
}

/// The state of all models.
#[derive(Debug)]
pub(super) struct Core {
    budget: u64,
    units: Vec<Unit>,
}

impl Core {
    /// No model is loaded. `bytes` has the memory of each; no one takes more than the budget.
    pub fn new(budget: u64, bytes: impl IntoIterator<Item = u64>) -> Self {
        let unit = |bytes| Unit {
            bytes,
            state: State::Unloaded,
            has_work: false,
            since: Duration::ZERO,
            is_fresh: true,
            failures: 0,
            retry_at: Duration::ZERO,
        };
        Self { budget, units: bytes.into_iter().map(unit).collect() }
    }

    /// Sets whether jobs of a model wait or run.
    pub fn set_work(&mut self, now: Duration, unit: usize, has_work: bool) {
        let unit = &mut self.units[unit];
        if unit.has_work != has_work {
            (unit.has_work, unit.since) = (has_work, now);
        }
    }

    /// The model is loaded.
    pub fn loaded(&mut self, now: Duration, unit: usize) {
        let unit = &mut self.units[unit];
        debug_assert_eq!(unit.state, State::Loading);
        (unit.state, unit.since, unit.is_fresh, unit.failures) =
            (State::Loaded(now), now, false, 0);
    }

    /// The model could not be loaded. Returns the time until it is tried again.
    pub fn load_failed(&mut self, now: Duration, unit: usize) -> Duration {
        let unit = &mut self.units[unit];
        debug_assert_eq!(unit.state, State::Loading);
        let wait = RETRY_MIN.saturating_mul(1 << unit.failures.min(16)).min(RETRY_MAX);
        unit.failures += 1;
        // It waits behind all others then.
        (unit.state, unit.retry_at, unit.since) = (State::Unloaded, now + wait, now + wait);
        wait
    }

    /// The memory of the model is free.
    pub fn unloaded(&mut self, now: Duration, unit: usize) {
        let unit = &mut self.units[unit];
        (unit.state, unit.since) = (State::Unloaded, now);
    }

    /// Returns what to do now.
    pub fn decide(&mut self, now: Duration) -> Vec<Action> {
        if self.units.iter().any(|unit| unit.state == State::Loading) {
            return Vec::new();
        }
        let in_state = |is: fn(State) -> bool| {
            self.units.iter().filter(move |unit| is(unit.state)).map(|unit| unit.bytes).sum::<u64>()
        };
        let free = self.budget.saturating_sub(in_state(|state| state != State::Unloaded));
        let mut coming = in_state(|state| state == State::Unloading);
        let mut waiting: Vec<usize> = (0..self.units.len())
            .filter(|&unit| self.units[unit].has_work && self.units[unit].can_load(now))
            .collect();
        waiting.sort_by_key(|&unit| self.units[unit].since);
        let mut actions = Vec::new();
        for (place, &unit) in waiting.iter().enumerate() {
            let Unit { bytes, since, .. } = self.units[unit];
            if bytes <= free {
                actions.push(self.load(unit));
                return actions;
            }
            // A model that failed again and again interrupts those that work less and less often.
            let turn_limit = TURN * (1 + self.units[unit].failures.saturating_sub(4).min(9));
            let is_late = now.saturating_sub(since) >= turn_limit;
            if place == 0 {
                let missing = bytes.saturating_sub(free + coming);
                for victim in self.victims(now, missing, is_late) {
                    self.units[victim].state = State::Unloading;
                    coming += self.units[victim].bytes;
                    actions.push(Action::Unload(victim));
                }
            }
            // The free memory and what is coming is kept for this model.
            if is_late || bytes <= free + coming {
                return actions;
            }
        }
        let fits = |unit: &Unit| unit.is_fresh && unit.can_load(now) && unit.bytes <= free;
        if let Some(unit) = self.units.iter().position(fits) {
            actions.push(self.load(unit));
        }
        actions
    }

    fn load(&mut self, unit: usize) -> Action {
        self.units[unit].state = State::Loading;
        Action::Load(unit)
    }

    /// Returns models to unload for `missing` bytes; none if that would not be enough.
    fn victims(&self, now: Duration, missing: u64, is_late: bool) -> Vec<usize> {
        let loaded = |unit: &usize| match self.units[*unit].state {
            State::Loaded(since) => Some((*unit, since)),
            _ => None,
        };
        let age = |since: Duration| now.saturating_sub(since);
        let (mut busy, mut idle): (Vec<_>, Vec<_>) = (0..self.units.len())
            .filter_map(|unit| loaded(&unit))
            .partition(|(unit, _)| self.units[*unit].has_work);
        idle.retain(|(unit, _)| is_late || age(self.units[*unit].since) >= IDLE_MIN);
        idle.sort_by_key(|(unit, _)| self.units[*unit].since);
        busy.retain(|(_, since)| is_late && age(*since) >= TURN);
        busy.sort_by_key(|(_, since)| *since);
        let mut sum = 0;
        let mut chosen = Vec::new();
        for (unit, _) in idle.into_iter().chain(busy) {
            if sum < missing {
                sum += self.units[unit].bytes;
                chosen.push(unit);
            }
        }
        if sum < missing {
            return Vec::new();
        }
        // A large one that came last may be enough without those before it.
        chosen.retain(|&unit| {
            let is_needed = sum - self.units[unit].bytes < missing;
            sum -= if is_needed { 0 } else { self.units[unit].bytes };
            is_needed
        });
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Action::{Load, Unload},
        *,
    };

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Runs what is decided until nothing more is, with loads and unloads that end at once.
    fn settle(core: &mut Core, now: u64) -> Vec<Action> {
        let mut all = Vec::new();
        loop {
            let actions = core.decide(s(now));
            for action in &actions {
                match *action {
                    Load(unit) => core.loaded(s(now), unit),
                    Unload(unit) => core.unloaded(s(now), unit),
                }
            }
            if actions.is_empty() {
                return all;
            }
            all.extend(actions);
        }
    }

    #[test]
    fn models_that_fit_together_are_loaded_at_the_start_and_stay() {
        let mut core = Core::new(10, [4, 6]);
        assert_eq!(core.decide(s(0)), [Load(0)]);
        assert_eq!(core.decide(s(1)), [], "one at a time");
        core.loaded(s(2), 0);
        assert_eq!(settle(&mut core, 2), [Load(1)]);
        for now in [100, 1000, 10_000] {
            core.set_work(s(now), (now / 100 % 2) as usize, now % 1000 == 0);
            assert_eq!(settle(&mut core, now), []);
        }
    }

    #[test]
    fn idle_model_makes_room_after_a_moment_and_a_busy_one_after_a_turn() {
        let mut core = Core::new(10, [6, 6]);
        assert_eq!(settle(&mut core, 0), [Load(0)], "the second one does not fit");
        core.set_work(s(1), 0, true);
        core.set_work(s(10), 1, true);
        core.set_work(s(20), 0, false);
        assert_eq!(settle(&mut core, 24), []);
        assert_eq!(settle(&mut core, 25), [Unload(0), Load(1)]);
        core.set_work(s(30), 0, true);
        assert_eq!(settle(&mut core, 84), [], "the other one has waited for 54 s");
        assert_eq!(settle(&mut core, 90), [Unload(1), Load(0)]);
        assert_eq!(settle(&mut core, 149), []);
        assert_eq!(settle(&mut core, 150), [Unload(0), Load(1)], "and so on");
    }

    #[test]
    fn least_recently_used_models_go_first_and_only_those_that_are_needed() {
        let mut core = Core::new(12, [2, 4, 6, 5]);
        assert_eq!(settle(&mut core, 0), [Load(0), Load(1), Load(2)]);
        for (unit, end) in [(2, 30), (0, 20), (1, 10)] {
            core.set_work(s(1), unit, true);
            core.set_work(s(end), unit, false);
        }
        core.set_work(s(40), 3, true);
        // The two that were idle for longest have six bytes.
        assert_eq!(settle(&mut core, 40), [Unload(1), Unload(0), Load(3)]);

        let mut core = Core::new(12, [2, 10, 9]);
        assert_eq!(settle(&mut core, 0), [Load(0), Load(1)]);
        core.set_work(s(10), 2, true);
        assert_eq!(settle(&mut core, 10), [Unload(1), Load(2)], "the small one stays");
    }

    #[test]
    fn small_models_do_not_overtake_one_that_has_waited_for_a_turn() {
        let mut core = Core::new(10, [10, 4, 4]);
        core.set_work(s(0), 1, true);
        assert_eq!(settle(&mut core, 0), [Load(1), Load(2)]);
        core.set_work(s(1), 0, true);
        core.set_work(s(1), 2, true);
        core.set_work(s(50), 2, false);
        assert_eq!(settle(&mut core, 59), [], "not enough would become free");
        // It has waited for 69 s: both others had their turn.
        core.set_work(s(70), 1, true);
        assert_eq!(core.decide(s(70)), [Unload(2), Unload(1)]);
        core.unloaded(s(71), 1);
        assert_eq!(core.decide(s(71)), [], "it waits for the other one");
        core.unloaded(s(72), 2);
        assert_eq!(core.decide(s(72)), [Load(0)]);
    }

    #[test]
    fn failed_loads_are_tried_again_later_and_block_no_other() {
        let mut core = Core::new(10, [6, 6]);
        core.set_work(s(0), 0, true);
        assert_eq!(core.decide(s(0)), [Load(0)]);
        assert_eq!(core.load_failed(s(0), 0), s(1));
        assert_eq!(settle(&mut core, 0), [Load(1)], "it has no work, but fits now");
        assert_eq!(core.decide(s(2)), [], "it was just loaded");
        assert_eq!(core.decide(s(5)), [Unload(1)]);
        core.unloaded(s(6), 1);
        for wait in [2, 4, 8] {
            let now = core.units[0].retry_at.max(s(6));
            assert_eq!(core.decide(now), [Load(0)]);
            assert_eq!(core.load_failed(now, 0), s(wait));
        }
        for _ in 0..30 {
            let now = core.units[0].retry_at;
            core.units[1].state = State::Unloaded;
            assert_eq!(core.decide(now), [Load(0)]);
            assert!(core.load_failed(now, 0) <= RETRY_MAX);
        }
    }
}
