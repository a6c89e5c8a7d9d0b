//! Connection URLs and the first connection.

use std::{
    str::FromStr,
    time::{Duration, Instant},
};

use sqlx::{
    Connection as _, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::timeout;

use super::{
    NoAnswer, Settings,
    hosts::{self, Hosts},
};
use crate::store::{StoreError, error::without_source_line};

/// Name under which the server lists this program's connections.
const APPLICATION_NAME: &str = "tritmill";
/// How long to look for the reason why no connection was made.
const EXPLAIN_LIMIT: Duration = Duration::from_secs(2);

/// The pause between two looks for a server that takes writes.
const SEARCH_PAUSE: Duration = Duration::from_millis(200);

/// Parameters of a URL. Others are refused: sqlx ignores an unknown one and logs it with its value.
const PARAMETERS: [&str; 13] = [
    "application_name",
    "dbname",
    "host",
    "options",
    "password",
    POOLER,
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    TARGET,
    "user",
];
/// Which of several servers to connect to.
const TARGET: &str = "target_session_attrs";
/// The kind of the pooler between this program and the server, if there is one.
const POOLER: &str = "pooler";

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

/// A URL has a parameter with an unknown value.
#[derive(Debug, thiserror::Error)]
#[error("{name} in the database URL is not {expected}")]
struct BadParameter {
    name: &'static str,
    expected: &'static str,
}

/// Reads the URL of a database: `postgres://USER:PASSWORD@HOST/DATABASE?sslmode=…`. As in libpq, there may
/// be several servers, as in `HOST:PORT,HOST:PORT`, and `target_session_attrs`.
pub(super) fn parse(url: &str) -> Result<Hosts, StoreError> {
    let url = url.split('#').next().unwrap_or_default();
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let mut names = query.split('&').filter_map(|pair| pair.split('=').next());
    if names.any(|name| !name.is_empty() && !PARAMETERS.contains(&name)) {
        return Err(StoreError::Unavailable(Box::new(UnknownParameter)));
    }
    let given = || query.split('&').filter_map(|pair| pair.split_once('='));
    for parameter in ["sslrootcert", "sslcert", "sslkey"] {
        for (_, path) in given().filter(|(name, path)| *name == parameter && !path.contains('%')) {
            if let Err(error) = std::fs::File::open(path) {
                let path = path.to_owned();
                return Err(StoreError::Unavailable(Box::new(NoFile { parameter, path, error })));
            }
        }
    }
    let value_of =
        |name| given().filter(|(given, _)| *given == name).map(|(_, value)| value).next_back();
    let bad = |name, expected| StoreError::Unavailable(Box::new(BadParameter { name, expected }));
    let (server_query, addresses) = (for_driver(query), one_for_each_host(address));
    let must_write = match value_of(TARGET) {
        Some("read-write" | "primary") => true,
        Some("any") => false,
        None => addresses.len() > 1,
        Some(_) => return Err(bad(TARGET, "read-write, primary or any")),
    };
    let is_pooled = match value_of(POOLER) {
        Some("transaction") => true,
        None => false,
        Some(_) => return Err(bad(POOLER, "transaction")),
    };
    let options = |address: &String| {
        let options = PgConnectOptions::from_str(&format!("{address}?{server_query}"))?;
        let name = options.get_application_name().unwrap_or(APPLICATION_NAME).to_owned();
        Ok(options.application_name(&name))
    };
    let servers = addresses.iter().map(options).collect::<Result<_, sqlx::Error>>()?;
    Ok(Hosts { servers, must_write, is_pooled })
}

/// Returns the parameters that the driver knows.
fn for_driver(query: &str) -> String {
    let is_own =
        |pair: &&str| [TARGET, POOLER].contains(&pair.split('=').next().unwrap_or_default());
    query.split('&').filter(|pair| !is_own(pair)).collect::<Vec<_>>().join("&")
}

/// Returns the address once for each of its hosts.
fn one_for_each_host(address: &str) -> Vec<String> {
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    match hosts.contains(',') {
        true => hosts.split(',').map(|host| format!("{scheme}://{user}{host}{path}")).collect(),
        false => vec![address.to_owned()],
    }
}

/// The reason why no connection to a server can be made. The message has no password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {source}")]
struct Unreachable {
    address: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// Opens a pool with one connection. Waits for a server that is starting; if none answers, the error has
/// the reason, which the pool does not report. Also returns the index of the server. `planning`: see
/// [`Hosts::with`].
pub(super) async fn pool(
    options: PgPoolOptions,
    hosts: &Hosts,
    planning: Option<Settings>,
) -> Result<(PgPool, usize), StoreError> {
    let limit = options.get_acquire_timeout();
    let index = if hosts.must_write { primary(hosts, limit).await? } else { 0 };
    let server = hosts.with(index, planning);
    let source = match options.clone().connect_with(server.clone()).await {
        Ok(pool) => return Ok((pool, index)),
        Err(sqlx::Error::PoolTimedOut) => {
            match timeout(EXPLAIN_LIMIT, PgConnection::connect_with(&server)).await {
                // The server has come up meanwhile.
                Ok(Ok(_)) => return Ok((options.connect_with(server).await?, index)),
                Ok(Err(error)) => without_source_line(error),
                Err(_) => NoAnswer(limit).into(),
            }
        }
        Err(error) => without_source_line(error),
    };
    let address = hosts::address(&server);
    Err(StoreError::Unavailable(Box::new(Unreachable { address, source })))
}

/// Waits for a server that takes writes.
async fn primary(hosts: &Hosts, limit: Duration) -> Result<usize, StoreError> {
    let started = Instant::now();
    loop {
        match hosts.primary().await {
            Ok(index) => return Ok(index),
            Err(error) if started.elapsed() >= limit => {
                return Err(StoreError::Unavailable(Box::new(error)));
            }
            Err(_) => tokio::time::sleep(SEARCH_PAUSE).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(url: &str) -> Vec<String> {
        parse(url).expect("a good URL").servers.iter().map(hosts::address).collect()
    }

    #[test]
    fn url_may_name_several_servers() {
        assert_eq!(addresses("postgres://u:p@a/db"), ["a:5432"]);
        assert_eq!(addresses("postgres://u:p,q@a:1,b,[::1]:7/db"), ["a:1", "b:5432", "[::1]:7"]);
        assert_eq!(addresses("postgres://a:1,b:2"), ["a:1", "b:2"]);
        let cluster = parse("postgres://u@a,b/db?sslmode=require").expect("a good URL");
        assert!(cluster.must_write);
        assert!(
            cluster.servers.iter().all(|server| {
                server.get_database() == Some("db") && server.get_username() == "u"
            })
        );
    }

    #[test]
    fn target_and_pooler_are_read() {
        let read = |parameters: &str| {
            let hosts = parse(&format!("postgres://u@a/db?{parameters}"))?;
            Ok::<_, StoreError>((hosts.must_write, hosts.is_pooled))
        };
        assert_eq!(read("").expect("nothing is given"), (false, false));
        assert_eq!(read("target_session_attrs=primary").expect("known"), (true, false));
        assert_eq!(
            read("target_session_attrs=any&pooler=transaction").expect("known"),
            (false, true)
        );
        for (parameters, name) in
            [("target_session_attrs=standby", TARGET), ("pooler=x", POOLER), ("tls=1", "known:")]
        {
            let refused = read(parameters).expect_err("not known").to_string();
            assert!(refused.contains(name), "{refused}");
        }
    }
}
