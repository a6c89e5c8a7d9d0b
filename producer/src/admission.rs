//! [`Admission`]: what operators and workers say about queues, and what this process has admitted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tritmill_queue::{
    Job, QueueName, StoreError, Timestamp,
    dispatch::{BacklogByPriority, Demand, Quotas},
    store::{QueueSettings, Serving, Workers},
};

use crate::overload::{Group, QueueLoad, Refused, WaitLimiter};

/// Time until a producer sees a change of a queue's limits.
const QUOTAS_FRESH_FOR: Duration = Duration::from_secs(5);
/// Time until a producer sees a change of a queue's workers.
const SERVING_FRESH_FOR: Duration = Duration::from_secs(1);
/// Time after which what workers could do no longer says what they can do.
const SERVING_KNOWN_FOR: Duration = Duration::from_secs(30);
/// Time between two warnings that it cannot be read.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Limits of queues with what is needed to apply them. Reads the store at most as often as the times above say.
pub(crate) struct Admission {
    settings: Arc<dyn QueueSettings>,
    workers: Arc<dyn Workers>,
    quotas: Cache<Quotas>,
    serving: Cache<Option<KnownServing>>,
    queues: Mutex<HashMap<QueueName, QueueState>>,
    /// The last warning that the store did not say what workers can do.
    warned_at: Mutex<Option<Instant>>,
}

/// What workers could do at a time.
#[derive(Debug, Clone, Copy)]
struct KnownServing {
    serving: Serving,
    read_at: Instant,
}

impl KnownServing {
    /// Returns the time on the clock of deadlines.
    fn now(&self) -> Timestamp {
        self.serving.now.after(self.read_at.elapsed())
    }

    /// Returns whether it may still be so.
    fn is_recent(&self) -> bool {
        self.read_at.elapsed() < SERVING_KNOWN_FOR
    }
}

/// The state of one queue's limits in this process.
#[derive(Debug, Default)]
struct QueueState {
    /// By priority.
    limiters: [WaitLimiter; 3],
    /// Tokens of admitted jobs that the dispatcher does not count yet, by priority.
    reserved: [u64; 3],
}

impl Admission {
    pub fn new<S: QueueSettings + Workers + 'static>(store: Arc<S>) -> Self {
        Self {
            settings: store.clone(),
            workers: store,
            quotas: Cache::new(QUOTAS_FRESH_FOR),
            serving: Cache::new(SERVING_FRESH_FOR),
            queues: Mutex::default(),
            warned_at: Mutex::default(),
        }
    }

    /// Returns a queue's limits. If the store does not answer, the last known ones apply; the store will refuse
    /// the submission itself.
    pub async fn quotas(&self, queue: &QueueName) -> Quotas {
        self.quotas.get(queue, self.settings.quotas(queue)).await
    }

    /// Returns what the workers of a queue can do; `None` if the store never answered, or not for
    /// [`SERVING_KNOWN_FOR`].
    pub async fn serving(&self, queue: &QueueName) -> Option<Serving> {
        Some(self.known_serving(queue).await?.serving)
    }

    async fn known_serving(&self, queue: &QueueName) -> Option<KnownServing> {
        let read = async {
            let read_at = Instant::now();
            let serving = self.workers.serving(queue).await;
            let serving = serving.inspect_err(|error| self.warn(queue, error))?;
            Ok(Some(KnownServing { serving, read_at }))
        };
        self.serving.get(queue, read).await.filter(KnownServing::is_recent)
    }

    /// Logs that predictions may be missing, at most once in [`WARN_EVERY`].
    fn warn(&self, queue: &QueueName, error: &StoreError) {
        let mut warned_at = self.warned_at.lock().unwrap_or_else(PoisonError::into_inner);
        if warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
            *warned_at = Some(Instant::now());
            tracing::warn!(%queue, %error, "workers of a queue not read: waits are not predicted without them");
        }
    }

    /// Checks jobs of one queue against its longest wait and, unless they are lines of a batch, which waits by
    /// itself, against their deadlines. The jobs count as waiting until the result is dropped.
    pub async fn reserve<'a>(
        self: &Arc<Self>,
        demand: &Demand,
        jobs: impl Iterator<Item = &'a Job> + Clone,
        quotas: &Quotas,
        backlog: BacklogByPriority,
    ) -> Result<Option<Reservation>, Refused> {
        let max_wait = quotas.max_wait.map(|wait| demand.part_of_wait(wait));
        let has_deadlines =
            !demand.is_patient() && jobs.clone().any(|job| job.expires_at.is_some());
        if max_wait.is_none() && !has_deadlines {
            return Ok(None);
        }
        let Some(known) = self.known_serving(&demand.queue).await else { return Ok(None) };
        let (serving, now) = (known.serving, known.now());
        let mut groups = Group::by_priority(jobs, now);
        if demand.is_patient() {
            groups.iter_mut().for_each(|group| group.expires_at = None);
        }
        let mut queues = self.lock();
        let state = queues.entry(demand.queue.clone()).or_default();
        let load = QueueLoad { backlog, reserved: state.reserved, serving, now, max_wait };
        for group in &groups {
            let limiter = &mut state.limiters[group.priority as usize];
            // Several jobs wait for each other, and a batch fills less than others: both leave the limiter of single
            // jobs as it is.
            match demand.entries {
                _ if demand.is_patient() => WaitLimiter::default().check(group, &load)?,
                1 => limiter.check(group, &load)?,
                _ => {
                    let mut copy = *limiter;
                    copy.check(group, &load)?;
                }
            }
        }
        let mut tokens = [0; 3];
        for group in &groups {
            tokens[group.priority as usize] += group.tokens;
            state.reserved[group.priority as usize] += group.tokens;
        }
        drop(queues);
        Ok(Some(Reservation { admission: Arc::clone(self), queue: demand.queue.clone(), tokens }))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<QueueName, QueueState>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Jobs that were admitted. They count as waiting until this is dropped, when the dispatcher counts them.
pub(crate) struct Reservation {
    admission: Arc<Admission>,
    queue: QueueName,
    tokens: [u64; 3],
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut queues = self.admission.lock();
        let Some(state) = queues.get_mut(&self.queue) else { return };
        for (sum, tokens) in state.reserved.iter_mut().zip(self.tokens) {
            *sum -= tokens;
        }
    }
}

/// Values of queues that are read from the store again after a time. While one caller reads, others get the old
/// value.
struct Cache<T> {
    fresh_for: Duration,
    known: Mutex<HashMap<QueueName, (Instant, T)>>,
}

impl<T: Clone + Default> Cache<T> {
    fn new(fresh_for: Duration) -> Self {
        Self { fresh_for, known: Mutex::default() }
    }

    /// Returns a queue's value; the last known one if it cannot be read, or the default.
    async fn get(&self, queue: &QueueName, read: impl Future<Output = Result<T, StoreError>>) -> T {
        if let Some((at, value)) = self.lock().get_mut(queue) {
            if at.elapsed() < self.fresh_for {
                return value.clone();
            }
            *at = Instant::now();
        }
        let value = match read.await {
            Ok(value) => value,
            Err(error) => {
                tracing::debug!(%error, "limits of a queue not read");
                let known = self.lock();
                known.get(queue).map(|(_, value)| value.clone()).unwrap_or_default()
            }
        };
        self.lock().insert(queue.clone(), (Instant::now(), value.clone()));
        value
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<QueueName, (Instant, T)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_workers_could_do_long_ago_is_unknown() {
        let read_before = |ago| {
            let read_at = Instant::now().checked_sub(ago).expect("the machine runs for a minute");
            KnownServing { serving: Serving::default(), read_at }.is_recent()
        };
        assert!(read_before(Duration::from_secs(20)));
        assert!(!read_before(SERVING_KNOWN_FOR));
    }
}
