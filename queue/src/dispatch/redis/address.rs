//! Redis URLs for a single server, sentinels and a cluster.
//!
//! ```text
//! redis://[user:password@]host[:6379][/db]                        one server
//! redis+sentinel://[user:password@]host[:26379],…/service[/db]    the master that sentinels name
//! redis+cluster://[user:password@]host[:6379],…                   a cluster
//! ```
//!
//! `rediss` instead of `redis` uses TLS, also for the sentinels. User and password are percent-encoded
//! and belong to the data servers; `?sentinel_password=` is for the sentinels. Neither is ever printed:
//! an error names the wrong part of the URL, and [`Address`] prints only hosts.
//!
//! `?shards=N` divides every queue into N shards, which may be on different nodes of a cluster. All processes
//! should have the same number: a worker takes jobs from its own number of shards.
//!
//! Certificate authorities are the system's (or those of `SSL_CERT_FILE`). `?sslrootcert=FILE` names a
//! private authority, `sslcert=FILE&sslkey=FILE` a client certificate. All are PEM files; the names are
//! those of Postgres URLs.

use std::{fmt, io};

use super::tls;
use redis::{
    Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, TlsCertificates, TlsMode,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};

/// Port of a data server.
const PORT: u16 = 6379;
/// Port of a sentinel.
const SENTINEL_PORT: u16 = 26379;
/// Most shards of a queue.
const SHARDS_MAX: u16 = 64;

/// An invalid Redis URL. The error never contains the URL, which may hold a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RedisUrlError {
    /// Unknown or missing scheme.
    #[error(
        "a Redis URL begins with redis://, redis+sentinel:// or redis+cluster:// (rediss for TLS)"
    )]
    Scheme,
    /// Missing or invalid host, with its number.
    #[error("host {0} of the Redis URL is not HOST or HOST:PORT")]
    Host(usize),
    /// More than one host for a single server.
    #[error("redis:// names one server; lists of hosts are for redis+sentinel and redis+cluster")]
    Hosts,
    /// The path is not a database number.
    #[error("the Redis URL's path is not a database number")]
    Database,
    /// A sentinel URL without a service name.
    #[error("a redis+sentinel:// URL needs a service after the hosts: …/SERVICE or …/SERVICE/DB")]
    Service,
    /// User or password cannot be decoded.
    #[error("user or password of the Redis URL are not percent-encoded UTF-8")]
    Credentials,
    /// An unknown parameter.
    #[error(
        "the Redis URL has an unknown parameter (known: shards, sslrootcert, sslcert and sslkey with \
         rediss://, sentinel_password with redis+sentinel://)"
    )]
    Parameter,
    /// The number of shards is not from 1 to [`SHARDS_MAX`].
    #[error("shards of the Redis URL must be a number from 1 to {SHARDS_MAX}")]
    Shards,
    /// A certificate without its key, or a key without its certificate.
    #[error("sslcert and sslkey of the Redis URL must be given together")]
    HalfCertificate,
    /// A certificate file cannot be read.
    #[error("cannot read {parameter} {path} of the Redis URL: {error}")]
    File {
        /// The parameter.
        parameter: &'static str,
        /// The path in the URL.
        path: String,
        /// The cause.
        error: io::Error,
    },
    /// A file holds no certificate or no key.
    #[error("the certificates of the Redis URL cannot be used: {0}")]
    Certificates(String),
}

/// How Redis is deployed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Server,
    Sentinel,
    Cluster,
}

/// A parsed URL.
#[derive(Clone)]
pub(super) struct Address {
    pub kind: Kind,
    tls: bool,
    hosts: Vec<(String, u16)>,
    service: String,
    database: i64,
    /// Shards of each queue.
    pub shards: u16,
    username: Option<String>,
    password: Option<String>,
    sentinel_password: Option<String>,
    certificates: Option<TlsCertificates>,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tls = if self.tls { "s" } else { "" };
        let kind = match self.kind {
            Kind::Server => "",
            Kind::Sentinel => "+sentinel",
            Kind::Cluster => "+cluster",
        };
        let hosts: Vec<String> =
            self.hosts.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        write!(f, "redis{tls}{kind}://{}", hosts.join(","))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Address {
    pub(super) fn parse(url: &str) -> Result<Self, RedisUrlError> {
        let (scheme, rest) = url.trim().split_once("://").ok_or(RedisUrlError::Scheme)?;
        let (tls, kind) = match scheme {
            "redis" => (false, Kind::Server),
            "rediss" => (true, Kind::Server),
            "redis+sentinel" => (false, Kind::Sentinel),
            "rediss+sentinel" => (true, Kind::Sentinel),
            "redis+cluster" => (false, Kind::Cluster),
            "rediss+cluster" => (true, Kind::Cluster),
            _ => return Err(RedisUrlError::Scheme),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        // Credentials end at the last @, so that a password may hold a raw slash.
        let (credentials, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (username, password) = credentials.split_once(':').unwrap_or((credentials, ""));
        let parameters = Parameters::parse(query)?;
        let shards = parameters.shards()?;
        let Parameters { sentinel_password, root, certificate, key, .. } = parameters;
        let is_strange = (sentinel_password.is_some() && kind != Kind::Sentinel)
            || (!tls && (root.is_some() || certificate.is_some() || key.is_some()));
        if is_strange {
            return Err(RedisUrlError::Parameter);
        }
        let (service, database) = match kind {
            Kind::Sentinel => path.split_once('/').unwrap_or((path, "")),
            Kind::Server | Kind::Cluster => ("", path),
        };
        if kind == Kind::Sentinel && service.is_empty() {
            return Err(RedisUrlError::Service);
        }
        let database = match (kind, database.trim_end_matches('/')) {
            (_, "") => 0,
            (Kind::Cluster, _) => return Err(RedisUrlError::Database),
            (_, number) => number.parse::<u16>().map_err(|_| RedisUrlError::Database)?.into(),
        };
        let port = if kind == Kind::Sentinel { SENTINEL_PORT } else { PORT };
        let host = |(index, text)| host(text, port).ok_or(RedisUrlError::Host(index + 1));
        let hosts = hosts.split(',').enumerate().map(host).collect::<Result<Vec<_>, _>>()?;
        if kind == Kind::Server && hosts.len() > 1 {
            return Err(RedisUrlError::Hosts);
        }
        Ok(Self {
            kind,
            tls,
            hosts,
            service: service.to_owned(),
            database,
            shards,
            username: secret(username)?,
            password: secret(password)?,
            sentinel_password,
            certificates: certificates(root, certificate, key)?,
        })
    }

    /// Returns whether to use TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls
    }

    /// Certificates instead of the system's.
    pub(super) fn certificates(&self) -> Option<TlsCertificates> {
        self.certificates.clone()
    }

    fn addresses(&self) -> impl Iterator<Item = ConnectionAddr> {
        self.hosts.iter().cloned().map(|(host, port)| match self.tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        })
    }

    /// Returns user, password and database.
    pub(super) fn login(&self) -> RedisConnectionInfo {
        let mut login = RedisConnectionInfo::default().set_db(self.database);
        if let Some(username) = &self.username {
            login = login.set_username(username);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password);
        }
        login
    }

    /// Returns how to connect to the single server with private authorities, if there are any.
    pub(super) fn private_tls(&self) -> Result<Option<tls::Connector>, RedisError> {
        match (&self.certificates, self.hosts.first()) {
            (Some(certificates), Some(host)) => tls::Connector::new(certificates, host.clone()),
            _ => Ok(None),
        }
    }

    /// Returns a client of one of the data servers, without a login. `None` if sentinels name the servers.
    pub(super) fn anonymous(&self) -> Option<Client> {
        let address = self.addresses().next().filter(|_| self.kind != Kind::Sentinel)?;
        let info = address.into_connection_info().ok()?;
        match self.certificates() {
            Some(certificates) => Client::build_with_tls(info, certificates).ok(),
            None => Client::open(info).ok(),
        }
    }

    /// Returns the commands of the login.
    pub(super) fn login_commands(&self) -> Vec<Cmd> {
        let mut commands = Vec::new();
        if let Some(password) = &self.password {
            let mut login = redis::cmd("AUTH");
            login.arg(self.username.as_slice()).arg(password);
            commands.push(login);
        }
        if self.database != 0 {
            let mut select = redis::cmd("SELECT");
            select.arg(self.database);
            commands.push(select);
        }
        commands
    }

    /// Returns the first host, for a connection without TLS.
    pub(super) fn plain_host(&self) -> Option<(&str, u16)> {
        let (host, port) = self.hosts.first().filter(|_| !self.tls)?;
        Some((host, *port))
    }

    /// Returns how to connect to the single server.
    pub(super) fn server(&self) -> Result<ConnectionInfo, RedisError> {
        let address = self.addresses().next();
        let address =
            address.ok_or_else(|| RedisError::from((ErrorKind::InvalidClientConfig, "no host")))?;
        let info = address.into_connection_info()?.set_redis_settings(self.login());
        match self.certificates() {
            Some(certificates) => Client::build_with_tls(info, certificates)
                .map(|client| client.get_connection_info().clone()),
            None => Ok(info),
        }
    }

    /// Returns a client that asks the sentinels for the master.
    pub(super) fn sentinel(&self) -> Result<SentinelClient, RedisError> {
        let kind = SentinelServerType::Master;
        let mut builder = SentinelClientBuilder::new(self.addresses(), &self.service, kind)?
            .set_client_to_redis_db(self.database);
        if self.tls {
            builder = builder
                .set_client_to_redis_tls_mode(TlsMode::Secure)
                .set_client_to_sentinel_tls_mode(TlsMode::Secure);
        }
        if let Some(certificates) = self.certificates() {
            builder = builder
                .set_client_to_redis_certificates(certificates.clone())
                .set_client_to_sentinel_certificates(certificates);
        }
        if let Some(username) = &self.username {
            builder = builder.set_client_to_redis_username(username);
        }
        if let Some(password) = &self.password {
            builder = builder.set_client_to_redis_password(password);
        }
        if let Some(password) = &self.sentinel_password {
            builder = builder.set_client_to_sentinel_password(password);
        }
        builder.build()
    }

    /// Returns the seed nodes of a cluster.
    pub(super) fn nodes(&self) -> Result<Vec<ConnectionInfo>, RedisError> {
        let login = self.login();
        let node = |address: ConnectionAddr| {
            Ok(address.into_connection_info()?.set_redis_settings(login.clone()))
        };
        self.addresses().map(node).collect()
    }
}

/// The decoded query parameters.
#[derive(Default)]
struct Parameters {
    sentinel_password: Option<String>,
    root: Option<String>,
    certificate: Option<String>,
    key: Option<String>,
    shards: Option<String>,
}

impl Parameters {
    fn parse(query: &str) -> Result<Self, RedisUrlError> {
        let mut found = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').ok_or(RedisUrlError::Parameter)?;
            let place = match name {
                "sentinel_password" => &mut found.sentinel_password,
                "sslrootcert" => &mut found.root,
                "sslcert" => &mut found.certificate,
                "sslkey" => &mut found.key,
                "shards" => &mut found.shards,
                _ => return Err(RedisUrlError::Parameter),
            };
            *place = secret(value)?;
        }
        Ok(found)
    }

    /// Returns the number of shards; 1 if it is not given.
    fn shards(&self) -> Result<u16, RedisUrlError> {
        let Some(text) = &self.shards else { return Ok(1) };
        let shards = text.parse().ok().filter(|shards| (1..=SHARDS_MAX).contains(shards));
        shards.ok_or(RedisUrlError::Shards)
    }
}

/// Reads the certificate files, if any.
fn certificates(
    root: Option<String>,
    certificate: Option<String>,
    key: Option<String>,
) -> Result<Option<TlsCertificates>, RedisUrlError> {
    let read = |parameter, path: String| {
        std::fs::read(&path).map_err(|error| RedisUrlError::File { parameter, path, error })
    };
    let root_cert = root.map(|path| read("sslrootcert", path)).transpose()?;
    let has_one = |pem: &Vec<u8>| String::from_utf8_lossy(pem).contains("BEGIN CERTIFICATE");
    if !root_cert.as_ref().is_none_or(has_one) {
        return Err(RedisUrlError::Certificates("no certificate in sslrootcert".to_owned()));
    }
    let client_tls = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(ClientTlsConfig {
            client_cert: read("sslcert", certificate)?,
            client_key: read("sslkey", key)?,
        }),
        (None, None) => None,
        _ => return Err(RedisUrlError::HalfCertificate),
    };
    let given = root_cert.is_some() || client_tls.is_some();
    Ok(given.then_some(TlsCertificates { client_tls, root_cert }))
}

/// `host`, `host:port`, `[v6]` or `[v6]:port`.
fn host(text: &str, default: u16) -> Option<(String, u16)> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            (host, port.strip_prefix(':').or(port.is_empty().then_some(""))?)
        }
        None => text.split_once(':').unwrap_or((text, "")),
    };
    let port = if port.is_empty() { default } else { port.parse().ok()? };
    let legal = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%');
    (!host.is_empty() && host.chars().all(legal)).then(|| (host.to_owned(), port))
}

/// Decodes a percent-encoded part of a URL; `None` if it is empty.
fn secret(text: &str) -> Result<Option<String>, RedisUrlError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, tail @ ..] = tail else { return Err(RedisUrlError::Credentials) };
        let digit = |byte: &u8| char::from(*byte).to_digit(16);
        let (Some(high), Some(low)) = (digit(high), digit(low)) else {
            return Err(RedisUrlError::Credentials);
        };
        bytes.push(u8::try_from(high * 16 + low).map_err(|_| RedisUrlError::Credentials)?);
        rest = tail;
    }
    let text = String::from_utf8(bytes).map_err(|_| RedisUrlError::Credentials)?;
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_deployment_has_a_url() {
        let check = |url: &str, expect: &str| match Address::parse(url) {
            Ok(address) => assert_eq!(address.to_string(), expect),
            Err(error) => panic!("{url}: {error}"),
        };
        check("redis://localhost", "redis://localhost:6379");
        check("rediss://u:p%40ss@h:1/3", "rediss://h:1");
        check("redis://[::1]:7/0", "redis://::1:7");
        check("redis+sentinel://:p@a,b:5/main/2", "redis+sentinel://a:26379,b:5");
        check("redis+sentinel://a/main?sentinel_password=x", "redis+sentinel://a:26379");
        check("rediss+cluster://u:p@a:1,b:2", "rediss+cluster://a:1,b:2");
    }

    #[test]
    fn credentials_are_decoded_and_never_printed() {
        let address = Address::parse("redis://me:s3cr%2Ft@h/1").expect("a URL");
        assert_eq!(address.password.as_deref(), Some("s3cr/t"));
        assert_eq!((address.username.as_deref(), address.database), (Some("me"), 1));
        assert_eq!(address.shards, 1);
        assert_eq!(Address::parse("redis+cluster://h?shards=64").expect("a URL").shards, 64);
        assert!(!format!("{address:?} {address}").contains("s3cr"));
    }

    #[test]
    fn invalid_url_is_refused_without_repeating_it() {
        let wrong = [
            "http://:s3cret@h",
            "s3cret",
            "redis://:s3cret@",
            "redis://:s3cret@h:port",
            "redis://:s3cret@a,b",
            "redis://:s3cret@h/x",
            "redis://:s3cret%4@h",
            "redis://:s3cret@h?x=1",
            "redis+sentinel://:s3cret@a,b",
            "redis+cluster://:s3cret@a,b/1",
            "redis://:s3cret@h/99999999999",
            "redis://:s3cret@h?shards=0",
            "redis://:s3cret@h?shards=65",
            "redis://:s3cret@h?shards=two",
        ];
        for url in wrong {
            let Err(error) = Address::parse(url) else { panic!("{url} was taken") };
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error}");
        }
    }
}
