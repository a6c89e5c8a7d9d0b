//! [`JobWaiter`]: waits for many jobs with one query to the store.
//!
//! A hundred callers that each polled the store would query it thousands of times a second; one task
//! polls for all of them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, timeout},
};
use tritmill_client::Client;
use tritmill_queue::{FinishedJob, JobId};

/// Pause between two queries, and its minimum as a multiple of a query's duration.
const POLL: Duration = Duration::from_millis(25);
const POLL_SHARE: u32 = 4;
/// How often an idle task checks whether its [`JobWaiter`] still exists.
const IDLE_CHECK: Duration = Duration::from_secs(1);
/// Pause after a failed query.
const RETRY: Duration = Duration::from_millis(500);

/// Waits for jobs to finish. Its polling task ends when it is dropped.
pub(crate) struct JobWaiter(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    by_job: Mutex<HashMap<JobId, oneshot::Sender<FinishedJob>>>,
    added: Notify,
}

impl JobWaiter {
    /// A waiter for jobs of this client's store. Must be called within a Tokio runtime.
    pub fn new(client: Client) -> Self {
        let waiting = Arc::new(Waiting::default());
        tokio::spawn(poll(client, Arc::downgrade(&waiting)));
        Self(waiting)
    }

    /// Receives the end of a job, which may be submitted before or after this call.
    pub fn wait_for(&self, id: JobId) -> oneshot::Receiver<FinishedJob> {
        let (sender, receiver) = oneshot::channel();
        self.0.lock().insert(id, sender);
        self.0.added.notify_one();
        receiver
    }
}

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, HashMap<JobId, oneshot::Sender<FinishedJob>>> {
        self.by_job.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn poll(client: Client, waiting: Weak<Waiting>) {
    loop {
        let Some(waiting) = waiting.upgrade() else { return };
        let ids: Vec<JobId> = {
            let mut by_job = waiting.lock();
            by_job.retain(|_, sender| !sender.is_closed());
            by_job.keys().copied().collect()
        };
        if ids.is_empty() {
            // The timeout lets the loop notice that the waiter was dropped.
            let _ = timeout(IDLE_CHECK, waiting.added.notified()).await;
            continue;
        }
        let started = Instant::now();
        let pause = match client.finished(&ids).await {
            Ok(ended) => {
                let mut by_job = waiting.lock();
                for end in ended {
                    if let Some(sender) = by_job.remove(&end.id) {
                        // The receiver may have been dropped meanwhile.
                        let _ = sender.send(end);
                    }
                }
                POLL.max(started.elapsed() * POLL_SHARE)
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read finished jobs, trying again");
                RETRY
            }
        };
        drop(waiting);
        sleep(pause).await;
    }
}
