//! Connections to Redis, whichever way it is run.
//!
//! Commands that answer at once share one multiplexed connection. Blocking reads have connections of
//! their own: one at a time uses each, its response timeout is longer than any wait, and whatever
//! ends a read early (an error, a dropped future) closes it. A broken shared connection is dropped
//! and the next command makes another, which asks the sentinels again; a cluster's connection
//! follows the cluster by itself.

use std::{
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{
    AsyncConnectionConfig, Client, Cmd, FromRedisValue, Pipeline, RedisError, RedisFuture,
    RedisResult, ToRedisArgs, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster::ClusterClient,
    cluster_async::ClusterConnection,
    sentinel::SentinelClient,
};

use super::{
    address::{Address, Kind},
    scripts::Script,
};

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long it may take to find out where to connect, and to connect.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a command that does not block may take.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait of one blocking read.
pub(crate) const BLOCK_MAX: Duration = Duration::from_secs(5);
/// How long a blocking read may take, with its wait.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(8);
const _: () = assert!(
    BLOCKING_TIMEOUT.as_millis() >= BLOCK_MAX.as_millis() + RESPONSE_TIMEOUT.as_millis(),
    "a read that waits its full time is not late"
);
/// Connections for blocking reads that are kept for the next one.
const IDLE_MAX: usize = 16;

/// How to get a connection.
enum Source {
    Server(Client),
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

/// The connections of one process to one Redis.
pub(crate) struct Connections {
    address: Address,
    source: Source,
    /// The shared connection and its number. Async, so that one caller connects while others wait.
    shared: tokio::sync::Mutex<Option<(u64, Link)>>,
    opened: AtomicU64,
    /// Connections for blocking reads between two reads.
    idle: Mutex<Vec<Link>>,
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Connections {
    /// Connects to nothing yet.
    pub(super) fn new(address: Address) -> RedisResult<Self> {
        let source = match address.kind {
            Kind::Server => Source::Server(address.client()?),
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
                        .build()
                        .map(Box::new)
                };
                let (shared, blocking) = (cluster(RESPONSE_TIMEOUT)?, cluster(BLOCKING_TIMEOUT)?);
                Source::Cluster { shared, blocking }
            }
        };
        let (opened, idle) = (AtomicU64::new(0), Mutex::default());
        Ok(Self { address, source, shared: tokio::sync::Mutex::new(None), opened, idle })
    }

    /// A new connection. Sentinels and nodes are asked one by one, each within its own timeout, so
    /// there is one for all of them too.
    async fn open(&self, blocking: bool) -> RedisResult<Link> {
        match tokio::time::timeout(OPEN_TIMEOUT, self.open_at_last(blocking)).await {
            Ok(opened) => opened.map_err(|error| self.unopened(&error)),
            Err(_) => Err(RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut))),
        }
    }

    /// Says where there was no connection, and what to look at when the other side speaks TLS and
    /// this one does not, or the other way round.
    fn unopened(&self, error: &RedisError) -> RedisError {
        let is_refusal = error.is_connection_refusal();
        let is_mute = error.is_timeout()
            || error.is_connection_dropped()
            || error.kind() == redis::ErrorKind::Parse;
        let hint = match (self.address.is_tls(), is_mute && !is_refusal) {
            (_, false) => "",
            (true, true) => " (does it speak TLS? redis:// does without)",
            (false, true) => " (does it want TLS? that is rediss://)",
        };
        let kind = match (is_refusal, error.is_timeout()) {
            (true, _) => std::io::ErrorKind::ConnectionRefused,
            (false, true) => std::io::ErrorKind::TimedOut,
            (false, false) => std::io::ErrorKind::Other,
        };
        let text = format!("cannot connect to {}: {error}{hint}", self.address);
        RedisError::from(std::io::Error::new(kind, text))
    }

    async fn open_at_last(&self, blocking: bool) -> RedisResult<Link> {
        let timeout = if blocking { BLOCKING_TIMEOUT } else { RESPONSE_TIMEOUT };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(timeout));
        match &self.source {
            Source::Server(client) => {
                let connection = client.get_multiplexed_async_connection_with_config(&config);
                connection.await.map(Link::Server)
            }
            Source::Sentinel(client) => {
                let mut client = client.lock().await;
                client.get_async_connection_with_config(&config).await.map(Link::Server)
            }
            Source::Cluster { shared, blocking: longer } => {
                let client = if blocking { longer } else { shared };
                client.get_async_connection().await.map(Link::Cluster)
            }
        }
    }

    async fn shared(&self) -> RedisResult<(u64, Link)> {
        let mut shared = self.shared.lock().await;
        if let Some((number, link)) = shared.as_ref() {
            return Ok((*number, link.clone()));
        }
        let link = self.open(false).await?;
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        *shared = Some((number, link.clone()));
        Ok((number, link))
    }

    /// Forgets the shared connection with this number, unless another took its place.
    async fn drop_shared(&self, number: u64) {
        let mut shared = self.shared.lock().await;
        if shared.as_ref().is_some_and(|(current, _)| *current == number) {
            *shared = None;
        }
    }

    /// Sends a command once. A connection that breaks over it is not used again.
    pub(crate) async fn query<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        let (number, mut link) = self.shared().await?;
        let result = command.query_async(&mut link).await;
        if result.as_ref().is_err_and(breaks) {
            self.drop_shared(number).await;
        }
        result
    }

    /// Sends a pipeline once, to one slot.
    pub(crate) async fn pipeline(&self, pipeline: &Pipeline) -> RedisResult<()> {
        let (number, mut link) = self.shared().await?;
        let result = pipeline.query_async::<()>(&mut link).await;
        if result.as_ref().is_err_and(breaks) {
            self.drop_shared(number).await;
        }
        result
    }

    /// Runs a script once; a server that does not know it is given its text.
    pub(crate) async fn run<T: FromRedisValue, A: ToRedisArgs + Sync>(
        &self,
        script: &Script,
        prefix: &str,
        arguments: &[A],
    ) -> RedisResult<T> {
        match self.query(&script.by_hash(prefix, arguments)).await {
            Err(error) if is_no_script(&error) => {
                self.query(&script.by_text(prefix, arguments)).await
            }
            result => result,
        }
    }

    /// Runs a script that may run twice; a connection found broken is replaced and it is sent again,
    /// so that a Redis that came back is no error.
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

    /// Sends a command that blocks for up to [`BLOCK_MAX`] on a connection that nobody else uses.
    /// Dropping the future closes the connection, and with it the wait in Redis.
    pub(crate) async fn block<T: FromRedisValue>(&self, command: &Cmd) -> RedisResult<T> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (fresh, mut link) = match idle {
            Some(link) => (false, link),
            None => (true, self.open(true).await?),
        };
        let mut result = command.query_async(&mut link).await;
        if !fresh && result.as_ref().is_err_and(|error| breaks(error) && !error.is_timeout()) {
            // It broke while it was idle, as all its kind did.
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
            link = self.open(true).await?;
            result = command.query_async(&mut link).await;
        }
        if !result.as_ref().is_err_and(breaks) {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_MAX {
                idle.push(link);
            }
        }
        result
    }
}

fn is_no_script(error: &RedisError) -> bool {
    error.kind() == redis::ErrorKind::Server(redis::ServerErrorKind::NoScript)
}

/// Whether a connection is of no more use after this error. A server that turned into a replica is
/// as good as gone: the sentinels know another.
pub(super) fn breaks(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || error.is_timeout()
        || error.is_unrecoverable_error()
        || matches!(error.code(), Some("READONLY" | "MASTERDOWN" | "LOADING"))
}
