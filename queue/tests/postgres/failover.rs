//! Several servers of one database, and servers that become read-only.

use std::time::Instant;

use tritmill_queue::store::PostgresOptions;

use super::*;

/// How long the store may take to find the server that takes writes.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

async fn scalar(server: &Postgres, statement: &str) -> String {
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let row = sqlx::query(AssertSqlSafe(statement.to_owned())).fetch_one(&mut connection);
    row.await.unwrap().get(0)
}

/// Returns the URL of both servers.
fn both(first: &Postgres, second: &Postgres) -> String {
    let [first, second] = [first, second].map(Postgres::port);
    format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/postgres")
}

/// Repeats a submission until it succeeds.
async fn submitted(store: &PostgresStore, jobs: &[Job]) {
    let started = Instant::now();
    while let Err(error) = store.submit(jobs).await {
        assert!(started.elapsed() < FOUND_WITHIN, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn promoted_standby_gets_the_calls() {
    let mut primary = Postgres::start().unwrap();
    PostgresStore::migrate(&primary.url()).await.unwrap();
    let standby = primary.start_standby().unwrap();
    let options = PostgresOptions { acquire_timeout: Duration::from_secs(1), ..Default::default() };
    // The standby is named first: it takes no writes.
    let url = both(&standby, &primary);
    PostgresStore::migrate(&url).await.unwrap();
    let store = PostgresStore::connect_with(&url, options).await.unwrap();
    let jobs = [job(), job()];
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs[..1]), by("a")).await.unwrap();
    while scalar(&standby, "SELECT count(*)::text FROM open_jobs WHERE state = 'running'").await
        != "1"
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    primary.kill();
    assert!(store.submit(&[job()]).await.is_err());
    scalar(&standby, "SELECT pg_promote()::text").await;
    submitted(&store, &[job()]).await;
    let done = [finished(claims[0].claim_ref(), answer("x"))];
    assert_eq!(store.finish(&done).await.unwrap().len(), 1);
    assert_eq!(store.claim(&ids(&jobs[1..]), by("b")).await.unwrap().len(), 1);
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
async fn connections_to_a_server_that_became_read_only_are_closed() {
    let (server, store) = start().await;
    store.submit(&[job()]).await.unwrap();
    let opened =
        "SELECT max(backend_start)::text FROM pg_stat_activity WHERE application_name = 'tritmill'";
    let before = scalar(&server, opened).await;
    execute(&server, "ALTER SYSTEM SET default_transaction_read_only = on").await;
    execute(&server, "SELECT pg_reload_conf()").await;
    let refused = loop {
        match store.submit(&[job()]).await {
            Ok(()) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(refused) => break refused,
        }
    };
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    assert!(refused.to_string().contains("read-only transaction (SQLSTATE 25006)"), "{refused}");
    // In another server's place the address would now lead to the one that takes writes.
    execute(&server, "ALTER SYSTEM RESET ALL").await;
    execute(&server, "SELECT pg_reload_conf()").await;
    submitted(&store, &[job()]).await;
    assert_ne!(scalar(&server, opened).await, before);
}
