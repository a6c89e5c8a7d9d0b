//! Runs the suite of rules on every dispatcher.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod dispatchers;

use std::{sync::Arc, time::Duration};

use dispatchers::Fixture;
use tritmill_queue::{
    Dispatcher,
    dispatch::{BacklogLimit, MemoryDispatcher, RedisDispatcher},
};
use tritmill_servers::{Port, Redis};

struct Memory(Arc<MemoryDispatcher>);

impl Fixture for Memory {
    async fn create(entries_max: usize) -> Self {
        Self(Arc::new(MemoryDispatcher::new(entries_max)))
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::<MemoryDispatcher>::clone(&self.0)
    }
}

struct OneRedis {
    dispatcher: RedisDispatcher,
    _redis: Redis,
}

impl Fixture for OneRedis {
    async fn create(entries: usize) -> Self {
        let redis = Redis::start().unwrap();
        let limit = BacklogLimit { entries, tokens: u64::MAX };
        Self { dispatcher: RedisDispatcher::new(&redis.url(), limit).unwrap(), _redis: redis }
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::new(self.dispatcher.clone())
    }
}

/// A cluster of two nodes, each with half of the slots.
struct Cluster {
    dispatcher: RedisDispatcher,
    _nodes: [(Redis, Port); 2],
}

/// Returns a node and the port of its cluster bus.
fn node() -> (Redis, Port) {
    let bus = Port::claim().unwrap();
    let port = bus.number().to_string();
    let options = ["--save", "", "--cluster-enabled", "yes", "--cluster-port", &port];
    (Redis::start_with(&options).unwrap(), bus)
}

async fn command(redis: &Redis, words: &[&str]) -> String {
    let client = redis::Client::open(redis.url()).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    redis::cmd(words[0]).arg(&words[1..]).query_async(&mut connection).await.unwrap()
}

impl Fixture for Cluster {
    async fn create(entries: usize) -> Self {
        let nodes = [node(), node()];
        let [(one, _), (two, bus)] = &nodes;
        command(one, &["CLUSTER", "ADDSLOTSRANGE", "0", "8191"]).await;
        command(two, &["CLUSTER", "ADDSLOTSRANGE", "8192", "16383"]).await;
        let (port, bus) = (two.port().to_string(), bus.number().to_string());
        command(one, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus]).await;
        for node in [one, two] {
            while !command(node, &["CLUSTER", "INFO"]).await.contains("cluster_state:ok") {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        let url = format!("redis+cluster://127.0.0.1:{}", one.port());
        let limit = BacklogLimit { entries, tokens: u64::MAX };
        Self { dispatcher: RedisDispatcher::new(&url, limit).unwrap(), _nodes: nodes }
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::new(self.dispatcher.clone())
    }
}

dispatcher_conformance!(memory, super::Memory);
dispatcher_conformance!(redis_server, super::OneRedis);
dispatcher_conformance!(redis_cluster, super::Cluster);
