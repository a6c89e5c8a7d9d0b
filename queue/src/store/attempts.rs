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

/// Longest signature in characters.
const SIGNATURE_MAX: usize = 160;

/// What an error says with `#` for every word that has a digit, so that errors that differ in
/// numbers and ids alone read alike.
pub(super) fn signature(error: &JobError) -> String {
    let is_word = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_');
    let mut signature = String::new();
    let mut word = String::new();
    // One more, which is of no word and ends the last.
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
    let signature: String = signature.trim_end().chars().take(SIGNATURE_MAX).collect();
    signature
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_differ_in_numbers_and_ids_have_one_signature() {
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
