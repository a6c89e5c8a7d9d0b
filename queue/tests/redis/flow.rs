//! Fairness, limits and delays of a Redis dispatcher, on a real Redis.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crate::rig::{MANY, command, dispatcher, entries, entry, ids, ids_of, pull, pull_for, queue};
use tritmill_queue::{
    DispatchError, Dispatcher, Entry, JobId, Priority, QueueName, Timestamp,
    dispatch::{BacklogLimit, Delayed, Limit, RedisDispatcher},
};
use tritmill_servers::Redis;

fn in_ms(ms: i64) -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    Timestamp(i64::try_from(now).unwrap() + ms)
}

/// Tokens served to each tenant in a number of pulls.
async fn served(
    dispatcher: &RedisDispatcher,
    fed: &[Entry],
    pulls: usize,
    max: usize,
) -> HashMap<String, u64> {
    let of: HashMap<JobId, &Entry> = fed.iter().map(|entry| (entry.id, entry)).collect();
    let mut tokens: HashMap<String, u64> = HashMap::new();
    for _ in 0..pulls {
        let taken = pull(dispatcher, "a", max).await;
        for delivery in &taken {
            let entry = of[&delivery.id];
            *tokens.entry(entry.tenant.0.clone()).or_default() += u64::from(entry.cost);
        }
        dispatcher.acknowledge("a", &taken).await.unwrap();
    }
    tokens
}

#[tokio::test]
async fn entries_wake_as_many_consumers_as_needed() {
    const IDLE: usize = 40;
    let redis = Redis::start().unwrap();
    let dispatcher = std::sync::Arc::new(dispatcher(&redis));
    let idle = |max: usize, dispatcher: &std::sync::Arc<RedisDispatcher>| {
        let mut consumers = tokio::task::JoinSet::new();
        for number in 0..IDLE {
            let dispatcher = std::sync::Arc::clone(dispatcher);
            let name = format!("c{number}");
            consumers.spawn(async move {
                pull_for(&dispatcher, &name, max, Duration::from_secs(4)).await.len()
            });
        }
        consumers
    };
    let waiting = async || {
        let clients: String = command(&redis, &["CLIENT", "LIST"]).await;
        clients.matches("cmd=blpop").count()
    };
    let looks = async || {
        let stats: String = command(&redis, &["INFO", "commandstats"]).await;
        let calls = stats.lines().filter(|line| line.starts_with("cmdstat_eval"));
        let calls = calls.filter_map(|line| line.split(['=', ',']).nth(1)?.parse::<usize>().ok());
        calls.sum::<usize>()
    };
    // One entry: one of them looks, and the others go on waiting until their time is over.
    let consumers = idle(64, &dispatcher);
    while waiting().await < IDLE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let before = looks().await;
    dispatcher.enqueue(&entries(1)).await.unwrap();
    while dispatcher.depth(&queue()).await.unwrap() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let woken = looks().await - before;
    assert!(woken <= 3, "the enqueue and one look, not {woken}");
    assert!(waiting().await >= IDLE - 1);
    assert_eq!(consumers.join_all().await.into_iter().sum::<usize>(), 1);
    // As many entries as consumers with room for one each: all are woken, and at once.
    let consumers = idle(1, &dispatcher);
    while waiting().await < IDLE {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let started = Instant::now();
    dispatcher.enqueue(&entries(IDLE)).await.unwrap();
    assert_eq!(consumers.join_all().await.into_iter().sum::<usize>(), IDLE);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[tokio::test]
async fn flood_of_one_tenant_does_not_starve_another() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let flood: Vec<Entry> = (0..2000).map(|_| entry(Priority::Normal, "flood", 10)).collect();
    dispatcher.enqueue(&flood).await.unwrap();
    served(&dispatcher, &flood, 4, 16).await;
    let others: Vec<Entry> = (0..50).map(|_| entry(Priority::Normal, "other", 40)).collect();
    dispatcher.enqueue(&others).await.unwrap();
    let fed = [flood, others].concat();
    let tokens = served(&dispatcher, &fed, 10, 16).await;
    let ratio = tokens["flood"] as f64 / tokens["other"] as f64;
    assert!((0.9..1.1).contains(&ratio), "in tokens: {tokens:?}");
}

#[tokio::test]
async fn entries_without_cost_starve_no_tenant() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let free: Vec<Entry> = (0..50).map(|_| entry(Priority::Normal, "free", 0)).collect();
    let other = [entry(Priority::Normal, "other", 0)];
    dispatcher.enqueue(&free).await.unwrap();
    pull(&dispatcher, "a", 5).await;
    dispatcher.enqueue(&other).await.unwrap();
    assert!(ids(&pull(&dispatcher, "a", 3).await).contains(&other[0].id));
}

#[tokio::test]
async fn tenant_that_leaves_and_returns_keeps_its_debt() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let flood: Vec<Entry> = (0..500).map(|_| entry(Priority::Normal, "flood", 10)).collect();
    dispatcher.enqueue(&flood).await.unwrap();
    let mut fed = flood;
    let (mut flood_tokens, mut large_tokens) = (0, 0);
    // A new large job after each one taken, so that its stream is empty in between.
    for _ in 0..200 {
        if large_tokens as usize / 100 + 1 > fed.len() - 500 {
            let large = entry(Priority::Normal, "large", 100);
            dispatcher.enqueue(std::slice::from_ref(&large)).await.unwrap();
            fed.push(large);
        }
        let tokens = served(&dispatcher, &fed, 1, 1).await;
        flood_tokens += tokens.get("flood").unwrap_or(&0);
        large_tokens += tokens.get("large").unwrap_or(&0);
    }
    let ratio = flood_tokens as f64 / large_tokens as f64;
    assert!((0.8..1.25).contains(&ratio), "{flood_tokens} to {large_tokens}");
}

#[tokio::test]
async fn weights_hold_over_many_small_pulls() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let mut of = HashMap::new();
    for priority in Priority::ALL {
        let fed: Vec<Entry> = (0..400).map(|_| entry(priority, "t", 1)).collect();
        of.extend(fed.iter().map(|entry| (entry.id, priority)));
        dispatcher.enqueue(&fed).await.unwrap();
    }
    let mut counts: HashMap<Priority, usize> = HashMap::new();
    for _ in 0..105 {
        let taken = pull(&dispatcher, "a", 3).await;
        for delivery in &taken {
            *counts.entry(of[&delivery.id]).or_default() += 1;
        }
    }
    let counted = Priority::ALL.map(|priority| counts[&priority]);
    assert_eq!(counted, [240, 60, 15]);
}

#[tokio::test]
async fn backlog_is_limited_in_tokens_and_returns_retry_time() {
    let redis = Redis::start().unwrap();
    let limit = BacklogLimit { entries: 100, tokens: 1000 };
    let dispatcher = RedisDispatcher::new(&redis.url(), limit).unwrap();
    let fed: Vec<Entry> = (0..9).map(|_| entry(Priority::Normal, "t", 100)).collect();
    dispatcher.enqueue(&fed).await.unwrap();
    let over = [entry(Priority::Low, "u", 60), entry(Priority::High, "v", 60)];
    let Err(DispatchError::Busy { limit, retry_after, .. }) = dispatcher.enqueue(&over).await
    else {
        panic!("960 + 60 tokens are too many")
    };
    assert_eq!((limit, retry_after), (Limit::Tokens(1000), Duration::from_secs(1)), "no rate yet");
    // Entries that already wait are not counted again.
    dispatcher.enqueue(&fed).await.unwrap();
    let backlog = dispatcher.backlog(&queue()).await.unwrap();
    assert_eq!((backlog.entries, backlog.tokens, backlog.drain_rate), (9, 900, None));
    assert_eq!(backlog.estimated_wait(), None);
    let taken = pull(&dispatcher, "a", 4).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    dispatcher.acknowledge("a", &taken).await.unwrap();
    let backlog = dispatcher.backlog(&queue()).await.unwrap();
    assert_eq!((backlog.entries, backlog.tokens), (5, 500));
    assert!(backlog.oldest_ms.is_some_and(|ms| (20..10_000).contains(&ms)), "{backlog:?}");
    // 400 tokens in the (at least one) second over which the rate is computed.
    assert!(backlog.drain_rate.is_some_and(|rate| (300.0..410.0).contains(&rate)), "{backlog:?}");
    let wait = backlog.estimated_wait().unwrap();
    assert!((1.0..2.0).contains(&wait.as_secs_f64()), "{wait:?}");
    let large = [entry(Priority::Low, "u", 900)];
    let Err(DispatchError::Busy { retry_after, .. }) = dispatcher.enqueue(&large).await else {
        panic!("500 + 900 tokens are too many")
    };
    assert!((0.9..1.5).contains(&retry_after.as_secs_f64()), "400 tokens over: {retry_after:?}");
}

#[tokio::test]
async fn long_list_is_enqueued_all_or_nothing() {
    let redis = Redis::start().unwrap();
    let limit = BacklogLimit { entries: 2000, ..MANY };
    let dispatcher = RedisDispatcher::new(&redis.url(), limit).unwrap();
    let mut fed = entries(2001);
    assert!(matches!(dispatcher.enqueue(&fed).await, Err(DispatchError::Busy { .. })));
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 0);
    fed.truncate(1500);
    dispatcher.enqueue(&fed).await.unwrap();
    let mut two = entries(600);
    two[0].queue.model = "another".into();
    assert!(matches!(dispatcher.enqueue(&two).await, Err(DispatchError::Busy { .. })));
    assert_eq!(dispatcher.depth(&two[0].queue).await.unwrap(), 0);
    assert_eq!(ids(&pull(&dispatcher, "a", 1500).await), ids_of(&fed)[..1024], "in order");
}

#[tokio::test]
async fn delayed_entries_are_delivered_when_due() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(3);
    let due = [in_ms(150), in_ms(60_000), in_ms(60_000)];
    let delayed: Vec<Delayed> =
        fed.iter().cloned().zip(due).map(|(entry, due)| Delayed { entry, due }).collect();
    dispatcher.delay(&delayed).await.unwrap();
    assert!(pull(&dispatcher, "a", 10).await.is_empty());
    assert_eq!(dispatcher.promote(&queue()).await.unwrap(), 0);
    assert_eq!(dispatcher.backlog(&queue()).await.unwrap().delayed, 3);
    // A waiting pull promotes due entries itself.
    let started = Instant::now();
    let taken = pull_for(&dispatcher, "a", 10, Duration::from_secs(10)).await;
    assert_eq!(ids(&taken), ids_of(&fed[..1]));
    assert!(started.elapsed() < Duration::from_secs(1));
    // A new due time, and an immediate enqueue.
    dispatcher.delay(&[Delayed { entry: fed[1].clone(), due: in_ms(-1) }]).await.unwrap();
    dispatcher.enqueue(&fed[2..]).await.unwrap();
    assert_eq!(dispatcher.promote(&queue()).await.unwrap(), 1);
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), [fed[2].id, fed[1].id]);
    // Already delivered: neither call adds a second entry.
    dispatcher.delay(&[Delayed { entry: fed[1].clone(), due: in_ms(-1) }]).await.unwrap();
    dispatcher.enqueue(&fed).await.unwrap();
    assert!(pull(&dispatcher, "a", 10).await.is_empty());
}

#[tokio::test]
async fn parked_entries_survive_another_hand_back() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(6);
    dispatcher.enqueue(&fed).await.unwrap();
    let first = pull(&dispatcher, "a", 4).await;
    dispatcher.hand_back("a", &first[1..3]).await.unwrap();
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 4);
    let second = pull(&dispatcher, "b", 1).await;
    assert_eq!((second[0].id, second[0].deliveries), (fed[1].id, 2));
    dispatcher.hand_back("b", &second).await.unwrap();
    let rest = pull(&dispatcher, "c", 10).await;
    assert_eq!(ids(&rest), [fed[1].id, fed[2].id, fed[4].id, fed[5].id]);
    assert_eq!(rest[0].deliveries, 3);
    assert_eq!(dispatcher.acknowledge("c", &rest).await.unwrap(), 4);
}

#[tokio::test]
async fn forgotten_queue_leaves_no_keys_and_can_be_reused() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = [
        entry(Priority::High, "a", 3),
        entry(Priority::Low, "a:{b}", 1),
        entry(Priority::Low, "c", 1),
        entry(Priority::Normal, "d", 1),
    ];
    dispatcher.enqueue(&fed).await.unwrap();
    dispatcher.delay(&[Delayed { entry: entries(1).remove(0), due: in_ms(60_000) }]).await.unwrap();
    let taken = pull(&dispatcher, "a", 3).await;
    dispatcher.acknowledge("a", &taken[..1]).await.unwrap();
    dispatcher.hand_back("a", &taken[1..2]).await.unwrap();
    let other = QueueName { model: "other".into(), ..queue() };
    let elsewhere = Entry { queue: other.clone(), ..entries(1).remove(0) };
    dispatcher.enqueue(&[elsewhere]).await.unwrap();

    dispatcher.forget_queue(&queue()).await.unwrap();
    let keys: Vec<String> = command(&redis, &["KEYS", "tm:{tiny:*"]).await;
    assert!(keys.is_empty(), "{keys:?}");
    assert_eq!(dispatcher.acknowledge("a", &taken[2..]).await.unwrap(), 0);
    assert_eq!(dispatcher.depth(&other).await.unwrap(), 1, "the other queue is unchanged");
    let again = entries(2);
    dispatcher.enqueue(&again).await.unwrap();
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), ids_of(&again));
    assert_eq!(dispatcher.stats().group_recreations, 0, "nothing was lost");
}

#[tokio::test]
async fn several_chunks_are_counted_and_limited_as_a_whole() {
    let redis = Redis::start().unwrap();
    let limit = BacklogLimit { tokens: 2000, ..MANY };
    let dispatcher = RedisDispatcher::new(&redis.url(), limit).unwrap();
    let mut fed = entries(1000);
    // Too many tokens only with the last one.
    fed[999].cost = 1002;
    let refused = dispatcher.enqueue(&fed).await;
    assert!(matches!(refused, Err(DispatchError::Busy { limit: Limit::Tokens(2000), .. })));
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 0);
    fed[999].cost = 1001;
    assert_eq!(dispatcher.enqueue(&fed).await.unwrap(), 1000);
}

#[tokio::test]
async fn any_number_of_due_entries_is_promoted() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let fed = entries(1100).into_iter();
    let delayed: Vec<Delayed> = fed.map(|entry| Delayed { entry, due: in_ms(-1000) }).collect();
    dispatcher.delay(&delayed).await.unwrap();
    assert_eq!(dispatcher.promote(&queue()).await.unwrap(), 1100);
}

#[tokio::test]
async fn used_memory_is_that_of_redis() {
    let redis = Redis::start().unwrap();
    let used = dispatcher(&redis).used_memory_bytes().await.unwrap();
    assert!((1 << 16..1 << 30).contains(&used), "{used}");
}
