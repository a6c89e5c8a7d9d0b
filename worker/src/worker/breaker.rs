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

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
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
    pub fn record_failure(&mut self, error: &RequestError) -> bool {
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
            self.state = State::Open { until: Instant::now() + self.backoff.record_failure() };
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
    pub fn allowance(&mut self) -> Allowance {
        match self.state {
            State::Closed => Allowance::All,
            State::Open { until } if Instant::now() < until => Allowance::Nothing,
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

    /// Returns the time at which the device may be tried again, if that is in the future.
    pub fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until).filter(|until| *until > Instant::now()),
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

    fn wait(breaker: &Breaker) -> Duration {
        breaker.retry_at().expect("it is open") - Instant::now()
    }

    #[test]
    fn opens_after_failures_in_a_row_and_closes_when_a_probe_works() {
        let mut breaker = Breaker::default();
        assert!(!breaker.record_failure(&step()) && !breaker.record_failure(&step()));
        assert!(!breaker.record_success(), "it was closed");
        assert!(!breaker.record_failure(&step()) && !breaker.record_failure(&step()));
        assert_eq!(breaker.allowance(), Allowance::All);
        assert!(breaker.record_failure(&step()));
        assert_eq!(breaker.allowance(), Allowance::Nothing);
        assert!(breaker.is_open() && wait(&breaker) <= WAIT_FIRST);
        assert!(!breaker.record_success() && breaker.is_open(), "tokens are from before");
        breaker.state = State::Open { until: Instant::now() };
        assert_eq!(breaker.allowance(), Allowance::Probe);
        assert!(breaker.record_failure(&step()), "the probe failed");
        let (least, slack) = (WAIT_FIRST * 2 / 2, Duration::from_millis(50));
        assert!(wait(&breaker) + slack >= least, "the wait doubles; at most half is taken off");
        breaker.state = State::Open { until: Instant::now() };
        assert_eq!(breaker.allowance(), Allowance::Probe);
        assert!(breaker.record_success());
        assert_eq!(breaker.allowance(), Allowance::All);
        (1..FAILURES_MAX).for_each(|_| assert!(!breaker.record_failure(&step())));
        assert!(breaker.record_failure(&step()));
        assert!(wait(&breaker) <= WAIT_FIRST, "waits start over");
    }

    #[test]
    fn step_counts_once_and_bad_requests_do_not_count() {
        let mut breaker = Breaker::default();
        let one = step();
        for _ in 0..10 {
            assert!(!breaker.record_failure(&one.clone()));
            let error = RequestError::OutOfBlocks { needed: 2, total: 1 };
            assert!(!breaker.record_failure(&error));
            let source = SampleError::NothingLeft;
            assert!(!breaker.record_failure(&RequestError::Sample { position: 1, source }));
        }
        assert_eq!(breaker.failures(), 1);
        let source = SampleError::NotFinite { token: 1, logit: f32::NAN };
        let nan = RequestError::Sample { position: 1, source };
        assert!(!breaker.record_failure(&nan) && breaker.record_failure(&nan));
    }
}
