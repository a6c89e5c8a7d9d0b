//! [`Ends`]: waits for many jobs with one question to the store.
//!
//! A hundred callers that each asked the store would ask it thousands of times a second; here one
//! task asks for all of them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, timeout},
};
use tritmill_client::Client;
use tritmill_queue::{FinishedJob, JobId};

/// Between two questions; no less than so many times what one takes.
const POLL: Duration = Duration::from_millis(25);
const POLL_SHARE: u32 = 4;
/// How late the task may see that nobody can come any more.
const LOOK: Duration = Duration::from_secs(1);
/// After the store failed.
const RETRY: Duration = Duration::from_millis(500);

/// Those who wait. The task that asks ends with it.
pub(crate) struct Ends(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    by_job: Mutex<HashMap<JobId, oneshot::Sender<FinishedJob>>>,
    came: Notify,
}

impl Ends {
    /// Ends of the jobs of this client's store. Within a runtime.
    pub fn of(client: Client) -> Self {
        let waiting = Arc::new(Waiting::default());
        tokio::spawn(ask(client, Arc::downgrade(&waiting)));
        Self(waiting)
    }

    /// Told when the job is over. To be called before the job is submitted, or after.
    pub fn of_job(&self, id: JobId) -> oneshot::Receiver<FinishedJob> {
        let (tell, told) = oneshot::channel();
        self.0.lock().insert(id, tell);
        self.0.came.notify_one();
        told
    }
}

impl Waiting {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<JobId, oneshot::Sender<FinishedJob>>> {
        self.by_job.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask(client: Client, waiting: Weak<Waiting>) {
    loop {
        let Some(all) = waiting.upgrade() else { return };
        let ids: Vec<JobId> = {
            let mut by_job = all.lock();
            by_job.retain(|_, tell| !tell.is_closed());
            by_job.keys().copied().collect()
        };
        if ids.is_empty() {
            // Now and then it looks whether anybody is left who could come.
            let _ = timeout(LOOK, all.came.notified()).await;
            continue;
        }
        let asked = Instant::now();
        let wait = match client.finished(&ids).await {
            Ok(ended) => {
                let mut by_job = all.lock();
                for end in ended {
                    if let Some(tell) = by_job.remove(&end.id) {
                        // Whoever waited may just have gone.
                        let _ = tell.send(end);
                    }
                }
                POLL.max(asked.elapsed() * POLL_SHARE)
            }
            Err(error) => {
                tracing::warn!(%error, "ends of jobs not read, trying again");
                RETRY
            }
        };
        drop(all);
        sleep(wait).await;
    }
}
