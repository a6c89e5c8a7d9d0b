//! Rules for all dispatchers: each is a test of the dispatcher in memory, of one in Redis and of one in a cluster.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{collections::HashMap, sync::Arc, time::Duration};

use tritmill_queue::{
    Delivery, DispatchError, Dispatcher, Entry, JobId, Priority, Pull, QueueName, Tenant,
    Timestamp,
    dispatch::{BacklogLimit, Demand, Limit, MemoryDispatcher, Missing, Quotas, RedisDispatcher},
};
use tritmill_servers::{Redis, RedisCluster};

/// A dispatcher for one test.
trait Fixture {
    /// Creates an empty dispatcher with this limit for each queue.
    async fn create(entries_max: usize) -> Self;
    /// Returns the dispatcher under test.
    fn dispatcher(&self) -> Arc<dyn Dispatcher>;
}

struct Memory(Arc<MemoryDispatcher>);

impl Fixture for Memory {
    async fn create(entries_max: usize) -> Self {
        Self(Arc::new(MemoryDispatcher::new(entries_max)))
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::<MemoryDispatcher>::clone(&self.0)
    }
}

struct OneRedis {
    dispatcher: RedisDispatcher,
    _redis: Redis,
}

impl Fixture for OneRedis {
    async fn create(entries: usize) -> Self {
        let redis = Redis::start().unwrap();
        let limit = BacklogLimit { entries, tokens: u64::MAX };
        Self { dispatcher: RedisDispatcher::new(&redis.url(), limit).unwrap(), _redis: redis }
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::new(self.dispatcher.clone())
    }
}

struct TwoNodes {
    dispatcher: RedisDispatcher,
    _cluster: RedisCluster,
}

impl Fixture for TwoNodes {
    async fn create(entries: usize) -> Self {
        let cluster = RedisCluster::start().unwrap();
        let limit = BacklogLimit { entries, tokens: u64::MAX };
        let dispatcher = RedisDispatcher::new(&cluster.url(), limit).unwrap();
        Self { dispatcher, _cluster: cluster }
    }

    fn dispatcher(&self) -> Arc<dyn Dispatcher> {
        Arc::new(self.dispatcher.clone())
    }
}

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
        shard_key: 0,
        is_first: false,
        expires_at: None,
    };
    (0..count).map(entry).collect()
}

async fn pull(dispatcher: &Arc<dyn Dispatcher>, consumer: &str, max: usize) -> Vec<Delivery> {
    let queue = queue();
    let wait = Duration::ZERO;
    dispatcher.pull(Pull { queue: &queue, consumer, max, wait, only: None }).await.unwrap()
}

fn ids(deliveries: &[Delivery]) -> Vec<JobId> {
    deliveries.iter().map(|delivery| delivery.id).collect()
}

fn sorted(deliveries: &[Delivery]) -> Vec<JobId> {
    let mut sorted = ids(deliveries);
    sorted.sort();
    sorted
}

async fn priorities_are_served_sixteen_to_four_to_one_and_first_in_first_out<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
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

async fn pull_of_one_priority_takes_no_other_and_does_not_wait<F: Fixture>() {
    let fixture = F::create(1000).await;
    let (dispatcher, queue) = (fixture.dispatcher(), queue());
    let wait = Duration::from_secs(60);
    let only = Some(Priority::High);
    let request = || Pull { queue: &queue, consumer: "a", max: 5, wait, only };
    let [high, normal] = [Priority::High, Priority::Normal].map(|priority| entries(priority, 7));
    dispatcher.enqueue(&normal).await.unwrap();
    assert_eq!(ids(&dispatcher.pull(request()).await.unwrap()), []);
    dispatcher.enqueue(&high).await.unwrap();
    let mut taken = ids(&dispatcher.pull(request()).await.unwrap());
    taken.extend(ids(&dispatcher.pull(request()).await.unwrap()));
    assert_eq!(taken, high.iter().map(|entry| entry.id).collect::<Vec<_>>());
    assert_eq!(pull(&dispatcher, "a", 100).await.len(), 7, "the others wait on");
}

async fn low_priority_alone_gets_everything<F: Fixture>() {
    let fixture = F::create(100).await;
    let dispatcher = fixture.dispatcher();
    dispatcher.enqueue(&entries(Priority::Low, 50)).await.unwrap();
    assert_eq!(pull(&dispatcher, "a", 100).await.len(), 50);
}

async fn full_queue_is_busy_and_adds_nothing<F: Fixture>() {
    let fixture = F::create(10).await;
    let dispatcher = fixture.dispatcher();
    dispatcher.enqueue(&entries(Priority::Normal, 8)).await.unwrap();
    let refused = dispatcher.enqueue(&entries(Priority::High, 3)).await;
    assert!(matches!(refused, Err(DispatchError::Busy { limit: Limit::Entries(10), .. })));
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 8);
    pull(&dispatcher, "a", 1).await;
    dispatcher.enqueue(&entries(Priority::High, 3)).await.unwrap();
}

async fn quotas_limit_waiting_tokens_of_queue_and_tenant<F: Fixture>() {
    let fixture = F::create(10).await;
    let dispatcher = fixture.dispatcher();
    let of = |tenant: &str, count| {
        let mut made = entries(Priority::Normal, count);
        made.iter_mut().for_each(|entry| {
            (entry.tenant, entry.cost) = (Tenant(tenant.to_owned()), 5);
        });
        made
    };
    dispatcher.enqueue(&of("a:1", 2)).await.unwrap();
    dispatcher.enqueue(&of("b", 1)).await.unwrap();
    let quotas = Quotas {
        tokens: Some(30),
        each_tenant: Some(12),
        tenants: HashMap::from([(Tenant("b".to_owned()), 20)]),
        ..Quotas::default()
    };
    let asked = async |tenant: &str, count| {
        let demands = Demand::by_queue(&of(tenant, count));
        match dispatcher.admit(&demands[0], &quotas).await {
            Ok(_) => None,
            Err(DispatchError::Busy { limit, retry_after, .. }) => {
                assert!(!retry_after.is_zero());
                Some(limit)
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(asked("b", 3).await, None);
    assert_eq!(asked("c", 2).await, None);
    assert_eq!(asked("a:1", 1).await, Some(Limit::Tenant(12)));
    assert_eq!(asked("c", 3).await, Some(Limit::Tenant(12)));
    assert_eq!(asked("b", 4).await, Some(Limit::Tokens(30)));
    assert_eq!(asked("b", 8).await, Some(Limit::Entries(10)));
    assert_eq!(asked("b", 3).await, None, "checking adds nothing");
    let batch = Demand::by_queue(&of("b", 3)).remove(0).leaving_room();
    let busy = dispatcher.admit(&batch, &quotas).await.unwrap_err();
    assert!(matches!(busy, DispatchError::Busy { limit: Limit::Tokens(24), .. }), "{busy}");
    // Delivered entries do not wait any more.
    assert_eq!(pull(&dispatcher, "w", 3).await.len(), 3);
    assert_eq!(asked("a:1", 1).await, None);
    // An entry larger than the quota is accepted alone.
    let large = Quotas { tokens: Some(4), each_tenant: Some(4), ..Quotas::default() };
    let demands = Demand::by_queue(&of("d", 2));
    assert!(dispatcher.admit(&demands[0], &large).await.is_err());
    let demands = Demand::by_queue(&of("d", 1));
    dispatcher.admit(&demands[0], &large).await.unwrap();
    dispatcher.enqueue(&of("d", 1)).await.unwrap();
    assert!(dispatcher.admit(&demands[0], &large).await.is_err());
}

async fn admission_tells_what_waits_by_priority<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let demand = Demand::by_queue(&entries(Priority::High, 1)).remove(0);
    let waiting = async || {
        let backlog = dispatcher.admit(&demand, &Quotas::default()).await.unwrap();
        backlog.parts.map(|part| (part.entries, part.tokens, part.before))
    };
    assert_eq!(waiting().await, [(0, 0, 0); 3]);
    let mut high = entries(Priority::High, 3);
    high.iter_mut().for_each(|entry| entry.cost = 20);
    dispatcher.enqueue(&high).await.unwrap();
    dispatcher.enqueue(&entries(Priority::Low, 5)).await.unwrap();
    assert_eq!(waiting().await, [(3, 60, 60), (0, 0, 0), (5, 5, 5)]);
    let taken = pull(&dispatcher, "a", 2).await;
    assert_eq!(waiting().await, [(1, 20, 20), (0, 0, 0), (5, 5, 5)], "delivered ones do not wait");
    dispatcher.hand_back("a", &taken[..1]).await.unwrap();
    dispatcher.acknowledge("a", &taken[1..]).await.unwrap();
    dispatcher.requeue(&entries(Priority::Normal, 1)).await.unwrap();
    assert_eq!(waiting().await, [(2, 40, 40), (1, 1, 1), (5, 5, 5)]);
    let missing = Missing { entries: 2, tokens: 50, refilling: true };
    dispatcher.set_missing(&queue(), missing).await.unwrap();
    assert_eq!(waiting().await, [(2, 40, 40), (1, 1, 1), (7, 55, 55)]);
    assert_eq!(pull(&dispatcher, "a", 10).await.len(), 8);
    assert_eq!(waiting().await, [(0, 0, 0), (0, 0, 0), (2, 50, 50)]);
}

async fn entry_enqueued_twice_is_delivered_once<F: Fixture>() {
    let fixture = F::create(100).await;
    let dispatcher = fixture.dispatcher();
    let fed = entries(Priority::Normal, 3);
    dispatcher.enqueue(&fed).await.unwrap();
    dispatcher.enqueue(&fed).await.unwrap();
    let first = pull(&dispatcher, "a", 2).await;
    dispatcher.enqueue(&fed).await.unwrap();
    let rest = pull(&dispatcher, "a", 10).await;
    assert_eq!((first.len(), rest.len()), (2, 1));
    assert_eq!(dispatcher.acknowledge("a", &first).await.unwrap(), 2);
    // Acknowledged entries are forgotten, so the same job can be enqueued again.
    dispatcher.enqueue(&fed).await.unwrap();
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 2);
}

async fn only_the_holder_of_a_delivery_may_acknowledge_it<F: Fixture>() {
    let fixture = F::create(100).await;
    let dispatcher = fixture.dispatcher();
    dispatcher.enqueue(&entries(Priority::Normal, 1)).await.unwrap();
    let first = pull(&dispatcher, "a", 1).await;
    assert_eq!(dispatcher.acknowledge("b", &first).await.unwrap(), 0);
    assert_eq!(dispatcher.hand_back("a", &first).await.unwrap(), 1);
    let second = pull(&dispatcher, "a", 1).await;
    assert_eq!(second[0].deliveries, 2);
    assert_eq!(dispatcher.acknowledge("a", &first).await.unwrap(), 0, "an old receipt");
    assert_eq!(dispatcher.acknowledge("a", &second).await.unwrap(), 1);
}

async fn handed_back_entries_come_first_and_in_order<F: Fixture>() {
    let fixture = F::create(100).await;
    let dispatcher = fixture.dispatcher();
    let fed = entries(Priority::Normal, 4);
    dispatcher.enqueue(&fed).await.unwrap();
    let taken = pull(&dispatcher, "a", 2).await;
    dispatcher.hand_back("a", &taken).await.unwrap();
    let expected: Vec<JobId> = fed.iter().map(|entry| entry.id).collect();
    assert_eq!(ids(&pull(&dispatcher, "b", 10).await), expected);
}

async fn requeued_jobs_ignore_the_limit_and_come_first_by_age<F: Fixture>() {
    let fixture = F::create(4).await;
    let dispatcher = fixture.dispatcher();
    let fed = entries(Priority::Normal, 7);
    dispatcher.enqueue(&fed[3..]).await.unwrap();
    assert!(dispatcher.enqueue(&entries(Priority::Normal, 1)).await.is_err(), "full");
    assert_eq!(dispatcher.requeue(&[fed[2].clone(), fed[0].clone()]).await.unwrap(), 2);
    assert_eq!(dispatcher.requeue(&fed[..4]).await.unwrap(), 1, "the others wait already");
    assert_eq!(dispatcher.enqueue(&fed).await.unwrap(), 0);
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 7);
    // Twice the limit is the end.
    let many = dispatcher.requeue(&entries(Priority::Low, 2)).await;
    assert!(matches!(many, Err(DispatchError::Busy { limit: Limit::Entries(4), .. })), "{many:?}");
    let taken = pull(&dispatcher, "a", 3).await;
    let expected: Vec<JobId> = fed.iter().map(|entry| entry.id).collect();
    assert_eq!(ids(&taken), expected[..3]);
    assert_eq!(dispatcher.requeue(&fed[..3]).await.unwrap(), 0, "delivered");
    assert_eq!(dispatcher.hand_back("a", &taken[..2]).await.unwrap(), 2);
    assert_eq!(dispatcher.acknowledge("a", &taken[2..]).await.unwrap(), 1);
    let rest = pull(&dispatcher, "b", 10).await;
    assert_eq!(ids(&rest), [&expected[..2], &expected[3..]].concat());
    assert_eq!((rest[0].deliveries, rest[2].deliveries), (2, 1));
    // As after a lost lease: acknowledged, and queued again.
    assert_eq!(dispatcher.acknowledge("b", &rest).await.unwrap(), 6);
    assert_eq!(dispatcher.requeue(&fed[..1]).await.unwrap(), 1);
    assert_eq!(ids(&pull(&dispatcher, "a", 10).await), expected[..1]);
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 0);
}

async fn requeued_jobs_of_dead_consumers_are_reclaimed<F: Fixture>() {
    let fixture = F::create(10).await;
    let dispatcher = fixture.dispatcher();
    let fed = entries(Priority::High, 3);
    dispatcher.requeue(&fed).await.unwrap();
    let taken = pull(&dispatcher, "dead", 2).await;
    assert_eq!(taken.len(), 2);
    let (queue, wait) = (queue(), Duration::ZERO);
    let request = Pull { queue: &queue, consumer: "b", max: 5, wait, only: None };
    let reclaimed = dispatcher.reclaim(request, Duration::ZERO).await.unwrap();
    assert_eq!(sorted(&reclaimed), sorted(&taken));
    assert_eq!(dispatcher.acknowledge("dead", &taken).await.unwrap(), 0);
    assert!(dispatcher.renew("b", &reclaimed).await.unwrap().is_empty());
    assert_eq!(dispatcher.acknowledge("b", &reclaimed).await.unwrap(), 2);
    assert_eq!(ids(&pull(&dispatcher, "b", 5).await), [fed[2].id]);
}

async fn jobs_that_only_the_store_has_count_towards_the_limits<F: Fixture>() {
    let fixture = F::create(10).await;
    let dispatcher = fixture.dispatcher();
    assert_eq!(dispatcher.missing(&queue()).await.unwrap(), None);
    dispatcher.enqueue(&entries(Priority::Normal, 2)).await.unwrap();
    let quotas = Quotas { tokens: Some(100), ..Quotas::default() };
    let two = Demand::by_queue(&entries(Priority::Normal, 2)).remove(0);
    let missing = Missing { entries: 7, tokens: 70, refilling: true };
    dispatcher.set_missing(&queue(), missing).await.unwrap();
    assert_eq!(dispatcher.missing(&queue()).await.unwrap(), Some(missing));
    let busy = dispatcher.admit(&two, &quotas).await.unwrap_err();
    assert!(matches!(busy, DispatchError::Busy { limit: Limit::Entries(10), .. }), "{busy}");
    let busy = dispatcher.enqueue(&entries(Priority::Low, 2)).await.unwrap_err();
    assert!(matches!(busy, DispatchError::Busy { limit: Limit::Entries(10), .. }), "{busy}");
    dispatcher.requeue(&entries(Priority::Low, 2)).await.unwrap();
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 4);
    let fewer = Missing { entries: 1, tokens: 95, refilling: true };
    dispatcher.set_missing(&queue(), fewer).await.unwrap();
    let busy = dispatcher.admit(&two, &quotas).await.unwrap_err();
    assert!(matches!(busy, DispatchError::Busy { limit: Limit::Tokens(100), .. }), "{busy}");
    dispatcher.set_missing(&queue(), Missing::default()).await.unwrap();
    dispatcher.admit(&two, &quotas).await.unwrap();
}

async fn waiting_pull_wakes_for_new_entry_and_times_out<F: Fixture>() {
    let fixture = F::create(100).await;
    let dispatcher = fixture.dispatcher();
    let waiting = {
        let dispatcher = Arc::clone(&dispatcher);
        tokio::spawn(async move {
            let queue = queue();
            let wait = Duration::from_secs(60);
            dispatcher
                .pull(Pull { queue: &queue, consumer: "a", max: 5, wait, only: None })
                .await
                .unwrap()
        })
    };
    dispatcher.enqueue(&entries(Priority::Low, 1)).await.unwrap();
    assert_eq!(waiting.await.unwrap().len(), 1);
    let (queue, wait) = (queue(), Duration::from_millis(1));
    let pull = Pull { queue: &queue, consumer: "a", max: 5, wait, only: None };
    assert!(dispatcher.pull(pull).await.unwrap().is_empty());
}

async fn only_idle_entries_of_others_are_reclaimed<F: Fixture>() {
    let fixture = F::create(10).await;
    let dispatcher = fixture.dispatcher();
    dispatcher.enqueue(&entries(Priority::Normal, 3)).await.unwrap();
    let taken = pull(&dispatcher, "dead", 3).await;
    let (queue, wait) = (queue(), Duration::ZERO);
    let request =
        |consumer: &'static str| Pull { queue: &queue, consumer, max: 2, wait, only: None };
    let idle = Duration::from_millis(20);
    assert!(dispatcher.reclaim(request("b"), idle).await.unwrap().is_empty());
    tokio::time::sleep(idle).await;
    assert!(dispatcher.renew("dead", &taken[..1]).await.unwrap().is_empty());
    assert!(dispatcher.reclaim(request("dead"), idle).await.unwrap().is_empty());
    let reclaimed = dispatcher.reclaim(request("b"), idle).await.unwrap();
    assert_eq!(reclaimed.len(), 2);
    assert!(
        reclaimed.iter().all(|delivery| delivery.deliveries == 2 && delivery.id != taken[0].id)
    );
    assert_eq!(dispatcher.renew("dead", &taken).await.unwrap(), taken[1..]);
    assert_eq!(dispatcher.acknowledge("dead", &taken).await.unwrap(), 1);
    assert_eq!(dispatcher.acknowledge("b", &reclaimed).await.unwrap(), 2);
}

async fn all_tenants_of_one_priority_make_progress<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let mut all = entries(Priority::Normal, 6);
    for (index, entry) in all.iter_mut().enumerate() {
        entry.tenant = Tenant(format!("{{t:{}}}", index % 3));
    }
    dispatcher.enqueue(&all).await.unwrap();
    let mut taken = ids(&pull(&dispatcher, "a", 10).await);
    taken.sort();
    assert_eq!(taken, all.iter().map(|entry| entry.id).collect::<Vec<_>>());
}

/// Tokens of the first deliveries, by tenant.
async fn served(
    dispatcher: &Arc<dyn Dispatcher>,
    fed: &[Entry],
    pulls: usize,
) -> HashMap<String, u64> {
    let of: HashMap<JobId, &Entry> = fed.iter().map(|entry| (entry.id, entry)).collect();
    let mut tokens: HashMap<String, u64> = HashMap::new();
    for _ in 0..pulls {
        let taken = pull(dispatcher, "a", 8).await;
        for delivery in &taken {
            let entry = of[&delivery.id];
            *tokens.entry(entry.tenant.0.clone()).or_default() += u64::from(entry.cost);
        }
        dispatcher.acknowledge("a", &taken).await.unwrap();
    }
    tokens
}

async fn tenants_of_one_priority_are_served_the_same_tokens<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let of = |tenant: &str, count, cost| {
        let mut made = entries(Priority::Normal, count);
        made.iter_mut()
            .for_each(|entry| (entry.tenant, entry.cost) = (Tenant(tenant.to_owned()), cost));
        made
    };
    let flood = of("flood", 400, 10);
    dispatcher.enqueue(&flood).await.unwrap();
    served(&dispatcher, &flood, 4).await;
    let other = of("other", 50, 40);
    dispatcher.enqueue(&other).await.unwrap();
    let tokens = served(&dispatcher, &[flood, other].concat(), 20).await;
    let ratio = tokens["flood"] as f64 / tokens["other"] as f64;
    assert!((0.9..1.1).contains(&ratio), "{tokens:?}");
}

/// The job's id has the time of its submission.
fn submitted_before(ago: Duration, number: u128) -> JobId {
    let at = JobId::first_of(Timestamp::by_this_machine().before(ago));
    uuid::Uuid::from_u128(uuid::Uuid::from(at).as_u128() | number).into()
}

async fn a_tenant_near_its_deadline_has_up_to_four_times_the_share<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let hour = Duration::from_secs(3600);
    let mut fed = Vec::new();
    for (tenant, left) in [("due", hour / 100), ("far", hour), ("none", Duration::ZERO)] {
        let mut made = entries(Priority::Normal, 200);
        for (number, entry) in (fed.len() as u128..).zip(&mut made) {
            entry.id = submitted_before(hour, number);
            (entry.tenant, entry.cost) = (Tenant(tenant.to_owned()), 100);
            let expires_at = Timestamp::by_this_machine().after(left);
            entry.expires_at = (!left.is_zero()).then_some(expires_at);
        }
        fed.extend(made);
    }
    dispatcher.enqueue(&fed).await.unwrap();
    let tokens = served(&dispatcher, &fed, 20).await;
    let times = tokens["due"] as f64 / tokens["none"] as f64;
    assert!((3.3..4.3).contains(&times), "{tokens:?}");
    let ratio = tokens["far"] as f64 / tokens["none"] as f64;
    assert!((0.9..1.1).contains(&ratio), "{tokens:?}");
}

async fn entries_that_are_first_go_before_others_of_their_tenant<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let (others, requeued) = (entries(Priority::High, 3), entries(Priority::High, 1));
    let mut first = entries(Priority::High, 2);
    first.iter_mut().for_each(|entry| entry.is_first = true);
    dispatcher.enqueue(&others).await.unwrap();
    dispatcher.requeue(&requeued).await.unwrap();
    assert_eq!(dispatcher.enqueue(&first).await.unwrap(), 2);
    assert_eq!(dispatcher.enqueue(&first).await.unwrap(), 0, "they wait already");
    assert_eq!(dispatcher.depth(&queue()).await.unwrap(), 6);
    let taken = pull(&dispatcher, "a", 2).await;
    assert_eq!(ids(&taken), [first[0].id, first[1].id]);
    assert_eq!(dispatcher.hand_back("a", &taken[1..]).await.unwrap(), 1);
    let rest = pull(&dispatcher, "a", 9).await;
    let expected = [first[1].id, requeued[0].id, others[0].id, others[1].id, others[2].id];
    assert_eq!(ids(&rest), expected);
    assert_eq!(dispatcher.acknowledge("a", &[&taken[..1], &rest].concat()).await.unwrap(), 6);
}

async fn queues_do_not_mix<F: Fixture>() {
    let fixture = F::create(1000).await;
    let dispatcher = fixture.dispatcher();
    let mut all = entries(Priority::High, 4);
    for entry in &mut all[2..] {
        entry.queue.format = "tl1".into();
    }
    dispatcher.enqueue(&all).await.unwrap();
    let taken = pull(&dispatcher, "a", 10).await;
    assert_eq!(ids(&taken), [all[0].id, all[1].id]);
    let wait = Duration::ZERO;
    let request = Pull { queue: &all[2].queue, consumer: "a", max: 10, wait, only: None };
    let others = dispatcher.pull(request).await.unwrap();
    assert_eq!(ids(&others), [all[2].id, all[3].id]);
    // One call for deliveries of both.
    let both: Vec<Delivery> = taken.into_iter().chain(others).collect();
    assert_eq!(dispatcher.acknowledge("a", &both).await.unwrap(), 4);
}

/// Creates a test for each rule.
macro_rules! dispatcher_conformance {
    ($name:ident, $fixture:ty) => {
        dispatcher_conformance!(@rules $name, $fixture;
            priorities_are_served_sixteen_to_four_to_one_and_first_in_first_out
            low_priority_alone_gets_everything
            pull_of_one_priority_takes_no_other_and_does_not_wait
            full_queue_is_busy_and_adds_nothing
            quotas_limit_waiting_tokens_of_queue_and_tenant
            admission_tells_what_waits_by_priority
            entry_enqueued_twice_is_delivered_once
            only_the_holder_of_a_delivery_may_acknowledge_it
            handed_back_entries_come_first_and_in_order
            requeued_jobs_ignore_the_limit_and_come_first_by_age
            requeued_jobs_of_dead_consumers_are_reclaimed
            jobs_that_only_the_store_has_count_towards_the_limits
            waiting_pull_wakes_for_new_entry_and_times_out
            only_idle_entries_of_others_are_reclaimed
            all_tenants_of_one_priority_make_progress
            tenants_of_one_priority_are_served_the_same_tokens
            a_tenant_near_its_deadline_has_up_to_four_times_the_share
            entries_that_are_first_go_before_others_of_their_tenant
            queues_do_not_mix
        );
    };
    (@rules $name:ident, $fixture:ty; $($rule:ident)+) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $rule() {
                    super::$rule::<$fixture>().await;
                }
            )+
        }
    };
}

dispatcher_conformance!(memory, super::Memory);
dispatcher_conformance!(redis_server, super::OneRedis);
dispatcher_conformance!(redis_cluster, super::TwoNodes);
