//! What the end of an attempt means for its job: the rules every store shares.

use std::time::Duration;

use super::StoreError;
use crate::{
    job::{JobId, JobState},
    outcome::{ErrorKind, JobError, Outcome},
};

/// Wait before the second attempt; doubles per attempt.
pub(super) const BACKOFF_BASE: Duration = Duration::from_millis(250);
/// Longest wait between attempts.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Doublings that are counted: enough to reach the longest wait.
pub(super) const BACKOFF_DOUBLINGS_MAX: u32 = 16;

/// What a job fails with when its last attempt lost its lease.
pub(super) fn lease_lost() -> JobError {
    JobError {
        kind: ErrorKind::LeaseLost,
        code: "lease_lost".to_owned(),
        message: "the worker stopped renewing its lease".to_owned(),
        param: None,
    }
}

/// What an attempt ends with whose worker cannot read the job: damaged bytes, or those of a later
/// release, whose own workers may do better.
pub(super) fn unreadable(error: &StoreError) -> JobError {
    JobError {
        kind: ErrorKind::Engine,
        code: "unreadable".to_owned(),
        message: error.to_string(),
        param: None,
    }
}

/// The state an outcome leads to.
pub(super) fn verdict(outcome: &Outcome, attempts: u32, attempts_max: u32) -> JobState {
    match outcome {
        Outcome::Completed(_) => JobState::Completed,
        Outcome::Expired => JobState::Expired,
        Outcome::Error(error) if error.kind == ErrorKind::InvalidRequest => JobState::Failed,
        Outcome::Error(_) if attempts.saturating_add(1) >= attempts_max => JobState::Failed,
        Outcome::Error(_) => JobState::Retrying,
    }
}

/// Factor of a wait, in `0.5..1`, drawn from the id.
pub(super) fn jitter(id: JobId) -> f64 {
    0.5 + f64::from(id.as_bytes()[15]) / 512.0
}

/// Wait before attempt `attempts + 1`: exponential, with jitter.
pub(super) fn backoff(id: JobId, attempts: u32) -> Duration {
    let doubled = BACKOFF_BASE.saturating_mul(1 << attempts.min(BACKOFF_DOUBLINGS_MAX));
    doubled.min(BACKOFF_MAX).mul_f64(jitter(id))
}
