//! Rules for the end of an attempt that every store shares.

use std::time::Duration;

use super::StoreError;
use crate::{
    job::{JobId, JobState},
    outcome::{ErrorKind, JobError, Outcome},
};

/// Wait before the second attempt; doubles with each attempt.
pub(super) const BACKOFF_BASE: Duration = Duration::from_millis(250);
/// Longest wait between attempts.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Maximum number of doublings: enough to reach the longest wait.
pub(super) const BACKOFF_DOUBLINGS_MAX: u32 = 16;

/// Returns the error of an attempt that lost its lease.
pub(super) fn lease_lost() -> JobError {
    JobError::new(ErrorKind::LeaseLost, "lease_lost", "the worker stopped renewing its lease")
}

/// Returns the error of an attempt at a job that cannot be read: its bytes are damaged, or of a later
/// release (then a worker of that release may succeed).
pub(super) fn unreadable(error: &StoreError) -> JobError {
    JobError::new(ErrorKind::Engine, "unreadable", error.to_string())
}

/// Longest signature in characters.
const SIGNATURE_MAX: usize = 160;

/// Returns an error's message with `#` for every word with a digit, so that errors that differ only in
/// numbers and ids have the same signature.
pub(super) fn signature(error: &JobError) -> String {
    let is_word = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_');
    let mut signature = String::new();
    let mut word = String::new();
    // The newline ends the last word.
    for c in error.message.chars().take(4 * SIGNATURE_MAX).chain(['\n']) {
        if is_word(c) {
            word.push(c);
            continue;
        }
        let has_digit = word.contains(|c: char| c.is_ascii_digit());
        signature.push_str(if has_digit { "#" } else { &word });
        word.clear();
        signature.push(if c.is_control() { ' ' } else { c });
    }
    signature.trim_end().chars().take(SIGNATURE_MAX).collect()
}

/// Returns the state that an outcome leads to.
pub(super) fn verdict(outcome: &Outcome, attempts: u32, attempts_max: u32) -> JobState {
    match outcome {
        Outcome::Completed(_) => JobState::Completed,
        Outcome::Expired => JobState::Expired,
        Outcome::Error(error) if error.kind == ErrorKind::InvalidRequest => JobState::Failed,
        Outcome::Error(_) if attempts.saturating_add(1) >= attempts_max => JobState::Failed,
        Outcome::Error(_) => JobState::Retrying,
    }
}

/// Returns the factor of a wait, in `0.5..1`, derived from the id.
pub(super) fn jitter(id: JobId) -> f64 {
    0.5 + f64::from(id.as_bytes()[15]) / 512.0
}

/// Returns the wait before attempt `attempts + 1`: exponential, with jitter.
pub(super) fn backoff(id: JobId, attempts: u32) -> Duration {
    let doubled = BACKOFF_BASE.saturating_mul(1 << attempts.min(BACKOFF_DOUBLINGS_MAX));
    doubled.min(BACKOFF_MAX).mul_f64(jitter(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signature_ignores_numbers_and_ids() {
        let check = |message: &str, expect: &str| {
            let error = JobError { message: message.to_owned(), ..lease_lost() };
            assert_eq!(signature(&error), expect);
        };
        check("prompt has 5123 tokens, the limit is 2048", "prompt has # tokens, the limit is #");
        check("no job 019aa0de-3f5c-7d61-b8f7-2c7f1d9b7c11.", "no job #.");
        check("two\nlines", "two lines");
        check("", "");
        check(&"x".repeat(1000), &"x".repeat(SIGNATURE_MAX));
    }
}
