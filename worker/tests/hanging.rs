//! A store with calls that hang: the worker continues everything else.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use rig::{Rig, alone, engine_on, eventually, gauge, hang, job, queue, rig};
use tokio::sync::watch;
use tritmill_queue::{
    Claim, ClaimRef, Claimant, Dispatcher, Job, JobId, JobState, Prompt, QueueName, Reconciled,
    Settled, Store, StoreError, Timestamp,
    dispatch::{Entry, Missing},
    store::{FinishedAttempt, FinishedJob, JobRecord, Progress, SqliteStore, Unannounced},
};
use tritmill_worker::{Mode, Stop, WorkerError};

const LEASE: Duration = Duration::from_millis(1500);

/// A store that forwards to another; selected calls hang.
struct Hanging {
    store: Arc<SqliteStore>,
    /// Names of the hanging calls.
    hung: watch::Sender<&'static [&'static str]>,
}

impl Hanging {
    fn over(rig: &mut Rig) -> Arc<Self> {
        let hanging = Arc::new(Self { store: rig.store.clone(), hung: watch::channel(&[][..]).0 });
        rig.worker.store = hanging.clone();
        hanging
    }

    fn hang(&self, calls: &'static [&'static str]) {
        self.hung.send_replace(calls);
    }

    async fn pass(&self, call: &str) {
        let mut hung = self.hung.subscribe();
        hung.wait_for(|hung| !hung.contains(&call)).await.unwrap();
    }
}

#[async_trait]
impl Store for Hanging {
    async fn submit(&self, jobs: &[Job]) -> Result<(), StoreError> {
        self.store.submit(jobs).await
    }
    async fn claim(&self, ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError> {
        self.pass("claim").await;
        self.store.claim(ids, by).await
    }
    async fn renew(&self, held: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError> {
        self.pass("renew").await;
        self.store.renew(held, lease).await
    }
    async fn checkpoint(&self, saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError> {
        self.pass("checkpoint").await;
        self.store.checkpoint(saved).await
    }
    async fn finish(&self, finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError> {
        self.pass("finish").await;
        self.store.finish(finished).await
    }
    async fn hand_back(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        self.pass("hand_back").await;
        self.store.hand_back(held).await
    }
    async fn hand_back_suspects(&self, held: &[ClaimRef]) -> Result<Vec<JobId>, StoreError> {
        self.pass("hand_back").await;
        self.store.hand_back_suspects(held).await
    }
    async fn now(&self) -> Result<Timestamp, StoreError> {
        Store::now(&*self.store).await
    }
    async fn cancel(&self, ids: &[JobId]) -> Result<Vec<JobId>, StoreError> {
        self.store.cancel(ids).await
    }
    async fn reconcile(&self) -> Result<Reconciled, StoreError> {
        self.pass("reconcile").await;
        self.store.reconcile().await
    }
    fn announced(&self, entries: &[Entry]) {
        self.store.announced(entries);
    }
    async fn unannounced(&self, queue: &QueueName) -> Result<Unannounced, StoreError> {
        self.store.unannounced(queue).await
    }
    async fn forget_announcements(&self, done: &Unannounced) -> Result<(), StoreError> {
        self.store.forget_announcements(done).await
    }
    async fn queued(
        &self,
        queue: &QueueName,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<Vec<Entry>, StoreError> {
        self.store.queued(queue, after, limit).await
    }
    async fn queued_heads(
        &self,
        queue: &QueueName,
        each: u32,
        limit: u32,
    ) -> Result<(Missing, Vec<Entry>), StoreError> {
        self.store.queued_heads(queue, each, limit).await
    }
    async fn state(&self, id: JobId) -> Result<Option<JobState>, StoreError> {
        self.store.state(id).await
    }
    async fn job(&self, id: JobId) -> Result<Option<JobRecord>, StoreError> {
        self.store.job(id).await
    }
    async fn finished(&self, ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError> {
        self.store.finished(ids).await
    }
    async fn unfinished(&self, queue: &QueueName) -> Result<u64, StoreError> {
        self.store.unfinished(queue).await
    }
    async fn progress(&self, queue: Option<&QueueName>) -> Result<Progress, StoreError> {
        self.store.progress(queue).await
    }
}

/// Longer than any test runs.
fn long() -> Job {
    job(Prompt::Tokens(vec![1, 2, 3]), 90_000)
}

fn short() -> Job {
    job(Prompt::Tokens(vec![1, 2, 3]), 2)
}

async fn service(drain: Duration) -> (Rig, Arc<Hanging>) {
    let mut rig = rig(Mode::Service, drain).await;
    rig.worker.config.lease = LEASE;
    rig.engine = engine_on(|| {
        std::thread::sleep(Duration::from_millis(2));
        Ok(())
    });
    let store = Hanging::over(&mut rig);
    (rig, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_work_stops_while_a_commit_hangs_and_the_results_are_committed_later() {
    let (mut rig, store) = service(Duration::from_secs(60)).await;
    let (long, short) = (long(), short());
    store.hang(&["finish"]);
    store.submit(&[long.clone(), short.clone()]).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    rig.dispatcher.enqueue(&[long.entry(), short.entry()]).await.unwrap();
    eventually("the short one has ended", || gauge(&metrics, "jobs_running") == 1).await;
    store.cancel(&[long.id]).await.unwrap();
    let cancelled_at = Instant::now();
    eventually("the long one stops", || gauge(&metrics, "jobs_running") == 0).await;
    let took = cancelled_at.elapsed();
    assert!(took < LEASE, "a third of a lease and a step, not {took:?}");
    // Longer than the limit of a call: the commit was tried again by now, with renewed leases.
    tokio::time::sleep(LEASE * 2).await;
    assert_eq!(store.job(short.id).await.unwrap().unwrap().state, JobState::Running);
    store.hang(&[]);
    let committed = rig.commits.recv().await.unwrap();
    assert_eq!(committed.settled, [(short.id, JobState::Completed)]);
    let record = store.job(short.id).await.unwrap().unwrap();
    assert_eq!((record.epoch, record.attempts), (1, 0), "still the first claim");
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn work_stops_before_its_lease_ends_while_every_call_hangs() {
    let (rig, store) = service(Duration::from_secs(60)).await;
    let jobs: Vec<Job> = (0..3).map(|_| long()).collect();
    store.submit(&jobs[..2]).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (_stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    let entries: Vec<Entry> = jobs.iter().map(Job::entry).collect();
    rig.dispatcher.enqueue(&entries[..2]).await.unwrap();
    eventually("both run", || gauge(&metrics, "jobs_running") == 2).await;
    store.hang(&["claim", "renew", "checkpoint", "finish", "hand_back", "reconcile"]);
    // There is room for it: its claim hangs.
    store.submit(&jobs[2..]).await.unwrap();
    rig.dispatcher.enqueue(&entries[2..]).await.unwrap();
    let hung_at = Instant::now();
    eventually("both stop", || gauge(&metrics, "jobs_running") == 0).await;
    let took = hung_at.elapsed();
    assert!(took <= LEASE + LEASE / 3, "from the last renewal on, not {took:?}");
    store.hang(&[]);
    eventually("all three run again", || gauge(&metrics, "jobs_running") == 3).await;
    running.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_step_is_detected_while_store_hangs() {
    let (mut rig, store) = service(Duration::from_secs(60)).await;
    rig.worker.config.step_limit = Duration::from_millis(300);
    rig.engine = engine_on(hang);
    let jobs = [short(), short()];
    store.submit(&jobs[..1]).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (_stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    rig.dispatcher.enqueue(&[jobs[0].entry()]).await.unwrap();
    eventually("one is in the engine", || gauge(&metrics, "jobs_running") == 1).await;
    store.hang(&["claim", "checkpoint", "finish", "hand_back"]);
    let hung_at = Instant::now();
    store.submit(&jobs[1..]).await.unwrap();
    rig.dispatcher.enqueue(&[jobs[1].entry()]).await.unwrap();
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, WorkerError::EngineHangs { .. }), "{error}");
    // The shutdown tries to commit for five seconds.
    let took = hung_at.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_ends_while_store_hangs() {
    let (rig, store) = service(Duration::from_millis(200)).await;
    let jobs = [long(), short()];
    store.submit(&jobs).await.unwrap();
    store.hang(&["checkpoint", "finish", "hand_back"]);
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    rig.dispatcher.enqueue(&[jobs[0].entry(), jobs[1].entry()]).await.unwrap();
    eventually("one has ended", || gauge(&metrics, "jobs_running") == 1).await;
    let stopped_at = Instant::now();
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let took = stopped_at.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    assert_eq!(rig.dispatcher.depth(&queue()).await.unwrap(), 0);
}
