//! [`AbandonedJobs`]: cancels jobs that no caller waits for any more.
//!
//! Thousands of callers may leave at once, for example when a proxy restarts. A store call for each of them would
//! wait for a connection behind all others and could fail; one task cancels many jobs with a call, and tries
//! again until the jobs expire.

use std::{collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};
use tritmill_client::Client;
use tritmill_queue::{DatabaseIndex, JobId};

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

/// Cancels jobs; returns those that could not be cancelled. A database that fails keeps back its own jobs alone.
async fn cancel(client: &Client, jobs: Vec<Abandoned>) -> Vec<Abandoned> {
    let mut by_database: BTreeMap<DatabaseIndex, Vec<Abandoned>> = BTreeMap::new();
    for job in jobs {
        by_database.entry(job.id.database()).or_default().push(job);
    }
    let calls = by_database.into_values().map(async |mut jobs| {
        while !jobs.is_empty() {
            let next: Vec<JobId> = jobs.iter().take(CHUNK).map(|job| job.id).collect();
            if let Err(error) = client.cancel(&next).await {
                tracing::warn!(jobs = jobs.len(), %error, "cannot cancel abandoned jobs, trying again");
                break;
            }
            jobs.drain(..next.len());
        }
        jobs
    });
    join_all(calls).await.into_iter().flatten().collect()
}
