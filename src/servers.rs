//! Connections to Redis and Postgres.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use tokio::time::timeout;
use tritmill_client::Client;
use tritmill_queue::{
    JobId, QueueName, Store, StoreError,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{
        Databases, NumericsClasses as _, Operations, PostgresOptions, RedisStore,
        classes::ClassError,
    },
};

/// URLs of the servers that producers and workers share.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Servers")]
pub struct Servers {
    /// URL of Redis: redis://, rediss://, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST
    #[arg(long, value_name = "URL", env = "REDIS_URL", hide_env_values = true)]
    pub redis: Option<String>,
    /// URL of Postgres: postgres://USER:PASSWORD@HOST[,HOST]/DATABASE; several URLs, separated by spaces, spread
    /// the jobs over several databases
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    pub database: Option<String>,
}

/// Time limit for asking Redis whether a queue is fast.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// Jobs deleted in one call.
const DELETE_CHUNK: usize = 1000;

/// Servers of a command that supports both modes.
#[derive(Debug, Clone, Args)]
pub struct ModeOptions {
    #[command(flatten)]
    pub servers: Servers,
    /// Fast mode, without a database: Redis alone keeps the jobs, finished ones for a day. A crash of
    /// Redis loses about the last second, or everything without an append-only file
    #[arg(long, help_heading = "Servers")]
    pub fast: bool,
}

impl ModeOptions {
    /// Returns the servers of the chosen mode.
    pub fn mode(&self) -> anyhow::Result<Mode<'_>> {
        if !self.fast {
            return self.servers.needed().map(Mode::Journalled);
        }
        if self.servers.database.is_some() {
            bail!("--fast uses no database: leave out --database (and DATABASE_URL)");
        }
        let redis = self.servers.redis.as_deref();
        redis.map(Mode::Fast).context("--fast needs --redis (or REDIS_URL)")
    }
}

/// The servers of one mode.
#[derive(Clone, Copy)]
pub enum Mode<'a> {
    /// Redis and Postgres.
    Journalled(Given<'a>),
    /// The URL of Redis.
    Fast(&'a str),
}

impl Mode<'_> {
    /// Returns the dispatcher, which connects when it is used: Redis may be down now.
    pub fn dispatcher(self) -> anyhow::Result<RedisDispatcher> {
        let (Self::Journalled(Given { redis, .. }) | Self::Fast(redis)) = self;
        RedisDispatcher::new(redis, BacklogLimit::default()).context("--redis")
    }

    /// Connects to the database, if there is one.
    pub async fn database(self) -> anyhow::Result<Option<Arc<Databases>>> {
        match self {
            Self::Journalled(given) => given.store().await.map(Some),
            Self::Fast(_) => Ok(None),
        }
    }
}

/// The store of jobs.
#[derive(Clone)]
pub enum Keeper {
    /// Postgres.
    Journal(Arc<Databases>),
    /// Redis alone.
    Fast(RedisStore),
}

impl Keeper {
    /// Uses the database if there is one, else the dispatcher's Redis, if it can keep jobs safely.
    pub async fn of(
        database: Option<Arc<Databases>>,
        dispatcher: &RedisDispatcher,
        queue: &QueueName,
        retention: Duration,
    ) -> anyhow::Result<Self> {
        let store = dispatcher.store(queue.clone(), retention);
        let Some(database) = database else {
            store.check().await.context("cannot keep jobs in Redis alone")?;
            return Ok(Self::Fast(store));
        };
        // Workers would mistake entries of one mode for finished jobs of the other. A Redis that does
        // not answer does not prevent the start.
        if let Ok(Ok(true)) = timeout(LOOK_LIMIT, store.is_used()).await {
            bail!("{queue} is a fast queue in this Redis: use --fast, or another Redis database");
        }
        Ok(Self::Journal(database))
    }

    /// Returns the store.
    pub fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Journal(store) => store.clone(),
            Self::Fast(store) => Arc::new(store.clone()),
        }
    }

    /// Returns the operations of Postgres.
    pub fn operations(&self) -> Option<Arc<dyn Operations>> {
        match self {
            Self::Journal(store) => Some(store.clone()),
            Self::Fast(_) => None,
        }
    }

    /// Sets the numerics class of a queue, or checks that workers of this class may serve it.
    pub async fn register_class(&self, queue: &QueueName, class: &str) -> anyhow::Result<()> {
        match self {
            Self::Journal(store) => {
                let registered = store.register_class(queue, class).await;
                registered.map_err(|error| refusal(error, ""))
            }
            Self::Fast(store) => {
                let registered = store.register_class(class).await;
                registered.context("a fast queue has one class: give the model another --name")
            }
        }
    }

    /// Returns a client.
    pub fn client(&self, dispatcher: RedisDispatcher) -> Client {
        match self {
            Self::Journal(store) => Client::from_servers(store.clone(), Arc::new(dispatcher)),
            Self::Fast(store) => Client::from_redis(dispatcher, store.clone()),
        }
    }

    /// Deletes jobs in any state and, in the fast mode, the data of their queue.
    pub async fn delete(&self, jobs: &[JobId]) -> Result<(), StoreError> {
        for chunk in jobs.chunks(DELETE_CHUNK) {
            match self {
                Self::Journal(store) => store.delete_jobs(chunk).await?,
                Self::Fast(store) => store.delete_jobs(chunk).await?,
            };
        }
        match self {
            Self::Journal(_) => Ok(()),
            Self::Fast(store) => store.forget_queue().await,
        }
    }
}

/// Returns the error of a worker that may not serve a queue, with advice for the operator. `place` has
/// the options that name the queue's store.
pub fn refusal(error: ClassError, place: &str) -> anyhow::Error {
    let ClassError::Mismatch { queue, offered, .. } = &error else { return error.into() };
    anyhow!(
        "{error}: answers would depend on the worker; to allow both classes: tritmill queue allow-class \
         {queue} {offered}{place} (or POST /admin/v1/queues/allow-class); else give the model another \
         --name"
    )
}

/// URLs of both servers.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    redis: &'a str,
    database: &'a str,
}

impl Servers {
    /// Returns both URLs, or none; one alone is an error.
    pub fn given(&self) -> anyhow::Result<Option<Given<'_>>> {
        match (&self.redis, &self.database) {
            (Some(redis), Some(database)) => Ok(Some(Given { redis, database })),
            (None, None) => Ok(None),
            (Some(_), None) => bail!("--redis is given, --database (DATABASE_URL) is not"),
            (None, Some(_)) => bail!("--database is given, --redis (REDIS_URL) is not"),
        }
    }

    /// Returns both URLs, which the command needs.
    pub fn needed(&self) -> anyhow::Result<Given<'_>> {
        self.given()?.context("give --redis and --database (or REDIS_URL and DATABASE_URL)")
    }

    /// Returns the URL of the database.
    pub fn database(&self) -> anyhow::Result<&str> {
        self.database.as_deref().context("give --database (or DATABASE_URL)")
    }
}

impl<'a> Given<'a> {
    /// Returns the URL of Redis.
    pub fn redis_url(self) -> &'a str {
        self.redis
    }

    /// Returns the URL of Postgres.
    pub fn database_url(self) -> &'a str {
        self.database
    }

    /// Connects to Postgres.
    pub async fn store(self) -> anyhow::Result<Arc<Databases>> {
        let store = Databases::connect(self.database).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// Connects to Postgres with up to `connections_max` connections in each of two pools.
    pub async fn store_with(self, connections_max: u32) -> anyhow::Result<Arc<Databases>> {
        let options = PostgresOptions { connections_max, ..PostgresOptions::default() };
        let store = Databases::connect_with(self.database, options).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// Returns the dispatcher, which connects when it is used: Redis may be down now.
    pub fn dispatcher(self) -> anyhow::Result<Arc<RedisDispatcher>> {
        Mode::Journalled(self).dispatcher().map(Arc::new)
    }

    /// Connects a client.
    pub async fn client(self) -> anyhow::Result<Client> {
        Ok(Client::from_servers(self.store().await?, self.dispatcher()?))
    }
}
