//! The stores, each with a clock set by the test. The root of the test names the traits that it needs `TestStore`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use tritmill_queue::{
    Timestamp,
    store::{PostgresStore, SqliteStore},
};
use tritmill_servers::Postgres;

use crate::TestStore;

/// A store and its clock.
pub struct Rig {
    pub store: Arc<dyn TestStore>,
    now: Arc<AtomicI64>,
}

impl Rig {
    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        self.now.fetch_add(i64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

fn clock() -> (Arc<AtomicI64>, Arc<dyn Fn() -> Timestamp + Send + Sync>) {
    let now = Arc::new(AtomicI64::new(1_700_000_000_000));
    let read = Arc::clone(&now);
    (now, Arc::new(move || Timestamp(read.load(Ordering::SeqCst))))
}

/// Runs a rule on every store.
pub async fn all<F: Future<Output = ()>>(rule: impl Fn(Rig) -> F) {
    let folder = tempfile::tempdir().unwrap();
    let (now, clock_of_file) = clock();
    let file = folder.path().join("jobs.sqlite");
    let store = SqliteStore::open_with_clock(&file, clock_of_file).await.unwrap();
    rule(Rig { store: Arc::new(store), now }).await;
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let (now, clock_of_server) = clock();
    let store = PostgresStore::connect(&server.url()).await.unwrap().with_clock(clock_of_server);
    rule(Rig { store: Arc::new(store), now }).await;
}
