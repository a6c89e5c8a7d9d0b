//! The store of the fast mode, beyond the conformance suite: jobs and entries in one step, limits,
//! restarts of Redis, retention, foreign strings.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite itself runs in tests/store.rs")]
mod conformance;

use std::{collections::HashSet, time::Duration};

use conformance::{LEASE, answer, by, error, finished, job, queue};
use futures_util::future::join_all;
use tritmill_queue::{
    Claim, Delivery, DispatchError, Dispatcher, Entry, ErrorKind, Job, JobId, JobState, Priority,
    Pull, QueueName, Store, StoreError, Tenant, Timestamp,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{AcceptError, FAST_RETENTION, RedisConfigError, RedisStore, classes::ClassError},
};
use tritmill_servers::Redis;

fn connect(redis: &Redis) -> (RedisDispatcher, RedisStore) {
    let dispatcher = RedisDispatcher::new(&redis.url(), BacklogLimit::default()).unwrap();
    let store = dispatcher.store(queue(), FAST_RETENTION);
    (dispatcher, store)
}

fn ids(jobs: &[Job]) -> Vec<JobId> {
    jobs.iter().map(|job| job.id).collect()
}

async fn pull(dispatcher: &RedisDispatcher, consumer: &str, max: usize) -> Vec<Delivery> {
    let (queue, wait) = (queue(), Duration::ZERO);
    dispatcher.pull(Pull { queue: &queue, consumer, max, wait, only: None }).await.unwrap()
}

/// Pulls, claims, answers and acknowledges jobs; returns how many.
async fn answer_all(dispatcher: &RedisDispatcher, store: &RedisStore, consumer: &str) -> usize {
    let mut count = 0;
    loop {
        let deliveries = pull(dispatcher, consumer, 100).await;
        if deliveries.is_empty() {
            return count;
        }
        let ids: Vec<JobId> = deliveries.iter().map(|delivery| delivery.id).collect();
        let claims = store.claim(&ids, by(consumer)).await.unwrap();
        let done: Vec<_> =
            claims.iter().map(|claim| finished(claim.claim_ref(), answer("x"))).collect();
        count += store.finish(&done).await.unwrap().len();
        dispatcher.acknowledge(consumer, &deliveries).await.unwrap();
    }
}

async fn command<T: redis::FromRedisValue>(redis: &Redis, words: &[&str]) -> T {
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn job_submitted_repeatedly_is_delivered_once() {
    let redis = Redis::start().unwrap();
    let (dispatcher, store) = connect(&redis);
    let mut jobs: Vec<Job> = (0..1200).map(|_| job()).collect();
    jobs[3].priority = Priority::High;
    jobs[4].tenant = Tenant("a:b{c}".into());
    jobs.push(jobs[7].clone());
    store.accept(&jobs[..600]).await.unwrap();
    store.accept(&jobs).await.unwrap();
    store.accept(&jobs).await.unwrap();
    let progress = store.progress(None).await.unwrap();
    assert_eq!((progress.queued, dispatcher.depth(&queue()).await.unwrap()), (1200, 1200));
    // Accepted jobs already have their entries.
    assert!(store.queued(&queue(), None, 10).await.unwrap().is_empty());
    assert_eq!(answer_all(&dispatcher, &store, "w").await, 1200);
    let progress = store.progress(None).await.unwrap();
    assert_eq!((progress.queued, progress.completed, progress.prompt_tokens), (0, 1200, 3600));
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 0);
    // Submitting a finished job again changes nothing.
    store.accept(&jobs).await.unwrap();
    assert!(pull(&dispatcher, "w", 1).await.is_empty());
    let waiting: Vec<String> = command(&redis, &["KEYS", "*:ids"]).await;
    assert!(waiting.is_empty(), "{waiting:?}");
}

#[tokio::test]
async fn full_queue_refuses_whole_chunk_and_ignores_known_jobs() {
    let redis = Redis::start().unwrap();
    let limit = BacklogLimit { entries: 10, tokens: 1 << 40 };
    let dispatcher = RedisDispatcher::new(&redis.url(), limit).unwrap();
    let store = dispatcher.store(queue(), FAST_RETENTION);
    let jobs: Vec<Job> = (0..12).map(|_| job()).collect();
    store.accept(&jobs[..8]).await.unwrap();
    let refused = store.accept(&jobs[8..]).await.unwrap_err();
    assert!(matches!(refused, AcceptError::Dispatch(DispatchError::Busy { .. })), "{refused}");
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 8);
    store.accept(&jobs[..10]).await.unwrap();
    store.accept(&jobs[..10]).await.unwrap();
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 10);
}

#[tokio::test]
async fn jobs_in_every_state_before_the_end_are_unfinished() {
    let redis = Redis::start().unwrap();
    let (_, store) = connect(&redis);
    let mut jobs: Vec<Job> = (0..5).map(|_| job()).collect();
    jobs[4].run_at = Some(Timestamp(1 << 50));
    store.accept(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs[..3]), by("w")).await.unwrap();
    let ends = [
        finished(claims[0].claim_ref(), answer("x")),
        finished(claims[1].claim_ref(), error(ErrorKind::Engine)),
    ];
    store.finish(&ends).await.unwrap();
    let progress = store.progress(None).await.unwrap();
    let (scheduled, running) = (progress.scheduled, progress.running);
    let (queued, retrying) = (progress.queued, progress.retrying);
    assert_eq!([scheduled, queued, running, retrying], [1; 4]);
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 4);
}

#[tokio::test]
async fn time_is_that_of_redis() {
    let redis = Redis::start().unwrap();
    let (_, store) = connect(&redis);
    let time = || async {
        let (seconds, micros): (i64, i64) = command(&redis, &["TIME"]).await;
        Timestamp(seconds * 1000 + micros / 1000)
    };
    for _ in 0..5 {
        let before = time().await;
        let now = store.now().await.unwrap();
        assert!(before <= now && now <= time().await, "{now:?}");
        tokio::time::sleep(Duration::from_millis(70)).await;
    }
}

#[tokio::test]
async fn scheduled_job_is_enqueued_when_due_and_past_one_at_once() {
    let redis = Redis::start().unwrap();
    let (dispatcher, store) = connect(&redis);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let now = Timestamp(i64::try_from(now.as_millis()).unwrap());
    let (mut later, mut past) = (job(), job());
    later.run_at = Some(now.after(Duration::from_secs(3600)));
    past.run_at = Some(Timestamp(1));
    store.accept(&[later.clone(), past.clone()]).await.unwrap();
    let delivered = pull(&dispatcher, "w", 10).await;
    assert_eq!(delivered.iter().map(|one| one.id).collect::<Vec<_>>(), [past.id]);
    let clock = std::sync::Arc::new(move || now.after(Duration::from_secs(3600)));
    assert_eq!(store.clone().with_clock(clock).reconcile().await.unwrap().moved, 1);
    let queued = store.queued(&queue(), None, 10).await.unwrap();
    assert_eq!(queued, [Entry { shard_key: 0, ..later.entry() }], "without shards");
    dispatcher.enqueue(&queued).await.unwrap();
    assert_eq!(pull(&dispatcher, "w", 10).await[0].id, later.id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn workers_of_one_queue_never_run_the_same_job() {
    let redis = Redis::start().unwrap();
    let (_, store) = connect(&redis);
    let jobs: Vec<Job> = (0..2000).map(|_| job()).collect();
    store.accept(&jobs).await.unwrap();
    let claimers = (0..8).map(|number| {
        let (_, store) = connect(&redis);
        let mut wanted = ids(&jobs);
        wanted.rotate_left(number * 61);
        tokio::spawn(async move {
            let mut claims = Vec::new();
            for some in wanted.chunks(50) {
                claims.extend(store.claim(some, by("w")).await.unwrap());
            }
            claims
        })
    });
    let claims: Vec<Claim> =
        join_all(claimers).await.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(claims.len(), jobs.len());
    let held: HashSet<_> = claims.iter().map(Claim::claim_ref).collect();
    assert_eq!(held.len(), jobs.len());
}

#[tokio::test]
async fn redis_with_appendfsync_always_loses_nothing_when_killed() {
    let mut redis = Redis::start_durable().unwrap();
    let (dispatcher, store) = connect(&redis);
    let jobs: Vec<Job> = (0..700).map(|_| job()).collect();
    store.accept(&jobs).await.unwrap();
    let some = pull(&dispatcher, "w", 5).await;
    let some: Vec<JobId> = some.iter().map(|delivery| delivery.id).collect();
    let claims = store.claim(&some, by("w")).await.unwrap();
    let done = [finished(claims[0].claim_ref(), answer("before"))];
    assert_eq!(store.finish(&done).await.unwrap().len(), 1);
    redis.kill();
    assert!(matches!(store.claim(&some, by("w")).await, Err(StoreError::Unavailable(_))));
    redis.restart().unwrap();
    let record = store.job(some[0]).await.unwrap().unwrap();
    assert_eq!((record.state, record.outcome), (JobState::Completed, Some(answer("before"))));
    assert!(store.renew(&[claims[1].claim_ref()], LEASE).await.unwrap().is_empty());
    assert_eq!(answer_all(&dispatcher, &store, "v").await, 695);
}

#[tokio::test]
async fn finished_job_expires_with_its_errors() {
    let redis = Redis::start().unwrap();
    let (dispatcher, _) = connect(&redis);
    let store = dispatcher.store(queue(), Duration::from_millis(50));
    let jobs = [job(), job(), job()];
    store.accept(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs)[..2], by("w")).await.unwrap();
    store.checkpoint(&[(claims[0].claim_ref(), b"some".to_vec())]).await.unwrap();
    let ends = [
        finished(claims[0].claim_ref(), answer("x")),
        finished(claims[1].claim_ref(), error(ErrorKind::InvalidRequest)),
    ];
    assert_eq!(store.finish(&ends).await.unwrap().len(), 2);
    store.cancel(&[jobs[2].id]).await.unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(30);
    loop {
        let left: Vec<String> = command(&redis, &["KEYS", "*0*"]).await;
        if left.is_empty() {
            break;
        }
        assert!(std::time::Instant::now() < until, "not expired: {left:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(store.job(jobs[0].id).await.unwrap(), None);
    let progress = store.progress(None).await.unwrap();
    assert_eq!((progress.completed, progress.failed, progress.cancelled), (1, 1, 1));
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 0);
}

#[tokio::test]
async fn foreign_strings_do_not_block_jobs() {
    let redis = Redis::start().unwrap();
    let (dispatcher, store) = connect(&redis);
    let jobs: Vec<Job> = (0..4).map(|_| job()).collect();
    store.accept(&jobs).await.unwrap();
    let key = |index: usize| format!("tm:{{tiny:i2_s}}:job:{}", jobs[index].id);
    let _: String = command(&redis, &["SET", &key(0), "garbage"]).await;
    // A valid header before an invalid job.
    let _: i64 = command(&redis, &["SETRANGE", &key(1), "60", "garbage"]).await;
    let claims = store.claim(&ids(&jobs), by("w")).await.unwrap();
    let claimed: Vec<JobId> = claims.iter().map(|claim| claim.job.id).collect();
    assert_eq!(claimed, ids(&jobs[2..]));
    assert!(matches!(store.job(jobs[0].id).await, Err(StoreError::Damaged { .. })));
    assert!(store.finished(&ids(&jobs)).await.unwrap().is_empty());
    assert_eq!(pull(&dispatcher, "w", 10).await.len(), 4);
}

#[tokio::test]
async fn other_queue_and_second_class_are_refused() {
    let redis = Redis::start().unwrap();
    let (_, store) = connect(&redis);
    let mut other = job();
    other.queue = QueueName { model: "other".into(), format: "i2_s".into() };
    let refused = store.accept(&[job(), other.clone()]).await.unwrap_err();
    assert!(
        matches!(&refused, AcceptError::Store(StoreError::OtherQueue { job, .. }) if *job == other.id),
        "{refused}"
    );
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 0);
    assert_eq!(store.progress(Some(&other.queue)).await.unwrap(), Default::default());
    store.register_class("one").await.unwrap();
    store.register_class("one").await.unwrap();
    let refused = store.register_class("two").await.unwrap_err();
    assert!(matches!(refused, ClassError::Mismatch { .. }), "{refused}");
}

#[tokio::test]
async fn evicting_redis_is_refused_and_full_one_is_busy() {
    let redis = Redis::start().unwrap();
    let (_, store) = connect(&redis);
    store.check().await.unwrap();
    let set = |name: &'static str, value: &'static str| {
        let redis = &redis;
        async move { command::<String>(redis, &["CONFIG", "SET", name, value]).await }
    };
    set("maxmemory-policy", "volatile-lru").await;
    store.check().await.unwrap();
    set("maxmemory", "1000").await;
    let unfit = store.check().await.unwrap_err();
    assert!(
        matches!(&unfit, RedisConfigError::Evicts { policy } if policy == "volatile-lru"),
        "{unfit}"
    );
    set("maxmemory", "0").await;
    set("maxmemory-policy", "noeviction").await;
    let running = job();
    store.accept(std::slice::from_ref(&running)).await.unwrap();
    let claims = store.claim(&[running.id], by("w")).await.unwrap();
    set("maxmemory", "1000").await;
    store.check().await.unwrap();
    let refused = store.accept(&[job()]).await.unwrap_err();
    assert!(matches!(refused, AcceptError::Dispatch(DispatchError::Busy { .. })), "{refused}");
    // Running jobs still finish.
    assert_eq!(
        store.finish(&[finished(claims[0].claim_ref(), answer("x"))]).await.unwrap().len(),
        1
    );
}

#[tokio::test]
async fn deleting_everything_leaves_no_keys() {
    let redis = Redis::start().unwrap();
    let (dispatcher, store) = connect(&redis);
    let mut jobs: Vec<Job> = (0..6).map(|_| job()).collect();
    jobs[5].expires_at = Some(Timestamp(i64::MAX));
    store.accept(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs)[..3], by("w")).await.unwrap();
    let ends = [
        finished(claims[0].claim_ref(), answer("x")),
        finished(claims[1].claim_ref(), error(ErrorKind::Engine)),
    ];
    store.finish(&ends).await.unwrap();
    store.register_class("one").await.unwrap();
    assert_eq!(store.delete_jobs(&ids(&jobs)).await.unwrap(), 6);
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 0);
    store.forget_queue().await.unwrap();
    dispatcher.forget_queue(&queue()).await.unwrap();
    let left: u64 = command(&redis, &["DBSIZE"]).await;
    assert_eq!(left, 0);
}
