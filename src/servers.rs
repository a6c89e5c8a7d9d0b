//! Connections to Redis and Postgres.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use tokio::time::timeout;
use tritmill_client::Client;
use tritmill_queue::{
    DispatchError,
    dispatch::{BacklogLimit, RedisDispatcher},
    store::{PostgresOptions, PostgresStore, classes::ClassError},
};

/// Longest check of Redis at the start.
const CHECK_LIMIT: Duration = Duration::from_secs(5);

/// URLs of the servers that producers and workers share.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Servers")]
pub struct Servers {
    /// URL of Redis: redis://, rediss://, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST
    #[arg(long, value_name = "URL", env = "REDIS_URL", hide_env_values = true)]
    pub redis: Option<String>,
    /// URL of Postgres: postgres://USER:PASSWORD@HOST[,HOST]/DATABASE
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    pub database: Option<String>,
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
pub struct ServerUrls<'a> {
    redis: &'a str,
    database: &'a str,
}

impl Servers {
    /// Returns both URLs, or none; one alone is an error.
    pub fn given(&self) -> anyhow::Result<Option<ServerUrls<'_>>> {
        match (&self.redis, &self.database) {
            (Some(redis), Some(database)) => Ok(Some(ServerUrls { redis, database })),
            (None, None) => Ok(None),
            (Some(_), None) => bail!("--redis is given, --database (DATABASE_URL) is not"),
            (None, Some(_)) => bail!("--database is given, --redis (REDIS_URL) is not"),
        }
    }

    /// Returns both URLs, which the command needs.
    pub fn needed(&self) -> anyhow::Result<ServerUrls<'_>> {
        self.given()?.context("give --redis and --database (or REDIS_URL and DATABASE_URL)")
    }

    /// Returns the URL of the database.
    pub fn database(&self) -> anyhow::Result<&str> {
        self.database.as_deref().context("give --database (or DATABASE_URL)")
    }
}

impl<'a> ServerUrls<'a> {
    /// Returns the URL of Redis.
    pub fn redis_url(self) -> &'a str {
        self.redis
    }

    /// Returns the URL of Postgres.
    pub fn database_url(self) -> &'a str {
        self.database
    }

    /// Connects to Postgres.
    pub async fn store(self) -> anyhow::Result<Arc<PostgresStore>> {
        let store = PostgresStore::connect(self.database).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// Connects to Postgres with up to `connections_max` connections in each of two pools.
    pub async fn store_with(self, connections_max: u32) -> anyhow::Result<Arc<PostgresStore>> {
        let options = PostgresOptions { connections_max, ..PostgresOptions::default() };
        let store = PostgresStore::connect_with(self.database, options).await;
        Ok(Arc::new(store.context("cannot use the database")?))
    }

    /// Returns the dispatcher. Redis may be down now, but it may not refuse the login or what queues need.
    pub async fn dispatcher(self) -> anyhow::Result<Arc<RedisDispatcher>> {
        let dispatcher = RedisDispatcher::new(self.redis, BacklogLimit::default());
        let dispatcher = dispatcher.context("--redis")?;
        check(dispatcher.check()).await?;
        Ok(Arc::new(dispatcher))
    }

    /// Connects a client.
    pub async fn client(self) -> anyhow::Result<Client> {
        Ok(Client::from_servers(self.store().await?, self.dispatcher().await?))
    }
}

/// Returns an error if a check of Redis found what only an operator can change.
pub async fn check(
    checking: impl Future<Output = Result<(), DispatchError>>,
) -> anyhow::Result<()> {
    match timeout(CHECK_LIMIT, checking).await {
        Ok(Ok(())) => {}
        Ok(Err(refused @ DispatchError::Refused(_))) => {
            return Err(refused).context("cannot use Redis");
        }
        Ok(Err(error)) => tracing::warn!(%error, "Redis could not be checked"),
        Err(_) => tracing::warn!("Redis could not be checked: no answer within {CHECK_LIMIT:?}"),
    }
    Ok(())
}
