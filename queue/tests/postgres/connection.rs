//! Connections: schemas, wrong addresses and passwords, restarts, silent servers.

use std::time::Duration;

use futures_util::future::join_all;
use sqlx::{Connection as _, PgConnection};
use tritmill_queue::{
    Store, StoreError,
    store::{PostgresOptions, PostgresStore, QueueSettings as _, SchemaError},
};
use tritmill_servers::Postgres;

use super::{
    conformance::{answer, by, finished, job},
    eventually, execute, ids, number, start, text,
};

fn cause(error: StoreError) -> SchemaError {
    match error {
        StoreError::Migrate(cause) => *cause.downcast().unwrap(),
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_migrations_succeed() {
    let server = Postgres::start().unwrap();
    let url = server.url();
    let opens = (0..4).map(|_| {
        let url = url.clone();
        tokio::spawn(async move {
            PostgresStore::migrate(&url).await.unwrap();
            PostgresStore::connect(&url).await.unwrap().submit(&[job()]).await.unwrap();
        })
    });
    for opened in join_all(opens).await {
        opened.unwrap();
    }
    let store = PostgresStore::connect(&url).await.unwrap();
    assert_eq!(store.progress(None).await.unwrap().queued, 4);
}

#[tokio::test]
async fn limits_of_the_role_do_not_stop_a_migration() {
    let server = Postgres::start().unwrap();
    execute(&server, "ALTER ROLE postgres SET statement_timeout = '1ms'").await;
    PostgresStore::migrate(&server.url()).await.unwrap();
    PostgresStore::connect(&server.url()).await.unwrap().submit(&[job()]).await.unwrap();
}

#[tokio::test]
async fn older_schema_is_refused() {
    let server = Postgres::start().unwrap();
    let url = server.url();
    let refused = PostgresStore::connect(&url).await.unwrap_err();
    assert_eq!(cause(refused), SchemaError::Missing);

    PostgresStore::migrate(&url).await.unwrap();
    let last = number(&server, "SELECT max(version) FROM _sqlx_migrations").await;
    execute(
        &server,
        &format!(
            "INSERT INTO _sqlx_migrations VALUES ({}, 'of a later release', now(), true, 'x', 0)",
            last + 1,
        ),
    )
    .await;
    PostgresStore::connect(&url).await.unwrap();
    PostgresStore::migrate(&url).await.unwrap();

    execute(&server, &format!("DELETE FROM _sqlx_migrations WHERE version >= {last}")).await;
    let found = last - 1;
    let refused = PostgresStore::connect(&url).await.unwrap_err();
    assert_eq!(cause(refused), SchemaError::Older { found, missing: last });
}

#[tokio::test]
async fn password_is_never_printed() {
    let (server, store) = start().await;
    let at = format!("127.0.0.1:{}", server.port());
    let secret = "hunter2";
    let options = PostgresOptions {
        connections_max: 1,
        acquire_timeout: Duration::from_millis(200),
        ..PostgresOptions::default()
    };
    let mut shown = vec![format!("{store:?}")];
    for url in [
        format!("postgres://postgres:{secret}@{at}/no_such_database"),
        format!("postgres://stranger:{secret}@{at}/postgres"),
        format!("postgres://postgres:{secret}@{at}/postgres?sslmode=require"),
        format!("postgres://postgres:{secret}@{at}/postgres?sslmode=perhaps"),
        format!("postgres://postgres:{secret}@127.0.0.1:1/postgres"),
        format!("postgres://postgres:{secret}@127.0.0.1:port/postgres"),
        format!("postgres://postgres:{secret}@"),
        format!("postgres:{secret}"),
        format!("postgres://postgres@{at}/postgres?pasword={secret}"),
    ] {
        match PostgresStore::connect_with(&url, options).await {
            Ok(store) => shown.push(format!("{store:?}")),
            Err(error) => {
                let is_named = matches!(error, StoreError::Unavailable(_) | StoreError::Refused(_));
                assert!(is_named, "{error}");
                shown.extend([format!("{error}"), format!("{error:?}")]);
            }
        }
    }
    let url = format!("postgres://postgres:{secret}@{at}/postgres");
    shown.push(format!("{:?}", PostgresStore::connect(&url).await.unwrap()));
    assert!(shown.len() > 10);
    for text in shown {
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn connection_error_names_server_and_reason() {
    let (server, _store) = start().await;
    let at = format!("127.0.0.1:{}", server.port());
    // Accepts connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().unwrap().to_string();
    let options = PostgresOptions {
        acquire_timeout: Duration::from_millis(200),
        ..PostgresOptions::default()
    };
    let closed = "127.0.0.1:1".to_owned();
    for (url, address, reason, is_permanent) in [
        (format!("postgres://postgres:hunter2@{closed}/postgres"), closed, "refused", false),
        (format!("postgres://stranger:hunter2@{at}/postgres"), at.clone(), "\"stranger\"", true),
        (format!("postgres://postgres:hunter2@{at}/nothing"), at, "create the database", true),
        (format!("postgres://postgres:hunter2@{silent}/postgres"), silent, "no answer", false),
    ] {
        let refused = PostgresStore::connect_with(&url, options).await.unwrap_err();
        assert_eq!(matches!(refused, StoreError::Refused(_)), is_permanent, "{refused}");
        assert_eq!(refused.is_permanent(), is_permanent, "{refused}");
        let said = refused.to_string();
        assert!(said.contains(reason) && said.contains(&address), "{said}");
        assert!(!said.contains("hunter2") && !said.contains("pool"), "{said}");
    }
}

#[tokio::test]
async fn wrong_password_is_reported() {
    let (server, _store) = start().await;
    execute(&server, "CREATE ROLE careful SUPERUSER LOGIN PASSWORD 'right'").await;
    let folder = text(&server, "SHOW hba_file").await;
    let rules = std::fs::read_to_string(&folder).unwrap();
    std::fs::write(&folder, format!("host all careful all scram-sha-256\n{rules}")).unwrap();
    execute(&server, "SELECT pg_reload_conf()").await;
    let url =
        |password| format!("postgres://careful:{password}@127.0.0.1:{}/postgres", server.port());
    let connect = async || PostgresStore::connect(&url("wrong")).await.err();
    let said = eventually("the rules are read", connect).await.to_string();
    assert!(said.contains("password authentication failed"), "{said}");
    assert!(!said.contains("wrong"), "{said}");
    PostgresStore::connect(&url("right")).await.unwrap();
}

#[tokio::test]
async fn server_restart_fails_only_the_calls_in_progress() {
    let mut server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let options = PostgresOptions {
        connections_max: 4,
        acquire_timeout: Duration::from_millis(300),
        ..PostgresOptions::default()
    };
    let store = PostgresStore::connect_with(&server.url(), options).await.unwrap();
    let jobs = [job(), job()];
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids(&jobs), by("a")).await.unwrap();
    // Every connection of the pool has been in use.
    join_all((0..4).map(|_| store.job(jobs[0].id))).await;

    server.kill();
    let done: Vec<_> =
        claims.iter().map(|claim| finished(claim.claim_ref(), answer("x"))).collect();
    let lost = store.finish(&done).await.unwrap_err();
    assert!(matches!(lost, StoreError::Unavailable(_)), "{lost}");
    server.restart().unwrap();
    // At most one error for each recently used connection of either pool.
    let mut errors = 0;
    let mut settled = store.finish(&done).await;
    while settled.is_err() {
        errors += 1;
        assert!(errors <= 4, "{settled:?}");
        settled = store.finish(&done).await;
    }
    assert_eq!(settled.unwrap().len(), 2);
    let mut errors = 0;
    for _ in 0..12 {
        match store.progress(None).await {
            Ok(progress) => assert_eq!(progress.completed, 2),
            Err(_) => errors += 1,
        }
    }
    assert!(errors <= 4, "one for each connection of the pool, not {errors}");
}

#[tokio::test]
async fn silent_server_times_out() {
    let (server, _) = start().await;
    let call_timeout = Duration::from_millis(200);
    let options = PostgresOptions { call_timeout, ..PostgresOptions::default() };
    let store = PostgresStore::connect_with(&server.url(), options).await.unwrap();
    let job = job();
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE jobs").execute(&mut *tx).await.unwrap();
    let silent = store.submit(std::slice::from_ref(&job)).await.unwrap_err();
    assert!(silent.to_string().contains("no answer"), "{silent}");
    tx.rollback().await.unwrap();
    // The first call may have succeeded; repeating it is harmless.
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    assert_eq!(store.progress(None).await.unwrap().queued, 1);
}

#[tokio::test]
async fn pools_tell_how_busy_they_are() {
    let (server, _) = start().await;
    let options = PostgresOptions {
        connections_max: 1,
        acquire_timeout: Duration::from_millis(300),
        ..PostgresOptions::default()
    };
    let store = PostgresStore::connect_with(&server.url(), options).await.unwrap();
    let [calls, hot] = store.pools();
    assert_eq!((calls.name, calls.idle, calls.max, calls.waits), ("calls", 1, 1, 0));
    assert_eq!((hot.name, hot.idle + hot.in_use, hot.max), ("hot", 0, 1));
    let mut other = PgConnection::connect(&server.url()).await.unwrap();
    let mut locked = other.begin().await.unwrap();
    sqlx::query("LOCK TABLE queues").execute(&mut *locked).await.unwrap();
    let blocked = tokio::spawn({
        let store = store.clone();
        async move { store.queue_states().await }
    });
    let works = async || (store.pools()[0].in_use > 0).then_some(());
    eventually("the connection is in use", works).await;
    let late = Store::now(&store).await.unwrap_err();
    assert!(matches!(late, StoreError::Unavailable(_)), "{late}");
    let [calls, hot] = store.pools();
    assert_eq!((calls.waits, calls.timeouts), (1, 1));
    assert_eq!((hot.waits, hot.timeouts), (0, 0));
    locked.rollback().await.unwrap();
    blocked.await.unwrap().unwrap();
}
