//! The target of `bench e2e --overload`: a service over a file, or on servers with a queue and a tenant of its own,
//! which are deleted at the end.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use tokio::time::{sleep, timeout};
use tritmill_admin::{
    new_key,
    store::{KeyRole, Keys as _, Tenants as _},
};
use tritmill_queue::{
    JobId, QueueName, Tenant,
    dispatch::RedisDispatcher,
    store::{NumericsClasses as _, PostgresStore, Workers as _, workers::Heartbeat},
};

use super::{
    Arguments,
    service::{Service, Setup},
};

/// Random digits at the end of a name.
const RANDOM_DIGITS: usize = 8;
/// Time between two steps of an erasure.
const ERASE_EVERY: Duration = Duration::from_millis(200);
/// Longest erasure.
const ERASE_MAX: Duration = Duration::from_secs(300);

/// A service and what it uses.
pub(super) struct Target {
    pub service: Service,
    /// The key of the requests, and the model that they name.
    pub key: String,
    pub model: String,
    servers: Option<OnServers>,
}

/// What this run has on servers.
struct OnServers {
    store: Arc<PostgresStore>,
    dispatcher: Arc<RedisDispatcher>,
    queue: QueueName,
    tenant: Tenant,
}

impl Target {
    /// Starts the service, on servers if they are given.
    pub async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        // All requests come from one address and with one key.
        let mut words: Vec<String> =
            ["--max-connections", "32768", "--max-waiting-per-address", "32768"]
                .map(str::to_owned)
                .into();
        let Some(given) = arguments.servers.given()? else {
            let service =
                Service::start_with(arguments, Setup { words, ..Setup::default() }).await?;
            let models = service.api.models().await?;
            let model = models.into_iter().next().context("nothing is served")?;
            return Ok(Self { key: service.key.clone(), model, service, servers: None });
        };
        let id = JobId::generate().to_string();
        let model = format!("bench-{}", &id[id.len() - RANDOM_DIGITS..]);
        words.extend(["--name".to_owned(), model.clone()]);
        let setup = Setup { words, servers: Some(given), ..Setup::default() };
        let service = Service::start_with(arguments, setup).await?;
        let (store, dispatcher) = (given.store().await?, given.dispatcher().await?);
        let tenant = Tenant(model.clone());
        let (key, secret) = new_key(tenant.clone(), KeyRole::Submit, "bench");
        store.add_key(&key, &secret.hash()).await.context("cannot keep the key")?;
        let format = arguments.run.format.to_string();
        let queue = QueueName { model: model.clone(), format };
        let servers = Some(OnServers { store, dispatcher, queue, tenant });
        Ok(Self { service, key: secret.reveal().to_owned(), model, servers })
    }

    /// Returns the memory of the service.
    pub fn memory_bytes(&self) -> anyhow::Result<u64> {
        self.service.memory.used_bytes(&self.service.process)
    }

    /// Returns the memory of Redis; `None` without servers.
    pub async fn redis_bytes(&self) -> anyhow::Result<Option<u64>> {
        let Some(servers) = &self.servers else { return Ok(None) };
        Ok(Some(servers.dispatcher.used_memory_bytes().await?))
    }

    /// Ends the service and deletes what it left on servers.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        // Fails if the process has ended.
        let _ = self.service.process.kill().await;
        match self.servers {
            Some(servers) => servers.clean_up().await,
            None => Ok(()),
        }
    }
}

impl OnServers {
    /// Deletes everything, also where a step fails; returns the first error.
    async fn clean_up(&self) -> anyhow::Result<()> {
        let Self { store, dispatcher, queue, .. } = self;
        let workers = self.forget_workers().await;
        let class = store.reset_class(queue).await.context("cannot delete the model").map(drop);
        let erased = timeout(ERASE_MAX, self.erase_jobs()).await;
        let erased = erased.context("the jobs are not deleted in time").flatten();
        let forgotten = dispatcher.forget_queue(queue).await;
        let forgotten = forgotten.context("cannot delete the queue in Redis");
        workers.and(class).and(erased).and(forgotten)
    }

    async fn forget_workers(&self) -> anyhow::Result<()> {
        for worker in self.store.workers().await.context("cannot list the workers")? {
            let Heartbeat { owner, queue, .. } = worker.heartbeat;
            if queue == self.queue {
                self.store.forget_worker(&owner).await.context("cannot delete the worker")?;
            }
        }
        Ok(())
    }

    async fn erase_jobs(&self) -> anyhow::Result<()> {
        let erase = || self.store.erase_tenant(&self.tenant);
        while !erase().await.context("cannot delete the jobs")?.done {
            sleep(ERASE_EVERY).await;
        }
        Ok(())
    }
}
