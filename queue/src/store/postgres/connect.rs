//! Connection URLs and the first connection.

use std::{
    str::FromStr,
    time::{Duration, Instant},
};

use sqlx::postgres::PgConnectOptions;

use super::{
    hosts::Hosts,
    parameters::{self, Parameters},
    pool::{Pool, PooledConnection},
};
use crate::store::StoreError;

const SCHEMES: [&str; 2] = ["postgres", "postgresql"];
/// Name under which the server lists this program's connections.
const APPLICATION_NAME: &str = "tritmill";
/// How often to wait at the start, each time as long as a call does, for a server that has no connection left.
const SCARCE_WAITS: u32 = 6;

/// The pause between two looks for a server that takes writes.
const SEARCH_PAUSE: Duration = Duration::from_millis(200);

/// The URL is of another kind of database, or is no URL. Shows no more of it, since it may have a password.
#[derive(Debug, thiserror::Error)]
#[error("the database URL has the scheme {scheme:?}, not postgres or postgresql")]
struct UnknownScheme {
    scheme: String,
}

/// Reads the URL of a database: `postgres://USER:PASSWORD@HOST/DATABASE?sslmode=…`. As in libpq, there may
/// be several servers, as in `HOST:PORT,HOST:PORT`. See `parameters.rs` for what follows the `?`.
pub(super) fn parse(url: &str) -> Result<Hosts, StoreError> {
    // A URL that was read from a file ends with a newline.
    let url = url.trim().split('#').next().unwrap_or_default();
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    // The driver takes all schemes, and asks a Postgres server there.
    let scheme = address.split_once("://").map_or("", |(scheme, _)| scheme);
    if !SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme)) {
        // What comes before another text's `://` may be a password.
        let is_scheme = |c: char| c.is_ascii_alphanumeric() || "+.-".contains(c);
        let shown = if scheme.chars().all(is_scheme) { scheme } else { "" };
        let scheme = shown.to_owned();
        return Err(StoreError::Unavailable(Box::new(UnknownScheme { scheme })));
    }
    let Parameters { for_driver, must_write, is_pooled, connect_timeout, fallback_name } =
        parameters::parse(query)?;
    let addresses = one_for_each_host(address);
    let options = |address: &String| {
        let options = PgConnectOptions::from_str(&format!("{address}?{for_driver}"))?;
        let given = options.get_application_name().or(fallback_name.as_deref());
        let name = given.unwrap_or(APPLICATION_NAME).to_owned();
        Ok(options.application_name(&name))
    };
    let servers = addresses.iter().map(options).collect::<Result<_, sqlx::Error>>()?;
    let must_write = must_write.unwrap_or(addresses.len() > 1);
    Ok(Hosts { servers, must_write, is_pooled, connect_timeout })
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

/// Waits for a pool's first connection, also while the server has none left: other processes give some back.
pub(super) async fn first(pool: &Pool) -> Result<PooledConnection, StoreError> {
    let mut waits = 0;
    loop {
        match pool.get().await {
            Ok(Some(connection)) => return Ok(connection),
            Err(error) if !pool.is_scarce() || waits >= SCARCE_WAITS => return Err(error),
            Err(error) => tracing::warn!(%error, "waiting for a connection"),
            Ok(None) => tokio::time::sleep(SEARCH_PAUSE).await,
        }
        waits += 1;
    }
}

/// Returns the index of the server to connect to; waits for one that takes writes, if it must.
pub(super) async fn server(hosts: &Hosts, limit: Duration) -> Result<usize, StoreError> {
    if !hosts.must_write {
        return Ok(0);
    }
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

    use super::super::hosts;

    fn addresses(url: &str) -> Vec<String> {
        parse(url).expect("a good URL").servers.iter().map(hosts::address).collect()
    }

    #[test]
    fn url_may_name_several_servers() {
        assert_eq!(addresses("postgres://u:p@a/db\n"), ["a:5432"]);
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
    fn other_databases_are_refused_by_their_scheme() {
        assert_eq!(addresses("postgresql://a/db"), ["a:5432"]);
        for (url, given) in [
            ("mysql://u:secret@a/db", "\"mysql\""),
            ("sqlite://jobs.sqlite", "\"sqlite\""),
            ("host=a password=secret", "\"\""),
            ("host=a password=secret://", "\"\""),
        ] {
            let Err(error) = parse(url) else { panic!("no Postgres: {url}") };
            let error = error.to_string();
            assert!(error.contains(given) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn one_server_may_be_a_standby_and_several_need_one_that_writes() {
        let must_write = |url| parse(url).expect("a good URL").must_write;
        assert!(!must_write("postgres://u@a/db"));
        assert!(must_write("postgres://u@a/db?target_session_attrs=primary"));
        assert!(must_write("postgres://u@a,b/db"));
        assert!(!must_write("postgres://u@a,b/db?target_session_attrs=any"));
    }

    #[test]
    fn program_has_a_name() {
        let name = |url| {
            let server = parse(url).expect("a good URL").servers.remove(0);
            server.get_application_name().map(str::to_owned)
        };
        let expect = |name: &str| Some(name.to_owned());
        assert_eq!(name("postgres://u@a/db"), expect("tritmill"));
        assert_eq!(name("postgres://u@a/db?fallback_application_name=f"), expect("f"));
        assert_eq!(
            name("postgres://u@a/db?fallback_application_name=f&application_name=n"),
            expect("n")
        );
    }
}
