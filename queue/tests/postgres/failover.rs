//! Several servers of one database, and servers that become read-only.

use tritmill_queue::store::{PostgresOptions, Submission};

use super::*;

/// Returns the URL of both servers.
fn both(first: &Postgres, second: &Postgres) -> String {
    let [first, second] = [first, second].map(Postgres::port);
    format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres")
}

/// Repeats a call until it succeeds.
async fn succeeded<T, E: std::fmt::Display>(call: impl AsyncFn() -> Result<T, E>) -> T {
    let started = Instant::now();
    loop {
        match call().await {
            Ok(value) => return value,
            Err(error) => assert!(started.elapsed() < CHANGES_WITHIN, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns a primary, its standby and a store of both.
async fn cluster() -> (Postgres, Postgres, PostgresStore) {
    let primary = Postgres::start().unwrap();
    PostgresStore::migrate(&primary.url()).await.unwrap();
    let standby = primary.start_standby().unwrap();
    let options = PostgresOptions { acquire_timeout: Duration::from_secs(1), ..Default::default() };
    // The standby is named first: it takes no writes.
    let url = both(&standby, &primary);
    PostgresStore::migrate(&url).await.unwrap();
    let store = PostgresStore::connect_with(&url, options).await.unwrap();
    (primary, standby, store)
}

#[tokio::test]
async fn promoted_standby_gets_the_calls() {
    let (mut primary, standby, store) = cluster().await;
    let jobs = [job(), job()];
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs[..1]), by("a")).await.unwrap();
    let running = "SELECT count(*) FROM open_jobs WHERE state = 'running'";
    let is_there = async || (number(&standby, running).await == 1).then_some(());
    eventually("the standby has the claim", is_there).await;

    primary.kill();
    assert!(store.submit(&[job()]).await.is_err());
    text(&standby, "SELECT pg_promote()::text").await;
    succeeded(async || store.submit(&[job()]).await).await;
    let done = [finished(claims[0].claim_ref(), answer("x"))];
    assert_eq!(store.finish(&done).await.unwrap().len(), 1);
    assert_eq!(store.claim(&ids(&jobs[1..]), by("b")).await.unwrap().len(), 1);
}

#[tokio::test]
async fn submissions_under_keys_alone_find_the_promoted_standby() {
    let (mut primary, standby, store) = cluster().await;
    let (tenant, jobs) = (Tenant("acme".into()), [job()]);
    let submit = async || store.submit_idempotent(&tenant, "key", b"hash", &jobs).await;
    primary.kill();
    assert!(submit().await.is_err());
    text(&standby, "SELECT pg_promote()::text").await;
    assert_eq!(succeeded(submit).await, Submission::New);
    assert_eq!(submit().await.unwrap(), Submission::Known(ids(&jobs)));
}

#[tokio::test]
async fn no_server_that_takes_writes_is_an_error_with_each_reason() {
    let mut primary = Postgres::start().unwrap();
    PostgresStore::migrate(&primary.url()).await.unwrap();
    let standby = primary.start_standby().unwrap();
    primary.kill();
    let options =
        PostgresOptions { acquire_timeout: Duration::from_millis(300), ..Default::default() };
    let refused =
        PostgresStore::connect_with(&both(&primary, &standby), options).await.unwrap_err();
    let said = refused.to_string();
    for part in ["no server takes writes", "refused", "it is read-only"] {
        assert!(said.contains(part), "{said}");
    }
}

#[tokio::test]
async fn server_that_does_not_answer_delays_no_connection() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    // Connections are established and never answered.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, port) = (silent.local_addr().unwrap(), server.port());
    let url = format!("postgres://postgres@{address},127.0.0.1:{port}/postgres");
    let started = Instant::now();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.submit(&[job()]).await.unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "took {:?}", started.elapsed());
}

#[tokio::test]
async fn connections_to_a_server_that_became_read_only_are_closed() {
    let (server, store) = start().await;
    store.submit(&[job()]).await.unwrap();
    let opened =
        "SELECT max(backend_start)::text FROM pg_stat_activity WHERE application_name = 'tritmill'";
    let before = text(&server, opened).await;
    execute(&server, "ALTER SYSTEM SET default_transaction_read_only = on").await;
    execute(&server, "SELECT pg_reload_conf()").await;
    let submit = async || store.submit(&[job()]).await.err();
    let refused = eventually("the server is read-only", submit).await;
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    assert!(refused.to_string().contains("read-only transaction (SQLSTATE 25006)"), "{refused}");
    // In another server's place the address would now lead to the one that takes writes.
    execute(&server, "ALTER SYSTEM RESET ALL").await;
    execute(&server, "SELECT pg_reload_conf()").await;
    succeeded(async || store.submit(&[job()]).await).await;
    assert_ne!(text(&server, opened).await, before);
}
