//! What every dispatcher must do, on the one in memory.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{sync::Arc, time::Duration};

use tritmill_queue::{
    Delivery, DispatchError, Dispatcher, Entry, JobId, Priority, Pull, QueueName, Tenant,
    dispatch::MemoryDispatcher,
};

fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

fn entries(priority: Priority, count: usize) -> Vec<Entry> {
    let entry = |_| Entry {
        id: JobId::generate(),
        queue: queue(),
        priority,
        tenant: Tenant::default(),
        cost: 1,
    };
    (0..count).map(entry).collect()
}

async fn pull(dispatcher: &MemoryDispatcher, consumer: &str, max: usize) -> Vec<Delivery> {
    let queue = queue();
    let wait = Duration::ZERO;
    dispatcher.pull(Pull { queue: &queue, consumer, max, wait }).await.unwrap()
}

fn ids(deliveries: &[Delivery]) -> Vec<JobId> {
    deliveries.iter().map(|delivery| delivery.id).collect()
}

#[tokio::test]
async fn priorities_are_served_sixteen_to_four_to_one_and_first_in_first_out() {
    let dispatcher = MemoryDispatcher::new(1000);
    let all: Vec<Vec<Entry>> =
        Priority::ALL.into_iter().map(|priority| entries(priority, 100)).collect();
    // Low first: the order of arrival across priorities does not matter.
    for lane in all.iter().rev() {
        dispatcher.enqueue(lane).await.unwrap();
    }
    let taken = ids(&pull(&dispatcher, "a", 42).await);
    for (lane, count) in all.iter().zip([32, 8, 2]) {
        let expected: Vec<JobId> = lane.iter().take(count).map(|entry| entry.id).collect();
        let served: Vec<JobId> =
            taken.iter().copied().filter(|id| lane.iter().any(|entry| entry.id == *id)).collect();
        assert_eq!(served, expected);
    }
    assert_eq!(taken[0], all[0][0].id, "high goes first");
}

#[tokio::test]
async fn low_alone_gets_everything() {
    let dispatcher = MemoryDispatcher::new(100);
    dispatcher.enqueue(&entries(Priority::Low, 50)).await.unwrap();
    assert_eq!(pull(&dispatcher, "a", 100).await.len(), 50);
}

#[tokio::test]
async fn a_full_queue_is_busy_and_takes_nothing() {
    let dispatcher = MemoryDispatcher::new(10);
    dispatcher.enqueue(&entries(Priority::Normal, 8)).await.unwrap();
    let refused = dispatcher.enqueue(&entries(Priority::High, 3)).await;
    assert!(matches!(refused, Err(DispatchError::Busy { limit: 10, .. })));
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 8);
    pull(&dispatcher, "a", 1).await;
    dispatcher.enqueue(&entries(Priority::High, 3)).await.unwrap();
}

#[tokio::test]
async fn feeding_twice_delivers_once() {
    let dispatcher = MemoryDispatcher::new(100);
    let fed = entries(Priority::Normal, 3);
    dispatcher.enqueue(&fed).await.unwrap();
    dispatcher.enqueue(&fed).await.unwrap();
    let first = pull(&dispatcher, "a", 2).await;
    dispatcher.enqueue(&fed).await.unwrap();
    let rest = pull(&dispatcher, "a", 10).await;
    assert_eq!((first.len(), rest.len()), (2, 1));
    assert_eq!(dispatcher.acknowledge("a", &first).await.unwrap(), 2);
    // Acknowledged is forgotten: the store decides whether it may come again.
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 2);
}

#[tokio::test]
async fn only_the_holder_of_a_delivery_may_acknowledge_it() {
    let dispatcher = MemoryDispatcher::new(100);
    dispatcher.enqueue(&entries(Priority::Normal, 1)).await.unwrap();
    let first = pull(&dispatcher, "a", 1).await;
    assert_eq!(dispatcher.acknowledge("b", &first).await.unwrap(), 0);
    assert_eq!(dispatcher.hand_back("a", &first).await.unwrap(), 1);
    let second = pull(&dispatcher, "a", 1).await;
    assert_eq!(second[0].deliveries, 2);
    assert_eq!(dispatcher.acknowledge("a", &first).await.unwrap(), 0, "an old receipt");
    assert_eq!(dispatcher.acknowledge("a", &second).await.unwrap(), 1);
}

#[tokio::test]
async fn what_is_handed_back_comes_first_and_in_order() {
    let dispatcher = MemoryDispatcher::new(100);
    let fed = entries(Priority::Normal, 4);
    dispatcher.enqueue(&fed).await.unwrap();
    let taken = pull(&dispatcher, "a", 2).await;
    dispatcher.hand_back("a", &taken).await.unwrap();
    let expected: Vec<JobId> = fed.iter().map(|entry| entry.id).collect();
    assert_eq!(ids(&pull(&dispatcher, "b", 10).await), expected);
}

#[tokio::test]
async fn a_waiting_pull_wakes_for_a_new_entry_and_gives_up_in_time() {
    let dispatcher = Arc::new(MemoryDispatcher::new(100));
    let waiting = {
        let dispatcher = Arc::clone(&dispatcher);
        tokio::spawn(async move {
            let queue = queue();
            let wait = Duration::from_secs(60);
            dispatcher.pull(Pull { queue: &queue, consumer: "a", max: 5, wait }).await.unwrap()
        })
    };
    dispatcher.enqueue(&entries(Priority::Low, 1)).await.unwrap();
    assert_eq!(waiting.await.unwrap().len(), 1);
    let (queue, wait) = (queue(), Duration::from_millis(1));
    let pull = Pull { queue: &queue, consumer: "a", max: 5, wait };
    assert!(dispatcher.pull(pull).await.unwrap().is_empty());
}

#[tokio::test]
async fn only_what_others_left_alone_is_reclaimed() {
    let dispatcher = MemoryDispatcher::new(10);
    dispatcher.enqueue(&entries(Priority::Normal, 3)).await.unwrap();
    let taken = pull(&dispatcher, "dead", 3).await;
    let (queue, wait) = (queue(), Duration::ZERO);
    let wish = |consumer: &'static str| Pull { queue: &queue, consumer, max: 2, wait };
    let idle = Duration::from_millis(20);
    assert!(dispatcher.reclaim(wish("b"), idle).await.unwrap().is_empty());
    tokio::time::sleep(idle).await;
    assert!(dispatcher.renew("dead", &taken[..1]).await.unwrap().is_empty());
    assert!(dispatcher.reclaim(wish("dead"), idle).await.unwrap().is_empty());
    let reclaimed = dispatcher.reclaim(wish("b"), idle).await.unwrap();
    assert_eq!(reclaimed.len(), 2);
    assert!(
        reclaimed.iter().all(|delivery| delivery.deliveries == 2 && delivery.id != taken[0].id)
    );
    assert_eq!(dispatcher.renew("dead", &taken).await.unwrap(), taken[1..]);
    assert_eq!(dispatcher.acknowledge("dead", &taken).await.unwrap(), 1);
    assert_eq!(dispatcher.acknowledge("b", &reclaimed).await.unwrap(), 2);
}
