//! Plans of the statements that change open jobs, made when statistics say that there are none.

use sqlx::{Connection as _, PgConnection, Row as _};
use tritmill_queue::{Claim, ClaimRef, Job, JobId, Store, store::PostgresStore};
use tritmill_servers::Postgres;

use super::{
    conformance::{LEASE, answer, by, finished, job},
    start,
};

const JOBS: usize = 128;

/// An index that ends with the id would be read as a whole for each id.
#[tokio::test]
async fn only_the_primary_key_finds_jobs_by_id() {
    let (server, _store) = start().await;
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let mut rows = Vec::new();
    for sql in [
        "BEGIN",
        "ALTER TABLE open_jobs DROP CONSTRAINT open_jobs_pkey",
        "SET LOCAL enable_seqscan = off",
        "EXPLAIN SELECT id FROM open_jobs
         WHERE id = ANY(ARRAY(SELECT first FROM announcements)) AND state || '' = 'queued'",
    ] {
        rows = sqlx::query(sql).fetch_all(&mut connection).await.unwrap();
    }
    let plan: String = rows[0].get(0);
    assert!(plan.starts_with("Seq Scan"), "{plan}");
}

#[tokio::test]
async fn time_of_a_call_is_not_quadratic_in_its_jobs() {
    let server = Postgres::start_with(&[
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "auto_explain.log_analyze=on",
        "auto_explain.log_timing=off",
    ]);
    let server = server.unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    sqlx::query("ANALYZE open_jobs").execute(&mut connection).await.unwrap();
    let store = PostgresStore::connect(&server.url()).await.unwrap();
    let jobs: Vec<Job> = (0..JOBS).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    store.submit(&jobs).await.unwrap();
    let held = async || -> Vec<ClaimRef> {
        let claims = store.claim(&ids, by("a")).await.unwrap();
        claims.iter().map(Claim::claim_ref).collect()
    };
    let first = held().await;
    assert_eq!(store.renew(&first, LEASE).await.unwrap(), []);
    assert_eq!(store.renew(&first, 2 * LEASE).await.unwrap(), []);
    store.hand_back(&first).await.unwrap();
    let ends: Vec<_> = held().await.into_iter().map(|held| finished(held, answer("x"))).collect();
    assert_eq!(store.finish(&ends).await.unwrap().len(), JOBS);
    let log = server.log().unwrap();
    assert!(log.contains("open_jobs_pkey"), "the log has the plans");
    let compared = log.lines().filter_map(|line| line.split_once("Removed by Join Filter: "));
    let most = compared.map(|(_, pairs)| pairs.trim().parse::<usize>().unwrap()).max();
    assert!(most.unwrap_or(0) < 2 * JOBS, "{most:?} pairs of a job and a value were compared");
}
