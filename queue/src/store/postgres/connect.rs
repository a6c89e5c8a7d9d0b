//! Where the server is, and the first connection to it.

use std::{str::FromStr, time::Duration};

use sqlx::{
    Connection as _, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;

use super::{NoAnswer, told, unavailable};
use crate::store::StoreError;

/// Name under which the server lists this program's connections.
const APPLICATION_NAME: &str = "tritmill";
/// How long to ask why no connection could be had.
const EXPLAIN_LIMIT: Duration = Duration::from_secs(2);

/// What a URL may say after its `?`. Others are refused: one that is misspelt would be ignored, and
/// written to the log with its value.
const PARAMETERS: [&str; 11] = [
    "application_name",
    "dbname",
    "host",
    "options",
    "password",
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "user",
];

/// A parameter of a URL that is not known.
#[derive(Debug, thiserror::Error)]
#[error("unknown parameter in the database URL (known: {})", PARAMETERS.join(", "))]
struct UnknownParameter;

/// A file that a URL names and that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {parameter} {path}: {error}")]
struct NoFile {
    parameter: &'static str,
    path: String,
    error: std::io::Error,
}

/// Options of every connection to `url` (`postgres://USER:PASSWORD@HOST/DATABASE?sslmode=…`).
pub(super) fn parse(url: &str) -> Result<PgConnectOptions, StoreError> {
    let query = url.split('#').next().and_then(|url| url.split_once('?')).map_or("", |(_, q)| q);
    let mut names = query.split('&').filter_map(|pair| pair.split('=').next());
    if names.any(|name| !name.is_empty() && !PARAMETERS.contains(&name)) {
        return Err(StoreError::Unavailable(Box::new(UnknownParameter)));
    }
    for parameter in ["sslrootcert", "sslcert", "sslkey"] {
        let given = query.split('&').filter_map(|pair| pair.split_once('='));
        for (_, path) in given.filter(|(name, path)| *name == parameter && !path.contains('%')) {
            if let Err(error) = std::fs::File::open(path) {
                let path = path.to_owned();
                return Err(StoreError::Unavailable(Box::new(NoFile { parameter, path, error })));
            }
        }
    }
    let options = PgConnectOptions::from_str(url).map_err(unavailable)?;
    let name = options.get_application_name().unwrap_or(APPLICATION_NAME).to_owned();
    Ok(options.application_name(&name))
}

/// A server that no connection can be made to, and why: names no password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {source}")]
struct Unreachable {
    address: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// Opens a pool with one connection. A server that is just starting is waited for; one that stays
/// away is reported with the reason, which the pool would keep to itself.
pub(super) async fn pool(
    options: PgPoolOptions,
    server: PgConnectOptions,
) -> Result<PgPool, StoreError> {
    let address = server.get_socket().map_or_else(
        || format!("{}:{}", server.get_host(), server.get_port()),
        |socket| socket.display().to_string(),
    );
    let limit = options.get_acquire_timeout();
    let source = match options.clone().connect_with(server.clone()).await {
        Ok(pool) => return Ok(pool),
        Err(sqlx::Error::PoolTimedOut) => {
            match timeout(EXPLAIN_LIMIT, PgConnection::connect_with(&server)).await {
                // It came at the last moment.
                Ok(Ok(_)) => return options.connect_with(server).await.map_err(unavailable),
                Ok(Err(error)) => told(error),
                Err(_) => NoAnswer(limit).into(),
            }
        }
        Err(error) => told(error),
    };
    Err(StoreError::Unavailable(Box::new(Unreachable { address, source })))
}
