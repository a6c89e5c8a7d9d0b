//! Queues in several shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::rig::{self, MANY, command, entries, ids, ids_of, pull, pull_for, queue, reclaim};
use tritmill_queue::{
    DispatchError, Dispatcher, Entry, Job, JobId, Priority, Prompt, Pull, Tenant, Timestamp,
    dispatch::{Delayed, Demand, Limit, Missing, Quotas, RedisDispatcher},
};
use tritmill_servers::Redis;

const SHARDS: u16 = 16;

fn sharded(redis: &Redis) -> RedisDispatcher {
    RedisDispatcher::new(&format!("{}?shards={SHARDS}", redis.url()), MANY).unwrap()
}

/// One entry in each shard.
fn one_in_each() -> Vec<Entry> {
    let numbered = entries(SHARDS.into()).into_iter().zip(0..);
    numbered.map(|(entry, shard_key)| Entry { shard_key, ..entry }).collect()
}

fn in_shard(shard_key: u16) -> Entry {
    Entry { shard_key, ..entries(1).remove(0) }
}

#[tokio::test]
async fn every_entry_of_every_shard_is_delivered_once() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    assert_eq!(dispatcher.shards(), SHARDS);
    let mut fed = entries(1000);
    for (entry, shard_key) in fed.iter_mut().zip((0..).step_by(7)) {
        entry.shard_key = shard_key;
    }
    assert_eq!(dispatcher.enqueue(&fed).await.unwrap(), 1000);
    assert_eq!(dispatcher.enqueue(&fed).await.unwrap(), 0, "all are known");
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 1000);
    let backlog = dispatcher.backlog(&queue()).await.unwrap();
    assert_eq!((backlog.entries, backlog.tokens), (1000, 1000));
    for shard in 1..SHARDS {
        let stream = format!("tm:{{tiny:i2_s:{shard}}}:normal:default");
        let length: usize = command(&redis, &["XLEN", &stream]).await;
        assert!((62..=63).contains(&length), "{length} entries in shard {shard}");
    }
    let mut seen = BTreeSet::new();
    for turn in 0.. {
        let consumer = ["a", "b", "c"][turn % 3];
        let taken = pull(&dispatcher, consumer, 64).await;
        if taken.is_empty() {
            break;
        }
        assert!(ids(&taken).iter().all(|id| seen.insert(*id)), "delivered twice");
        assert_eq!(dispatcher.acknowledge(consumer, &taken).await.unwrap(), taken.len());
    }
    assert_eq!(seen, ids_of(&fed).into_iter().collect());
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 0);
    dispatcher.forget_queue(&queue()).await.unwrap();
    assert_eq!(command::<usize>(&redis, &["DBSIZE"]).await, 0);
}

#[tokio::test]
async fn entries_beside_a_shard_that_fails_are_delivered() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    dispatcher.enqueue(&one_in_each()).await.unwrap();
    // A key of another type: every script on this shard fails.
    let _: String = command(&redis, &["SET", "tm:{tiny:i2_s:3}:meta", "x"]).await;
    let (queue, mut failures, mut taken) = (queue(), 0, BTreeSet::new());
    for _ in 0..2 * SHARDS {
        let wait = Duration::ZERO;
        let pull = Pull { queue: &queue, consumer: "a", max: 64, wait, only: None };
        match dispatcher.pull(pull).await {
            Ok(deliveries) => taken.extend(ids(&deliveries)),
            Err(_) => failures += 1,
        }
    }
    assert_eq!(taken.len(), usize::from(SHARDS) - 1);
    assert!(failures > 0, "a look that finds nothing else says so");
}

#[tokio::test]
async fn home_shards_take_turns_and_the_others_are_served_when_they_are_empty() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    let mut fed = Vec::new();
    for _ in 0..64 {
        fed.extend(one_in_each());
    }
    dispatcher.enqueue(&fed).await.unwrap();
    let shard_of: BTreeMap<JobId, u16> = fed.iter().map(|one| (one.id, one.shard_key)).collect();
    // Sixteen looks begin with the same home shard, but for the last, which begins with one of the others.
    let mut first_shards = BTreeSet::new();
    for looks in 1..=64_usize {
        let taken = pull(&dispatcher, "a", 1).await;
        assert_eq!(taken.len(), 1);
        first_shards.insert(shard_of[&taken[0].id]);
        let (home, others) = (looks.div_ceil(16), looks / 16);
        assert_eq!(first_shards.len(), home + others, "{looks} looks: {first_shards:?}");
    }
    assert_eq!(first_shards.len(), 8, "four home shards and four others");
    let mut taken = 64;
    while taken < fed.len() {
        let more = pull(&dispatcher, "a", 64).await.len();
        assert!(more > 0, "{taken} of {} taken", fed.len());
        taken += more;
    }
}

#[tokio::test]
async fn pull_of_one_priority_looks_at_all_home_shards_and_is_no_turn() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    let queue = queue();
    let only_high = async |max| {
        let (wait, only) = (Duration::ZERO, Some(Priority::High));
        dispatcher.pull(Pull { queue: &queue, consumer: "a", max, wait, only }).await.unwrap()
    };
    // The next look begins with another shard.
    for _ in 0..15 {
        assert!(pull(&dispatcher, "a", 1).await.is_empty());
    }
    let high: Vec<Entry> = one_in_each()
        .into_iter()
        .map(|entry| Entry { priority: Priority::High, ..entry })
        .collect();
    dispatcher.enqueue(&high).await.unwrap();
    let shard_of: BTreeMap<JobId, u16> = high.iter().map(|one| (one.id, one.shard_key)).collect();
    let taken = only_high(100).await;
    let home: BTreeSet<u16> = ids(&taken).iter().map(|id| shard_of[id]).collect();
    assert_eq!((taken.len(), home.len()), (4, 4));
    let is_first = |shard: &u16| (0..4).all(|n| home.contains(&((shard + n) % SHARDS)));
    assert!(home.iter().any(is_first), "they follow each other: {home:?}");
    dispatcher.hand_back("a", &taken).await.unwrap();
    let taken = pull(&dispatcher, "a", 1).await;
    assert!(!home.contains(&shard_of[&taken[0].id]), "that was no look of its turns");
}

#[tokio::test]
async fn waiting_consumer_is_woken_by_any_shard() {
    let redis = Redis::start().unwrap();
    let dispatcher = Arc::new(sharded(&redis));
    let waiting = || {
        let dispatcher = Arc::clone(&dispatcher);
        tokio::spawn(async move { pull_for(&dispatcher, "a", 1, Duration::from_secs(30)).await })
    };
    let is_waiting = async || {
        while !command::<String>(&redis, &["CLIENT", "LIST"]).await.contains("cmd=blpop") {
            tokio::task::yield_now().await;
        }
    };
    // Without a wake-up it would poll again after five seconds.
    let soon = Duration::from_secs(4);
    for entry in one_in_each() {
        let consumer = waiting();
        is_waiting().await;
        let began = Instant::now();
        dispatcher.enqueue(std::slice::from_ref(&entry)).await.unwrap();
        let taken = consumer.await.unwrap();
        assert_eq!(ids(&taken), [entry.id]);
        assert!(began.elapsed() < soon, "shard {}: {:?}", entry.shard_key, began.elapsed());
        let consumer = waiting();
        is_waiting().await;
        let began = Instant::now();
        assert_eq!(dispatcher.hand_back("a", &taken).await.unwrap(), 1);
        let again = consumer.await.unwrap();
        assert!(began.elapsed() < soon, "shard {}: handed back", entry.shard_key);
        dispatcher.acknowledge("a", &again).await.unwrap();
    }
}

#[tokio::test]
async fn delayed_entries_of_every_shard_become_due() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    let fed = one_in_each();
    let delayed = fed.iter().map(|entry| Delayed { entry: entry.clone(), due: Timestamp(1) });
    dispatcher.delay(&delayed.collect::<Vec<_>>()).await.unwrap();
    assert_eq!(dispatcher.backlog(&queue()).await.unwrap().delayed, fed.len());
    assert_eq!(dispatcher.promote(&queue()).await.unwrap(), fed.len());
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), fed.len());
}

#[tokio::test]
async fn entries_of_a_dead_consumer_are_reclaimed_from_every_shard() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    let fed = one_in_each();
    dispatcher.enqueue(&fed).await.unwrap();
    let mut taken = BTreeSet::new();
    while taken.len() < fed.len() {
        taken.extend(ids(&pull(&dispatcher, "dead", 4).await));
    }
    let reclaimed = reclaim(&dispatcher, "b", 100, Duration::ZERO).await;
    assert_eq!(ids(&reclaimed).into_iter().collect::<BTreeSet<_>>(), taken);
    assert_eq!(dispatcher.renew("b", &reclaimed).await.unwrap(), []);
    assert_eq!(dispatcher.acknowledge("b", &reclaimed).await.unwrap(), fed.len());
}

#[tokio::test]
async fn loss_of_one_shard_is_noticed() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    assert_eq!(dispatcher.missing(&queue()).await.unwrap(), None);
    let missing = Missing { entries: 5, tokens: 50, refilling: true };
    dispatcher.set_missing(&queue(), missing).await.unwrap();
    assert_eq!(dispatcher.missing(&queue()).await.unwrap(), Some(missing));
    let _: i64 = command(&redis, &["DEL", "tm:{tiny:i2_s:9}:meta"]).await;
    assert_eq!(dispatcher.missing(&queue()).await.unwrap(), None);
}

#[tokio::test]
async fn quotas_apply_to_the_sum_of_the_shards() {
    let redis = Redis::start().unwrap();
    let dispatcher = sharded(&redis);
    let (tenant, costly) = (Tenant("default".into()), |key, cost| Entry { cost, ..in_shard(key) });
    dispatcher.enqueue(&[costly(3, 60), costly(11, 30)]).await.unwrap();
    let quotas = Quotas { tenants: [(tenant, 100)].into(), ..Quotas::default() };
    let admit = async |entries: &[Entry], quotas: &Quotas| {
        dispatcher.admit(&Demand::by_queue(entries)[0], quotas).await
    };
    admit(&[costly(5, 10)], &quotas).await.unwrap();
    let refused = admit(&[costly(5, 11)], &quotas).await.unwrap_err();
    let DispatchError::Busy { limit, .. } = refused else { panic!("{refused}") };
    assert_eq!(limit, Limit::Tenant(100));
    let quotas = Quotas { tokens: Some(95), ..Quotas::default() };
    let refused = admit(&[costly(5, 6)], &quotas).await.unwrap_err();
    let DispatchError::Busy { limit, .. } = refused else { panic!("{refused}") };
    assert_eq!(limit, Limit::Tokens(95));
}

#[tokio::test]
async fn more_shards_find_what_fewer_have() {
    let redis = Redis::start().unwrap();
    let fed = one_in_each();
    rig::dispatcher(&redis).enqueue(&fed).await.unwrap();
    assert_eq!(ids(&pull(&sharded(&redis), "a", 100).await), ids_of(&fed));
}

#[test]
fn jobs_with_one_begin_have_one_shard() {
    let begin = "You are a helpful assistant. ".repeat(10);
    let job = |text: &str| Job { prompt: Prompt::Text(text.into()), ..job() };
    let key = |text: &str| job(text).entry().shard_key;
    assert_eq!(key(&format!("{begin}one")), key(&format!("{begin}two")));
    // FNV-1a of "foobar" is 0xbf9cf968. The stored values must not change.
    assert_eq!(key("foobar"), 0xbf9c ^ 0xf968);
    let keys: BTreeSet<u16> = (0..1000).map(|n| key(&format!("prompt {n}")) % SHARDS).collect();
    assert_eq!(keys.len(), usize::from(SHARDS));
}

fn job() -> Job {
    let entry = in_shard(0);
    Job {
        id: entry.id,
        queue: entry.queue,
        tenant: entry.tenant,
        priority: entry.priority,
        prompt: Prompt::Tokens(vec![]),
        sampling: tritmill_queue::Sampling::default(),
        seed: 0,
        attempts_max: 1,
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
