//! Changes of jobs that wait for their time: the [`WaitingJobs`] trait.
//!
//! A scheduled or retrying job is in the store alone. A queued one also has an entry in the dispatcher, which lies under
//! the job's priority, and a running one is in an engine: neither is changed here.

use async_trait::async_trait;

use super::StoreError;
use crate::job::{JobId, Priority};

/// Changes of scheduled and retrying jobs.
#[async_trait]
pub trait WaitingJobs: Send + Sync {
    /// Makes the scheduled and retrying jobs among `ids` due now: the next [`reconcile`](super::Store::reconcile) queues
    /// them. Returns their ids.
    async fn run_now(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError>;

    /// Changes the priority of a job that is scheduled or retrying. Returns false for other jobs, which stay as they
    /// are.
    async fn set_priority(&self, id: JobId, priority: Priority) -> Result<bool, StoreError>;
}
