//! Where Redis and Postgres are, and connecting to them.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use tritmill_producer::Client;
use tritmill_queue::{
    dispatch::{BacklogLimit, RedisDispatcher},
    store::PostgresStore,
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

    /// The dispatcher, which connects when it is used: Redis may be away for now.
    pub fn dispatcher(self) -> anyhow::Result<Arc<RedisDispatcher>> {
        let dispatcher = RedisDispatcher::new(self.redis, BacklogLimit::default());
        Ok(Arc::new(dispatcher.context("--redis")?))
    }

    /// A producer's connection.
    pub async fn client(self) -> anyhow::Result<Client> {
        Ok(Client::of_servers(self.store().await?, self.dispatcher()?))
    }
}
