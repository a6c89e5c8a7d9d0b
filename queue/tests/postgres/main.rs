//! What the Postgres store does beyond the suite: concurrency, unreadable rows, idempotency keys, and
//! connections.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite runs in tests/store.rs")]
#[path = "../conformance/mod.rs"]
mod conformance;
mod connection;
mod failover;
mod few_connections;
mod fleet;
mod plans;
mod refusals;
mod shards;

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use conformance::{LEASE, answer, beat, by, finished, job, queue};
use futures_util::future::join_all;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use tritmill_queue::{
    Claim, ClaimRef, Claimant, ErrorKind, Job, JobId, JobState, Store, StoreError, Tenant,
    Timestamp,
    store::{Conflict, PostgresStore, Submission, SubmitError},
};
use tritmill_servers::Postgres;
use uuid::Uuid;

/// How long a server or a pool may take to change its state.
const CHANGES_WITHIN: Duration = Duration::from_secs(10);

/// Returns a server and a connected store.
async fn start() -> (Postgres, PostgresStore) {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    (server, store)
}

/// As [`start`], with a clock that only the test moves, in milliseconds since 1970.
async fn start_with_clock() -> (Postgres, PostgresStore, Arc<AtomicI64>) {
    let (server, store) = start().await;
    let now = Arc::new(AtomicI64::new(store.now().await.unwrap().0));
    let clock = Arc::clone(&now);
    let store = store.with_clock(Arc::new(move || Timestamp(clock.load(Ordering::SeqCst))));
    (server, store, now)
}

/// Repeats a call until it returns a value; fails after ten seconds.
async fn eventually<T>(what: &str, call: impl AsyncFn() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = call().await {
            return value;
        }
        assert!(started.elapsed() < CHANGES_WITHIN, "not within {CHANGES_WITHIN:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn number(server: &Postgres, statement: &str) -> i64 {
    value(server, statement).await
}

async fn text(server: &Postgres, statement: &str) -> String {
    value(server, statement).await
}

/// Returns the first column of a statement's first row, read on a separate connection.
async fn value<T>(server: &Postgres, statement: &str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let row = sqlx::query(AssertSqlSafe(statement)).fetch_one(&mut connection).await.unwrap();
    row.get(0)
}

async fn execute(server: &Postgres, statement: &str) {
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await.unwrap();
}

fn ids(jobs: &[Job]) -> Vec<JobId> {
    jobs.iter().map(|job| job.id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_claims_never_share_a_job() {
    let (_server, store) = start().await;
    let jobs: Vec<Job> = (0..500).map(|_| job()).collect();
    store.submit(&jobs).await.unwrap();
    let claimers = (0..8).map(|number| {
        let store = store.clone();
        let mut wanted = ids(&jobs);
        // Each claims in a different order.
        wanted.rotate_left(number * 61);
        if number % 2 == 1 {
            wanted.reverse();
        }
        tokio::spawn(async move {
            let mut claimed = Vec::new();
            for some in wanted.chunks(50) {
                let owner = format!("worker {number}");
                let claimant = Claimant::new(&owner, LEASE);
                let claims = store.claim(some, claimant).await.unwrap();
                assert!(claims.iter().all(|claim| claim.epoch == 1));
                claimed.extend(claims.iter().map(Claim::claim_ref));
            }
            claimed
        })
    });
    let claimed: Vec<_> = join_all(claimers).await.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(claimed.len(), jobs.len());
    assert_eq!(claimed.iter().collect::<HashSet<_>>().len(), jobs.len());

    // Concurrent finishes: each attempt is recorded once.
    let endings = (0..4).map(|number| {
        let store = store.clone();
        let mut done: Vec<_> = claimed.iter().map(|held| finished(*held, answer("x"))).collect();
        if number % 2 == 1 {
            done.reverse();
        }
        tokio::spawn(async move { store.finish(&done).await.unwrap().len() })
    });
    let settled: usize = join_all(endings).await.into_iter().map(Result::unwrap).sum();
    assert_eq!(settled, jobs.len());
    let progress = store.progress(Some(&queue())).await.unwrap();
    assert_eq!((progress.completed, progress.prompt_tokens), (500, 1500));
}

#[tokio::test]
async fn updates_use_the_primary_key_and_renewals_write_nothing_at_first() {
    let (server, store) = start().await;
    let jobs: Vec<Job> = (0..20_000).map(|_| job()).collect();
    for some in jobs.chunks(2000) {
        store.submit(some).await.unwrap();
    }
    let some: Vec<JobId> = ids(&jobs).into_iter().step_by(200).collect();
    execute(&server, "ANALYZE open_jobs; SELECT pg_stat_reset()").await;
    let held: Vec<_> =
        store.claim(&some, by("a")).await.unwrap().iter().map(Claim::claim_ref).collect();
    assert!(store.renew(&held, LEASE).await.unwrap().is_empty());
    let saved: Vec<_> = held.iter().map(|held| (*held, vec![1; 100])).collect();
    assert!(store.checkpoint(&saved).await.unwrap().is_empty());
    assert_eq!(store.hand_back(&held[..10]).await.unwrap().len(), 10);
    assert_eq!(store.cancel(&some[..20]).await.unwrap().len(), 20);
    let done: Vec<_> = held.iter().map(|held| finished(*held, answer("x"))).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), 80);
    assert_eq!(store.reconcile().await.unwrap().moved, 0);
    assert_eq!(store.queued(&queue(), Some(jobs[9000].id), 10).await.unwrap().len(), 10);
    assert!(store.job(jobs[0].id).await.unwrap().is_some());
    // Connections report their statistics when they close.
    store.close().await;
    let of_jobs = "FROM pg_stat_user_tables WHERE relname = 'open_jobs'";
    // 100 claimed and saved; 10 handed back; 20 cancelled, 10 of which were claimed; 80 finished.
    let moved = format!("SELECT sum(n_tup_upd + n_tup_del)::bigint {of_jobs}");
    let mut looks = 0;
    while number(&server, &moved).await != 200 + 10 + 20 + 80 {
        looks += 1;
        assert!(looks < 1000, "the server never counted every update");
    }
    let read = number(&server, &format!("SELECT sum(seq_tup_read)::bigint {of_jobs}")).await;
    assert_eq!(read, 0, "rows read by a scan of a table");
    let hot = number(&server, &format!("SELECT sum(n_tup_hot_upd)::bigint {of_jobs}")).await;
    assert!((75..=100).contains(&hot), "{hot} of 100 checkpoints stayed in their page");
}

#[tokio::test]
async fn jobs_are_announced_until_the_dispatcher_has_them() {
    let (server, store, now) = start_with_clock().await;
    let pass = |s: i64| now.fetch_add(s * 1000, Ordering::SeqCst);
    let announced = async || {
        let found = store.unannounced(&queue()).await.unwrap();
        let ids: Vec<JobId> = found.entries.iter().map(|entry| entry.id).collect();
        store.forget_announcements(&found).await.unwrap();
        ids
    };
    let entries = |jobs: &[Job]| jobs.iter().map(Job::entry).collect::<Vec<_>>();
    let count = async || number(&server, "SELECT count(*) FROM announcements").await;
    // The producer of these enqueues them, and deletes its note with the next submission.
    let jobs: Vec<Job> = (0..4).map(|_| job()).collect();
    store.submit(&jobs).await.unwrap();
    store.announced(&entries(&jobs));
    assert_eq!(count().await, 1);
    // The producer of these dies.
    let later = Job { run_at: Some(Timestamp(now.load(Ordering::SeqCst) + 60_000)), ..job() };
    let lost = [job(), job(), later.clone()];
    store.submit(&lost).await.unwrap();
    assert_eq!(count().await, 1);
    assert_eq!(announced().await, [], "a producer has five seconds");
    pass(5);
    store.reconcile().await.unwrap();
    assert_eq!(announced().await, ids(&lost[..2]));
    assert_eq!(count().await, 0);
    // Jobs that were claimed meanwhile are not enqueued, those that are queued again are.
    store.submit(&[job()]).await.unwrap();
    let held = store.claim(&ids(&jobs), by("a")).await.unwrap();
    let held: Vec<ClaimRef> = held.iter().map(Claim::claim_ref).collect();
    assert_eq!(store.hand_back(&held[..2]).await.unwrap().len(), 2);
    let mut lapsed = 0;
    for _ in 0..5 {
        pass(4);
        lapsed += store.reconcile().await.unwrap().lapsed;
    }
    assert_eq!(lapsed, 2);
    store.claim(&[jobs[3].id], by("b")).await.unwrap();
    pass(5);
    let again = announced().await;
    assert_eq!(again.len(), 4, "a new one, two that were handed back, one that lapsed");
    assert!(!again.contains(&jobs[3].id));
    pass(60);
    store.reconcile().await.unwrap();
    pass(5);
    assert!(announced().await.contains(&later.id), "when it was due");
    assert_eq!(count().await, 0);
}

#[tokio::test]
async fn unreadable_job_does_not_stop_its_neighbours() {
    let (server, store) = start().await;
    let jobs = [job(), job(), job()];
    store.submit(&jobs).await.unwrap();
    execute(&server, &format!("UPDATE open_jobs SET job = '\\x00' WHERE id = '{}'", jobs[1].id))
        .await;
    let claims = store.claim(&ids(&jobs), by("a")).await.unwrap();
    let claimed: Vec<_> = claims.iter().map(|claim| claim.job.id).collect();
    assert_eq!(claimed, [jobs[0].id, jobs[2].id]);
    // Its attempt ended with an error; its other columns are still readable.
    let record = store.job(jobs[1].id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Retrying, 1));
    assert_eq!((record.job.id, &record.job.queue), (jobs[1].id, &jobs[1].queue));
    let codes: Vec<&str> = record.errors.iter().map(|error| error.code.as_str()).collect();
    assert_eq!(codes, ["unreadable"]);
}

#[tokio::test]
async fn text_with_nul_is_refused() {
    let (_server, store) = start().await;
    let refused = store.submit(&[Job { tenant: Tenant("a\0b".into()), ..job() }]).await;
    assert!(matches!(refused, Err(StoreError::InvalidValue { what: "tenant", .. })));
    assert_eq!(store.progress(None).await.unwrap().queued, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn idempotency_key_has_one_request() {
    let (_server, store) = start().await;
    let tenant = Tenant("a".into());
    let submissions = (0..8).map(|_| {
        let (store, tenant) = (store.clone(), tenant.clone());
        tokio::spawn(async move {
            let job = job();
            let id = job.id;
            (id, store.submit_idempotent(&tenant, "k", b"hash", &[job]).await.unwrap())
        })
    });
    let outcomes: Vec<_> = join_all(submissions).await.into_iter().map(Result::unwrap).collect();
    let first: Vec<JobId> = outcomes
        .iter()
        .filter(|(_, outcome)| *outcome == Submission::New)
        .map(|(id, _)| *id)
        .collect();
    assert_eq!(first.len(), 1);
    let repeated = Submission::Known(first.clone());
    assert_eq!(outcomes.iter().filter(|(_, outcome)| *outcome == repeated).count(), 7);
    assert_eq!(store.progress(None).await.unwrap().queued, 1);

    let other = store.submit_idempotent(&tenant, "k", b"other", &[job()]).await.unwrap_err();
    assert!(matches!(&other, SubmitError::Conflict(Conflict { key }) if key == "k"), "{other}");
    let neighbour = Tenant("b".into());
    let fresh = store.submit_idempotent(&neighbour, "k", b"other", &[job()]).await.unwrap();
    assert_eq!(fresh, Submission::New);
    assert_eq!(store.progress(None).await.unwrap().queued, 2);
}

#[tokio::test]
async fn reconciler_skips_locked_jobs() {
    let (server, store) = start().await;
    let jobs: Vec<Job> = (0..3).map(|_| job()).collect();
    store.submit(&jobs).await.unwrap();
    store.claim(&ids(&jobs), Claimant::new("a", Duration::ZERO)).await.unwrap();
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    sqlx::query("SELECT id FROM open_jobs WHERE id = $1 FOR UPDATE")
        .bind(Uuid::from(jobs[0].id))
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert_eq!(store.reconcile().await.unwrap().moved, 2);
    tx.rollback().await.unwrap();
    assert_eq!(store.reconcile().await.unwrap().moved, 1);
}

#[tokio::test]
async fn reconcile_repeats_until_all_jobs_are_changed() {
    // A slow machine must not look like a fleet that was away.
    let (_server, store, now) = start_with_clock().await;
    let jobs: Vec<Job> = (0..2500).map(|_| Job { attempts_max: 1, ..job() }).collect();
    store.submit(&jobs).await.unwrap();
    // Suspects are charged for a lost worker.
    let claims = store.claim(&ids(&jobs), Claimant::new("a", Duration::ZERO)).await.unwrap();
    let claims: Vec<ClaimRef> = claims.iter().map(Claim::claim_ref).collect();
    store.hand_back_suspects(&claims).await.unwrap();
    store.claim(&ids(&jobs), Claimant::new("a", Duration::ZERO)).await.unwrap();
    now.fetch_add(1, Ordering::SeqCst);
    let done = store.reconcile().await.unwrap();
    assert_eq!((done.moved, done.queued.len()), (2500, 0), "none has an attempt left");
    let record = store.job(jobs[0].id).await.unwrap().unwrap();
    assert_eq!((record.state, record.errors.len()), (JobState::Failed, 1));
    assert_eq!(record.errors[0].kind, ErrorKind::LeaseLost);
    assert_eq!(record.outcome, Some(tritmill_queue::Outcome::Error(record.errors[0].clone())));
}

/// `cargo nextest run --run-ignored only -E 'test(claims_and_finishes_per_second)' --no-capture`
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement: takes its time and the machine"]
async fn claims_and_finishes_per_second() {
    let server = Postgres::start_with(&[]).unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let jobs: Vec<Job> = (0..100_000).map(|_| job()).collect();
    let started = Instant::now();
    for some in jobs.chunks(1000) {
        store.submit(some).await.unwrap();
    }
    println!("submitted {:.0}/s", 1e5 / started.elapsed().as_secs_f64());
    for size in [32, 128] {
        let started = Instant::now();
        let half = if size == 32 { &jobs[..50_000] } else { &jobs[50_000..] };
        let workers = half.chunks(half.len() / 8 + 1).map(|share| {
            let (store, share) = (store.clone(), ids(share));
            tokio::spawn(async move {
                let mut settled = 0;
                for some in share.chunks(size) {
                    let claims = store.claim(some, by("a")).await.unwrap();
                    let done: Vec<_> = claims
                        .iter()
                        .map(|claim| finished(claim.claim_ref(), answer("x")))
                        .collect();
                    settled += store.finish(&done).await.unwrap().len();
                }
                settled
            })
        });
        let settled: usize = join_all(workers).await.into_iter().map(Result::unwrap).sum();
        assert_eq!(settled, half.len());
        let rate = 5e4 / started.elapsed().as_secs_f64();
        println!("claimed and finished {rate:.0}/s in micro-batches of {size}");
    }
}
