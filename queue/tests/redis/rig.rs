//! A Redis, a dispatcher in it, and shortcuts for both.

use std::{sync::Arc, time::Duration};

use tritmill_queue::{
    Delivery, Dispatcher, Entry, JobId, Priority, Pull, QueueName, Tenant,
    dispatch::{BacklogLimit, RedisDispatcher},
};
use tritmill_servers::Redis;

pub const MANY: BacklogLimit = BacklogLimit { entries: 1 << 20, tokens: 1 << 40 };

pub fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

/// The stream of the queue's normal priority and default tenant.
pub const STREAM: &str = "tm:{tiny:i2_s}:normal:default";

pub fn entry(priority: Priority, tenant: &str, cost: u32) -> Entry {
    let (id, tenant) = (JobId::generate(), Tenant(tenant.into()));
    Entry {
        id,
        queue: queue(),
        priority,
        tenant,
        cost,
        shard_key: 0,
        is_first: false,
        expires_at: None,
    }
}

pub fn entries(count: usize) -> Vec<Entry> {
    (0..count).map(|_| entry(Priority::Normal, "default", 1)).collect()
}

pub fn dispatcher(redis: &Redis) -> RedisDispatcher {
    RedisDispatcher::new(&redis.url(), MANY).unwrap()
}

pub async fn pull_for(
    dispatcher: &RedisDispatcher,
    consumer: &str,
    max: usize,
    wait: Duration,
) -> Vec<Delivery> {
    let queue = queue();
    dispatcher.pull(Pull { queue: &queue, consumer, max, wait, only: None }).await.unwrap()
}

pub async fn pull(dispatcher: &RedisDispatcher, consumer: &str, max: usize) -> Vec<Delivery> {
    pull_for(dispatcher, consumer, max, Duration::ZERO).await
}

pub async fn reclaim(
    dispatcher: &RedisDispatcher,
    consumer: &str,
    max: usize,
    idle: Duration,
) -> Vec<Delivery> {
    let (queue, wait) = (queue(), Duration::ZERO);
    dispatcher.reclaim(Pull { queue: &queue, consumer, max, wait, only: None }, idle).await.unwrap()
}

pub fn ids(deliveries: &[Delivery]) -> Vec<JobId> {
    deliveries.iter().map(|delivery| delivery.id).collect()
}

pub fn ids_of(entries: &[Entry]) -> Vec<JobId> {
    entries.iter().map(|entry| entry.id).collect()
}

/// Sends a command past the dispatcher.
pub async fn command<T: redis::FromRedisValue>(redis: &Redis, words: &[&str]) -> T {
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await.unwrap()
}

/// Returns the number of pending entries.
pub async fn pending(redis: &Redis) -> usize {
    let (count, _, _, _): (usize, redis::Value, redis::Value, redis::Value) =
        command(redis, &["XPENDING", STREAM, "workers"]).await;
    count
}

/// Aborts a task and waits for its end.
pub async fn abort<T>(task: tokio::task::JoinHandle<T>) {
    task.abort();
    let _ = task.await;
}

/// Returns a dispatcher to share between tasks.
pub fn shared(redis: &Redis) -> Arc<RedisDispatcher> {
    Arc::new(dispatcher(redis))
}
