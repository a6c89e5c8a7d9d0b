//! A pool of connections that takes what the server can spare.
//!
//! A pool begins with its base of one connection or none, and its callers share what it has. While some wait, it opens
//! another connection, unless the server then has few left; while the server has few left, pools give back what is
//! above their base, one connection at a time. So many processes work on a server with few connections, and a new
//! process finds one.

use std::{
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{NoAnswer, hosts::CurrentHost, spare};
use crate::{
    refusal::{self, Needs, Refusal},
    store::{
        StoreError,
        error::{sqlstate, without_source_line},
    },
};

/// A connection that was idle for longer is checked before use: the server may have restarted. Shorter
/// than any restart, so that a restart fails only the calls in progress.
const TRUSTED_IDLE: Duration = Duration::from_millis(100);
/// A connection above the base that was idle for longer is closed.
const KEPT_IDLE: Duration = Duration::from_secs(60);
/// How often a pool looks whether to give connections back.
const TEND_EVERY: Duration = Duration::from_secs(2);
/// How long a pool does not ask for more connections after the server had none to spare.
const SCARCE_FOR: Duration = Duration::from_secs(10);
/// Pauses between attempts to connect to a server that starts or has no connection left.
const WAIT_FIRST: Duration = Duration::from_millis(10);
const WAIT_LAST: Duration = Duration::from_millis(500);
/// How long to wait for calls in progress at the end.
const CLOSE_LIMIT: Duration = Duration::from_secs(60);

/// What to do about a certificate that is its own authority: the driver takes none.
const OWN_AUTHORITY: &str = "the server's certificate is that of an authority: make it with \
                             -addext basicConstraints=critical,CA:FALSE, or have an authority sign it";

/// SQLSTATE `too_many_connections`.
pub(super) const TOO_MANY: &str = "53300";
/// SQLSTATE `cannot_connect_now`.
const STARTING: &str = "57P03";

/// No connection became free in time.
#[derive(Debug, thiserror::Error)]
#[error(
    "no connection to the database became free within {limit:?}: all {has} of this process have calls{}",
    .said.as_ref().map(|said| format!(", and the server gives no more: {said}")).unwrap_or_default()
)]
struct NoneFree {
    limit: Duration,
    has: usize,
    /// What the server said when it was asked for one more.
    said: Option<String>,
}

/// No connection can be made. The message has no password.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {address}: {source}")]
struct Unreachable {
    address: String,
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// The pool was closed.
#[derive(Debug, thiserror::Error)]
#[error("the store is closed")]
struct Closed;

/// How a pool opens connections, and how many.
#[derive(Debug, Clone)]
pub(super) struct PoolOptions {
    /// Connections that it always may have: 0 or 1.
    pub(super) base: usize,
    /// Most connections.
    pub(super) max: usize,
    /// Longest wait for a connection, including connecting.
    pub(super) acquire_timeout: Duration,
    /// Longest time to open a connection.
    pub(super) connect_timeout: Duration,
    /// Whether a pooler is between: then the server's count says nothing.
    pub(super) is_pooled: bool,
}

/// A pool. Clones share it.
#[derive(Clone)]
pub(super) struct Pool(Arc<Shared>);

struct Shared {
    options: PoolOptions,
    server: RwLock<PgConnectOptions>,
    host: Arc<CurrentHost>,
    /// A permit for each connection that the pool may have and that has no call.
    free: Semaphore,
    /// Open connections without a call; the last one was used last.
    idle: Mutex<Vec<Opened>>,
    /// Connections that the pool may have now.
    allowed: AtomicUsize,
    open: Arc<AtomicUsize>,
    /// Callers that wait for a permit.
    waiting: AtomicUsize,
    is_growing: AtomicBool,
    is_tended: AtomicBool,
    /// When the server had no connection to spare, and what it said.
    scarce: Mutex<Option<(Instant, String)>>,
    waits: AtomicU64,
    timeouts: AtomicU64,
}

/// An open connection.
struct Opened {
    connection: PgConnection,
    since: Instant,
    used: Instant,
    open: Arc<AtomicUsize>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The right to one connection; dropping it lets another caller have it.
struct Slot {
    pool: Pool,
    is_given_up: bool,
}

impl Slot {
    /// Ends the right.
    fn give_up(mut self) {
        self.pool.0.allowed.fetch_sub(1, Ordering::Relaxed);
        self.is_given_up = true;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.is_given_up {
            self.pool.0.free.add_permits(1);
        }
    }
}

/// A connection of a pool. It is closed when it is dropped, since a call that was cut off may still run on it; a call
/// that ended [`release`](Self::release)s it.
pub struct PooledConnection {
    opened: Option<Opened>,
    slot: Slot,
}

impl PooledConnection {
    /// Gives the connection back after a call with this result, which it returns. A connection that may be broken is
    /// closed.
    pub(super) fn release<T>(mut self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        let is_sound = !matches!(result, Err(StoreError::Unavailable(_)));
        if let Some(mut opened) = self.opened.take()
            && is_sound
            && !self.slot.pool.0.free.is_closed()
        {
            opened.used = Instant::now();
            self.slot.pool.0.idle.lock().push(opened);
        }
        result
    }
}

impl Deref for PooledConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.opened.as_ref().expect("it is there until its release").connection
    }
}

impl DerefMut for PooledConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.opened.as_mut().expect("it is there until its release").connection
    }
}

/// A transaction. Without [`commit`](Self::commit) its connection is closed, and so it has no effect.
pub struct Transaction(PooledConnection);

impl Transaction {
    /// Begins a transaction.
    pub(super) async fn begin(mut connection: PooledConnection) -> Result<Self, StoreError> {
        sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
        Ok(Self(connection))
    }

    /// Makes the changes permanent.
    ///
    /// # Errors
    /// If the server does not answer: the changes may be permanent then.
    pub async fn commit(self) -> Result<(), StoreError> {
        self.end("COMMIT").await
    }

    /// Undoes the changes, and keeps the connection.
    ///
    /// # Errors
    /// If the server does not answer; the changes are undone all the same.
    pub async fn rollback(self) -> Result<(), StoreError> {
        self.end("ROLLBACK").await
    }

    async fn end(self, statement: &'static str) -> Result<(), StoreError> {
        let Self(mut connection) = self;
        let ended = sqlx::raw_sql(statement).execute(&mut *connection).await;
        connection.release(ended.map(drop).map_err(StoreError::from))
    }
}

impl Deref for Transaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.0
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.0
    }
}

/// Why a connection was not opened.
enum NotOpened {
    /// The server has few connections left.
    Scarce(String),
    /// The server starts, or does not accept connections yet.
    NotYet(StoreError),
    /// Another try does not help soon.
    Failed(StoreError),
}

impl Pool {
    /// Creates a pool of connections to this server, without any. Connections from before the last change of `host`
    /// are closed.
    pub(super) fn new(
        options: PoolOptions,
        server: PgConnectOptions,
        host: Arc<CurrentHost>,
    ) -> Self {
        let base = options.base;
        Self(Arc::new(Shared {
            options,
            server: RwLock::new(server),
            host,
            free: Semaphore::new(base),
            idle: Mutex::default(),
            allowed: AtomicUsize::new(base),
            open: Arc::default(),
            waiting: AtomicUsize::new(0),
            is_growing: AtomicBool::new(false),
            is_tended: AtomicBool::new(false),
            scarce: Mutex::default(),
            waits: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
        }))
    }

    /// Lets new connections go to another server.
    pub(super) fn set_server(&self, server: PgConnectOptions) {
        *self.0.server.write() = server;
    }

    /// Returns a connection. `None` if the pool may have none now: its base is 0, and the server has few left.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] and [`StoreError::Refused`], with the server's own words.
    pub(super) async fn get(&self) -> Result<Option<PooledConnection>, StoreError> {
        let began = Instant::now();
        let mut wait = WAIT_FIRST;
        loop {
            let Some(slot) = self.slot(began).await? else { return Ok(None) };
            while let Some(mut opened) = { self.0.idle.lock().pop() } {
                if self.is_usable(&mut opened).await {
                    return Ok(Some(PooledConnection { opened: Some(opened), slot }));
                }
            }
            let limit = self.left(began).min(self.0.options.connect_timeout);
            let opened = timeout(limit, self.open()).await;
            let silent = || NotOpened::Failed(self.unreachable(Box::new(NoAnswer(limit))));
            let error = match opened.unwrap_or_else(|_| Err(silent())) {
                Ok(opened) => return Ok(Some(PooledConnection { opened: Some(opened), slot })),
                Err(NotOpened::Failed(error)) => return Err(error),
                Err(NotOpened::NotYet(error)) => error,
                Err(NotOpened::Scarce(said)) => {
                    self.note_scarce(said.clone());
                    if self.may_shrink() {
                        // The others share what is left.
                        slot.give_up();
                        continue;
                    }
                    self.unreachable(said.into())
                }
            };
            drop(slot);
            if self.left(began) <= wait {
                self.0.timeouts.fetch_add(1, Ordering::Relaxed);
                return Err(error);
            }
            sleep(wait).await;
            wait = (wait * 2).min(WAIT_LAST);
        }
    }

    /// Returns the right to a connection; waits until a caller has ended.
    async fn slot(&self, began: Instant) -> Result<Option<Slot>, StoreError> {
        let Shared { free, waits, waiting, timeouts, allowed, .. } = &*self.0;
        let permit = match free.try_acquire() {
            Ok(permit) => permit,
            Err(_) if free.is_closed() => return Err(StoreError::Unavailable(Box::new(Closed))),
            Err(_) => {
                self.grow();
                if allowed.load(Ordering::Relaxed) == 0 {
                    return Ok(None);
                }
                waits.fetch_add(1, Ordering::Relaxed);
                waiting.fetch_add(1, Ordering::Relaxed);
                let _waiting = Decrement(waiting);
                match timeout(self.left(began), free.acquire()).await {
                    Ok(Ok(permit)) => permit,
                    Ok(Err(_)) => return Err(StoreError::Unavailable(Box::new(Closed))),
                    Err(_) => {
                        timeouts.fetch_add(1, Ordering::Relaxed);
                        return Err(StoreError::Unavailable(Box::new(self.none_free())));
                    }
                }
            }
        };
        permit.forget();
        Ok(Some(Slot { pool: self.clone(), is_given_up: false }))
    }

    fn left(&self, began: Instant) -> Duration {
        self.0.options.acquire_timeout.saturating_sub(began.elapsed())
    }

    fn none_free(&self) -> NoneFree {
        NoneFree {
            limit: self.0.options.acquire_timeout,
            has: self.0.allowed.load(Ordering::Relaxed),
            said: self.0.scarce.lock().as_ref().map(|(_, said)| said.clone()),
        }
    }

    async fn is_usable(&self, opened: &mut Opened) -> bool {
        self.0.host.is_current(opened.since.elapsed())
            && (opened.used.elapsed() < TRUSTED_IDLE || opened.connection.ping().await.is_ok())
    }

    async fn open(&self) -> Result<Opened, NotOpened> {
        let server = self.0.server.read().clone();
        let connection = server.connect().await.map_err(|error| self.not_opened(error))?;
        self.0.open.fetch_add(1, Ordering::Relaxed);
        let (since, open) = (Instant::now(), Arc::clone(&self.0.open));
        Ok(Opened { connection, since, used: since, open })
    }

    fn not_opened(&self, error: sqlx::Error) -> NotOpened {
        let state = sqlstate(&error);
        let is_refused = matches!(&error, sqlx::Error::Io(error)
            if error.kind() == std::io::ErrorKind::ConnectionRefused);
        let said = without_source_line(error);
        match state.as_deref() {
            Some(TOO_MANY) => NotOpened::Scarce(said.to_string()),
            Some(STARTING) => NotOpened::NotYet(self.unreachable(said)),
            Some(state) => NotOpened::Failed(match refusal::of_postgres(state) {
                Needs::Time => self.unreachable(said),
                Needs::Operator(remedy) => self.refused(&*said, remedy),
                Needs::AnotherValue => {
                    self.refused(&*said, "correct the parameters of the database URL")
                }
            }),
            None if is_refused => NotOpened::NotYet(self.unreachable(said)),
            None if said.to_string().contains("CaUsedAsEndEntity") => {
                NotOpened::Failed(self.refused(&*said, OWN_AUTHORITY))
            }
            None => NotOpened::Failed(self.unreachable(said)),
        }
    }

    fn unreachable(&self, source: Box<dyn std::error::Error + Send + Sync>) -> StoreError {
        let address = super::hosts::address(&self.0.server.read());
        StoreError::Unavailable(Box::new(Unreachable { address, source }))
    }

    fn refused(&self, said: &dyn std::error::Error, remedy: &'static str) -> StoreError {
        let address = super::hosts::address(&self.0.server.read());
        let said = format!("cannot connect to {address}: {said}");
        StoreError::Refused(Refusal { said, remedy })
    }

    fn note_scarce(&self, said: String) {
        *self.0.scarce.lock() = Some((Instant::now(), said));
    }

    fn may_shrink(&self) -> bool {
        self.0.allowed.load(Ordering::Relaxed) > self.0.options.base
    }

    /// Opens further connections for the callers that wait, unless the server has few left.
    fn grow(&self) {
        let Shared { options, allowed, is_growing, .. } = &*self.0;
        let is_full = allowed.load(Ordering::Relaxed) >= options.max;
        if is_full || self.is_scarce() || is_growing.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = self.clone();
        tokio::spawn(async move {
            let Shared { options, allowed, waiting, is_growing, idle, free, scarce, .. } = &*pool.0;
            loop {
                match timeout(options.connect_timeout, pool.open_spare()).await {
                    Ok(Ok(opened)) => {
                        *scarce.lock() = None;
                        allowed.fetch_add(1, Ordering::Relaxed);
                        idle.lock().push(opened);
                        free.add_permits(1);
                        pool.tend();
                    }
                    Ok(Err(NotOpened::Scarce(said))) => {
                        pool.note_scarce(said);
                        break;
                    }
                    Ok(Err(NotOpened::NotYet(_) | NotOpened::Failed(_))) | Err(_) => break,
                }
                let waits = waiting.load(Ordering::Relaxed) > 0;
                if !waits || allowed.load(Ordering::Relaxed) >= options.max || free.is_closed() {
                    break;
                }
            }
            is_growing.store(false, Ordering::Relaxed);
        });
    }

    /// Opens a connection above the base, if the server has enough left for others.
    async fn open_spare(&self) -> Result<Opened, NotOpened> {
        let mut opened = self.open().await?;
        match self.few_left(&mut opened.connection).await {
            Some(said) => Err(NotOpened::Scarce(said)),
            None => Ok(opened),
        }
    }

    /// Returns how many connections the server has left, in words, if they are few.
    async fn few_left(&self, connection: &mut PgConnection) -> Option<String> {
        if self.0.options.is_pooled {
            return None;
        }
        // A server that does not say counts as one with enough.
        let count = spare::count(connection).await.ok()?;
        count.is_few().then(|| count.to_string())
    }

    /// Looks every few seconds whether to give connections back, while there are any above the base.
    fn tend(&self) {
        if self.0.is_tended.swap(true, Ordering::Relaxed) {
            return;
        }
        let pool = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            loop {
                sleep(TEND_EVERY).await;
                let Some(pool) = pool.upgrade().map(Pool) else { return };
                pool.give_back_some().await;
                if !pool.may_shrink() {
                    pool.0.is_tended.store(false, Ordering::Relaxed);
                    return;
                }
            }
        });
    }

    /// Closes connections above the base that were idle for long, and one more if the server has few left.
    async fn give_back_some(&self) {
        let is_old = |first: &Opened| first.used.elapsed() > KEPT_IDLE;
        while self.0.idle.lock().first().is_some_and(is_old) && self.give_back() {}
        // A connection that is just being used is asked another time.
        if !self.may_shrink() || self.0.idle.lock().is_empty() {
            return;
        }
        let Ok(Some(mut connection)) = self.get().await else { return };
        let few = self.few_left(&mut connection).await;
        // Sound, or found to be broken by the next call.
        let _ = connection.release(Ok(()));
        if let Some(said) = few {
            self.note_scarce(said);
            self.give_back();
        }
    }

    /// Closes the connection above the base that was idle for longest; returns whether there was one.
    fn give_back(&self) -> bool {
        let Shared { free, allowed, idle, .. } = &*self.0;
        if !self.may_shrink() {
            return false;
        }
        let Ok(permit) = free.try_acquire() else { return false };
        permit.forget();
        allowed.fetch_sub(1, Ordering::Relaxed);
        let mut idle = idle.lock();
        if !idle.is_empty() {
            idle.remove(0);
        }
        true
    }

    /// Waits for the calls in progress and closes every connection.
    pub(super) async fn close(&self) {
        let Shared { free, idle, open, .. } = &*self.0;
        free.close();
        let all = std::mem::take(&mut *idle.lock());
        drop(all);
        let began = Instant::now();
        while open.load(Ordering::Relaxed) > 0 && began.elapsed() < CLOSE_LIMIT {
            sleep(WAIT_FIRST).await;
        }
    }

    /// Returns the connections without a call and the open ones.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.0.idle.lock().len(), self.0.open.load(Ordering::Relaxed))
    }

    /// Returns whether the server had no connection to spare a moment ago.
    pub(super) fn is_scarce(&self) -> bool {
        self.0.scarce.lock().as_ref().is_some_and(|(at, _)| at.elapsed() < SCARCE_FOR)
    }

    /// Returns the waits and timeouts of callers so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.0.waits.load(Ordering::Relaxed), self.0.timeouts.load(Ordering::Relaxed))
    }

    /// Returns the most connections.
    pub(super) fn max(&self) -> usize {
        self.0.options.max
    }
}

/// Decrements a count when it is dropped.
struct Decrement<'a>(&'a AtomicUsize);

impl Drop for Decrement<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
