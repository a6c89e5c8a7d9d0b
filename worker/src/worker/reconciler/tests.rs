//! Refills, lost leases and full queues, on a store in a file and a dispatcher in memory.

use tritmill_queue::{
    Claimant, Delivery, Job, Priority, Prompt, Sampling, Tenant,
    dispatch::{Demand, MemoryDispatcher, Pull, Quotas},
    store::{SqliteStore, workers::Leadership},
};

use super::*;

fn job() -> Job {
    Job {
        id: JobId::generate(),
        tenant: Tenant::default(),
        queue: QueueName { model: "tiny".into(), format: "i2_s".into() },
        priority: Priority::Normal,
        prompt: Prompt::Text("once".into()),
        sampling: Sampling::default(),
        seed: 1,
        attempts_max: 3,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        task: tritmill_queue::Task::Generate,
        echo: serde_json::Map::new(),
        line_key: None,
        billing: tritmill_queue::Billing::default(),
        line_shape: None,
        custom_id: None,
    }
}

async fn reconciler(store: Arc<SqliteStore>, bound: usize) -> (Reconciler, Arc<MemoryDispatcher>) {
    let dispatcher = Arc::new(MemoryDispatcher::new(bound));
    let reconciler = Reconciler {
        store,
        dispatcher: dispatcher.clone(),
        metrics: Arc::default(),
        queue: job().queue,
        directive: watch::channel(Directive {
            drain: false,
            paused: false,
            leads: Leadership::ALL,
        })
        .1,
        low: 4,
        cursor: None,
        due: HashMap::new(),
        refill: None,
        others_refill: None,
    };
    (reconciler, dispatcher)
}

async fn store(folder: &tempfile::TempDir, jobs: &[Job]) -> Arc<SqliteStore> {
    let store = SqliteStore::open(&folder.path().join("jobs")).await.expect("opens");
    store.submit(jobs).await.expect("submits");
    Arc::new(store)
}

#[tokio::test]
async fn empty_dispatcher_gets_everything_in_one_round() {
    let folder = tempfile::tempdir().expect("a folder");
    let jobs: Vec<Job> = (0..3 * FEED_COUNT).map(|_| job()).collect();
    let store = store(&folder, &jobs).await;
    let (mut reconciler, dispatcher) = reconciler(store, 1_000_000).await;
    // Enough other entries that the dispatcher has not run low.
    let others: Vec<Entry> = (0..100).map(|_| job().entry()).collect();
    dispatcher.enqueue(&others).await.expect("room");
    reconciler.round().await.expect("a round");
    let depth = dispatcher.depth(&reconciler.queue).await.expect("a depth");
    assert_eq!(depth, jobs.len() + others.len());
    // The dispatcher now has every entry, so the scan is slow again.
    reconciler.round().await.expect("a round");
    assert_eq!(reconciler.cursor, Some(jobs[SCAN_COUNT as usize - 1].id));
}

#[tokio::test]
async fn job_with_lost_lease_is_first_at_once_also_in_a_full_queue() {
    let folder = tempfile::tempdir().expect("a folder");
    let jobs: Vec<Job> = (0..2000).map(|_| job()).collect();
    let store = store(&folder, &jobs).await;
    // Requeued jobs have twice as much room.
    let (mut reconciler, dispatcher) = reconciler(store.clone(), 1000).await;
    let queue = reconciler.queue.clone();
    reconciler.round().await.expect("a round");
    let pull = || Pull { queue: &queue, consumer: "w", max: 1, wait: Duration::ZERO, only: None };
    let taken = dispatcher.pull(pull()).await.expect("one");
    let by = Claimant::new("w", Duration::ZERO);
    let claims = store.claim(&[taken[0].id], by).await.expect("claims");
    assert_eq!((claims[0].job.id, claims[0].epoch), (jobs[0].id, 1));
    dispatcher.acknowledge("w", &taken).await.expect("acknowledges");
    // The scan is past this job, and there is no room even for requeued jobs: the job is not
    // enqueued, and not forgotten.
    reconciler.cursor = Some(jobs[600].id);
    dispatcher.requeue(&[job().entry()]).await.expect("room for one");
    reconciler.round().await.expect("a round");
    assert_eq!(dispatcher.depth(&queue).await.expect("a depth"), 2000);
    let first = dispatcher.pull(pull()).await.expect("one");
    dispatcher.acknowledge("w", &first).await.expect("acknowledges");
    let due: Vec<JobId> = reconciler.due[&queue].iter().map(|entry| entry.id).collect();
    assert_eq!(due, [jobs[0].id]);
    reconciler.cursor = Some(jobs[600].id);
    assert!(dispatcher.enqueue(&[job().entry()]).await.is_err(), "full for new jobs");
    reconciler.round().await.expect("a round");
    assert!(reconciler.due.is_empty());
    assert_eq!(dispatcher.depth(&queue).await.expect("a depth"), 2000);
    let first = dispatcher.pull(pull()).await.expect("one");
    assert_eq!(first[0].id, jobs[0].id, "the oldest");
}

#[tokio::test]
async fn worker_that_dies_while_it_refills_closes_no_empty_queue() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = store(&folder, &[]).await;
    let (mut reconciler, dispatcher) = reconciler(store.clone(), 1000).await;
    reconciler.begin_refill().await.expect("begins");
    let missing = dispatcher.missing(&reconciler.queue).await.expect("missing");
    assert_eq!(missing, Some(Missing { refilling: true, ..Missing::default() }));
    // A single job fits an empty queue, whatever its quota.
    let ask = Demand::by_queue(&[job().entry()]).remove(0);
    let quotas = Quotas { tokens: Some(0), ..Quotas::default() };
    dispatcher.admit(&ask, &quotas).await.expect("room");
    reconciler.round().await.expect("a round");
    let missing = dispatcher.missing(&reconciler.queue).await.expect("missing");
    assert_eq!(missing, Some(Missing::default()));
}

#[tokio::test]
async fn lost_queue_is_refilled_by_priority_and_tenant_while_admission_counts_the_store() {
    let of = |priority: Priority, tenant: &str| {
        let tenant = Tenant(tenant.to_owned());
        Job { priority, tenant, ..job() }
    };
    let folder = tempfile::tempdir().expect("a folder");
    let mut jobs: Vec<Job> = (0..5000).map(|_| of(Priority::Low, "large")).collect();
    jobs.extend((0..10).map(|_| of(Priority::Low, "small")));
    jobs.extend((0..10).map(|_| of(Priority::High, "large")));
    let store = store(&folder, &jobs).await;
    let (mut reconciler, dispatcher) = reconciler(store.clone(), 1000).await;
    let queue = reconciler.queue.clone();
    let ask = Demand::by_queue(&[job().entry(), job().entry()]).remove(0);
    let quotas = Quotas::default();
    dispatcher.admit(&ask, &quotas).await.expect("nothing is known yet");
    reconciler.round().await.expect("a round");
    // The heads of all lines, 1044 jobs, and one chunk of the rest fit twice the limit.
    let pull =
        || Pull { queue: &queue, consumer: "w", max: 5000, wait: Duration::ZERO, only: None };
    let mut taken = dispatcher.pull(pull()).await.expect("entries");
    assert_eq!(taken.len(), 1044 + CHUNK);
    let seen = |taken: &[Delivery], job: &Job| taken.iter().any(|one| one.id == job.id);
    assert!(jobs[5000..].iter().all(|job| seen(&taken, job)));
    // Nothing waits in the dispatcher, but much in the store.
    let missing = dispatcher.missing(&queue).await.expect("missing").expect("known");
    assert_eq!(missing.entries, (5020 - 1044 - CHUNK) as u64);
    let busy = dispatcher.admit(&ask, &quotas).await;
    assert!(matches!(busy, Err(DispatchError::Busy { .. })), "{busy:?}");
    while dispatcher.missing(&queue).await.expect("missing") != Some(Missing::default()) {
        reconciler.round().await.expect("a round");
        taken.extend(dispatcher.pull(pull()).await.expect("entries"));
    }
    assert_eq!(taken.len(), jobs.len());
    dispatcher.admit(&ask, &quotas).await.expect("room again");
}
