//! Servers with few connections: many processes share what there is, and errors have the server's own words.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Connection as _, PgConnection};
use tritmill_queue::{
    Store, StoreError,
    store::{PostgresOptions, PostgresStore, QueueSettings as _},
};
use tritmill_servers::Postgres;

use super::{
    conformance::{answer, by, finished, job},
    eventually, execute, ids, number,
};

/// Starts a server with `connections` for all users, three of them for administrators, and a schema that belongs to
/// `plain`, who is none; returns it with the user's URL.
async fn start(connections: u32, role: &str) -> (Postgres, String) {
    let limit = format!("max_connections={connections}");
    let server = Postgres::start_with(&["fsync=off", "full_page_writes=off", &limit]).unwrap();
    execute(&server, &format!("CREATE ROLE plain LOGIN {role}")).await;
    execute(&server, "GRANT CREATE ON SCHEMA public TO plain").await;
    let url = format!("postgres://plain@127.0.0.1:{}/postgres", server.port());
    PostgresStore::migrate(&url).await.unwrap();
    (server, url)
}

/// Submits, claims and finishes jobs, twenty calls at once.
async fn work(store: &PostgresStore) {
    let work = (0..20).map(async |_| {
        let jobs = [job(), job()];
        store.submit(&jobs).await.unwrap();
        let claims = store.claim(&ids(&jobs), by("a")).await.unwrap();
        let done: Vec<_> =
            claims.iter().map(|claim| finished(claim.claim_ref(), answer("x"))).collect();
        assert_eq!(store.finish(&done).await.unwrap().len(), 2);
    });
    join_all(work).await;
}

const PLAIN: &str = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'plain'";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_processes_share_few_connections() {
    // Seven for the stores. Each may have sixteen.
    let (server, url) = start(10, "").await;
    let mut stores = Vec::new();
    for _ in 0..6 {
        stores.push(PostgresStore::connect(&url).await.unwrap());
        join_all(stores.iter().map(work)).await;
    }
    let open = number(&server, PLAIN).await;
    assert!((6..=7).contains(&open), "{open}");
    for store in &stores {
        assert_eq!(store.pools().map(|pool| pool.timeouts), [0, 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_process_takes_more_while_there_are_enough() {
    let (server, url) = start(40, "").await;
    let store = PostgresStore::connect(&url).await.unwrap();
    assert_eq!(number(&server, PLAIN).await, 1, "one until more are needed");
    work(&store).await;
    let more = async || (number(&server, PLAIN).await > 4).then_some(());
    eventually("more connections are open", async || {
        work(&store).await;
        more().await
    })
    .await;
    assert_eq!(store.pools().map(|pool| pool.timeouts), [0, 0]);
}

#[tokio::test]
async fn errors_have_the_words_of_the_server() {
    let (server, url) = start(40, "CONNECTION LIMIT 1").await;
    let options = PostgresOptions {
        acquire_timeout: Duration::from_millis(300),
        ..PostgresOptions::default()
    };
    let store = PostgresStore::connect_with(&url, options).await.unwrap();
    let refused = PostgresStore::connect_with(&url, options).await.unwrap_err();
    assert!(matches!(refused, StoreError::Unavailable(_)), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("too many connections for role \"plain\" (SQLSTATE 53300)"), "{said}");

    let mut other = PgConnection::connect(&server.url()).await.unwrap();
    let mut locked = other.begin().await.unwrap();
    sqlx::query("LOCK TABLE queues").execute(&mut *locked).await.unwrap();
    let blocked = tokio::spawn({
        let store = store.clone();
        async move { store.queue_states().await }
    });
    let works = async || (store.pools()[0].in_use > 0).then_some(());
    eventually("the connection is in use", works).await;
    let late = Store::now(&store).await.unwrap_err().to_string();
    for part in ["all 1 of this process", "too many connections for role"] {
        assert!(late.contains(part), "{late}");
    }
    locked.rollback().await.unwrap();
    blocked.await.unwrap().unwrap();
    work(&store).await;
}
