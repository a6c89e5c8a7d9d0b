//! Tests of the measured calls.

use std::{future::Future, pin::pin, task::Poll};

use prometheus_client::{encoding::text, registry::Registry};

use super::*;
use crate::{
    dispatch::MemoryDispatcher,
    store::{JobStore, SqliteStore},
};

/// A method with a default body that is not passed on would silently lose what the store does.
#[test]
fn every_call_of_the_traits_is_passed_on() {
    let sources = [
        (include_str!("../../store.rs"), STORE_CALLS),
        (include_str!("../../store/job_queries.rs"), STORE_CALLS),
        (include_str!("../../store/job_ranges.rs"), STORE_CALLS),
        (include_str!("../../store/queue_settings.rs"), STORE_CALLS),
        (include_str!("../../store/history.rs"), STORE_CALLS),
        (include_str!("../../store/classes.rs"), STORE_CALLS),
        (include_str!("../../store/workers.rs"), STORE_CALLS),
        (include_str!("../../store/dead_letters.rs"), STORE_CALLS),
        (include_str!("../../store/waiting.rs"), STORE_CALLS),
        (include_str!("../../store/maintenance.rs"), STORE_CALLS),
        (include_str!("../../dispatch.rs"), DISPATCHER_CALLS),
    ];
    for (source, names) in sources {
        let (_, body) = source.split_once(": Send + Sync {\n").expect("a trait");
        let (body, _) = body.split_once("\n}\n").expect("its end");
        let methods = body.split("\n    ").filter_map(|line| {
            let name = line.strip_prefix("async fn ").or_else(|| line.strip_prefix("fn "))?;
            name.split('(').next()
        });
        let missing: Vec<&str> =
            methods.filter(|name| *name != "announced" && !names.contains(name)).collect();
        assert!(missing.is_empty(), "not passed on: {missing:?}");
    }
}

fn encoded(calls: &CallMetrics) -> String {
    let (mut registry, mut out) = (Registry::default(), String::new());
    calls.register(&mut registry);
    text::encode(&mut out, &registry).expect("a string takes everything");
    out
}

#[tokio::test]
async fn calls_are_counted_by_name_and_result() {
    let calls = CallMetrics::default();
    let folder = tempfile::tempdir().expect("a folder");
    let sqlite = SqliteStore::open(&folder.path().join("store")).await.expect("a new store");
    let sqlite: Arc<dyn JobStore> = Arc::new(sqlite);
    let store: Arc<dyn JobStore> = Arc::new(MeasuredStore::new(sqlite, &calls));
    assert!(!encoded(&calls).contains("call="), "no series before the first call");
    store.now().await.expect("it has a clock");
    store.now().await.expect("it has a clock");
    let queue = QueueName { model: "m".to_owned(), format: "i2_s".to_owned() };
    store.set_paused(&queue, true).await.expect("it pauses a queue");
    store.workers().await.expect("it lists workers");
    let out = encoded(&calls);
    for (call, count) in [("now", 2), ("set_paused", 1), ("workers", 1)] {
        let line = format!("store_call_seconds_count{{call=\"{call}\",result=\"ok\"}} {count}");
        assert!(out.contains(&line), "{line}: {out}");
    }
}

#[tokio::test]
async fn refused_and_dropped_calls_are_counted_as_such() {
    let calls = CallMetrics::default();
    let memory: Arc<dyn Dispatcher> = Arc::new(MemoryDispatcher::new(1));
    let dispatcher = MeasuredDispatcher::new(memory, &calls);
    let queue = QueueName { model: "m".to_owned(), format: "i2_s".to_owned() };
    let entry = || Entry {
        id: JobId::generate(),
        queue: queue.clone(),
        priority: Priority::Normal,
        tenant: Tenant::default(),
        cost: 1,
        shard_key: 0,
        is_first: false,
        expires_at: None,
    };
    dispatcher.enqueue(&[entry(), entry()]).await.expect_err("it is full");
    let pull =
        Pull { queue: &queue, consumer: "c", max: 1, wait: Duration::from_secs(60), only: None };
    {
        let mut waiting = pin!(dispatcher.pull(pull));
        let poll = std::future::poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context)));
        assert!(poll.await.is_pending());
    }
    let out = encoded(&calls);
    for labels in ["call=\"enqueue\",result=\"busy\"", "call=\"pull\",result=\"dropped\""] {
        let line = format!("dispatcher_call_seconds_count{{{labels}}} 1");
        assert!(out.contains(&line), "{line}: {out}");
    }
}
