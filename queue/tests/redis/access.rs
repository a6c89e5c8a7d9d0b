//! Connections to Redis.

use std::time::{Duration, Instant};

use crate::rig::{MANY, command, entries, ids, ids_of, pull};
use tritmill_queue::{DispatchError, Dispatcher, Entry, dispatch::RedisDispatcher};
use tritmill_servers::{Port, Redis, Sentinel};

/// A master that does not answer for this time is replaced.
const DOWN_AFTER: Duration = Duration::from_millis(300);

/// Enqueues, retrying until it succeeds.
async fn enqueue_soon(dispatcher: &RedisDispatcher, entries: &[Entry]) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Err(error) = dispatcher.enqueue(entries).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the number of replicas that have all earlier writes. `WAIT` covers the writes of its own
/// connection.
async fn copies(master: &Redis) -> usize {
    let client = redis::Client::open(master.url()).unwrap();
    let patient =
        redis::AsyncConnectionConfig::new().set_response_timeout(Some(Duration::from_secs(20)));
    let mut connection =
        client.get_multiplexed_async_connection_with_config(&patient).await.unwrap();
    let mut script = redis::pipe();
    script.cmd("SET").arg("mark").arg(1).ignore().cmd("WAIT").arg(1).arg(10_000);
    let (copies,): (usize,) = script.query_async(&mut connection).await.unwrap();
    copies
}

#[tokio::test]
async fn sentinels_provide_the_master() {
    let mut redis = Redis::start().unwrap();
    let sentinel = Sentinel::start(redis.port(), DOWN_AFTER).unwrap();
    let url = format!("redis+sentinel://127.0.0.1:1,127.0.0.1:{}/main", sentinel.port());
    let dispatcher = RedisDispatcher::new(&url, MANY).unwrap();
    let fed = entries(3);
    // On a loaded machine the sentinel may think for a moment that the master is down.
    enqueue_soon(&dispatcher, &fed).await;
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), ids_of(&fed));
    redis.kill();
    assert!(dispatcher.enqueue(&fed).await.is_err());
    redis.restart().unwrap();
    enqueue_soon(&dispatcher, &fed).await;
    assert_eq!(pull(&dispatcher, "a", 10).await.len(), 3);
}

#[tokio::test]
async fn client_follows_a_failover() {
    let mut master = Redis::start().unwrap();
    let port = master.port().to_string();
    let options = ["--save", "", "--appendonly", "no", "--replicaof", "127.0.0.1", &port];
    let replica = Redis::start_with(&options).unwrap();
    while !command::<String>(&master, &["INFO", "replication"]).await.contains("state=online") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sentinel = Sentinel::start(master.port(), DOWN_AFTER).unwrap();
    let dispatcher = RedisDispatcher::new(&sentinel.url(), MANY).unwrap();
    let fed = entries(3);
    dispatcher.enqueue(&fed).await.unwrap();
    let first = pull(&dispatcher, "a", 1).await;
    assert_eq!(copies(&master).await, 1);
    master.kill();
    let started = Instant::now();
    while dispatcher.acknowledge("a", &first).await.is_err() {
        assert!(started.elapsed() < Duration::from_secs(30), "no server became master");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The first pulls may use connections that the failover has broken.
    let mut pulled = Vec::new();
    while pulled.is_empty() && started.elapsed() < Duration::from_secs(60) {
        pulled = ids(&pull(&dispatcher, "a", 10).await);
    }
    assert_eq!(pulled, ids_of(&fed[1..]));
    assert!(command::<String>(&replica, &["INFO", "replication"]).await.contains("role:master"));
}

#[tokio::test]
async fn passwords_authenticate_and_are_never_printed() {
    let redis = Redis::start().unwrap();
    let _: String = command(&redis, &["CONFIG", "SET", "requirepass", "s3cr:t@/"]).await;
    let host = format!("127.0.0.1:{}", redis.port());
    let right = format!("redis://:s3cr%3At%40%2F@{host}/0");
    let dispatcher = RedisDispatcher::new(&right, MANY).unwrap();
    dispatcher.ping().await.unwrap();
    assert!(!format!("{dispatcher:?} {:?}", dispatcher.events()).contains("s3cr"));
    assert!(format!("{dispatcher:?}").contains(&host));
    for scheme in ["redis", "redis+cluster"] {
        let wrong = format!("{scheme}://:s3cr-wrong@{host}");
        let error = RedisDispatcher::new(&wrong, MANY).unwrap().ping().await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cr"), "{error:?}");
        assert!(!error.to_string().contains("has no password"), "{error:?}");
    }
    let none = RedisDispatcher::new(&format!("redis://{host}"), MANY).unwrap();
    let error = none.ping().await.unwrap_err();
    assert!(error.to_string().contains("has no password"), "{error:?}");
    // Refused before Redis reads the command.
    let error = none.enqueue(&entries(100)).await.unwrap_err();
    assert!(error.to_string().contains("has no password"), "{error:?}");
}

#[tokio::test]
async fn unreachable_redis_is_reported_quickly() {
    let port = Port::claim().unwrap();
    let url = format!("redis://127.0.0.1:{}", port.number());
    let dispatcher = RedisDispatcher::new(&url, MANY).unwrap();
    let started = Instant::now();
    let refused = dispatcher.enqueue(&entries(1)).await;
    assert!(matches!(refused, Err(DispatchError::Unavailable(_))));
    assert!(started.elapsed() < Duration::from_secs(4));
}

#[tokio::test]
async fn rediss_to_server_without_tls_fails() {
    let redis = Redis::start().unwrap();
    for scheme in ["rediss", "rediss+cluster"] {
        let url = format!("{scheme}://127.0.0.1:{}", redis.port());
        let dispatcher = RedisDispatcher::new(&url, MANY).unwrap();
        assert!(matches!(dispatcher.ping().await, Err(DispatchError::Unavailable(_))));
    }
}
