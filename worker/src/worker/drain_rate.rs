//! [`DrainRate`]: how fast a busy worker takes tokens off the backlog.
//!
//! The backlog counts what jobs may cost: their prompts by length, and the most that they may generate. Engines
//! count what they compute, which is less: answers end early, and prompts that begin alike are computed once.
//! So the rate of computed tokens is multiplied by the ratio of both over jobs that were answered. That is known
//! within seconds also where an answer takes minutes.

use std::time::Duration;

/// Time constants of the rate and of the ratio.
const RATE_OVER: Duration = Duration::from_secs(10);
const RATIO_OVER: Duration = Duration::from_secs(60);

/// What a worker did since its last heartbeat.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Done {
    /// Time since then.
    pub elapsed: Duration,
    /// Whether at least half of the slots were taken, then and now.
    pub was_busy: bool,
    /// Tokens that the engines computed for prompts and generated.
    pub computed: u64,
    /// The cost of jobs that were answered, and the tokens that were computed for them.
    pub answered_cost: u64,
    pub answered_tokens: u64,
}

/// The rate, measured while the worker is busy and kept while it is not.
#[derive(Debug, Default)]
pub(super) struct DrainRate {
    /// Computed tokens and seconds of busy times, the older ones with less weight.
    tokens: f64,
    seconds: f64,
    /// Cost of answered jobs and their tokens, the older ones with less weight.
    cost: f64,
    cost_tokens: f64,
}

impl DrainRate {
    /// Adds what was done.
    pub fn record(&mut self, done: Done) {
        let kept = |over: Duration| (-done.elapsed.as_secs_f64() / over.as_secs_f64()).exp();
        if done.answered_tokens > 0 {
            let kept = kept(RATIO_OVER);
            self.cost = self.cost * kept + done.answered_cost as f64;
            self.cost_tokens = self.cost_tokens * kept + done.answered_tokens as f64;
        }
        if done.was_busy && done.computed > 0 {
            let kept = kept(RATE_OVER);
            self.tokens = self.tokens * kept + done.computed as f64;
            self.seconds = self.seconds * kept + done.elapsed.as_secs_f64();
        }
    }

    /// Returns the tokens per second, as the costs of jobs count them; `None` before the worker was busy.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let ratio = if self.cost_tokens > 0.0 { self.cost / self.cost_tokens } else { 1.0 };
        (self.seconds > 0.0).then(|| ratio * self.tokens / self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEAT: Duration = Duration::from_secs(2);

    fn busy(computed: u64) -> Done {
        Done { elapsed: BEAT, was_busy: true, computed, ..Done::default() }
    }

    fn rate(rate: &DrainRate) -> f64 {
        rate.tokens_per_s().expect("it was busy")
    }

    #[test]
    fn rate_is_that_of_busy_times() {
        let mut drain = DrainRate::default();
        drain.record(Done { was_busy: false, ..busy(50) });
        assert_eq!(drain.tokens_per_s(), None);
        drain.record(busy(2000));
        assert!((rate(&drain) - 1000.0).abs() < 0.01, "known after one heartbeat");
        for _ in 0..1000 {
            drain.record(Done { was_busy: false, ..busy(10) });
        }
        assert!((rate(&drain) - 1000.0).abs() < 0.01, "an idle hour changes nothing");
    }

    #[test]
    fn one_slow_heartbeat_changes_little_and_many_change_all() {
        let mut drain = DrainRate::default();
        (0..20).for_each(|_| drain.record(busy(2000)));
        drain.record(busy(200));
        assert!((800.0..900.0).contains(&rate(&drain)), "{}", rate(&drain));
        (0..30).for_each(|_| drain.record(busy(200)));
        assert!((99.0..110.0).contains(&rate(&drain)), "{}", rate(&drain));
    }

    #[test]
    fn rate_is_in_the_tokens_that_jobs_count() {
        let mut drain = DrainRate::default();
        // Answers of 100 tokens from jobs that may generate 400.
        let answered = Done { answered_cost: 4000, answered_tokens: 1000, ..busy(2000) };
        drain.record(answered);
        assert!((rate(&drain) - 4000.0).abs() < 0.01);
        // Later answers are as long as they may be.
        (0..200).for_each(|_| drain.record(Done { answered_cost: 1000, ..answered }));
        assert!((1000.0..1010.0).contains(&rate(&drain)), "{}", rate(&drain));
    }
}
