//! Daily partitions of the Postgres store.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite itself runs in tests/store.rs")]
mod conformance;

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use conformance::{answer, beat, by, finished, job, queue};
use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use tritmill_queue::{
    Claim, Job, JobId, JobState, Store, Tenant, Timestamp,
    store::{
        Maintained, Maintenance as _, PostgresOptions, PostgresStore, QueueHistory as _,
        RETENTION_DEFAULT, Submission, Workers as _,
    },
};
use tritmill_servers::Postgres;
use uuid::Uuid;

const DAY_MS: i64 = 24 * 60 * 60 * 1000;
/// 2023-11-14.
const TODAY: i64 = 19_675;

/// Returns the first column of a statement's first row, read on a separate connection.
async fn number(server: &Postgres, statement: &str) -> i64 {
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let row = sqlx::query(AssertSqlSafe(statement)).fetch_one(&mut connection).await.unwrap();
    row.get(0)
}

/// Returns a store with a clock that only the test moves, in milliseconds since 1970: first the begin of a day.
async fn store_at(server: &Postgres, day: i64) -> (PostgresStore, Arc<AtomicI64>) {
    let now = Arc::new(AtomicI64::new(day * DAY_MS));
    let clock = Arc::clone(&now);
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    (store.with_clock(Arc::new(move || Timestamp(clock.load(Ordering::SeqCst)))), now)
}

fn ids(jobs: &[Job]) -> Vec<JobId> {
    jobs.iter().map(|job| job.id).collect()
}

/// Returns a job with an id of that day.
fn job_of(day: i64) -> Job {
    let ms = u128::try_from(day * DAY_MS + DAY_MS / 2).unwrap();
    let bits = Uuid::now_v7().as_u128() & ((1 << 80) - 1);
    Job { id: JobId::from(Uuid::from_u128(ms << 80 | bits)), ..job() }
}

/// Partitions of the table `jobs` without the default one.
async fn partitions(server: &Postgres) -> i64 {
    let statement = "SELECT count(*) FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
                     WHERE inhparent = 'jobs'::regclass AND relname <> 'jobs_default'";
    number(server, statement).await
}

#[tokio::test]
async fn old_partitions_are_dropped_when_their_jobs_are_finished() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let made = partitions(&server).await;
    assert_eq!(made, 4, "migration creates today and three days");
    let (store, now) = store_at(&server, TODAY).await;

    // These days have no partition: the jobs go to the default one and are moved.
    let (old, open, recent) = (job_of(TODAY - 20), job_of(TODAY - 10), job_of(TODAY - 1));
    let odd = Job { id: JobId::from(Uuid::from_u128(7)), ..job() };
    store.submit(&[old.clone(), open.clone(), recent.clone(), odd.clone()]).await.unwrap();
    for id in [old.id, recent.id] {
        let held = store.claim(&[id], by("a")).await.unwrap()[0].claim_ref();
        store.finish(&[finished(held, answer("x"))]).await.unwrap();
    }
    assert_eq!(number(&server, "SELECT count(*) FROM jobs_default").await, 2);
    let retention = Duration::from_secs(7 * 24 * 60 * 60);
    assert_eq!(store.retention().await.unwrap(), RETENTION_DEFAULT);
    store.set_retention(retention).await.unwrap();
    assert_eq!(store.retention().await.unwrap(), retention);
    // Six days of jobs, six of results, four of errors. Jobs with old ids have only just finished.
    let done = store.maintain().await.unwrap();
    let created = 6 + 6 + 4;
    assert_eq!(done, Maintained { created, dropped: 0, kept_recent: 1 });
    assert_eq!(number(&server, "SELECT count(*) FROM jobs_default").await, 0);
    now.fetch_add(7 * DAY_MS, Ordering::SeqCst);
    let done = store.maintain().await.unwrap();
    assert_eq!((done.dropped, done.kept_recent), (0, 2), "finished seven days ago, not longer");
    for (id, state) in [
        (old.id, JobState::Completed),
        (open.id, JobState::Queued),
        (recent.id, JobState::Completed),
        (odd.id, JobState::Queued),
    ] {
        assert_eq!(store.job(id).await.unwrap().unwrap().state, state);
    }
    now.fetch_add(1, Ordering::SeqCst);
    let done = store.maintain().await.unwrap();
    assert_eq!((done.dropped, done.kept_recent), (4, 0), "with results");
    assert_eq!(store.job(old.id).await.unwrap(), None);
    assert_eq!(store.job(recent.id).await.unwrap(), None);
    let again = store.maintain().await.unwrap();
    assert_eq!(again, Maintained::default());

    // An open job outlives its day's retention, and is dropped one retention after its end.
    let held = store.claim(&[open.id], by("a")).await.unwrap()[0].claim_ref();
    store.finish(&[finished(held, answer("x"))]).await.unwrap();
    assert_eq!(store.maintain().await.unwrap().kept_recent, 1);
    now.fetch_add(7 * DAY_MS + 1, Ordering::SeqCst);
    store.maintain().await.unwrap();
    assert_eq!(store.job(open.id).await.unwrap(), None);
}

#[tokio::test]
async fn job_that_ends_after_its_day_was_dropped_keeps_its_result() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let (store, now) = store_at(&server, TODAY).await;
    store.set_retention(Duration::from_secs(7 * 24 * 60 * 60)).await.unwrap();
    // A neighbour of its day ends at once; that day is created and, a week later, dropped.
    let (early, late) = (job_of(TODAY - 1), job_of(TODAY - 1));
    store.submit(&[early.clone(), late.clone()]).await.unwrap();
    let held = store.claim(&[early.id], by("a")).await.unwrap()[0].claim_ref();
    store.finish(&[finished(held, answer("x"))]).await.unwrap();
    store.maintain().await.unwrap();
    let in_default =
        "SELECT (SELECT count(*) FROM jobs_default) + (SELECT count(*) FROM results_default)";
    assert_eq!(number(&server, in_default).await, 0, "moved to the day's partitions");
    now.fetch_add(8 * DAY_MS, Ordering::SeqCst);
    assert_eq!(
        store.maintain().await.unwrap().dropped,
        2 + 3,
        "that day and the next, an empty one"
    );
    assert_eq!(store.job(early.id).await.unwrap(), None);
    assert_eq!(store.job(late.id).await.unwrap().unwrap().state, JobState::Queued);
    let held = store.claim(&[late.id], by("a")).await.unwrap()[0].claim_ref();
    store.finish(&[finished(held, answer("late"))]).await.unwrap();
    for _ in 0..2 {
        store.maintain().await.unwrap();
        let record = store.job(late.id).await.unwrap().unwrap();
        assert_eq!((record.state, record.outcome), (JobState::Completed, Some(answer("late"))));
    }
    now.fetch_add(8 * DAY_MS, Ordering::SeqCst);
    store.maintain().await.unwrap();
    assert_eq!(store.job(late.id).await.unwrap(), None);
}

#[tokio::test]
async fn maintenance_beside_a_dump_gives_up_at_once_and_delays_nothing() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let (store, now) = store_at(&server, TODAY).await;
    store.set_retention(Duration::from_secs(7 * 24 * 60 * 60)).await.unwrap();
    store.maintain().await.unwrap();
    now.fetch_add(9 * DAY_MS, Ordering::SeqCst);
    // What pg_dump holds for as long as it runs.
    let mut dump = PgConnection::connect(&server.url()).await.unwrap();
    let begin = "BEGIN; LOCK TABLE jobs, results, attempt_errors IN ACCESS SHARE MODE";
    sqlx::raw_sql(begin).execute(&mut dump).await.unwrap();
    let work = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..50 {
            let (started, one) = (Instant::now(), job());
            store.submit(std::slice::from_ref(&one)).await.unwrap();
            let held = store.claim(&[one.id], by("a")).await.unwrap()[0].claim_ref();
            assert_eq!(store.finish(&[finished(held, answer("x"))]).await.unwrap().len(), 1);
            slowest = slowest.max(started.elapsed());
        }
        slowest
    };
    let maintenance = async {
        let started = Instant::now();
        let error = store.maintain().await.unwrap_err().to_string();
        assert!(error.contains("lock timeout"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    };
    let ((), slowest) = futures_util::future::join(maintenance, work).await;
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    sqlx::raw_sql("COMMIT").execute(&mut dump).await.unwrap();
    assert!(store.maintain().await.unwrap().dropped > 0);
}

/// A server whose lock table has no room for the locks of a hundred partitions with their indexes.
#[tokio::test]
async fn calls_of_every_second_do_not_touch_old_partitions() {
    let few = [
        "max_locks_per_transaction=10",
        "max_connections=16",
        "max_worker_processes=2",
        "max_wal_senders=0",
    ];
    let server = Postgres::start_with(&few).unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let today = i64::try_from(Uuid::now_v7().as_u128() >> 80).unwrap() / DAY_MS;
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    for day in 1..=100 {
        for table in ["jobs", "results"] {
            let [from, to] = [today - day, today - day + 1]
                .map(|day| Uuid::from_u128(u128::try_from(day * DAY_MS).unwrap() << 80));
            let create = format!(
                "CREATE TABLE {table}_old_{day} PARTITION OF {table}
                 FOR VALUES FROM ('{from}') TO ('{to}')"
            );
            sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut connection).await.unwrap();
        }
    }
    let every = sqlx::query("SELECT count(*) FROM jobs").fetch_one(&mut connection).await;
    assert!(every.unwrap_err().to_string().contains("out of shared memory"));
    // The error arrives before the failed transaction has released its locks.
    sqlx::raw_sql("SELECT").execute(&mut connection).await.unwrap();
    let options = PostgresOptions { connections_max: 2, ..PostgresOptions::default() };
    let store = PostgresStore::connect_with(&server.url(), options).await.unwrap();
    let jobs: Vec<Job> = (0..20).map(|_| job()).collect();
    store.submit(&jobs).await.unwrap();
    for _ in 0..2 {
        store.heartbeat(&beat()).await.unwrap();
        store.reconcile().await.unwrap();
        store.sample().await.unwrap();
        store.unannounced(&queue()).await.unwrap();
    }
    assert_eq!(store.queued(&queue(), None, 100).await.unwrap().len(), 20);
    assert_eq!(store.queued_heads(&queue(), 3, 3).await.unwrap().0.entries, 20);
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 20);
    let claims = store.claim(&ids(&jobs), by("a")).await.unwrap();
    let claims: Vec<_> = claims.iter().map(Claim::claim_ref).collect();
    assert!(store.renew(&claims, Duration::from_secs(15)).await.unwrap().is_empty());
    assert_eq!(store.hand_back(&claims[..5]).await.unwrap().len(), 5);
    assert_eq!(store.cancel(&ids(&jobs[..5])).await.unwrap().len(), 5);
    let done: Vec<_> = claims[5..].iter().map(|held| finished(*held, answer("x"))).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), 15);
    assert_eq!(store.state(jobs[9].id).await.unwrap(), Some(JobState::Completed));
    assert_eq!(store.finished(&ids(&jobs)).await.unwrap().len(), 20);
    assert_eq!(store.job(jobs[9].id).await.unwrap().unwrap().outcome, Some(answer("x")));
    store.maintain().await.unwrap();
}

#[tokio::test]
async fn idempotency_key_is_kept_as_long_as_its_job() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let today = i64::try_from(Uuid::now_v7().as_u128() >> 80).unwrap() / DAY_MS;
    let (store, now) = store_at(&server, today).await;
    let (tenant, one) = (Tenant::default(), job());
    let submit = async |job: &Job| {
        store.submit_idempotent(&tenant, "k", b"hash", std::slice::from_ref(job)).await.unwrap()
    };
    assert_eq!(submit(&one).await, Submission::New);
    now.fetch_add(400 * DAY_MS, Ordering::SeqCst);
    store.maintain().await.unwrap();
    assert_eq!(submit(&job()).await, Submission::Known(vec![one.id]), "it is still queued");
    store.delete_jobs(&[one.id]).await.unwrap();
    store.maintain().await.unwrap();
    assert_eq!(submit(&job()).await, Submission::New);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn maintenance_runs_alongside_work_and_other_maintenance() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    store.set_retention(Duration::from_secs(60 * 86_400)).await.unwrap();
    let maintainers = (0..3).map(|_| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                assert_eq!(store.maintain().await.unwrap().dropped, 0);
            }
        })
    });
    let maintained = join_all(maintainers);
    let today = i64::try_from(Uuid::now_v7().as_u128() >> 80).unwrap() / DAY_MS;
    let work = async {
        for day in 10..20 {
            let jobs: Vec<Job> = (0..20).map(|_| job_of(today - day)).collect();
            store.submit(&jobs).await.unwrap();
            let claims = store.claim(&ids(&jobs), by("a")).await.unwrap();
            assert_eq!(claims.len(), jobs.len());
            store.maintain().await.unwrap();
            let done: Vec<_> =
                claims.iter().map(|claim| finished(claim.claim_ref(), answer("x"))).collect();
            assert_eq!(store.finish(&done).await.unwrap().len(), jobs.len());
        }
    };
    let (maintained, ()) = futures_util::future::join(maintained, work).await;
    for done in maintained {
        done.unwrap();
    }
    assert_eq!(store.progress(None).await.unwrap().completed, 200);
}
