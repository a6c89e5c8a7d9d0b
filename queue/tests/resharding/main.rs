//! A queue's slot moves to another node of a Redis Cluster while producers and consumers run.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tritmill_queue::{
    Delivery, DispatchError, Dispatcher, Entry, JobId, Priority, Pull, QueueName, Tenant,
    dispatch::{BacklogLimit, RedisDispatcher},
};
use tritmill_servers::{RedisCluster, SlotMove};

const META: &str = "tm:{tiny:i2_s}:meta";
const PAUSE: Duration = Duration::from_millis(20);

/// Between two calls of a producer, and of a consumer. A producer enqueues 7 jobs for each 5 that a consumer
/// pulls, so that the queue is never empty while its slot moves.
const CALL_PAUSE: Duration = Duration::from_millis(3);

fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

fn entry(number: usize) -> Entry {
    let tenant = Tenant(format!("tenant-{}", number % 5));
    let priority = Priority::ALL[number % 3];
    Entry {
        id: JobId::generate(),
        queue: queue(),
        priority,
        tenant,
        cost: 3,
        shard_key: 0,
        is_first: false,
        expires_at: None,
    }
}

/// Moves all keys of the slot one by one, with a pause after each; returns their number. Fails if the
/// other node has a key already: a script has run there.
async fn move_keys(cluster: &RedisCluster, moving: &SlotMove, pause: Duration) -> usize {
    let mut moved = 0;
    while cluster.move_keys(moving, 1).unwrap() > 0 {
        moved += 1;
        tokio::time::sleep(pause).await;
    }
    moved
}

/// Repeats a call while the slot moves.
macro_rules! until_ok {
    ($call:expr) => {
        loop {
            match $call.await {
                Ok(done) => break done,
                Err(error) => eprintln!("again: {error}"),
            }
        }
    };
}

/// Enqueues jobs until told to stop; returns them.
async fn produce(dispatcher: RedisDispatcher, stop: Arc<AtomicBool>) -> Vec<JobId> {
    let mut ids = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let fed: Vec<Entry> = (ids.len()..ids.len() + 7).map(entry).collect();
        let added = match ids.len() % 3 {
            0 => until_ok!(dispatcher.requeue(&fed)),
            _ => until_ok!(dispatcher.enqueue(&fed)),
        };
        assert_eq!(added, fed.len());
        ids.extend(fed.iter().map(|entry| entry.id));
        tokio::time::sleep(CALL_PAUSE).await;
    }
    ids
}

async fn pull(
    dispatcher: &RedisDispatcher,
    consumer: &str,
    wait: Duration,
) -> Result<Vec<Delivery>, DispatchError> {
    let queue = queue();
    dispatcher.pull(Pull { queue: &queue, consumer, max: 5, wait, only: None }).await
}

/// Pulls and acknowledges until nothing is left after `stop`; hands each fifth entry back once. Returns
/// how often each job was acknowledged.
async fn consume(
    dispatcher: RedisDispatcher,
    name: &'static str,
    stop: Arc<AtomicBool>,
) -> HashMap<JobId, usize> {
    let mut acknowledged: HashMap<JobId, usize> = HashMap::new();
    loop {
        let is_last = stop.load(Ordering::Relaxed);
        let wait = Duration::from_millis(20);
        let taken = until_ok!(pull(&dispatcher, name, wait));
        if taken.is_empty() && is_last {
            return acknowledged;
        }
        let is_back = |delivery: &Delivery| {
            delivery.deliveries == 1 && delivery.id.as_bytes()[15].is_multiple_of(5)
        };
        let (back, done): (Vec<Delivery>, Vec<Delivery>) = taken.into_iter().partition(is_back);
        for delivery in &done {
            let times =
                if is_back(&Delivery { deliveries: 1, ..delivery.clone() }) { 2 } else { 1 };
            assert_eq!(delivery.deliveries, times, "{}", delivery.id);
        }
        // A repeated call finds nothing to do if the answer of the first was lost.
        let count = until_ok!(dispatcher.hand_back(name, &back));
        assert_eq!(count, back.len());
        let count = until_ok!(dispatcher.acknowledge(name, &done));
        assert_eq!(count, done.len());
        for delivery in done {
            *acknowledged.entry(delivery.id).or_default() += 1;
        }
        if !is_last {
            tokio::time::sleep(CALL_PAUSE).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_moves_with_its_slot_while_producers_and_consumers_run() {
    let cluster = RedisCluster::start().unwrap();
    let limit = BacklogLimit { entries: 1 << 20, tokens: 1 << 40 };
    let dispatcher = || RedisDispatcher::new(&cluster.url(), limit).unwrap();
    let one = dispatcher();
    let preloaded: Vec<Entry> = (0..300).map(entry).collect();
    one.enqueue(&preloaded).await.unwrap();
    let (stop, drained) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
    let producers = [dispatcher(), dispatcher()]
        .map(|dispatcher| tokio::spawn(produce(dispatcher, Arc::clone(&stop))));
    let consumers = [("a", dispatcher()), ("b", dispatcher())]
        .map(|(name, dispatcher)| tokio::spawn(consume(dispatcher, name, Arc::clone(&drained))));

    tokio::time::sleep(PAUSE * 2).await;
    let moving = cluster.open_slot(META).unwrap();
    tokio::time::sleep(PAUSE * 2).await;
    let moved = move_keys(&cluster, &moving, PAUSE).await;
    assert!(moved > 10, "{moved} keys");
    tokio::time::sleep(PAUSE * 2).await;
    cluster.close_slot(&moving).unwrap();
    tokio::time::sleep(PAUSE * 5).await;

    stop.store(true, Ordering::Relaxed);
    let mut all: Vec<JobId> = preloaded.iter().map(|entry| entry.id).collect();
    for producer in producers {
        all.extend(producer.await.unwrap());
    }
    drained.store(true, Ordering::Relaxed);
    let mut acknowledged: HashMap<JobId, usize> = HashMap::new();
    for consumer in consumers {
        for (id, times) in consumer.await.unwrap() {
            *acknowledged.entry(id).or_default() += times;
        }
    }
    assert_eq!(acknowledged.len(), all.len());
    assert!(all.iter().all(|id| acknowledged[id] == 1));
    let backlog = one.backlog(&queue()).await.unwrap();
    assert_eq!((backlog.entries, backlog.tokens), (0, 0));
    let (old, new) = cluster.keys(&moving).unwrap();
    assert!((old, new) <= (0, 2), "only the counters and wake-ups are left: {old}, {new}");
    assert_eq!(one.stats().group_recreations, 0);
}
