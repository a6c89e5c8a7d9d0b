//! The servers of a database: one, or the members of a replicated cluster, of which one takes writes.
//!
//! After a failover another member takes writes. It is looked for when a call fails, and later
//! connections go there. Connections to a server that became read-only are closed.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};
use tokio::time::timeout;

use super::{PLANNED_EACH_TIME, PLANNED_ONCE, PostgresStore, calls::query, settings};
use crate::store::{StoreError, error::without_source_line};

/// How long a server may take to say whether it takes writes.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// The shortest time between two searches for the server that takes writes.
const SEARCH_INTERVAL: Duration = Duration::from_millis(500);

/// The servers of a database, as its URL names them.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    pub(super) servers: Vec<PgConnectOptions>,
    /// Whether to connect only to a server that takes writes.
    pub(super) must_write: bool,
    /// Whether connections go through a pooler that shares them between transactions: they then have
    /// no settings of their own.
    pub(super) is_pooled: bool,
}

/// No server takes writes.
#[derive(Debug, thiserror::Error)]
#[error("no server takes writes: {}", .0.join("; "))]
pub(super) struct NoPrimary(Vec<String>);

impl Hosts {
    /// Returns the options of connections to a server, with settings of their own unless a pooler
    /// shares the connections.
    pub(super) fn with(&self, index: usize, settings: &[(&str, &str)]) -> PgConnectOptions {
        let server = self.servers[index].clone();
        match self.is_pooled {
            // A pooler refuses parameters of a connection that it does not know.
            true => server.extra_float_digits(None),
            false => server.options(settings.iter().copied()),
        }
    }

    /// Returns the index of the first server that takes writes.
    ///
    /// # Errors
    /// With the reason for each server.
    pub(super) async fn primary(&self) -> Result<usize, NoPrimary> {
        let servers = 0..self.servers.len();
        let answers = join_all(servers.map(|index| refusal(self.with(index, &[])))).await;
        match answers.iter().position(Option::is_none) {
            Some(index) => Ok(index),
            None => Err(NoPrimary(answers.into_iter().flatten().collect())),
        }
    }
}

/// Returns `HOST:PORT`, or the path of the socket.
pub(super) fn address(server: &PgConnectOptions) -> String {
    server.get_socket().map_or_else(
        || format!("{}:{}", server.get_host(), server.get_port()),
        |socket| socket.display().to_string(),
    )
}

/// Asks a server whether it takes writes; if not, returns its address and the reason.
async fn refusal(server: PgConnectOptions) -> Option<String> {
    let asked = timeout(ANSWER_LIMIT, async {
        let mut connection = PgConnection::connect_with(&server).await?;
        let row = query("SHOW transaction_read_only").fetch_one(&mut connection).await?;
        let is_read_only = row.try_get::<String, _>(0)? == "on";
        connection.close().await?;
        Ok::<_, sqlx::Error>(is_read_only)
    });
    let reason = match asked.await {
        Ok(Ok(false)) => return None,
        Ok(Ok(true)) => "it is read-only".to_owned(),
        Ok(Err(error)) => without_source_line(error).to_string(),
        Err(_) => format!("no answer within {ANSWER_LIMIT:?}"),
    };
    Some(format!("{}: {reason}", address(&server)))
}

/// Where new connections go, and since when.
#[derive(Debug)]
pub(super) struct CurrentHost {
    index: AtomicUsize,
    /// Connections from before this time are closed before use.
    since: Mutex<Instant>,
    searched: Mutex<Option<Instant>>,
}

impl CurrentHost {
    pub(super) fn new(index: usize) -> Self {
        let since = Mutex::new(Instant::now());
        Self { index: AtomicUsize::new(index), since, searched: Mutex::new(None) }
    }

    /// Returns whether a connection of this age may be used.
    pub(super) fn is_current(&self, age: Duration) -> bool {
        age <= self.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// Returns whether a search is due; then the next one is due after a moment.
    pub(super) fn may_search(&self) -> bool {
        let mut searched = self.searched.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL);
        if is_due {
            *searched = Some(Instant::now());
        }
        is_due
    }

    /// Lets earlier connections be closed.
    pub(super) fn renew(&self) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Sends new connections to this server; returns whether it is another one.
    pub(super) fn move_to(&self, index: usize) -> bool {
        let is_other = self.index.swap(index, Ordering::Relaxed) != index;
        if is_other {
            self.renew();
        }
        is_other
    }
}

impl PostgresStore {
    /// Closes the connections to a server that became read-only. Looks for the server that takes writes,
    /// without waiting for it.
    pub(super) fn on_unavailable(&self, error: &StoreError) {
        if error.is_read_only() {
            self.host.renew();
        }
        if !self.hosts.must_write || !self.host.may_search() {
            return;
        }
        let store = self.clone();
        tokio::spawn(async move {
            // If none is found, the next failed call looks again.
            let Ok(index) = store.hosts.primary().await else { return };
            if store.host.move_to(index) {
                let address = address(&store.hosts.servers[index]);
                tracing::warn!(address, "another database server takes writes now");
                let options = |planning| store.hosts.with(index, &settings(planning));
                store.pool.set_connect_options(options(PLANNED_EACH_TIME));
                store.hot.set_connect_options(options(PLANNED_ONCE));
            }
        });
    }
}
