//! Runs the suite of rules on every store.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod conformance;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use conformance::Fixture;
use tritmill_queue::{
    Timestamp,
    store::{PostgresStore, SqliteStore},
};
use tritmill_servers::Postgres;

/// Start of every clock.
const START: i64 = 1_700_000_000_000;

/// A SQLite file in a temporary folder, with a clock set by the test.
struct Sqlite {
    folder: tempfile::TempDir,
    now: Arc<AtomicI64>,
}

impl Sqlite {
    fn path(&self) -> PathBuf {
        self.folder.path().join("jobs.sqlite")
    }
}

impl Fixture for Sqlite {
    type Store = SqliteStore;

    fn create() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { folder, now: Arc::new(AtomicI64::new(START)) }
    }

    async fn open(&self) -> SqliteStore {
        let now = Arc::clone(&self.now);
        let clock = Arc::new(move || Timestamp(now.load(Ordering::SeqCst)));
        SqliteStore::open_with_clock(&self.path(), clock).await.unwrap()
    }

    fn advance(&self, by: Duration) {
        self.now.fetch_add(i64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

store_conformance!(sqlite, super::Sqlite);

/// A Postgres server, with a clock set by the test.
struct Server {
    server: Postgres,
    now: Arc<AtomicI64>,
}

impl Server {
    async fn open_migrated(&self) -> PostgresStore {
        let now = Arc::clone(&self.now);
        let clock = Arc::new(move || Timestamp(now.load(Ordering::SeqCst)));
        PostgresStore::connect(&self.server.url()).await.unwrap().with_clock(clock)
    }
}

impl Fixture for Server {
    type Store = PostgresStore;

    fn create() -> Self {
        Self { server: Postgres::start().unwrap(), now: Arc::new(AtomicI64::new(START)) }
    }

    async fn open(&self) -> PostgresStore {
        PostgresStore::migrate(&self.server.url()).await.unwrap();
        self.open_migrated().await
    }

    fn advance(&self, by: Duration) {
        self.now.fetch_add(i64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

store_conformance!(postgres, super::Server);

#[tokio::test]
async fn file_of_another_program_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("letter.txt");
    std::fs::write(&path, "Dear Sir or Madam, this is no database at all. ".repeat(100)).unwrap();
    let error = SqliteStore::open(&path).await.unwrap_err().to_string();
    assert!(error.contains("not a database"), "{error}");
}

#[tokio::test]
async fn handing_everything_back_costs_no_attempt() {
    use tritmill_queue::{Claimant, Store};
    let fixture = Sqlite::create();
    let store = fixture.open().await;
    let job = conformance::job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for _ in 0..10 {
        let lease = Duration::from_secs(15);
        let claims = store.claim(&[job.id], Claimant::new("w", lease)).await.unwrap();
        assert_eq!((claims.len(), claims[0].attempts), (1, 0));
        assert_eq!(store.hand_back_all().await.unwrap(), 1);
    }
}

#[tokio::test]
async fn database_of_another_program_is_refused_and_stays_as_it_is() {
    use sqlx::Connection as _;
    let fixture = Sqlite::create();
    let url = format!("sqlite:{}?mode=rwc", fixture.path().display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::query("CREATE TABLE jobs (id INTEGER)").execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let before = std::fs::read(fixture.path()).unwrap();
    let refused = SqliteStore::open(&fixture.path()).await.unwrap_err().to_string();
    assert!(refused.contains("a database of another program"), "{refused}");
    assert_eq!(std::fs::read(fixture.path()).unwrap(), before);
}

#[tokio::test]
async fn unreadable_job_does_not_stop_its_neighbours() {
    use sqlx::Connection as _;
    use tritmill_queue::{Claimant, JobState, Store};
    let fixture = Sqlite::create();
    let store = fixture.open().await;
    let jobs = [conformance::job(), conformance::job()];
    store.submit(&jobs).await.unwrap();
    store.close().await;
    let url = format!("sqlite:{}", fixture.path().display());
    let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
    sqlx::query("UPDATE jobs SET job = '{' WHERE id = $1")
        .bind(uuid::Uuid::from(jobs[0].id))
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
    let store = fixture.open().await;
    let by = Claimant::new("w", Duration::from_secs(15));
    let claims = store.claim(&[jobs[0].id, jobs[1].id], by).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.job.id).collect::<Vec<_>>(), [jobs[1].id]);
    let record = store.job(jobs[0].id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Retrying, 1));
    assert_eq!(record.errors[0].code, "unreadable");
}
