//! Runs the suite of rules on every dispatcher.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod dispatchers;

use std::sync::Arc;

use dispatchers::Fixture;
use tritmill_queue::{
    Dispatcher,
    dispatch::{BacklogLimit, MemoryDispatcher, RedisDispatcher},
};
use tritmill_servers::{Redis, RedisCluster};

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

struct TwoNodes {
    dispatcher: RedisDispatcher,
    _cluster: RedisCluster,
}

impl Fixture for TwoNodes {
    async fn create(entries: usize) -> Self {
        let cluster = RedisCluster::start().unwrap();
        let limit = BacklogLimit { entries, tokens: u64::MAX };
        let dispatcher = RedisDispatcher::new(&cluster.url(), limit).unwrap();
        Self { dispatcher, _cluster: cluster }
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::new(self.dispatcher.clone())
    }
}

dispatcher_conformance!(memory, super::Memory);
dispatcher_conformance!(redis_server, super::OneRedis);
dispatcher_conformance!(redis_cluster, super::TwoNodes);
