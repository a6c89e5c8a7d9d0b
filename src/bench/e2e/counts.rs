//! Requests of `bench e2e --overload`, by what became of them.

use std::{collections::BTreeMap, time::Duration};

/// What became of a request.
pub(super) enum End {
    /// The whole answer came after this time.
    Answered(Duration),
    /// It was refused with this error code.
    Refused(String),
    /// It was accepted, and there was no answer in time.
    Expired,
    /// Something else failed.
    Failed(String),
}

/// Requests of one phase, by what became of them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub offered: u64,
    /// Answered within the deadline; of these, before the phase ended.
    pub met: u64,
    pub met_in_phase: u64,
    /// Accepted, and answered late or not at all.
    pub late: u64,
    pub expired: u64,
    pub refused: BTreeMap<String, u64>,
    pub failed: BTreeMap<String, u64>,
    pub latencies: Vec<Duration>,
}

impl Counts {
    pub fn count(&mut self, end: End, deadline: Duration, is_over: bool) {
        match end {
            End::Answered(latency) => {
                self.latencies.push(latency);
                if latency > deadline {
                    self.late += 1;
                } else {
                    self.met += 1;
                    self.met_in_phase += u64::from(!is_over);
                }
            }
            End::Expired => self.expired += 1,
            End::Refused(code) => *self.refused.entry(code).or_default() += 1,
            End::Failed(why) => *self.failed.entry(why).or_default() += 1,
        }
    }

    pub fn accepted(&self) -> u64 {
        self.met + self.late + self.expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_and_missing_ones_count_as_accepted() {
        let (mut counts, second) = (Counts::default(), Duration::from_secs(1));
        counts.count(End::Answered(second), second, false);
        counts.count(End::Answered(second / 2), second, true);
        counts.count(End::Answered(second * 2), second, false);
        counts.count(End::Expired, second, false);
        counts.count(End::Refused("cpu_busy".to_owned()), second, false);
        counts.count(End::Failed("broken".to_owned()), second, false);
        assert_eq!((counts.accepted(), counts.met, counts.met_in_phase), (4, 2, 1));
        assert_eq!((counts.late, counts.expired), (1, 1));
        assert_eq!((counts.refused["cpu_busy"], counts.failed["broken"]), (1, 1));
    }
}
