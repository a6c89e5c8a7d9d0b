//! The parameters of a database URL: those of libpq, and `pooler`.
//!
//! All of libpq's are taken, since URLs are copied from other programs and from the pages of managed services: they are
//! obeyed, or ignored with a warning that names them. Others are refused by name. Source: section 34.1.2 of Postgres'
//! manual.

use std::time::Duration;

use crate::store::StoreError;

/// Which of several servers to connect to.
pub(super) const TARGET: &str = "target_session_attrs";
/// The kind of the pooler between this program and the server, if there is one.
pub(super) const POOLER: &str = "pooler";
const TIMEOUT: &str = "connect_timeout";
const FALLBACK_NAME: &str = "fallback_application_name";
const ROOTS: &str = "sslrootcert";

/// Parameters that the driver obeys.
const OF_DRIVER: [&str; 12] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    ROOTS,
    "user",
];
/// Parameters that are obeyed here.
const OWN: [&str; 4] = [TARGET, POOLER, TIMEOUT, FALLBACK_NAME];
/// Parameters of libpq that are ignored.
const IGNORED: [&str; 40] = [
    "channel_binding",
    "client_encoding",
    "gssdelegation",
    "gssencmode",
    "gsslib",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "krbsrvname",
    "load_balance_hosts",
    "max_protocol_version",
    "min_protocol_version",
    "oauth_ca_file",
    "oauth_client_id",
    "oauth_client_secret",
    "oauth_issuer",
    "oauth_scope",
    "passfile",
    "replication",
    "require_auth",
    "requirepeer",
    "requiressl",
    "scram_client_key",
    "scram_server_key",
    "service",
    "servicefile",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslcertmode",
    "sslcompression",
    "sslcrl",
    "sslcrldir",
    "sslkeylogfile",
    "sslnegotiation",
    "sslpassword",
    "sslsni",
    "tcp_user_timeout",
    "tty",
    "authtype",
];

/// A URL has a parameter that libpq does not have.
#[derive(Debug, thiserror::Error)]
#[error(
    "unknown parameter {name:?} in the database URL (known: those of libpq, such as {}, and {POOLER})",
    OF_DRIVER.join(", ")
)]
struct UnknownParameter {
    name: String,
}

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

/// What a URL says beside its servers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parameters {
    /// Those for the driver, as a query.
    pub(super) for_driver: String,
    /// Whether to connect only to a server that takes writes; `None` if the URL does not say.
    pub(super) must_write: Option<bool>,
    /// Whether a pooler shares the connections between transactions.
    pub(super) is_pooled: bool,
    /// Longest time to open a connection.
    pub(super) connect_timeout: Option<Duration>,
    /// Name of the program if the URL has no `application_name`.
    pub(super) fallback_name: Option<String>,
}

/// Reads the part of a URL after its `?`. Logs the parameters that are ignored.
pub(super) fn parse(query: &str) -> Result<Parameters, StoreError> {
    let pairs: Vec<(&str, &str)> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .collect();
    let is_known =
        |name: &str| OF_DRIVER.contains(&name) || OWN.contains(&name) || IGNORED.contains(&name);
    if let Some((name, _)) = pairs.iter().find(|(name, _)| !is_known(name)) {
        return Err(unusable(UnknownParameter { name: (*name).to_owned() }));
    }
    let ignored: Vec<&str> =
        pairs.iter().map(|(name, _)| *name).filter(|name| IGNORED.contains(name)).collect();
    if !ignored.is_empty() {
        let parameters = ignored.join(", ");
        tracing::warn!(parameters, "parameters of the database URL are ignored");
    }
    let value_of = |name| {
        pairs.iter().filter(|(given, _)| *given == name).map(|(_, value)| *value).next_back()
    };
    for parameter in [ROOTS, "sslcert", "sslkey"] {
        let path = value_of(parameter).filter(|path| !path.contains('%') && *path != "system");
        if let Some(path) = path
            && let Err(error) = std::fs::File::open(path)
        {
            return Err(unusable(NoFile { parameter, path: path.to_owned(), error }));
        }
    }
    let bad = |name, expected| Err(unusable(BadParameter { name, expected }));
    let must_write = match value_of(TARGET) {
        Some("read-write" | "primary") => Some(true),
        Some("any") => Some(false),
        None => None,
        Some(_) => return bad(TARGET, "read-write, primary or any, which take writes"),
    };
    let is_pooled = match value_of(POOLER) {
        Some("transaction") => true,
        None => false,
        Some(_) => return bad(POOLER, "transaction"),
    };
    let connect_timeout = match value_of(TIMEOUT).map(str::parse::<i32>) {
        // As in libpq: no limit of its own below 1, and at least 2 seconds.
        Some(Ok(seconds)) => u64::try_from(seconds)
            .ok()
            .filter(|seconds| *seconds > 0)
            .map(|seconds| Duration::from_secs(seconds.max(2))),
        Some(Err(_)) => return bad(TIMEOUT, "a whole number of seconds"),
        None => None,
    };
    // Beginning with Postgres 16: the system's authorities, and then the whole check.
    let is_system = value_of(ROOTS) == Some("system");
    let kept = |(name, value): &&(&str, &str)| {
        OF_DRIVER.contains(name) && !(*name == ROOTS && *value == "system")
    };
    let mut for_driver: Vec<String> =
        pairs.iter().filter(kept).map(|(name, value)| format!("{name}={value}")).collect();
    if is_system && value_of("sslmode").is_none() {
        for_driver.push("sslmode=verify-full".to_owned());
    }
    Ok(Parameters {
        for_driver: for_driver.join("&"),
        must_write,
        is_pooled,
        connect_timeout,
        fallback_name: value_of(FALLBACK_NAME).map(str::to_owned),
    })
}

fn unusable(error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_libpq_are_taken() {
        let all = IGNORED.map(|name| format!("{name}=x")).join("&");
        let read = parse(&all).expect("libpq knows them");
        assert_eq!(read.for_driver, "", "the driver would log them with their values");
        let read = parse(
            "sslmode=require&channel_binding=require&connect_timeout=1&application_name=a&\
             fallback_application_name=f&options=-c%20a%3Db&target_session_attrs=primary",
        )
        .expect("libpq knows them");
        assert_eq!(read.for_driver, "sslmode=require&application_name=a&options=-c%20a%3Db");
        assert_eq!(read.connect_timeout, Some(Duration::from_secs(2)), "libpq's least");
        assert_eq!((read.must_write, read.is_pooled), (Some(true), false));
        assert_eq!(read.fallback_name.as_deref(), Some("f"));
        let read = parse("connect_timeout=0&sslrootcert=system").expect("libpq knows them");
        assert_eq!((read.connect_timeout, &*read.for_driver), (None, "sslmode=verify-full"));
    }

    #[test]
    fn other_parameters_are_refused_by_name() {
        for (query, name) in [
            ("target_session_attrs=standby", TARGET),
            ("pooler=x", POOLER),
            ("tls=hunter2", "\"tls\""),
            ("connect_timeout=soon", TIMEOUT),
            ("sslrootcert=/no/such/file", "/no/such/file"),
        ] {
            let refused = parse(query).expect_err("not known").to_string();
            assert!(refused.contains(name) && !refused.contains("hunter2"), "{refused}");
        }
    }
}
