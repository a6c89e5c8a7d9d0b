//! The servers of a database: one, or the members of a replicated cluster, of which one takes writes.
//!
//! After a failover another member takes writes. It is looked for when a call fails, and later
//! connections go there. Connections to a server that became read-only are closed.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgConnectOptions};
use tokio::time::timeout;

use super::{
    CONNECTION_SETTINGS, PLANNED_EACH_TIME, PLANNED_ONCE, PostgresStore, Settings, calls::query,
    pool::PoolOptions,
};
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
    /// Longest time to open a connection; `None`: as long as a call may wait for one.
    pub(super) connect_timeout: Option<Duration>,
}

/// No server takes writes.
#[derive(Debug, thiserror::Error)]
#[error("no server takes writes: {}", .0.join("; "))]
pub(super) struct NoPrimary(Vec<String>);

impl Hosts {
    /// Returns the options of connections to a server. With `planning` they have settings of their own
    /// unless a pooler shares the connections.
    pub(super) fn with(&self, index: usize, planning: Option<Settings>) -> PgConnectOptions {
        let server = self.servers[index].clone();
        match planning {
            // A pooler refuses parameters of a connection that it does not know.
            _ if self.is_pooled => server.extra_float_digits(None),
            Some(planning) => server.options(CONNECTION_SETTINGS.iter().chain(planning).copied()),
            None => server,
        }
    }

    /// Returns the options of a pool of up to `max` connections, of which one is always there. `limit` is the longest
    /// wait for a connection.
    pub(super) fn pool_options(&self, max: usize, limit: Duration) -> PoolOptions {
        PoolOptions {
            base: 1,
            max,
            acquire_timeout: limit,
            connect_timeout: self.connect_timeout.unwrap_or(limit),
            is_pooled: self.is_pooled,
        }
    }

    /// Returns the index of the first server to answer that it takes writes. Does not wait for the others:
    /// after a failover the earlier one often does not answer.
    ///
    /// # Errors
    /// With the reason for each server.
    pub(super) async fn primary(&self) -> Result<usize, NoPrimary> {
        let ask = async |index| (index, refusal(self.with(index, None)).await);
        let mut answers: FuturesUnordered<_> = (0..self.servers.len()).map(ask).collect();
        let mut reasons = Vec::with_capacity(self.servers.len());
        while let Some((index, answer)) = answers.next().await {
            match answer {
                None => return Ok(index),
                Some(reason) => reasons.push((index, reason)),
            }
        }
        reasons.sort_unstable();
        Err(NoPrimary(reasons.into_iter().map(|(_, reason)| reason).collect()))
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
pub(super) struct CurrentHost(Mutex<Current>);

#[derive(Debug)]
struct Current {
    index: usize,
    /// Connections from before this time are closed before use.
    since: Instant,
    /// When the last search for the server that takes writes began.
    searched: Option<Instant>,
    is_searching: bool,
}

/// A search for the server that takes writes. No other one begins until it is dropped.
struct Search(Arc<CurrentHost>);

impl Drop for Search {
    fn drop(&mut self) {
        self.0.0.lock().is_searching = false;
    }
}

impl CurrentHost {
    pub(super) fn new(index: usize) -> Self {
        let since = Instant::now();
        Self(Mutex::new(Current { index, since, searched: None, is_searching: false }))
    }

    /// Returns whether a connection of this age may be used.
    pub(super) fn is_current(&self, age: Duration) -> bool {
        age <= self.0.lock().since.elapsed()
    }

    /// Begins a search if one is due.
    fn search(self: &Arc<Self>) -> Option<Search> {
        let mut current = self.0.lock();
        let is_due = current.searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL);
        if current.is_searching || !is_due {
            return None;
        }
        (current.is_searching, current.searched) = (true, Some(Instant::now()));
        Some(Search(Arc::clone(self)))
    }

    /// Lets the connections be closed after a call that began at this time failed. Those that were
    /// opened after the last renewal stay if the call began before it: it may have used an earlier one.
    fn renew_after_call(&self, began: Instant) {
        let mut current = self.0.lock();
        if began >= current.since {
            current.since = Instant::now();
        }
    }

    /// Lets all connections be closed.
    fn renew(&self) {
        self.0.lock().since = Instant::now();
    }

    /// Notes the server of new connections; returns whether it is another one.
    pub(super) fn set_index(&self, index: usize) -> bool {
        std::mem::replace(&mut self.0.lock().index, index) != index
    }
}

impl PostgresStore {
    /// Closes the connections to a server that became read-only. Looks for the server that takes writes,
    /// without waiting for it. `began` is when the failed call began.
    pub(super) fn on_unavailable(&self, error: &StoreError, began: Instant) {
        if error.is_read_only() {
            self.host.renew_after_call(began);
        }
        if !self.hosts.must_write {
            return;
        }
        let Some(search) = self.host.search() else { return };
        let store = self.clone();
        tokio::spawn(async move {
            // If none is found, the next failed call looks again.
            let found = store.hosts.primary().await;
            if let Ok(index) = found
                && store.host.set_index(index)
            {
                let address = address(&store.hosts.servers[index]);
                tracing::warn!(address, "another database server takes writes now");
                let options = |planning| store.hosts.with(index, Some(planning));
                store.pool.set_server(options(PLANNED_EACH_TIME));
                store.hot.set_server(options(PLANNED_ONCE));
                // A connection that is being opened now leads to the earlier server and stays until a call
                // fails on it.
                store.host.renew();
            }
            drop(search);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_search_runs_at_a_time() {
        let host = Arc::new(CurrentHost::new(0));
        let search = host.search().expect("the first one");
        host.0.lock().searched = Instant::now().checked_sub(SEARCH_INTERVAL);
        assert!(host.search().is_none(), "one runs");
        drop(search);
        let search = host.search().expect("none runs");
        drop(search);
        assert!(host.search().is_none(), "the last one began a moment ago");
    }

    #[test]
    fn late_failure_of_an_earlier_call_closes_no_newer_connection() {
        let host = CurrentHost::new(0);
        let before = Instant::now().checked_sub(SEARCH_INTERVAL).expect("the machine is up");
        host.0.lock().since = before;
        host.renew_after_call(before);
        let renewed = host.0.lock().since;
        assert!(renewed > before, "the call used a connection of the earlier server");
        assert!(!host.is_current(SEARCH_INTERVAL));
        host.renew_after_call(before);
        assert_eq!(host.0.lock().since, renewed);
        assert!(host.is_current(Duration::ZERO));
    }
}
