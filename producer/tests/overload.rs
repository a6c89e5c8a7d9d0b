//! Jobs that would wait too long are refused, with every pair of store and dispatcher.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tritmill_client::{
    Cause, Client, ClientError, Dispatcher, Events, Job, JobBuilder, Limit, MemoryDispatcher,
    MemoryEvents, QueueName, RedisDispatcher, Sampling, SqliteStore, Store,
};
use tritmill_queue::{
    Pull,
    dispatch::BacklogLimit,
    store::{
        PostgresStore, QueueSettings, Workers,
        workers::{Heartbeat, WorkerMetrics},
    },
};
use tritmill_servers::{Postgres, Redis};

/// A store, its dispatcher, and clients of both.
struct Rig {
    settings: Arc<dyn QueueSettings>,
    workers: Arc<dyn Workers>,
    dispatcher: Arc<dyn Dispatcher>,
    /// Makes a client that has read nothing yet.
    client: Box<dyn Fn() -> Client>,
}

/// Runs a rule without servers and with them.
async fn each<F: Future<Output = ()>>(rule: impl Fn(Rig) -> F) {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(&folder.path().join("store")).await.unwrap());
    let dispatcher = Arc::new(MemoryDispatcher::new(1000));
    let (kept, given) = (store.clone(), dispatcher.clone());
    rule(Rig {
        settings: store.clone(),
        workers: store,
        dispatcher,
        client: Box::new(move || {
            let events: Arc<dyn Events> = Arc::new(MemoryEvents::default());
            let store: Arc<dyn Store> = kept.clone();
            Client::embedded(store, given.clone(), events).limited_by(kept.clone())
        }),
    })
    .await;
    let (redis, postgres) = (Redis::start().unwrap(), Postgres::start().unwrap());
    PostgresStore::migrate(&postgres.url()).await.unwrap();
    let store = Arc::new(PostgresStore::connect(&postgres.url()).await.unwrap());
    let dispatcher = Arc::new(RedisDispatcher::new(&redis.url(), BacklogLimit::default()).unwrap());
    let (kept, given) = (store.clone(), dispatcher.clone());
    rule(Rig {
        settings: store.clone(),
        workers: store,
        dispatcher,
        client: Box::new(move || Client::from_servers(kept.clone(), given.clone())),
    })
    .await;
}

fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

/// A worker that drains 100 tokens/s in 10 slots, all of which are taken.
async fn busy_worker(workers: &Arc<dyn Workers>) {
    let metrics = WorkerMetrics {
        device: "cuda:0".into(),
        drain_tokens_per_s: Some(100.0),
        ..WorkerMetrics::default()
    };
    let heartbeat = Heartbeat {
        owner: "host-1-abc".into(),
        queue: queue(),
        host: "host".into(),
        pid: 1,
        running: 10,
        slots: 10,
        draining: false,
        tokens_per_s: 100.0,
        metrics,
    };
    workers.heartbeat(&heartbeat).await.unwrap();
}

/// A job of 100 tokens, which takes 10 s in that worker.
async fn job(client: &Client, seconds: Option<f64>) -> Job {
    let sampling = Sampling { max_tokens: Some(90), ..Sampling::default() };
    let job = JobBuilder::tokens("tiny@i2_s", vec![1; 10]).sampling(sampling).build().unwrap();
    let now = client.now().await.unwrap();
    let expires_at = seconds.map(|seconds| now.after(Duration::from_secs_f64(seconds)));
    Job { expires_at, ..job }
}

fn refusal(result: Result<(), ClientError>) -> (Limit, Cause, Duration) {
    match result.unwrap_err() {
        ClientError::Busy { limit, cause, retry_after, .. } => (limit, cause, retry_after),
        error => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_that_would_miss_its_deadline_is_refused_until_the_queue_has_drained() {
    each(async |rig| {
        busy_worker(&rig.workers).await;
        let client = (rig.client)();
        // 0.64 × 56.25 s less the 10 s of its own leave 26 s to wait. At the same moment, too.
        let jobs: Vec<Job> = join_all((0..40).map(|_| job(&client, Some(56.25)))).await;
        let results = join_all(jobs.iter().map(|job| client.submit(job.clone()))).await;
        let accepted = results.iter().filter(|result| result.is_ok()).count();
        assert!((25..=27).contains(&accepted), "{accepted} were accepted");
        let late = job(&client, Some(56.25)).await;
        let (limit, cause, retry_after) = refusal(client.submit(late).await.map(drop));
        assert!(
            matches!(limit, Limit::Deadline(left) if (25..=26).contains(&left.as_secs())),
            "{limit:?}"
        );
        assert_eq!(cause, Cause::Gpu);
        assert!((5.0..8.0).contains(&retry_after.as_secs_f64()), "{retry_after:?}");
        client.submit(job(&client, None).await).await.unwrap();
        client.submit(job(&client, Some(3600.0)).await).await.unwrap();
        // It opens again when a fifth of the wait has drained, not before.
        let drain = async |max| {
            let (queue, wait) = (queue(), Duration::ZERO);
            let pull = Pull { queue: &queue, consumer: "a", max, wait, only: None };
            let taken = rig.dispatcher.pull(pull).await.unwrap();
            assert_eq!(rig.dispatcher.acknowledge("a", &taken).await.unwrap(), max);
        };
        drain(accepted + 2 - 24).await;
        assert!(
            client.submit(job(&client, Some(56.25)).await).await.is_err(),
            "24 s are before it"
        );
        drain(5).await;
        client.submit(job(&client, Some(56.25)).await).await.unwrap();
        client.submit(job(&client, Some(56.25)).await).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_in_bulk_are_accepted_as_far_as_single_ones() {
    each(async |rig| {
        busy_worker(&rig.workers).await;
        let client = (rig.client)();
        // As above, 26 s are left to wait. That forty do not fit together shuts nothing.
        let jobs: Vec<Job> = join_all((0..40).map(|_| job(&client, Some(56.25)))).await;
        match client.submit_many(&jobs).await.unwrap_err() {
            ClientError::Busy { accepted, .. } => {
                assert!((25..=27).contains(&accepted), "{accepted} were accepted");
            }
            error => panic!("{error}"),
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_fill_a_part_of_the_longest_wait_and_ignore_deadlines() {
    each(async |rig| {
        busy_worker(&rig.workers).await;
        let client = (rig.client)();
        for _ in 0..10 {
            client.submit(job(&client, None).await).await.unwrap();
        }
        client.admit(&[job(&client, Some(11.0)).await]).await.unwrap();
        rig.settings.set_max_wait(&queue(), Some(Duration::from_secs(12))).await.unwrap();
        let client = (rig.client)();
        let line = job(&client, Some(11.0)).await;
        let (limit, cause, _) = refusal(client.admit(&[line]).await);
        assert_eq!((limit, cause), (Limit::MaxWait(Duration::from_millis(9600)), Cause::Gpu));
        for _ in 0..3 {
            client.submit(job(&client, None).await).await.unwrap();
        }
        let (limit, ..) = refusal(client.submit(job(&client, None).await).await.map(drop));
        assert_eq!(limit, Limit::MaxWait(Duration::from_secs(12)));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_workers_only_the_backlog_is_limited() {
    each(async |rig| {
        rig.settings.set_max_wait(&queue(), Some(Duration::from_secs(1))).await.unwrap();
        rig.settings.set_limit(&queue(), Some(550)).await.unwrap();
        let client = (rig.client)();
        for _ in 0..5 {
            client.submit(job(&client, Some(11.0)).await).await.unwrap();
        }
        let sixth = client.submit(job(&client, Some(11.0)).await).await.map(drop);
        let (limit, cause, retry_after) = refusal(sixth);
        assert_eq!((limit, cause), (Limit::Tokens(550), Cause::NoWorker));
        assert_eq!(retry_after, Duration::from_secs(15));
    })
    .await;
}
