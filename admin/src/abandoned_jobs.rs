//! [`AbandonedJobs`]: cancels jobs that no caller waits for any more.
//!
//! Thousands of callers may leave at once, for example when a proxy restarts. A store call for each of them would
//! wait for a connection behind all others and could fail; one task cancels many jobs with a call, and tries
//! again until the jobs expire.

use std::time::Duration;

use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tritmill_client::Client;
use tritmill_queue::JobId;

/// Most jobs of a call to the store.
const CHUNK: usize = 1000;
/// Pause after a failed call.
const RETRY: Duration = Duration::from_secs(1);

/// Cancels the jobs that it is given. Its task ends when it is dropped.
pub(crate) struct AbandonedJobs(mpsc::UnboundedSender<Abandoned>);

/// A job to cancel.
struct Abandoned {
    id: JobId,
    /// When the job expires by itself.
    expires: Instant,
}

impl AbandonedJobs {
    /// For jobs of this client's store. Must be called within a Tokio runtime.
    pub fn new(client: Client) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(cancel_all(client, receiver));
        Self(sender)
    }

    /// Cancels a job soon, unless it is finished.
    pub fn add(&self, id: JobId, expires: Instant) {
        // Fails only at shutdown, when the runtime has dropped the task: the job expires.
        let _ = self.0.send(Abandoned { id, expires });
    }
}

async fn cancel_all(client: Client, mut receiver: mpsc::UnboundedReceiver<Abandoned>) {
    let mut jobs = Vec::new();
    loop {
        if jobs.is_empty() {
            let Some(job) = receiver.recv().await else { return };
            jobs.push(job);
        } else {
            sleep(RETRY).await;
            let now = Instant::now();
            jobs.retain(|job: &Abandoned| job.expires > now);
        }
        while let Ok(job) = receiver.try_recv() {
            jobs.push(job);
        }
        jobs = cancel(&client, jobs).await;
    }
}

/// Cancels jobs; returns those that could not be cancelled.
async fn cancel(client: &Client, mut jobs: Vec<Abandoned>) -> Vec<Abandoned> {
    while !jobs.is_empty() {
        let next: Vec<JobId> = jobs.iter().take(CHUNK).map(|job| job.id).collect();
        if let Err(error) = client.cancel(&next).await {
            tracing::warn!(jobs = jobs.len(), %error, "cannot cancel abandoned jobs, trying again");
            break;
        }
        jobs.drain(..next.len());
    }
    jobs
}
