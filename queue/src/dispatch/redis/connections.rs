//! Connections to one Redis server, a master behind sentinels, or a cluster.
//!
//! Commands that answer at once share one multiplexed connection. Each blocking read has a pooled
//! connection to itself, with a response timeout longer than any wait; a read that ends early (an
//! error or a dropped future) closes its connection instead of returning it to the pool. A broken
//! shared connection is dropped and the next command opens another, which asks the sentinels again; a
//! cluster connection follows the cluster by itself.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use deadpool::{
    Runtime, Status,
    managed::{Manager, Metrics, Object, Pool, PoolError, RecycleResult},
};
use redis::{
    AsyncConnectionConfig, Cmd, FromRedisValue, Pipeline, RedisConnectionInfo, RedisError,
    RedisFuture, RedisResult, ToRedisArgs, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster::ClusterClient,
    cluster_async::ClusterConnection,
    sentinel::SentinelClient,
};

use tokio::{io::AsyncReadExt as _, net::TcpStream};

use super::{
    address::{Address, Kind},
    inner::words,
    scripts::{Script, keys_of},
    tls,
};

/// Limit for one connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit for finding the server and connecting to it.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit for a command that does not block.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a cluster's client sends a command again that a node refuses for the moment, as it does
/// while a slot moves (`TRYAGAIN`, `ASK`, `MOVED`).
const CLUSTER_RETRIES: u32 = 10;
/// Shortest and longest wait before that, in milliseconds. All waits together are shorter than
/// [`RESPONSE_TIMEOUT`], so that the caller gets the refusal and keeps the connection.
const CLUSTER_WAIT_MS: (u64, u64) = (10, 150);
const _: () = assert!(
    CLUSTER_RETRIES as u128 * CLUSTER_WAIT_MS.1 as u128 <= RESPONSE_TIMEOUT.as_millis(),
    "a command is not late because of its retries"
);
/// Longest wait for what a server says by itself, and the most that is read, in bytes.
const GREETING_TIMEOUT: Duration = Duration::from_millis(200);
const GREETING_MAX: usize = 256;
/// Longest wait of one blocking read.
pub(crate) const BLOCK_MAX: Duration = Duration::from_secs(5);
/// Limit for a blocking read, including its wait.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(8);
const _: () = assert!(
    BLOCKING_TIMEOUT.as_millis() >= BLOCK_MAX.as_millis() + RESPONSE_TIMEOUT.as_millis(),
    "a read that waits its full time is not late"
);
/// Maximum number of concurrent blocking reads, more than the streams of an API server; further
/// reads wait for a connection.
const BLOCKING_MAX: usize = 1 << 14;
/// Idle connections for blocking reads that are kept.
const IDLE_MAX: usize = 16;

/// The clients that open connections.
enum Source {
    Server { manager: deadpool_redis::Manager, private_tls: Option<tls::Connector> },
    Sentinel(tokio::sync::Mutex<SentinelClient>),
    Cluster { shared: Box<ClusterClient>, blocking: Box<ClusterClient> },
}

/// A connection.
#[derive(Clone)]
pub(crate) enum Link {
    /// To one server.
    Server(MultiplexedConnection),
    /// To the nodes of a cluster.
    Cluster(ClusterConnection),
}

impl ConnectionLike for Link {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Server(connection) => connection.req_packed_command(cmd),
            Self::Cluster(connection) => connection.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Server(connection) => connection.req_packed_commands(pipeline, offset, count),
            Self::Cluster(connection) => connection.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Server(connection) => connection.get_db(),
            Self::Cluster(connection) => connection.get_db(),
        }
    }
}

/// Opens connections and manages the pool of connections for blocking reads. A plain server uses the manager of
/// `deadpool-redis`. Its managers for sentinels and clusters accept no response timeouts and no certificates (0.23).
struct Connector {
    address: Address,
    source: Source,
}

impl Manager for Connector {
    type Type = Link;
    type Error = RedisError;

    async fn create(&self) -> RedisResult<Link> {
        self.open(true).await
    }

    async fn recycle(&self, _: &mut Link, _: &Metrics) -> RecycleResult<RedisError> {
        // The next read finds out whether the connection still works.
        Ok(())
    }
}

/// No connection can be made. The message has no password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {}{hint}", words(source))]
pub(super) struct CannotConnect {
    address: String,
    /// The cause.
    pub(super) source: RedisError,
    hint: &'static str,
}

impl CannotConnect {
    /// Returns the one inside of an error.
    pub(super) fn of(error: &RedisError) -> Option<&Self> {
        let inner = std::error::Error::source(error)?;
        let shared = inner.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>()?;
        shared.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()
    }
}

impl Connector {
    fn new(address: Address) -> RedisResult<Self> {
        let source = match address.kind {
            Kind::Server => {
                let manager = deadpool_redis::Manager::new_with_config(address.server()?, config());
                Source::Server { manager: manager?, private_tls: address.private_tls()? }
            }
            Kind::Sentinel => Source::Sentinel(tokio::sync::Mutex::new(address.sentinel()?)),
            Kind::Cluster => {
                let cluster = |timeout: Duration| {
                    let mut builder = ClusterClient::builder(address.nodes()?);
                    if let Some(certificates) = address.certificates() {
                        builder = builder.certs(certificates);
                    }
                    builder
                        .connection_timeout(CONNECT_TIMEOUT)
                        .response_timeout(timeout)
                        .overall_response_timeout(Some(timeout))
                        .retries(CLUSTER_RETRIES)
                        .min_retry_wait(CLUSTER_WAIT_MS.0)
                        .max_retry_wait(CLUSTER_WAIT_MS.1)
                        .build()
                        .map(Box::new)
                };
                let (shared, blocking) = (cluster(RESPONSE_TIMEOUT)?, cluster(BLOCKING_TIMEOUT)?);
                Source::Cluster { shared, blocking }
            }
        };
        Ok(Self { address, source })
    }

    /// Opens a connection. Sentinels and nodes are tried one by one, each with its own timeout, so
    /// a total timeout applies as well.
    async fn open(&self, blocking: bool) -> RedisResult<Link> {
        let error = match tokio::time::timeout(OPEN_TIMEOUT, self.connect(blocking)).await {
            Ok(Ok(link)) => return Ok(link),
            Ok(Err(error)) => self.words_of_server().await.unwrap_or(error),
            Err(_) => RedisError::from(io::Error::from(io::ErrorKind::TimedOut)),
        };
        Err(self.cannot_connect(error))
    }

    /// Returns why the server refuses the login, in its own words: the library does not tell. It says the same of a
    /// wrong password and of a server that has too many clients.
    async fn words_of_server(&self) -> Option<RedisError> {
        let asked = async {
            let mut link = match &self.source {
                Source::Server { private_tls: Some(connector), .. } => {
                    connector.connect(&RedisConnectionInfo::default(), config()).await
                }
                _ => {
                    let client = self.address.anonymous()?;
                    client.get_multiplexed_async_connection_with_config(&config()).await
                }
            }
            .ok()?;
            for command in self.address.login_commands() {
                if let Err(error) = command.query_async::<Value>(&mut link).await {
                    return Some(error);
                }
            }
            // A password is missing, or what failed works now.
            redis::cmd("PING").query_async::<Value>(&mut link).await.err()
        };
        let answer = tokio::time::timeout(RESPONSE_TIMEOUT, asked).await.ok()?;
        match answer.filter(|error| error.code().is_some()) {
            Some(error) => Some(error),
            None => tokio::time::timeout(GREETING_TIMEOUT, self.greeting()).await.ok()?,
        }
    }

    /// Returns what a server says that closes a connection at once; others wait for a command.
    async fn greeting(&self) -> Option<RedisError> {
        let mut stream = TcpStream::connect(self.address.plain_host()?).await.ok()?;
        let mut said = [0; GREETING_MAX];
        let length = stream.read(&mut said).await.ok()?;
        let said = std::str::from_utf8(&said[..length]).ok()?.strip_prefix('-')?.trim_end();
        Some((redis::ErrorKind::Extension, "the server says", said.to_owned()).into())
    }

    /// Adds the address, and a hint when one side seems to speak TLS and the other does not.
    fn cannot_connect(&self, source: RedisError) -> RedisError {
        let is_refusal = source.is_connection_refusal();
        let is_mute = source.is_timeout()
            || source.is_connection_dropped()
            || source.kind() == redis::ErrorKind::Parse;
        let hint = match (self.address.is_tls(), is_mute && !is_refusal) {
            (_, false) => "",
            (true, true) => " (the server may not use TLS: try redis://)",
            (false, true) => " (the server may require TLS: try rediss://)",
        };
        let kind = match (is_refusal, source.is_timeout()) {
            (true, _) => io::ErrorKind::ConnectionRefused,
            (false, true) => io::ErrorKind::TimedOut,
            (false, false) => io::ErrorKind::Other,
        };
        let address = self.address.to_string();
        RedisError::from(io::Error::new(kind, CannotConnect { address, source, hint }))
    }

    async fn connect(&self, blocking: bool) -> RedisResult<Link> {
        let mut connection = match &self.source {
            Source::Server { private_tls: Some(connector), .. } => {
                connector.connect(&self.address.login(), config()).await?
            }
            Source::Server { manager, .. } => manager.create().await?,
            Source::Sentinel(client) => {
                client.lock().await.get_async_connection_with_config(&config()).await?
            }
            Source::Cluster { shared, blocking: longer } => {
                let client = if blocking { longer } else { shared };
                return client.get_async_connection().await.map(Link::Cluster);
            }
        };
        connection.set_response_timeout(if blocking { BLOCKING_TIMEOUT } else { RESPONSE_TIMEOUT });
        Ok(Link::Server(connection))
    }
}

/// How to connect to one server.
fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(Some(RESPONSE_TIMEOUT))
}

/// A pooled connection during a read; dropping it closes the connection.
struct Reading(Option<Object<Connector>>);

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.take().map(Object::take);
    }
}

/// Connections for blocking reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockingConnections {
    /// Open connections without a read.
    pub idle: usize,
    /// Open connections with a read.
    pub in_use: usize,
    /// Maximum number of connections.
    pub max: usize,
    /// Reads that wait for a connection.
    pub waiting: usize,
}

/// The connections of one process to one Redis.
pub(crate) struct Connections {
    /// Connections for blocking reads.
    pool: Pool<Connector>,
    /// The shared connection and its number. Async, so that one caller connects while others wait.
    shared: tokio::sync::Mutex<Option<(u64, Link)>>,
    opened: AtomicU64,
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.pool.manager().address;
        f.debug_struct("Connections").field("address", address).finish_non_exhaustive()
    }
}

impl Connections {
    /// Returns the number of shards of each queue.
    pub(crate) fn shards(&self) -> u16 {
        self.pool.manager().address.shards
    }

    /// Prepares the clients; connects on first use.
    pub(super) fn new(address: Address) -> RedisResult<Self> {
        let pool = Pool::builder(Connector::new(address)?)
            .max_size(BLOCKING_MAX)
            .wait_timeout(Some(OPEN_TIMEOUT))
            .runtime(Runtime::Tokio1)
            .build()
            .expect("the pool has a runtime for its timeout");
        Ok(Self { pool, shared: tokio::sync::Mutex::new(None), opened: AtomicU64::new(0) })
    }

    /// Returns the state of the connections for blocking reads.
    pub(super) fn blocking(&self) -> BlockingConnections {
        let Status { max_size: max, size, available: idle, waiting } = self.pool.status();
        BlockingConnections { idle, in_use: size.saturating_sub(idle), max, waiting }
    }

    async fn shared(&self) -> RedisResult<(u64, Link)> {
        let mut shared = self.shared.lock().await;
        if let Some((number, link)) = shared.as_ref() {
            return Ok((*number, link.clone()));
        }
        let link = self.pool.manager().open(false).await?;
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        *shared = Some((number, link.clone()));
        Ok((number, link))
    }

    /// Drops the shared connection with this number, unless another has replaced it.
    async fn drop_shared(&self, number: u64) {
        let mut shared = self.shared.lock().await;
        if shared.as_ref().is_some_and(|(current, _)| *current == number) {
            *shared = None;
        }
    }

    /// Sends a command once. A connection that breaks is not used again.
    pub(crate) async fn query<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        let (number, mut link) = self.shared().await?;
        let result = command.query_async(&mut link).await;
        if result.as_ref().is_err_and(breaks) {
            self.drop_shared(number).await;
        }
        result.map_err(|error| self.with_kind(error))
    }

    /// Names the mistake if a node of a cluster is used as a single server. A cluster's client follows such answers.
    fn with_kind(&self, error: RedisError) -> RedisError {
        let is_moved = error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::Moved);
        if is_moved && self.pool.manager().address.kind == Kind::Server {
            let kind = redis::ErrorKind::InvalidClientConfig;
            return (kind, "this server is a node of a cluster").into();
        }
        error
    }

    /// Sends an idempotent command; again on a new connection if the connection is broken.
    pub(crate) async fn query_again<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        match self.query(command).await {
            Err(error) if breaks(&error) && !error.is_timeout() => self.query(command).await,
            result => result,
        }
    }

    /// Runs a script of a queue once; sends its text if the server does not know its hash.
    pub(crate) async fn run<T: FromRedisValue, A: ToRedisArgs + Sync>(
        &self,
        script: &Script,
        prefix: &str,
        arguments: &[A],
    ) -> RedisResult<T> {
        self.run_on(script, &keys_of(prefix), arguments).await
    }

    /// Runs a script once, with these keys.
    pub(crate) async fn run_on<T: FromRedisValue, A: ToRedisArgs + Sync>(
        &self,
        script: &Script,
        keys: &[String],
        arguments: &[A],
    ) -> RedisResult<T> {
        match self.query(&script.by_hash(keys, arguments)).await {
            Err(error) if is_no_script(&error) => {
                self.query(&script.by_text(keys, arguments)).await
            }
            result => result,
        }
    }

    /// Runs an idempotent script; sends it again on a new connection if the connection is broken, so
    /// that a restarted Redis causes no error.
    pub(crate) async fn run_again<T: FromRedisValue, A: ToRedisArgs + Sync>(
        &self,
        script: &Script,
        prefix: &str,
        arguments: &[A],
    ) -> RedisResult<T> {
        match self.run(script, prefix, arguments).await {
            Err(error) if breaks(&error) && !error.is_timeout() => {
                self.run(script, prefix, arguments).await
            }
            result => result,
        }
    }

    /// Sends a command that blocks for up to [`BLOCK_MAX`] on a connection of its own. Dropping the
    /// future closes the connection, and with it the wait in Redis.
    pub(crate) async fn block<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        let link = self.pooled().await?;
        let was_idle = Object::metrics(&link).recycle_count > 0;
        match self.read(link, command).await {
            Err(error) if was_idle && breaks(&error) && !error.is_timeout() => {
                // The connection broke while it was idle, and so did the other idle connections.
                self.pool.retain(|_, _| false);
                self.read(self.pooled().await?, command).await
            }
            result => result,
        }
    }

    async fn pooled(&self) -> RedisResult<Object<Connector>> {
        self.pool.get().await.map_err(|error| match error {
            PoolError::Backend(error) => error,
            other => RedisError::from(io::Error::new(io::ErrorKind::TimedOut, other.to_string())),
        })
    }

    async fn read<T: FromRedisValue>(
        &self,
        link: Object<Connector>,
        command: &Cmd,
    ) -> RedisResult<T> {
        let mut reading = Reading(Some(link));
        let link = reading.0.as_deref_mut().expect("put there above");
        let result = command.query_async(link).await;
        if !result.as_ref().is_err_and(breaks) && self.pool.status().available < IDLE_MAX {
            // Returns the connection to the pool.
            drop(reading.0.take());
        }
        result
    }
}

fn is_no_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript)
}

/// Returns whether a connection is unusable after this error. This includes the error of a server
/// that became a replica: the sentinels then name the new master.
pub(super) fn breaks(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_timeout()
        || error.is_unrecoverable_error()
        || matches!(error.code(), Some("READONLY" | "MASTERDOWN" | "LOADING"))
}
