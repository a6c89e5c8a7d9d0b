//! Logs failures of the dispatcher, at most one line per [`LOG_EVERY`] however many jobs are
//! submitted.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::DispatchError;

/// Time between two log lines about the same outage.
const LOG_EVERY: Duration = Duration::from_secs(30);

/// Time of the last log line of this process.
static LOGGED_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// Logs that the store accepted jobs and the dispatcher could not be notified.
pub(crate) fn log_dispatch_failure(error: &DispatchError) {
    let mut logged_at = LOGGED_AT.lock().unwrap_or_else(PoisonError::into_inner);
    if logged_at.is_none_or(|at| at.elapsed() >= LOG_EVERY) {
        *logged_at = Some(Instant::now());
        tracing::warn!(%error, "jobs are recorded but not announced: workers find them in the database");
    }
}
