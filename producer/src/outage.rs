//! Saying that the dispatcher was not told, without saying it for every thousand jobs.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use tritmill_queue::DispatchError;

/// Between two lines about the same outage.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// When it was said last, in this process.
static SAID: Mutex<Option<Instant>> = Mutex::new(None);

/// Jobs were accepted by the store, the dispatcher could not be told: workers find them there.
pub(crate) fn log_dispatch_failure(error: &DispatchError) {
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.is_none_or(|at| at.elapsed() >= SAY_EVERY) {
        *said = Some(Instant::now());
        tracing::warn!(%error, "jobs are recorded but not announced: workers find them in the database");
    }
}
