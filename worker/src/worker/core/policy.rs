//! What differs between a service and an embedded worker.

use std::time::Duration;

use crate::worker::config::Mode;

/// Time limit of a service's shutdown: an unreachable store must not delay the exit.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);

/// The differences between the modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::worker) struct Policy {
    /// Whether the worker fills its dispatcher from the store and ends when all jobs are finished.
    pub feeds_itself: bool,
    /// Whether devices have additional slots for jobs of priority high, which start while all others are taken.
    pub reserves: bool,
    /// Whether failed calls are made again without end; otherwise the first one ends the worker.
    pub retries: bool,
    /// Whether devices that fail get no jobs for a while. If no other worker could take them, jobs
    /// fail instead.
    pub suspends_devices: bool,
    /// Longest duration of a call. Claims of a service last for a lease, so a later answer is useless,
    /// and waiting longer would only delay the next try.
    pub call_limit: Duration,
    /// Longest duration of the shutdown.
    pub shutdown_limit: Duration,
}

impl Policy {
    /// Returns the policy of a mode, for claims with this lease.
    pub fn for_mode(mode: Mode, lease: Duration) -> Self {
        match mode {
            Mode::Service => Self {
                feeds_itself: false,
                reserves: true,
                retries: true,
                suspends_devices: true,
                call_limit: lease,
                shutdown_limit: SHUTDOWN_LIMIT,
            },
            Mode::Embedded => Self {
                feeds_itself: true,
                reserves: false,
                retries: false,
                suspends_devices: false,
                call_limit: Duration::MAX,
                shutdown_limit: Duration::MAX,
            },
        }
    }
}
