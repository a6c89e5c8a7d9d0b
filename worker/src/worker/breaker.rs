//! A device that fails again and again is left alone for a while, so that it does not use up the
//! attempts of every job of the queue.
//!
//! ```text
//! closed ─FAILURES_MAX in a row─► open ─its wait is over─► half open (one job)
//!   ▲                              ▲                           │
//!   │                              └── it failed: wait × 2 ────┤
//!   └──────────────── it got tokens ───────────────────────────┘
//! ```
//!
//! What a bad request causes does not count: it fails before a step, or by itself.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tritmill_engine::{RequestError, SampleError, backend::StepError};

/// Failures in a row that open it. A step counts once, however many sequences it took along.
const FAILURES_MAX: u32 = 3;
const WAIT_FIRST: Duration = Duration::from_secs(1);
const WAIT_LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closed,
    Open { until: Instant },
    HalfOpen,
}

/// How many jobs may be taken now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowance {
    /// As many as fit.
    All,
    /// One, if nothing else is held.
    Probe,
    /// None.
    Nothing,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Breaker {
    state: State,
    failures: u32,
    /// The step that failed last, whose other sequences tell nothing new.
    last_step: Option<Arc<StepError>>,
    /// The wait of the next time it opens.
    wait: Duration,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, failures: 0, last_step: None, wait: WAIT_FIRST }
    }
}

impl Breaker {
    /// Notes why a request failed; true if this opened the breaker.
    pub fn failed(&mut self, error: &RequestError) -> bool {
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
            self.state = State::Open { until: Instant::now() + self.wait };
            self.wait = (self.wait * 2).min(WAIT_LONGEST);
        }
        opens
    }

    /// Notes that a request got tokens; true if this closed the breaker. Says nothing while it is
    /// open: that was before.
    pub fn worked(&mut self) -> bool {
        let closes = self.state == State::HalfOpen;
        if !matches!(self.state, State::Open { .. }) {
            *self = Self::default();
        }
        closes
    }

    /// What may be taken.
    pub fn allows(&mut self) -> Allowance {
        match self.state {
            State::Closed => Allowance::All,
            State::Open { until } if Instant::now() < until => Allowance::Nothing,
            State::Open { .. } | State::HalfOpen => {
                self.state = State::HalfOpen;
                Allowance::Probe
            }
        }
    }

    /// Whether nothing may be run.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// When it may be tried again, if that is not now.
    pub fn until(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until).filter(|until| *until > Instant::now()),
            State::Closed | State::HalfOpen => None,
        }
    }

    /// Failures in a row.
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
    fn it_opens_after_failures_in_a_row_and_closes_when_a_probe_works() {
        let mut breaker = Breaker::default();
        assert!(!breaker.failed(&step()) && !breaker.failed(&step()));
        assert!(!breaker.worked(), "it was closed");
        assert!(!breaker.failed(&step()) && !breaker.failed(&step()));
        assert_eq!(breaker.allows(), Allowance::All);
        assert!(breaker.failed(&step()));
        assert_eq!(breaker.allows(), Allowance::Nothing);
        assert!(breaker.is_open() && breaker.until().is_some());
        assert!(!breaker.worked() && breaker.is_open(), "what ran before says nothing");
        breaker.state = State::Open { until: Instant::now() };
        assert_eq!(breaker.allows(), Allowance::Probe);
        assert_eq!(breaker.wait, WAIT_FIRST * 2);
        assert!(breaker.failed(&step()), "the probe failed");
        breaker.state = State::HalfOpen;
        assert!(breaker.worked());
        assert_eq!((breaker.allows(), breaker.wait), (Allowance::All, WAIT_FIRST));
    }

    #[test]
    fn a_step_counts_once_and_bad_requests_do_not() {
        let mut breaker = Breaker::default();
        let one = step();
        for _ in 0..10 {
            assert!(!breaker.failed(&one.clone()));
            assert!(!breaker.failed(&RequestError::OutOfBlocks { needed: 2, total: 1 }));
            let source = SampleError::NothingLeft;
            assert!(!breaker.failed(&RequestError::Sample { position: 1, source }));
        }
        assert_eq!(breaker.failures(), 1);
        let source = SampleError::NotFinite { token: 1, logit: f32::NAN };
        let nan = RequestError::Sample { position: 1, source };
        assert!(!breaker.failed(&nan) && breaker.failed(&nan));
    }
}
