//! What Redis refuses until an operator has changed something, and what it refuses for a moment.

use std::{path::Path, process::Command, time::Duration};

use tritmill_queue::{DispatchError, Dispatcher, dispatch::RedisDispatcher};
use tritmill_servers::{Port, Redis, RedisCluster};

use crate::rig::{MANY, STREAM, command, dispatcher, entries, pull, queue};

/// The rights that docs/OPERATIONS.md names.
const RIGHTS: [&str; 4] = ["~tm:*", "+@all", "-@dangerous", "+info"];

async fn refusal(url: &str) -> String {
    let refused = RedisDispatcher::new(url, MANY).unwrap().check().await.unwrap_err();
    assert!(matches!(refused, DispatchError::Refused(_)), "{url}: {refused}");
    refused.to_string()
}

#[tokio::test]
async fn check_of_a_good_server_leaves_nothing() {
    let redis = Redis::start().unwrap();
    dispatcher(&redis).check().await.unwrap();
    dispatcher(&redis).check_queue(&queue()).await.unwrap();
    let keys: Vec<String> = command(&redis, &["KEYS", "*"]).await;
    assert!(keys.is_empty(), "{keys:?}");
    let cluster = RedisCluster::start().unwrap();
    let dispatcher = RedisDispatcher::new(&cluster.url(), MANY).unwrap();
    dispatcher.check().await.unwrap();
    dispatcher.check_queue(&queue()).await.unwrap();
}

#[tokio::test]
async fn what_a_check_leaves_expires() {
    let redis = Redis::start().unwrap();
    // A check without the right to delete leaves what one leaves that is killed: at its end, and after its first entry.
    for (name, without) in [("mill", &["-del"][..]), ("other", &["-del", "-xclaim"])] {
        let user = ["ACL", "SETUSER", name, "on", ">pw"];
        let _: String = command(&redis, &[&user[..], &RIGHTS, without].concat()).await;
        refusal(&format!("redis://{name}:pw@127.0.0.1:{}", redis.port())).await;
        let keys: Vec<String> = command(&redis, &["KEYS", "tm:{*"]).await;
        assert!(!keys.is_empty());
        for key in keys {
            let left: i64 = command(&redis, &["PTTL", &key]).await;
            assert!((1..=15_000).contains(&left), "{name}, {key}: {left} ms");
        }
        let _: String = command(&redis, &["FLUSHALL"]).await;
    }
}

#[tokio::test]
async fn wrong_login_is_refused_in_the_words_of_the_server() {
    let redis = Redis::start().unwrap();
    let host = format!("127.0.0.1:{}", redis.port());
    let said = refusal(&format!("redis://:secret@{host}")).await;
    assert!(said.contains("remove the one in the Redis URL"), "{said}");
    let said = refusal(&format!("redis://{host}/99")).await;
    assert!(said.contains("DB index is out of range") && said.contains("`databases`"), "{said}");

    let _: String = command(&redis, &["CONFIG", "SET", "requirepass", "right"]).await;
    for url in ["redis://:hunter2@", "redis://guest:hunter2@", "redis+cluster://:hunter2@"] {
        let said = refusal(&format!("{url}{host}")).await;
        assert!(said.contains("WRONGPASS") && said.contains("check user and password"), "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    for scheme in ["redis", "redis+cluster"] {
        let said = refusal(&format!("{scheme}://{host}")).await;
        assert!(said.contains("has no password"), "{said}");
    }
}

#[tokio::test]
async fn user_needs_the_rights_that_the_documentation_names() {
    let redis = Redis::start().unwrap();
    let user = ["ACL", "SETUSER", "mill", "on", ">pw"];
    let _: String = command(&redis, &[&user[..], &RIGHTS].concat()).await;
    let url = format!("redis://mill:pw@127.0.0.1:{}", redis.port());
    RedisDispatcher::new(&url, MANY).unwrap().check().await.unwrap();
    for lacking in ["-eval", "-xadd", "-blpop", "-xread", "resetkeys"] {
        let _: String = command(&redis, &["ACL", "SETUSER", "mill", lacking]).await;
        let said = refusal(&url).await;
        assert!(said.contains("allow the user of the Redis URL"), "{lacking}: {said}");
        let _: String = command(&redis, &[&user[..], &RIGHTS].concat()).await;
    }
}

#[tokio::test]
async fn keys_of_another_program_are_named() {
    let redis = Redis::start().unwrap();
    let dispatcher = dispatcher(&redis);
    let _: String = command(&redis, &["SET", STREAM, "x"]).await;
    dispatcher.check().await.unwrap();
    let refused = dispatcher.check_queue(&queue()).await.unwrap_err();
    assert!(matches!(refused, DispatchError::Refused(_)), "{refused}");
    let said = refused.to_string();
    assert!(said.contains(STREAM) && said.contains("is a string, not a stream"), "{said}");
    // Without the check, the first call says what it can.
    let refused = dispatcher.enqueue(&entries(1)).await.unwrap_err();
    assert!(matches!(refused, DispatchError::Refused(_)), "{refused}");
    assert!(refused.to_string().contains("another database number"), "{refused}");
}

#[tokio::test]
async fn cluster_and_server_are_told_apart() {
    let cluster = RedisCluster::start().unwrap();
    for node in cluster.nodes() {
        let refused = RedisDispatcher::new(&node.url(), MANY).unwrap();
        let mut said = String::new();
        // Some queues are on this node.
        for _ in 0..20 {
            if let Err(error) = refused.check().await {
                said = error.to_string();
                break;
            }
        }
        assert!(said.contains("use redis+cluster://"), "{said}");
    }
    let redis = Redis::start().unwrap();
    let said = refusal(&format!("redis+cluster://127.0.0.1:{}", redis.port())).await;
    assert!(said.contains("use redis://"), "{said}");
}

#[tokio::test]
async fn full_and_absent_servers_are_not_refusals() {
    let redis = Redis::start().unwrap();
    let _: String = command(&redis, &["CONFIG", "SET", "requirepass", "pw"]).await;
    let url = format!("redis://:pw@127.0.0.1:{}", redis.port());
    let client = redis::Client::open(url.as_str()).unwrap();
    let mut admin = client.get_multiplexed_async_connection().await.unwrap();
    let mut set = redis::cmd("CONFIG");
    let () = set.arg("SET").arg("maxclients").arg(1).query_async(&mut admin).await.unwrap();
    let refused = RedisDispatcher::new(&url, MANY).unwrap().check().await.unwrap_err();
    assert!(matches!(refused, DispatchError::Unavailable(_)), "{refused}");
    assert!(refused.to_string().contains("max number of clients"), "{refused}");

    let full = Redis::start_with(&["--save", "", "--maxmemory", "1"]).unwrap();
    let refused = dispatcher(&full).check().await.unwrap_err();
    assert!(matches!(refused, DispatchError::Busy { .. }), "{refused}");

    let absent = format!("redis://127.0.0.1:{}", Port::claim().unwrap().number());
    let refused = RedisDispatcher::new(&absent, MANY).unwrap().check().await.unwrap_err();
    assert!(matches!(refused, DispatchError::Unavailable(_)), "{refused}");
}

/// Makes a certificate that is its own authority, as users make them, and its key.
fn make_certificate(folder: &Path, name: &str, more: &[&str]) -> [String; 2] {
    let path = |kind| folder.join(name).with_extension(kind).to_str().unwrap().to_owned();
    let [certificate, key] = [path("crt"), path("key")];
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "9"]);
    openssl.args(["-subj", "/CN=localhost", "-out", &certificate, "-keyout", &key]).args(more);
    assert!(openssl.output().unwrap().status.success());
    [certificate, key]
}

#[tokio::test]
async fn certificate_that_is_its_own_authority_is_taken() {
    if Command::new("openssl").arg("version").output().is_err() {
        return tritmill_servers::skip("openssl (apt install openssl)");
    }
    let folder = tempfile::tempdir().unwrap();
    let names = ["-addext", "subjectAltName=DNS:localhost"];
    let [certificate, key] = make_certificate(folder.path(), "server", &names);
    let [stranger, _] = make_certificate(folder.path(), "stranger", &names);
    let port = Port::claim().unwrap();
    let number = port.number().to_string();
    let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key];
    let options = ["--save", "", "--tls-port", &number, "--tls-auth-clients", "no"];
    let redis = Redis::start_with(&[&options[..], &files].concat()).unwrap();
    let _: String = command(&redis, &["CONFIG", "SET", "requirepass", "pw"]).await;

    let url = |host: &str, root: &str| format!("rediss://:pw@{host}:{number}/3?sslrootcert={root}");
    let good = RedisDispatcher::new(&url("localhost", &certificate), MANY).unwrap();
    good.check().await.unwrap();
    good.enqueue(&entries(2)).await.unwrap();
    assert_eq!(pull(&good, "a", 10).await.len(), 2);
    for (host, root, expected) in
        [("localhost", &stranger, "certificate"), ("127.0.0.1", &certificate, "not valid for name")]
    {
        let wrong = RedisDispatcher::new(&url(host, root), MANY).unwrap();
        let refused = tokio::time::timeout(Duration::from_secs(20), wrong.check()).await.unwrap();
        let said = refused.unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
    let wrong = url("localhost", &certificate).replace(":pw@", ":hunter2@");
    assert!(refusal(&wrong).await.contains("WRONGPASS"));
}
