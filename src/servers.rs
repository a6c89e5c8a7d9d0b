//! Where Redis and Postgres are, and connecting to them.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use tokio::time::timeout;
use tritmill_client::Client;
use tritmill_queue::{
    JobId, Operations, QueueName, Store, StoreError,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{
        NumericsClasses as _, PostgresOptions, PostgresStore, RedisStore, classes::ClassError,
    },
};

/// The servers that producers and workers share.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Servers")]
pub struct Servers {
    /// Redis: redis://, rediss://, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST
    #[arg(long, value_name = "URL", env = "REDIS_URL", hide_env_values = true)]
    pub redis: Option<String>,
    /// Postgres: postgres://USER:PASSWORD@HOST/DATABASE
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    pub database: Option<String>,
}

/// How long to wait for Redis to say whether a queue is a fast one.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// Jobs deleted in one call.
const DELETE_CHUNK: usize = 1000;

/// The servers of a command that knows both modes.
#[derive(Debug, Clone, Args)]
pub struct ModeOptions {
    #[command(flatten)]
    pub servers: Servers,
    /// Fast mode, without a database: Redis alone keeps the jobs, for a day after they are over. A
    /// crash of Redis loses about its last second, or everything if it writes no append-only file
    #[arg(long, help_heading = "Servers")]
    pub fast: bool,
}

impl ModeOptions {
    /// What the command needs for its mode.
    pub fn mode(&self) -> anyhow::Result<Mode<'_>> {
        if !self.fast {
            return self.servers.needed().map(Mode::Journalled);
        }
        if self.servers.database.is_some() {
            bail!("--fast keeps nothing in a database: leave out --database (and DATABASE_URL)");
        }
        let redis = self.servers.redis.as_deref();
        redis.map(Mode::Fast).context("--fast needs --redis (or REDIS_URL)")
    }
}

/// The servers of one mode.
#[derive(Clone, Copy)]
pub enum Mode<'a> {
    /// Both.
    Journalled(Given<'a>),
    /// The address of Redis.
    Fast(&'a str),
}

impl Mode<'_> {
    /// The dispatcher, which connects when it is used: Redis may be away for now.
    pub fn dispatcher(self) -> anyhow::Result<RedisDispatcher> {
        let (Self::Journalled(Given { redis, .. }) | Self::Fast(redis)) = self;
        RedisDispatcher::new(redis, BacklogLimit::default()).context("--redis")
    }

    /// The database, if there is one.
    pub async fn database(self) -> anyhow::Result<Option<Arc<PostgresStore>>> {
        match self {
            Self::Journalled(given) => given.store().await.map(Some),
            Self::Fast(_) => Ok(None),
        }
    }
}

/// Where jobs are kept.
#[derive(Clone)]
pub enum Keeper {
    /// In the database.
    Journal(Arc<PostgresStore>),
    /// In Redis alone.
    Fast(RedisStore),
}

impl Keeper {
    /// In the database if there is one, else in the dispatcher's Redis, if that is fit.
    pub async fn of(
        database: Option<Arc<PostgresStore>>,
        dispatcher: &RedisDispatcher,
        queue: &QueueName,
        retention: Duration,
    ) -> anyhow::Result<Self> {
        let store = dispatcher.store(queue.clone(), retention);
        let Some(database) = database else {
            store.check().await.context("cannot keep jobs in Redis alone")?;
            return Ok(Self::Fast(store));
        };
        // Its workers would take entries of the one mode for jobs of the other that are over. A
        // Redis that does not answer is no reason not to begin.
        if let Ok(Ok(true)) = timeout(LOOK_LIMIT, store.is_used()).await {
            bail!("{queue} is a fast queue in this Redis: use --fast, or another Redis database");
        }
        Ok(Self::Journal(database))
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Journal(store) => store.clone(),
            Self::Fast(store) => Arc::new(store.clone()),
        }
    }

    /// What operators use, if it is there.
    pub fn operations(&self) -> Option<Arc<dyn Operations>> {
        match self {
            Self::Journal(store) => Some(store.clone()),
            Self::Fast(_) => None,
        }
    }

    /// Gives a queue its numerics class, or confirms that workers of this class may serve it.
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

    /// A producer's connection.
    pub fn client(&self, dispatcher: RedisDispatcher) -> Client {
        match self {
            Self::Journal(store) => Client::of_servers(store.clone(), Arc::new(dispatcher)),
            Self::Fast(store) => Client::within(dispatcher, store.clone()),
        }
    }

    /// Deletes jobs, whatever their state, and what the store knows of their queue.
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

/// Why a worker does not serve a queue, and what an operator may do about it; `place` says where the
/// queue's settings are, as options.
pub fn refusal(error: ClassError, place: &str) -> anyhow::Error {
    let ClassError::Mismatch { queue, offered, .. } = &error else { return error.into() };
    anyhow!(
        "{error}: its answers would depend on who gives them; to have both classes serve it: tritmill \
         queue allow-class {queue} {offered}{place} (or POST /admin/v1/queues/allow-class), else give \
         the model another --name"
    )
}

/// Both addresses.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    redis: &'a str,
    database: &'a str,
}

impl Servers {
    /// Both addresses, or none; one alone is a mistake.
    pub fn given(&self) -> anyhow::Result<Option<Given<'_>>> {
        match (&self.redis, &self.database) {
            (Some(redis), Some(database)) => Ok(Some(Given { redis, database })),
            (None, None) => Ok(None),
            (Some(_), None) => bail!("--redis is given, --database (DATABASE_URL) is not"),
            (None, Some(_)) => bail!("--database is given, --redis (REDIS_URL) is not"),
        }
    }

    /// Both addresses, which the command needs.
    pub fn needed(&self) -> anyhow::Result<Given<'_>> {
        self.given()?.context("give --redis and --database (or REDIS_URL and DATABASE_URL)")
    }

    /// The database's address alone.
    pub fn database(&self) -> anyhow::Result<&str> {
        self.database.as_deref().context("give --database (or DATABASE_URL)")
    }
}

impl<'a> Given<'a> {
    /// Postgres's address.
    pub fn database_url(self) -> &'a str {
        self.database
    }

    /// Connects to Postgres.
    pub async fn store(self) -> anyhow::Result<Arc<PostgresStore>> {
        let store = PostgresStore::connect(self.database).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// Connects to Postgres with so many connections.
    pub async fn store_with(self, connections_max: u32) -> anyhow::Result<Arc<PostgresStore>> {
        let options = PostgresOptions { connections_max, ..PostgresOptions::default() };
        let store = PostgresStore::connect_with(self.database, options).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// The dispatcher, which connects when it is used: Redis may be away for now.
    pub fn dispatcher(self) -> anyhow::Result<Arc<RedisDispatcher>> {
        Mode::Journalled(self).dispatcher().map(Arc::new)
    }

    /// A producer's connection.
    pub async fn client(self) -> anyhow::Result<Client> {
        Ok(Client::of_servers(self.store().await?, self.dispatcher()?))
    }
}
