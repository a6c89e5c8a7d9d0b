//! How a worker runs, and how it is asked to stop.

use std::time::Duration;

use tritmill_queue::QueueName;

/// How the dispatcher is filled, and whether the worker ends by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Producers fill it; the worker runs until it is stopped.
    Service,
    /// The worker fills it from the store and ends when all jobs are finished.
    Embedded,
}

/// A stop request to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Continue.
    No,
    /// Take nothing new, finish and commit what runs.
    Finish,
    /// As `Finish`, but hand back what has not ended after a while.
    Drain,
}

/// The configuration of a worker.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// The queue it serves.
    pub queue: QueueName,
    /// Name of the process incarnation.
    pub owner: String,
    /// Choices that each device holds at once: what its engine runs, and a few prepared ones.
    pub slots: usize,
    /// Length of a lease; leases are renewed three times as often.
    pub lease: Duration,
    /// How long a drain waits for running jobs before it hands them back.
    pub drain: Duration,
    /// How long one step may run before its engine counts as hung.
    pub step_limit: Duration,
    /// How the dispatcher is filled.
    pub mode: Mode,
    /// The instruction set of CPU kernels, for display.
    pub isa: String,
}
