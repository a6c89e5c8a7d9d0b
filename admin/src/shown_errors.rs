//! What tenants see of a job: nothing about the machines that ran it.
//!
//! Names of workers have hosts and process ids, and errors of an engine have what its libraries and devices say.
//! Operators see both; tenants see the code of the error and what it means.

use tritmill_queue::{
    ErrorKind, JobError, Outcome,
    store::job_queries::{AttemptEnd, JobHistory},
};

/// Codes of errors with messages that say nothing about machines.
const PLAIN_CODES: [&str; 4] = ["answer_not_finite", "job_deleted", "lease_lost", "prepare_failed"];

/// Returns an error as tenants see it.
pub(crate) fn for_tenant(error: &JobError) -> JobError {
    match error.kind {
        ErrorKind::Engine | ErrorKind::LeaseLost if !PLAIN_CODES.contains(&&*error.code) => {
            let message = "the job could not be run: the operator of the service sees why";
            JobError { message: message.to_owned(), ..error.clone() }
        }
        _ => error.clone(),
    }
}

/// Returns an outcome as tenants see it.
pub(crate) fn outcome_for_tenant(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Error(error) => Outcome::Error(for_tenant(&error)),
        other => other,
    }
}

/// Returns a job with its attempts as tenants see it.
pub(crate) fn history_for_tenant(mut history: JobHistory) -> JobHistory {
    history.record.outcome = history.record.outcome.map(outcome_for_tenant);
    for attempt in &mut history.attempts {
        attempt.owner = None;
        if let AttemptEnd::Error(error) = &mut attempt.end {
            *error = for_tenant(error);
        }
    }
    history
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_see_no_words_of_an_engine() {
        let shown = |kind, code: &str| {
            let error = for_tenant(&JobError::new(kind, code, "CUDA error 700 at gpu-7:4711"));
            assert_eq!((error.kind, error.code.as_str()), (kind, code));
            error.message
        };
        for code in ["engine_error", "engine_broken", "unreadable", "a_new_code"] {
            assert!(!shown(ErrorKind::Engine, code).contains("gpu-7"), "{code}");
        }
        assert!(shown(ErrorKind::InvalidRequest, "context_length_exceeded").contains("gpu-7"));
        let lost = JobError::new(ErrorKind::LeaseLost, "lease_lost", "it stopped renewing");
        assert_eq!(for_tenant(&lost), lost);
    }
}
