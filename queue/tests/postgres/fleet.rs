//! Leaders, and how many workers a queue needs.

use tritmill_queue::{
    QueueName,
    store::{
        NumericsClasses as _, QueueHistory as _, QueueSettings as _, Workers as _,
        workers::{Heartbeat, Leadership, WorkerMetrics},
    },
};

use super::*;

#[tokio::test]
async fn one_worker_leads_until_it_drains_ends_or_is_silent() {
    let (_server, store, now) = start_with_clock().await;
    let advance = |by: Duration| now.fetch_add(by.as_millis() as i64, Ordering::SeqCst);
    let named = |owner: &str| Heartbeat { owner: owner.into(), ..beat() };
    let leads = async |beat: &Heartbeat| store.heartbeat(beat).await.unwrap().leads;
    let other_queue =
        Heartbeat { queue: QueueName { format: "tl1".into(), ..queue() }, ..named("c") };
    assert_eq!(leads(&named("a")).await, Leadership::ALL);
    assert_eq!(leads(&named("b")).await, Leadership::default());
    assert_eq!(leads(&other_queue).await, Leadership { store: false, queue: true });
    advance(Leadership::LEASE - Duration::from_secs(1));
    assert_eq!(leads(&named("b")).await, Leadership::default());
    assert_eq!(leads(&named("a")).await, Leadership::ALL, "and holds it for longer");
    advance(Leadership::LEASE);
    assert_eq!(leads(&named("b")).await, Leadership::ALL, "the other one was silent");
    assert_eq!(leads(&named("a")).await, Leadership::default());
    assert_eq!(leads(&Heartbeat { draining: true, ..named("b") }).await, Leadership::default());
    assert_eq!(leads(&named("a")).await, Leadership::ALL);
    store.forget_worker("a").await.unwrap();
    assert_eq!(leads(&named("b")).await, Leadership::ALL);
}

#[tokio::test]
async fn wanted_workers_follow_tokens_deadlines_and_the_measured_rate() {
    let (server, store, now) = start_with_clock().await;
    let wanted = async |sql: &str| number(&server, sql).await;
    let wanted_now = "SELECT wanted_workers('tiny', 'i2_s', 100)";
    assert_eq!(wanted(wanted_now).await, 0, "scale to zero");
    let jobs: Vec<Job> = (0..1000).map(|_| job()).collect();
    let tokens: i64 = jobs.iter().map(|job| i64::from(job.cost())).sum();
    store.submit(&jobs).await.unwrap();
    // 100 tokens/s until a rate is known.
    let workers = |rate: f64, s: f64| (tokens as f64 / (rate * s)).ceil() as i64;
    assert_eq!(wanted(wanted_now).await, workers(100.0, 100.0).max(1));
    // A worker that is full measures 20 tokens/s.
    let metrics =
        WorkerMetrics { prefill_tokens_per_s: 15.0, decode_tokens_per_s: 5.0, ..beat().metrics };
    store.register_class(&queue(), "class").await.unwrap();
    store.heartbeat(&Heartbeat { running: 32, metrics, ..beat() }).await.unwrap();
    store.sample().await.unwrap();
    now.fetch_add(10_000, Ordering::SeqCst);
    assert!(store.sample().await.unwrap());
    assert_eq!(wanted(wanted_now).await, workers(20.0, 100.0));
    // One deadline in 50 s. The function uses the server's clock.
    let soon = wanted("SELECT store_now_ms(NULL)").await + 50_000;
    let urgent = Job { expires_at: Some(Timestamp(soon)), ..job() };
    store.submit(&[urgent]).await.unwrap();
    let more = wanted(wanted_now).await;
    assert!((workers(20.0, 50.0)..=workers(20.0, 49.0) + 1).contains(&more), "{more}");
    // A paused queue keeps what its running jobs need.
    store
        .claim(&jobs.iter().map(|job| job.id).take(40).collect::<Vec<_>>(), by("w"))
        .await
        .unwrap();
    store.set_paused(&queue(), true).await.unwrap();
    assert_eq!(wanted(wanted_now).await, 2, "40 jobs in workers with 32 slots");
    let standby = Heartbeat { owner: "standby".into(), running: 0, slots: 0, ..beat() };
    store.heartbeat(&standby).await.unwrap();
    assert_eq!(wanted(wanted_now).await, 2, "a worker that has not loaded the model has no slots");
    assert_eq!(wanted("SELECT wanted_workers('other', 'i2_s')").await, 0);
    let later = Job {
        queue: QueueName { model: "other".into(), ..queue() },
        run_at: Some(Timestamp(soon)),
        ..job()
    };
    store.submit(&[later]).await.unwrap();
    assert_eq!(wanted("SELECT wanted_workers('other', 'i2_s')").await, 1, "due within a minute");
}

#[tokio::test]
async fn sample_has_the_age_of_jobs_that_were_not_announced() {
    let (_server, store, now) = start_with_clock().await;
    let sampled = async || {
        now.fetch_add(10_000, Ordering::SeqCst);
        assert!(store.sample().await.unwrap());
        let snapshot = store.snapshot().await.unwrap().unwrap();
        snapshot.queues.first().and_then(|queue| queue.depth.unannounced_since)
    };
    store.sample().await.unwrap();
    assert_eq!(sampled().await, None);
    let submitted_at = store.now().await.unwrap();
    store.submit(&[job()]).await.unwrap();
    now.fetch_add(1000, Ordering::SeqCst);
    store.submit(&[job()]).await.unwrap();
    assert_eq!(sampled().await, Some(submitted_at), "the oldest");
    let unannounced = store.unannounced(&queue()).await.unwrap();
    store.forget_announcements(&unannounced).await.unwrap();
    assert_eq!(sampled().await, None);
}
