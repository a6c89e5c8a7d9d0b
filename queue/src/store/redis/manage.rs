//! Checks and management of a Redis store.

use redis::FromRedisValue as _;

use super::{CHUNK, RedisStore, scripts, unavailable};
use crate::{
    job::JobId,
    store::{StoreError, classes::ClassError},
};

/// The configuration of Redis is not safe for a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisConfigError {
    /// Redis would drop jobs or results when its memory is full.
    #[error("Redis evicts ({policy}): set maxmemory-policy noeviction")]
    Evicts {
        /// Its `maxmemory-policy`.
        policy: String,
    },
    /// The URL asks for shards.
    #[error("a fast queue has no shards: leave shards out of the Redis URL")]
    Shards,
    /// Redis does not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl RedisStore {
    /// Checks that Redis is reachable and does not evict. Settings that it does not report, as with some
    /// managed services, are assumed to be safe.
    pub async fn check(&self) -> Result<(), RedisConfigError> {
        if self.connections.shards() > 1 {
            return Err(RedisConfigError::Shards);
        }
        let mut command = redis::cmd("INFO");
        command.arg("memory");
        let asked = match self.connections.query::<redis::Value>(&command).await {
            // A broken connection was dropped: try a new one.
            Err(_) => self.connections.query(&command).await,
            answer => answer,
        };
        let info = String::from_redis_value(asked.map_err(unavailable)?).unwrap_or_default();
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        match (field("maxmemory"), field("maxmemory_policy")) {
            (Some(bytes), Some(policy)) if bytes != "0" && policy != "noeviction" => {
                Err(RedisConfigError::Evicts { policy: policy.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether this Redis has stored jobs of the queue in the fast mode.
    pub async fn is_used(&self) -> Result<bool, StoreError> {
        let mut exists = redis::cmd("EXISTS");
        exists.arg(format!("{}:totals", self.prefix));
        self.connections.query(&exists).await.map_err(unavailable)
    }

    /// Registers the numerics class of the queue, or confirms it.
    ///
    /// # Errors
    /// [`ClassError::Mismatch`] when another class was registered first.
    pub async fn register_class(&self, class: &str) -> Result<(), ClassError> {
        let key = format!("{}:totals", self.prefix);
        let mut set = redis::cmd("HSETNX");
        set.arg(&key).arg("class").arg(class);
        let mut get = redis::cmd("HGET");
        get.arg(&key).arg("class");
        self.connections.query::<redis::Value>(&set).await.map_err(unavailable)?;
        let registered: String = self.connections.query(&get).await.map_err(unavailable)?;
        if registered == class {
            return Ok(());
        }
        let (queue, offered) = (self.queue.clone(), class.to_owned());
        Err(ClassError::Mismatch { queue, registered, allowed: Vec::new(), offered })
    }

    /// Deletes jobs in any state with their results and errors; returns how many existed.
    pub async fn delete_jobs(&self, ids: &[JobId]) -> Result<u64, StoreError> {
        let mut count = 0;
        for chunk in ids.chunks(CHUNK) {
            let mut arguments = self.arguments();
            chunk.iter().for_each(|id| arguments.number(id));
            count += self.run::<u64>(&scripts::DELETE, &arguments).await?;
        }
        Ok(count)
    }

    /// Deletes the queue's counters, sets and numerics class. Finished jobs expire as before; unfinished
    /// ones are not found again.
    pub async fn forget_queue(&self) -> Result<(), StoreError> {
        self.run::<u64>(&scripts::DELETE, &self.arguments()).await.map(drop)
    }
}
