//! [`Serving`]: what the live workers of a queue can do together. Producers read it at most once a second and
//! predict from it how long a new job waits.

use crate::{dispatch::Cause, job::Timestamp};

/// The live workers of a queue, without those that drain.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Serving {
    /// When they were read, on the clock of deadlines.
    pub now: Timestamp,
    /// Workers.
    pub workers: u64,
    /// Those of them with a GPU.
    pub gpu_workers: u64,
    /// Jobs that they have room for.
    pub slots: u64,
    /// Jobs in their engines.
    pub running: u64,
    /// Tokens that they take off the backlog per second while all of them are busy, as jobs' costs count them.
    /// Workers that were not busy yet count as the mean of the others; `None` if none was.
    pub drain_tokens_per_s: Option<f64>,
    /// KV blocks held by sequences.
    pub kv_blocks_used: u64,
    /// KV blocks in total.
    pub kv_blocks_total: u64,
}

/// Percentage of the slots, or of the KV blocks, from which on they count as full.
const FULL_PERCENT: u64 = 90;

fn is_full(used: u64, total: u64) -> bool {
    total > 0 && used.saturating_mul(100) >= total.saturating_mul(FULL_PERCENT)
}

impl Serving {
    /// Returns the rate of all slots, from the summed rate of some of them.
    pub(super) fn rate_of_all(
        measured: Option<f64>,
        measured_slots: u64,
        slots: u64,
    ) -> Option<f64> {
        let rate = measured.filter(|rate| *rate > 0.0 && measured_slots > 0)?;
        Some(rate * slots as f64 / measured_slots as f64)
    }

    /// Returns whether another job would start at once. A worker has a quarter more slots than its engine has
    /// sequences: jobs in these wait in the worker, so that the engine gets the next one without a pull.
    pub fn has_free_slots(&self) -> bool {
        let sequences = self.slots.saturating_mul(4) / 5;
        self.running < sequences && !is_full(self.kv_blocks_used, self.kv_blocks_total)
    }

    /// Returns what keeps the workers from answering more.
    pub fn cause(&self) -> Cause {
        if self.workers == 0 {
            Cause::NoWorker
        } else if is_full(self.running, self.slots) {
            if self.gpu_workers * 2 > self.workers { Cause::Gpu } else { Cause::Cpu }
        } else if is_full(self.kv_blocks_used, self.kv_blocks_total) {
            Cause::Memory
        } else {
            Cause::Backlog
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_what_the_workers_have_none_left_of() {
        let idle = Serving { workers: 2, slots: 100, kv_blocks_total: 1000, ..Serving::default() };
        let of = |running, kv_blocks_used, gpu_workers| {
            Serving { running, kv_blocks_used, gpu_workers, ..idle }.cause()
        };
        assert_eq!(Serving::default().cause(), Cause::NoWorker);
        assert_eq!(of(10, 10, 0), Cause::Backlog);
        assert_eq!(of(90, 950, 0), Cause::Cpu);
        assert_eq!(of(90, 10, 1), Cause::Cpu, "as many CPUs as GPUs");
        assert_eq!(of(90, 10, 2), Cause::Gpu);
        assert_eq!(of(50, 900, 2), Cause::Memory);
    }

    #[test]
    fn slots_beyond_the_sequences_of_engines_are_not_free() {
        let of = |running, slots, kv_blocks_used| {
            let blocks = Serving { kv_blocks_used, kv_blocks_total: 1000, ..Serving::default() };
            Serving { running, slots, ..blocks }.has_free_slots()
        };
        // Engines of 64, 10 and 1 sequences.
        assert!(of(63, 80, 10) && of(9, 13, 10) && of(0, 2, 10));
        assert!(!of(64, 80, 10) && !of(10, 13, 10) && !of(1, 2, 10));
        assert!(!of(0, 80, 900) && !of(0, 0, 10));
    }

    #[test]
    fn workers_without_a_measurement_count_as_the_others() {
        assert_eq!(Serving::rate_of_all(Some(100.0), 20, 60), Some(300.0));
        assert_eq!(Serving::rate_of_all(None, 0, 60), None);
        assert_eq!(Serving::rate_of_all(Some(0.0), 20, 60), None);
    }
}
