//! The check at the start of a process: does Redis take the login, and allow what queues need?

use std::{sync::Arc, time::Duration};

use redis::{RedisResult, Value};

use super::{
    RedisDispatcher,
    inner::{Inner, unavailable},
    keys, scripts,
};
use crate::{
    dispatch::{
        BacklogLimit, Demand, DispatchError, Dispatcher as _, Entry, Missing, Pull, Quotas,
    },
    job::{JobId, Priority, QueueName, Tenant},
    refusal::Refusal,
};

/// Name of the consumer, and beginning of the name of the queue.
const NAME: &str = "tritmill-check";
/// Wait of the pull that finds nothing: it uses the command that blocks.
const WAIT: Duration = Duration::from_millis(5);
/// Time after which Redis deletes what is left of a check, if the process or the connection ends in the middle.
const LEFT: Duration = Duration::from_secs(15);
/// Tenants of a queue that are looked at.
const TENANTS_MAX: usize = 1000;

impl RedisDispatcher {
    /// Checks that Redis takes the login and allows what queues and events need: uses a queue of its own for a moment.
    ///
    /// # Errors
    /// [`DispatchError::Refused`], with the remedy. [`DispatchError::Unavailable`] and [`DispatchError::Busy`] say
    /// nothing about the setup: Redis may be down or full for the moment.
    pub async fn check(&self) -> Result<(), DispatchError> {
        self.ping().await?;
        let id = JobId::generate();
        let queue = QueueName { model: format!("{NAME}-{id}"), format: "check".to_owned() };
        let inner = Inner::new(Arc::clone(&self.inner.connections), 1, BacklogLimit::default());
        let dispatcher = Self { inner: Arc::new(inner) };
        let used = dispatcher.use_once(&queue, id).await;
        let forgotten = dispatcher.forget_queue(&queue).await;
        used.and(forgotten)
    }

    /// Checks that no other program has keys of this queue.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub async fn check_queue(&self, queue: &QueueName) -> Result<(), DispatchError> {
        let places = Priority::ALL.map(|priority| keys::place(priority, &Tenant::default()));
        let arguments: Vec<String> =
            std::iter::once(TENANTS_MAX.to_string()).chain(places).collect();
        for prefix in self.inner.prefixes(queue) {
            let run = self.inner.connections.run_again(&scripts::TYPES, &prefix, &arguments);
            let found: Option<String> = run.await.map_err(unavailable)?;
            if let Some(said) = found {
                let remedy = "another program uses it: give one of them another database number, or delete it";
                return Err(DispatchError::Refused(Refusal { said, remedy }));
            }
        }
        Ok(())
    }

    /// Does what the calls of a dispatcher need seldom, or without telling of a failure: sends the text of a script, and
    /// blocks.
    async fn use_directly(&self, queue: &QueueName) -> RedisResult<()> {
        let (prefix, connections) = (keys::prefix(queue), &self.inner.connections);
        let none: &[String] = &[];
        let text = scripts::MISSING.by_text(&scripts::keys_of(&prefix), none);
        connections.query::<Value>(&text).await?;
        let mut wait = redis::cmd("BLPOP");
        wait.arg(format!("{prefix}:wakeups")).arg(WAIT.as_secs_f64());
        connections.block::<Value>(&wait).await.map(drop)
    }

    /// Does all that processes do with a queue.
    async fn use_once(&self, queue: &QueueName, id: JobId) -> Result<(), DispatchError> {
        let entry = Entry {
            id,
            queue: queue.clone(),
            priority: Priority::Normal,
            tenant: Tenant::default(),
            cost: 1,
            shard_key: 0,
            is_first: false,
            expires_at: None,
        };
        let entries = std::slice::from_ref(&entry);
        self.use_directly(queue).await.map_err(unavailable)?;
        let pull = |wait| Pull { queue, consumer: NAME, max: 1, wait, only: None };
        for demand in Demand::by_queue(entries) {
            self.admit(&demand, &Quotas::default()).await?;
        }
        self.set_missing(queue, Missing::default()).await?;
        self.forget_after(queue, LEFT).await?;
        self.missing(queue).await?;
        self.pull(pull(WAIT)).await?;
        self.enqueue(entries).await?;
        self.forget_after(queue, LEFT).await?;
        let taken = self.pull(pull(Duration::ZERO)).await?;
        self.renew(NAME, &taken).await?;
        self.hand_back(NAME, &taken).await?;
        let taken = self.pull(pull(Duration::ZERO)).await?;
        self.reclaim(pull(Duration::ZERO), Duration::from_secs(60)).await?;
        self.acknowledge(NAME, &taken).await?;
        self.requeue(entries).await?;
        self.forget_after(queue, LEFT).await?;
        self.backlog(queue).await?;
        self.depth(queue).await?;
        self.remove_idle_consumers(queue, Duration::from_secs(600)).await?;
        self.events().check(id).await
    }
}
