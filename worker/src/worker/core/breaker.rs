//! A circuit breaker: a device that fails repeatedly gets no jobs for a while, so that it does not use
//! up the attempts of every job in the queue.
//!
//! ```text
//! closed ─FAILURES_MAX in a row─► open ─its wait is over─► half open (one job)
//!   ▲                              ▲                           │
//!   │                              └── it failed: wait × 2 ────┤
//!   └──────────────── it got tokens ───────────────────────────┘
//! ```
//!
//! Failures caused by a bad request do not count: such a request fails before a step, or alone.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tritmill_engine::{RequestError, SampleError, backend::StepError};
use tritmill_queue::Backoff;

/// Failures in a row that open the breaker. A failed step counts once, for all its sequences.
const FAILURES_MAX: u32 = 3;
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Instant },
    HalfOpen,
}

/// How many jobs a device may take now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowance {
    /// As many jobs as fit.
    All,
    /// One job, if the device holds no other job.
    Probe,
    /// No jobs.
    Nothing,
}

/// The state of one device's breaker.
#[derive(Debug)]
pub(super) struct Breaker {
    state: State,
    failures: u32,
    /// The step that failed last; errors of its other sequences are not counted again.
    last_step: Option<Arc<StepError>>,
    /// The waits while it is open.
    backoff: Backoff,
}

impl Default for Breaker {
    fn default() -> Self {
        let backoff = Backoff::new(WAIT_FIRST, WAIT_LONGEST);
        Self { state: State::Closed, failures: 0, last_step: None, backoff }
    }
}

impl Breaker {
    /// Records why a request failed; returns true if this opened the breaker.
    pub fn record_failure(&mut self, error: &RequestError, now: Instant) -> bool {
        match error {
            RequestError::Step(step) => {
                if self.last_step.as_ref().is_some_and(|last| Arc::ptr_eq(last, step)) {
                    return false;
                }
                self.last_step = Some(Arc::clone(step));
            }
            RequestError::Sample { source: SampleError::NotFinite { .. }, .. } => {}
            _ => return false,
        }
        self.failures += 1;
        let opens = match self.state {
            State::Closed => self.failures >= FAILURES_MAX,
            State::HalfOpen => true,
            State::Open { .. } => false,
        };
        if opens {
            self.state = State::Open { until: now + self.backoff.record_failure() };
        }
        opens
    }

    /// Records that a request got tokens; returns true if this closed the breaker. Ignored while
    /// the breaker is open: the tokens belong to an earlier step.
    pub fn record_success(&mut self) -> bool {
        let closes = self.state == State::HalfOpen;
        if !self.is_open() {
            *self = Self::default();
        }
        closes
    }

    /// Returns how many jobs the device may take. Half-opens the breaker when its wait is over.
    pub fn allowance(&mut self, now: Instant) -> Allowance {
        match self.state {
            State::Closed => Allowance::All,
            State::Open { until } if now < until => Allowance::Nothing,
            State::Open { .. } | State::HalfOpen => {
                self.state = State::HalfOpen;
                Allowance::Probe
            }
        }
    }

    /// Returns whether the device may not run any job.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// Returns the time at which a suspended device may be tried again.
    pub fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            State::Closed | State::HalfOpen => None,
        }
    }

    /// Returns the number of failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> RequestError {
        RequestError::Step(Arc::new(StepError::Device("off the bus".into())))
    }

    #[test]
    fn opens_after_failures_in_a_row_and_closes_when_a_probe_works() {
        let mut breaker = Breaker::default();
        let start = Instant::now();
        let fail = |breaker: &mut Breaker, now| breaker.record_failure(&step(), now);
        assert!(!fail(&mut breaker, start) && !fail(&mut breaker, start));
        assert!(!breaker.record_success(), "it was closed");
        assert!(!fail(&mut breaker, start) && !fail(&mut breaker, start));
        assert_eq!(breaker.allowance(start), Allowance::All);
        assert!(fail(&mut breaker, start));
        assert_eq!(breaker.allowance(start), Allowance::Nothing);
        let until = breaker.retry_at().expect("it is open");
        assert!(breaker.is_open() && until > start && until <= start + WAIT_FIRST);
        assert!(!breaker.record_success() && breaker.is_open(), "tokens are from before");
        assert_eq!(breaker.allowance(until), Allowance::Probe);
        assert!(fail(&mut breaker, until), "the probe failed");
        let second = breaker.retry_at().expect("it is open");
        assert!(second >= until + WAIT_FIRST, "the wait doubles; at most half is taken off");
        assert_eq!(breaker.allowance(second), Allowance::Probe);
        assert!(breaker.record_success());
        assert_eq!(breaker.allowance(second), Allowance::All);
        (1..FAILURES_MAX).for_each(|_| assert!(!fail(&mut breaker, second)));
        assert!(fail(&mut breaker, second));
        assert!(breaker.retry_at() <= Some(second + WAIT_FIRST), "waits start over");
    }

    #[test]
    fn step_counts_once_and_bad_requests_do_not_count() {
        let mut breaker = Breaker::default();
        let (one, now) = (step(), Instant::now());
        for _ in 0..10 {
            assert!(!breaker.record_failure(&one.clone(), now));
            let error = RequestError::OutOfBlocks { needed: 2, total: 1 };
            assert!(!breaker.record_failure(&error, now));
            let source = SampleError::NothingLeft;
            assert!(!breaker.record_failure(&RequestError::Sample { position: 1, source }, now));
        }
        assert_eq!(breaker.failures(), 1);
        let source = SampleError::NotFinite { token: 1, logit: f32::NAN };
        let nan = RequestError::Sample { position: 1, source };
        assert!(!breaker.record_failure(&nan, now) && breaker.record_failure(&nan, now));
    }
}
