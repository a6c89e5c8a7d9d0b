//! Faults around a Redis dispatcher, on a real Redis.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::rig::{
    STREAM, abort, command, dispatcher, entries, entry, ids, ids_of, pending, pull, pull_for,
    queue, reclaim, shared,
};
use tritmill_queue::{DispatchError, Dispatcher, JobId, Priority, Pull};
use tritmill_servers::{Redis, Signal};

const IDLE: Duration = Duration::from_millis(30);

#[tokio::test]
async fn zombie_cannot_acknowledge_reclaimed_entry() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    dispatcher.enqueue(&entries(2)).await.unwrap();
    let zombie = pull(&dispatcher, "zombie", 2).await;
    tokio::time::sleep(IDLE).await;
    let reclaimed = reclaim(&dispatcher, "heir", 10, IDLE).await;
    assert_eq!(ids(&reclaimed), ids(&zombie));
    assert_eq!(dispatcher.acknowledge("zombie", &zombie).await.unwrap(), 0);
    assert_eq!(pending(&redis).await, 2, "the heir still has them");
    assert_eq!(dispatcher.acknowledge("heir", &reclaimed).await.unwrap(), 2);
    let stats = dispatcher.stats();
    assert_eq!((stats.fenced_acknowledgements, stats.reclaimed), (2, 2));
}

#[tokio::test]
async fn renewal_by_zombie_returns_its_loss_and_takes_nothing() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    dispatcher.enqueue(&entries(2)).await.unwrap();
    let zombie = pull(&dispatcher, "zombie", 2).await;
    tokio::time::sleep(IDLE).await;
    let reclaimed = reclaim(&dispatcher, "heir", 1, IDLE).await;
    let lost = dispatcher.renew("zombie", &zombie).await.unwrap();
    assert_eq!(ids(&lost), ids(&reclaimed));
    assert!(dispatcher.renew("heir", &reclaimed).await.unwrap().is_empty());
    assert_eq!(dispatcher.hand_back("zombie", &zombie).await.unwrap(), 1);
}

#[tokio::test]
async fn consumers_continue_after_redis_lost_all_data() {
    let mut redis = Redis::start().unwrap();
    let dispatcher = shared(&redis);
    dispatcher.enqueue(&entries(5)).await.unwrap();
    assert_eq!(pull(&dispatcher, "a", 2).await.len(), 2);
    let looping = {
        let dispatcher = Arc::clone(&dispatcher);
        tokio::spawn(async move {
            let (queue, wait) = (queue(), Duration::from_secs(5));
            let mut taken: Vec<JobId> = Vec::new();
            while taken.len() < 3 + 4 {
                let request = Pull { queue: &queue, consumer: "a", max: 1, wait, only: None };
                match dispatcher.pull(request).await {
                    Ok(deliveries) => {
                        taken.extend(ids(&deliveries));
                        let _ = dispatcher.acknowledge("a", &deliveries).await;
                    }
                    Err(DispatchError::Unavailable(_)) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            taken
        })
    };
    // The loop takes the remaining three and then waits for the doorbell.
    while dispatcher.depth(&queue()).await.unwrap() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    redis.kill();
    assert!(matches!(dispatcher.enqueue(&entries(1)).await, Err(DispatchError::Unavailable(_))));
    redis.restart().unwrap();
    let fed = entries(4);
    dispatcher.enqueue(&fed).await.unwrap();
    let taken = tokio::time::timeout(Duration::from_secs(20), looping).await.unwrap().unwrap();
    assert_eq!(taken[3..], ids_of(&fed));
    assert!(dispatcher.stats().group_recreations >= 1);
}

#[tokio::test]
async fn durable_redis_keeps_order_and_deliveries() {
    let mut redis = Redis::start_durable().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(20);
    dispatcher.enqueue(&fed).await.unwrap();
    let first = pull(&dispatcher, "a", 5).await;
    redis.kill();
    redis.restart().unwrap();
    assert_eq!(dispatcher.acknowledge("a", &first).await.unwrap(), 5);
    assert_eq!(ids(&pull(&dispatcher, "a", 50).await), ids_of(&fed[5..]));
}

#[tokio::test]
async fn four_consumers_share_two_thousand_entries_without_repeats() {
    let redis = Redis::start().unwrap();
    let fed = entries(2000);
    dispatcher(&redis).enqueue(&fed).await.unwrap();
    let consumers = (0..4).map(|number| {
        let dispatcher = dispatcher(&redis);
        tokio::spawn(async move {
            let (name, mut taken) = (format!("c{number}"), Vec::new());
            loop {
                let deliveries = pull(&dispatcher, &name, 16).await;
                if deliveries.is_empty() {
                    return taken;
                }
                taken.extend(ids(&deliveries));
                let count = dispatcher.acknowledge(&name, &deliveries).await.unwrap();
                assert_eq!(count, deliveries.len());
            }
        })
    });
    let mut seen: HashMap<JobId, usize> = HashMap::new();
    for consumer in consumers.collect::<Vec<_>>() {
        for id in consumer.await.unwrap() {
            *seen.entry(id).or_default() += 1;
        }
    }
    assert_eq!(seen.len(), fed.len());
    assert!(seen.values().all(|count| *count == 1));
    let keys: Vec<String> = command(&redis, &["KEYS", "tm:*"]).await;
    assert!(keys.len() <= 2, "an empty queue keeps its counters and its wake-ups: {keys:?}");
}

#[tokio::test]
async fn garbage_in_stream_is_dropped_and_counted() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(2);
    dispatcher.enqueue(&fed[..1]).await.unwrap();
    let garbage: [&[&str]; 5] = [
        &["x", "y"],
        &["version", "3", "id", "0190b7a0-0000-7000-8000-000000000000", "cost", "1"],
        &["version", "1", "id", "unknown", "cost", "1"],
        &["version", "1", "id", "0190b7a0-0000-7000-8000-000000000000", "cost", "-1"],
        &["version", "1", "id", "0190b7a0-0000-7000-8000-000000000000"],
    ];
    for fields in garbage {
        let words = [&["XADD", STREAM, "*"], fields].concat();
        let _: String = command(&redis, &words).await;
    }
    // A second entry of a waiting job.
    let again = fed[0].id.to_string();
    let _: String =
        command(&redis, &["XADD", STREAM, "*", "version", "1", "id", &again, "cost", "1"]).await;
    dispatcher.enqueue(&fed[1..]).await.unwrap();
    let taken = pull(&dispatcher, "a", 10).await;
    assert_eq!(ids(&taken), ids_of(&fed));
    assert_eq!(dispatcher.stats().foreign_entries, 6);
    assert_eq!(dispatcher.acknowledge("a", &taken).await.unwrap(), 2);
}

#[tokio::test]
async fn deleted_entries_can_be_enqueued_again() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(3);
    dispatcher.enqueue(&fed).await.unwrap();
    let taken = pull(&dispatcher, "dead", 2).await;
    let entry = taken[0].receipt.rsplit(':').next().unwrap();
    let _: usize = command(&redis, &["XDEL", STREAM, entry]).await;
    tokio::time::sleep(IDLE).await;
    let reclaimed = reclaim(&dispatcher, "b", 10, IDLE).await;
    assert_eq!(ids(&reclaimed), [fed[1].id]);
    assert_eq!(dispatcher.stats().deleted_entries, 1);
    // A reconciler enqueues all again; one was lost.
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(ids(&pull(&dispatcher, "b", 10).await), [fed[2].id, fed[0].id]);
}

#[tokio::test]
async fn lost_group_is_created_again() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(3);
    dispatcher.enqueue(&fed).await.unwrap();
    let _: usize = command(&redis, &["XGROUP", "DESTROY", STREAM, "workers"]).await;
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), ids_of(&fed));
    assert_eq!(dispatcher.stats().group_recreations, 1);
}

#[tokio::test]
async fn wait_ends_within_fifty_milliseconds_of_an_enqueue() {
    let redis = Redis::start().unwrap();
    let dispatcher = shared(&redis);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let waiting = {
            let dispatcher = Arc::clone(&dispatcher);
            tokio::spawn(async move {
                let taken = pull_for(&dispatcher, "a", 4, Duration::from_secs(10)).await;
                (taken, Instant::now())
            })
        };
        while command::<String>(&redis, &["INFO", "clients"]).await.contains("blocked_clients:0") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let enqueued_at = Instant::now();
        dispatcher.enqueue(&entries(1)).await.unwrap();
        let (taken, woken) = waiting.await.unwrap();
        assert_eq!(taken.len(), 1);
        slowest = slowest.max(woken - enqueued_at);
        dispatcher.acknowledge("a", &taken).await.unwrap();
    }
    assert!(slowest < Duration::from_millis(50), "{slowest:?}");
}

#[tokio::test]
async fn wait_is_longer_than_one_blocking_read() {
    let redis = Redis::start().unwrap();
    let dispatcher = shared(&redis);
    let waiting = {
        let dispatcher = Arc::clone(&dispatcher);
        tokio::spawn(async move { pull_for(&dispatcher, "a", 1, Duration::from_secs(30)).await })
    };
    // One blocking read lasts at most five seconds.
    tokio::time::sleep(Duration::from_millis(5500)).await;
    assert!(!waiting.is_finished());
    let fed = entries(1);
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(ids(&waiting.await.unwrap()), ids_of(&fed));
}

#[tokio::test]
async fn dropped_pull_keeps_no_entries() {
    let redis = Redis::start().unwrap();
    let one = shared(&redis);
    for round in 0..30_u64 {
        let waiting = {
            let one = Arc::clone(&one);
            tokio::spawn(async move { pull_for(&one, "gone", 4, Duration::from_secs(10)).await })
        };
        // From before the look until well into the wait.
        tokio::time::sleep(Duration::from_micros(round * 150)).await;
        let fed = entries(2);
        let enqueued = one.enqueue(&fed);
        if round % 2 == 0 {
            abort(waiting).await;
            enqueued.await.unwrap();
        } else {
            let (enqueued, ()) = tokio::join!(enqueued, abort(waiting));
            enqueued.unwrap();
        }
        let mut taken = Vec::new();
        let started = Instant::now();
        while taken.len() < 2 && started.elapsed() < Duration::from_secs(2) {
            taken.extend(pull_for(&one, "other", 4, Duration::from_millis(100)).await);
        }
        assert_eq!(ids(&taken).len(), 2, "round {round}");
        one.acknowledge("other", &taken).await.unwrap();
    }
}

#[tokio::test]
async fn entries_found_after_a_pull_was_dropped_are_handed_back() {
    let redis = Redis::start().unwrap();
    let one = shared(&redis);
    one.enqueue(&entries(2)).await.unwrap();
    // The answer comes when the caller has gone.
    let _: String = command(&redis, &["CLIENT", "PAUSE", "300"]).await;
    let waiting = tokio::spawn({
        let one = Arc::clone(&one);
        async move { pull(&one, "gone", 4).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    abort(waiting).await;
    let (mut taken, started) = (0, Instant::now());
    while taken < 2 && started.elapsed() < Duration::from_secs(5) {
        taken += pull_for(&one, "other", 4, Duration::from_millis(100)).await.len();
    }
    assert_eq!(taken, 2);
}

#[tokio::test]
async fn pull_over_a_broken_connection_is_repeated_over_a_new_one() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    dispatcher.enqueue(&entries(2)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(pull(&dispatcher, "a", 1).await.len(), 1);
        let _: i64 = command(&redis, &["CLIENT", "KILL", "TYPE", "normal"]).await;
    }
}

#[tokio::test]
async fn entries_of_lost_answer_are_recovered() {
    let redis = Redis::start().unwrap();
    let dispatcher = shared(&redis);
    let fed = entries(3);
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(pull(&dispatcher, "a", 1).await.len(), 1);
    // The server is stopped during the pull: it executes the pull later, and the answer comes too late.
    redis.signal(Signal::Stop).unwrap();
    let queue = queue();
    let request = Pull { queue: &queue, consumer: "a", max: 1, wait: Duration::ZERO, only: None };
    assert!(matches!(dispatcher.pull(request).await, Err(DispatchError::Unavailable(_))));
    redis.signal(Signal::Continue).unwrap();
    let mut taken = pull(&dispatcher, "a", 10).await;
    taken.sort_by_key(|delivery| delivery.id);
    assert_eq!(ids(&taken), ids_of(&fed[1..]), "without the known one");
    assert_eq!(dispatcher.stats().recovered, 1);
}

#[tokio::test]
async fn pull_of_one_priority_leaves_recovery_to_the_next_one() {
    let redis = Redis::start().unwrap();
    let dispatcher = shared(&redis);
    let fed = entries(2);
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(pull(&dispatcher, "a", 1).await.len(), 1);
    redis.signal(Signal::Stop).unwrap();
    let queue = queue();
    let of = |only| Pull { queue: &queue, consumer: "a", max: 10, wait: Duration::ZERO, only };
    assert!(dispatcher.pull(of(None)).await.is_err());
    redis.signal(Signal::Continue).unwrap();
    let high = vec![entry(Priority::High, "default", 1)];
    dispatcher.enqueue(&high).await.unwrap();
    let taken = dispatcher.pull(of(Some(Priority::High))).await.unwrap();
    assert_eq!(ids(&taken), ids_of(&high));
    assert_eq!(dispatcher.stats().recovered, 0);
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), ids_of(&fed[1..]));
    assert_eq!(dispatcher.stats().recovered, 1, "without the known ones");
}

#[tokio::test]
async fn only_consumers_without_entries_are_removed() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    dispatcher.enqueue(&entries(3)).await.unwrap();
    let done = pull(&dispatcher, "done", 1).await;
    pull(&dispatcher, "busy", 1).await;
    dispatcher.acknowledge("done", &done).await.unwrap();
    tokio::time::sleep(IDLE).await;
    assert_eq!(dispatcher.remove_idle_consumers(&queue(), IDLE).await.unwrap(), 1);
    assert_eq!(dispatcher.remove_idle_consumers(&queue(), IDLE).await.unwrap(), 0);
    assert_eq!(pending(&redis).await, 1);
    // A consumer that was removed is created again.
    assert_eq!(pull(&dispatcher, "done", 1).await.len(), 1);
}

#[tokio::test]
async fn full_memory_refuses_new_entries_and_frees_old_ones() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    dispatcher.enqueue(&entries(2)).await.unwrap();
    let _: String = command(&redis, &["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = dispatcher.enqueue(&entries(1)).await;
    assert!(matches!(refused, Err(DispatchError::Busy { .. })), "{refused:?}");
    let taken = pull(&dispatcher, "a", 10).await;
    assert_eq!(dispatcher.acknowledge("a", &taken).await.unwrap(), 2);
}

#[tokio::test]
async fn recovery_returns_at_most_max_entries() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(5);
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(ids(&pull(&dispatcher, "b", 1).await), [fed[0].id]);
    // As if the answer to a look had been lost.
    let group = ["XREADGROUP", "GROUP", "workers", "a", "COUNT", "3", "STREAMS", STREAM, ">"];
    let _: redis::Value = command(&redis, &group).await;
    redis.signal(Signal::Stop).unwrap();
    let queue = queue();
    let request = Pull { queue: &queue, consumer: "a", max: 3, wait: Duration::ZERO, only: None };
    assert!(dispatcher.pull(request).await.is_err());
    redis.signal(Signal::Continue).unwrap();
    assert_eq!(ids(&pull(&dispatcher, "a", 1).await), [fed[1].id]);
    let rest: HashSet<JobId> = ids(&pull(&dispatcher, "b", 10).await).into_iter().collect();
    assert_eq!(rest, ids_of(&fed[2..]).into_iter().collect(), "others get the rest");
}
