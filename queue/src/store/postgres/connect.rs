//! Connection URLs and the first connection.

use std::{str::FromStr, time::Duration};

use sqlx::{
    Connection as _, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;

use super::NoAnswer;
use crate::store::{StoreError, error::without_source_line};

/// Name under which the server lists this program's connections.
const APPLICATION_NAME: &str = "tritmill";
/// How long to look for the reason why no connection was made.
const EXPLAIN_LIMIT: Duration = Duration::from_secs(2);

/// Parameters of a URL. Others are refused: sqlx ignores an unknown one and logs it with its value.
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

/// A URL has an unknown parameter.
#[derive(Debug, thiserror::Error)]
#[error("unknown parameter in the database URL (known: {})", PARAMETERS.join(", "))]
struct UnknownParameter;

/// A file that a URL names cannot be read.
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
    let options = PgConnectOptions::from_str(url)?;
    let name = options.get_application_name().unwrap_or(APPLICATION_NAME).to_owned();
    Ok(options.application_name(&name))
}

/// The reason why no connection to a server can be made. The message has no password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {source}")]
struct Unreachable {
    address: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// Opens a pool with one connection. Waits for a server that is starting; if none answers, the error has
/// the reason, which the pool does not report.
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
                // The server has come up meanwhile.
                Ok(Ok(_)) => return Ok(options.connect_with(server).await?),
                Ok(Err(error)) => without_source_line(error),
                Err(_) => NoAnswer(limit).into(),
            }
        }
        Err(error) => without_source_line(error),
    };
    Err(StoreError::Unavailable(Box::new(Unreachable { address, source })))
}
