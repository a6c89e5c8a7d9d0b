//! Queue settings, numerics classes, workers and dead letters in Postgres and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite itself runs in tests/store.rs")]
mod conformance;
mod stores;

use std::{sync::Arc, time::Duration};

use conformance::{answer, by, error, finished, job, queue};
use stores::{Rig, all};
use tritmill_queue::{
    Billing, Completion, ErrorKind, Job, JobId, JobState, Outcome, Priority, QueueName, Store,
    StoreError, Tenant, Tier, Timestamp, Usage,
    billing::Price,
    dispatch::{Missing, Quotas},
    store::{
        JobStore as TestStore, PostgresStore, Serving,
        charges::{ChargeFilter, ChargeGroups, ChargeSum, PriceOf, day_of, price_of},
        classes::{ALLOWED_CLASSES_MAX, ClassError, ResetClassError},
        queue_settings::QueueState,
        workers::{Directive, Heartbeat, Leadership, SILENT_ALIVE_MAX, Worker, WorkerMetrics},
    },
};
use tritmill_servers::Postgres;
use uuid::Uuid;

fn beat() -> Heartbeat {
    let metrics =
        WorkerMetrics { isa: "avx2".into(), kv_blocks_used: 7, ..WorkerMetrics::default() };
    Heartbeat { pid: u32::MAX, metrics, ..conformance::beat() }
}

/// Submits jobs and makes them dead letters.
async fn fail(store: &Arc<dyn TestStore>, jobs: &[Job]) {
    store.submit(jobs).await.unwrap();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let claims = store.claim(&ids, by("a")).await.unwrap();
    let refused = || error(ErrorKind::InvalidRequest);
    let done: Vec<_> = claims.iter().map(|claim| finished(claim.claim_ref(), refused())).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), jobs.len());
}

#[tokio::test]
async fn heads_of_a_queue_go_by_priority_and_round_the_tenants() {
    all(async |Rig { store, .. }| {
        let of = |priority, tenant: &str| {
            let tenant = Tenant(tenant.to_owned());
            Job { priority, tenant, ..job() }
        };
        let [low, normal, high] = [Priority::Low, Priority::Normal, Priority::High];
        let lines = [(low, "a"), (low, "a"), (low, "a"), (low, ""), (high, "a"), (normal, "b")];
        let jobs = lines.map(|(priority, tenant)| of(priority, tenant));
        store.submit(&jobs).await.unwrap();
        let (total, heads) = store.queued_heads(&queue(), 2, 10).await.unwrap();
        let expected = [4, 5, 0, 3, 1].map(|index| jobs[index].id);
        assert_eq!(heads.iter().map(|entry| entry.id).collect::<Vec<_>>(), expected);
        let queued = store.queued(&queue(), None, 10).await.unwrap();
        assert!(heads.iter().all(|entry| queued.contains(entry)));
        let tokens = queued.iter().map(|entry| u64::from(entry.cost)).sum();
        assert_eq!(total, Missing { entries: 6, tokens, refilling: false });
        let (same, two) = store.queued_heads(&queue(), 2, 2).await.unwrap();
        assert_eq!((same, &two[..]), (total, &heads[..2]));
        let other = QueueName { format: "other".into(), ..queue() };
        let (none, heads) = store.queued_heads(&other, 2, 10).await.unwrap();
        assert_eq!((none, heads.len()), (Missing::default(), 0));
    })
    .await;
}

/// The answer with these tokens.
fn counted(prompt_tokens: u64, cached_tokens: u64, completion_tokens: u64) -> Outcome {
    let Outcome::Completed(completion) = answer("yes") else { unreachable!("an answer") };
    let usage = Usage { prompt_tokens, cached_tokens, completion_tokens, ..completion.usage };
    Outcome::Completed(Completion { usage, ..completion })
}

#[tokio::test]
async fn charges_are_fixed_with_the_answer_and_summed_by_day() {
    all(async |rig| {
        let store = &rig.store;
        let price = |input| Price {
            currency: "EUR".parse().unwrap(),
            input,
            cached_input: input / 2,
            output: 3 * input,
        };
        let any = PriceOf { model: None, tier: None };
        let flex = PriceOf { tier: Some(Tier::Flex), ..any.clone() };
        let tiny = PriceOf { model: Some(queue().model), tier: None };
        let key = Uuid::now_v7();
        let run = async |tier, outcome: Outcome| {
            let billing = Billing { tier, key: Some(key) };
            let job = Job { billing, tenant: Tenant("acme".into()), ..job() };
            store.submit(std::slice::from_ref(&job)).await.unwrap();
            let claim = store.claim(&[job.id], by("a")).await.unwrap()[0].claim_ref();
            // A result that comes twice counts once.
            for _ in 0..2 {
                store.finish(&[finished(claim, outcome.clone())]).await.unwrap();
            }
            let ended = store.finished(&[job.id]).await.unwrap();
            let Some(Outcome::Completed(completion)) = &ended[0].outcome else { return None };
            completion.charge.as_ref().map(|charge| charge.nanounits)
        };
        assert_eq!(run(Tier::Default, counted(7, 0, 7)).await, None);
        store.set_price(&any, &price(2_000_000)).await.unwrap();
        store.set_price(&flex, &price(1_000_000)).await.unwrap();
        assert_eq!(
            run(Tier::Default, counted(10, 4, 5)).await,
            Some(6 * 2000 + 4 * 1000 + 5 * 6000)
        );
        assert_eq!(run(Tier::Flex, counted(10, 0, 1)).await, Some(13_000));
        store.set_price(&tiny, &price(1500)).await.unwrap();
        let of_model = counted(1, 0, 0);
        assert_eq!(run(Tier::Flex, of_model).await, Some(2), "the model counts first; half up");
        let failed = run(Tier::Default, error(ErrorKind::InvalidRequest)).await;
        assert_eq!(failed, None);
        let set = store.prices().await.unwrap();
        let found = price_of(&set, &queue().model, Tier::Flex).unwrap();
        assert_eq!(found, &price(1500));
        let usage =
            Usage { prompt_tokens: 10, cached_tokens: 4, completion_tokens: 5, ..Usage::default() };
        assert_eq!(price_of(&set, "other", Tier::Batch).unwrap().charge(usage).nanounits, 46_000);
        assert!(store.delete_price(&tiny).await.unwrap());
        assert!(!store.delete_price(&tiny).await.unwrap());

        rig.advance(Duration::from_secs(60));
        store.sample().await.unwrap();
        rig.advance(Duration::from_secs(60));
        store.sample().await.unwrap();
        let today = day_of(store.now().await.unwrap());
        let filter = ChargeFilter { from: today, to: today + 1, ..ChargeFilter::default() };
        let sums =
            async |filter: &ChargeFilter, groups| store.charges(filter, groups, 10).await.unwrap();
        let all = sums(&filter, ChargeGroups::default()).await;
        let told = |sum: &ChargeSum| {
            let charge = sum.charge.as_ref().map(|charge| charge.nanounits);
            (sum.answers, sum.usage.prompt_tokens, sum.usage.cached_tokens, charge)
        };
        assert_eq!(
            all.iter().map(told).collect::<Vec<_>>(),
            [(1, 7, 0, None), (3, 21, 4, Some(59_002))]
        );
        let groups =
            ChargeGroups { tier: true, key: true, tenant: true, ..ChargeGroups::default() };
        let by_tier = sums(&filter, groups).await;
        assert!(by_tier.iter().all(|sum| sum.key == Some(key.to_string()) && sum.day.is_none()));
        let tiers = by_tier.iter().map(|sum| (sum.tier.unwrap(), told(sum).3));
        let expected =
            [(Tier::Default, None), (Tier::Default, Some(46_000)), (Tier::Flex, Some(13_002))];
        assert_eq!(tiers.collect::<Vec<_>>(), expected);
        for none in [
            ChargeFilter { tenant: Some(Tenant("other".into())), ..filter.clone() },
            ChargeFilter { model: Some("other".into()), ..filter.clone() },
            ChargeFilter { key: Some(String::new()), ..filter.clone() },
            ChargeFilter { to: today, ..filter.clone() },
        ] {
            assert_eq!(sums(&none, ChargeGroups::default()).await, []);
        }
    })
    .await;
}

#[tokio::test]
async fn queue_settings_are_stored() {
    all(async |Rig { store, .. }| {
        let untouched = QueueState::with_defaults(queue());
        assert_eq!(store.queue_state(&queue()).await.unwrap(), untouched);
        store.set_limit(&queue(), Some(1_000_000)).await.unwrap();
        store.set_paused(&queue(), true).await.unwrap();
        let max_wait = Some(Duration::from_millis(2500));
        store.set_max_wait(&queue(), max_wait).await.unwrap();
        assert_eq!(store.quotas(&queue()).await.unwrap().max_wait, max_wait);
        let limit_tokens = Some(1_000_000);
        let set = QueueState { paused: true, limit_tokens, max_wait, ..untouched.clone() };
        assert_eq!(store.queue_state(&queue()).await.unwrap(), set);
        store.set_paused(&queue(), false).await.unwrap();
        store.set_limit(&queue(), None).await.unwrap();
        store.set_max_wait(&queue(), None).await.unwrap();
        assert_eq!(store.queue_state(&queue()).await.unwrap(), untouched);
    })
    .await;
}

#[tokio::test]
async fn live_workers_of_a_queue_are_summed_up() {
    all(async |rig| {
        let store = &rig.store;
        let none = Serving { now: store.now().await.unwrap(), ..Serving::default() };
        assert_eq!(store.serving(&queue()).await.unwrap(), none);
        let of = |owner: &str, slots, rate, device: &str| {
            let metrics = WorkerMetrics {
                device: device.into(),
                drain_tokens_per_s: rate,
                kv_blocks_used: 30,
                kv_blocks_total: 100,
                ..WorkerMetrics::default()
            };
            Heartbeat { owner: owner.into(), running: 2, slots, metrics, ..beat() }
        };
        store.heartbeat(&of("silent", 10, Some(1e6), "cpu")).await.unwrap();
        rig.advance(Worker::SILENT_MAX + Duration::from_millis(1));
        let format: String = "tl1".into();
        let other = QueueName { format, ..queue() };
        for heartbeat in [
            of("measured", 10, Some(100.0), "cpu"),
            of("fresh", 30, None, "cuda:0,cuda:1"),
            Heartbeat { draining: true, ..of("draining", 10, Some(1e6), "cpu") },
            Heartbeat { queue: other.clone(), ..of("other", 10, None, "cpu") },
            // Without measurements.
            Heartbeat { metrics: WorkerMetrics::default(), ..of("unmeasured", 10, None, "") },
            // Its model was loaded once.
            of("not loaded", 0, Some(1e6), "cpu"),
        ] {
            store.heartbeat(&heartbeat).await.unwrap();
        }
        let now = store.now().await.unwrap();
        let expected = Serving {
            now,
            workers: 4,
            gpu_workers: 1,
            slots: 50,
            running: 8,
            drain_tokens_per_s: Some(500.0),
            kv_blocks_used: 90,
            kv_blocks_total: 300,
        };
        assert_eq!(store.serving(&queue()).await.unwrap(), expected);
        let unmeasured = store.serving(&other).await.unwrap();
        assert_eq!((unmeasured.workers, unmeasured.drain_tokens_per_s), (1, None));
    })
    .await;
}

#[tokio::test]
async fn quotas_are_stored_per_queue_and_tenant() {
    all(async |Rig { store, .. }| {
        assert_eq!(store.quotas(&queue()).await.unwrap(), Quotas::default());
        let [a, b] = ["a", "b"].map(|name| Tenant(name.to_owned()));
        store.set_limit(&queue(), Some(100)).await.unwrap();
        store.set_quota(&queue(), None, Some(50)).await.unwrap();
        store.set_quota(&queue(), Some(&a), Some(10)).await.unwrap();
        store.set_quota(&queue(), Some(&a), Some(20)).await.unwrap();
        let quotas = store.quotas(&queue()).await.unwrap();
        assert_eq!(
            (quotas.tokens, quotas.of_tenant(&a), quotas.of_tenant(&b)),
            (Some(100), Some(20), Some(50))
        );
        store.set_quota(&queue(), Some(&a), None).await.unwrap();
        assert_eq!(store.quotas(&queue()).await.unwrap().of_tenant(&a), Some(50));
        let other = QueueName { format: "tl1".into(), ..queue() };
        assert_eq!(store.quotas(&other).await.unwrap(), Quotas::default());
    })
    .await;
}

#[tokio::test]
async fn worker_of_another_numerics_class_is_refused() {
    all(async |Rig { store, .. }| {
        // The queue has a row but no class yet.
        store.set_paused(&queue(), false).await.unwrap();
        store.register_class(&queue(), "f16 exact").await.unwrap();
        store.register_class(&queue(), "f16 exact").await.unwrap();
        let refused = store.register_class(&queue(), "int8 fast").await.unwrap_err();
        let ClassError::Mismatch { registered, offered, .. } = &refused else {
            panic!("{refused}")
        };
        assert_eq!((registered.as_str(), offered.as_str()), ("f16 exact", "int8 fast"));
        assert_eq!(store.queue_state(&queue()).await.unwrap().class.as_deref(), Some("f16 exact"));
        let other = QueueName { format: "tl1".into(), ..queue() };
        store.register_class(&other, "int8 fast").await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn allowed_class_is_accepted_until_withdrawn() {
    all(async |Rig { store, .. }| {
        let allowed = async || store.queue_state(&queue()).await.unwrap().allowed_classes;
        // Before the queue has a class or a row.
        assert!(store.allow_class(&queue(), "cuda").await.unwrap());
        assert!(!store.allow_class(&queue(), "cuda").await.unwrap(), "it is allowed already");
        store.register_class(&queue(), "cpu").await.unwrap();
        store.register_class(&queue(), "cuda").await.unwrap();
        assert!(!store.allow_class(&queue(), "cpu").await.unwrap(), "the own class");
        assert_eq!(allowed().await, ["cuda"]);
        assert_eq!(store.queue_state(&queue()).await.unwrap().class.as_deref(), Some("cpu"));
        assert_eq!(store.queues().await.unwrap()[0].settings.allowed_classes, ["cuda"]);
        assert_eq!(store.queue_states().await.unwrap()[0].allowed_classes, ["cuda"]);
        let refused = store.register_class(&queue(), "q8").await.unwrap_err().to_string();
        let expected = "queue tiny@i2_s has numerics class 'cpu' or 'cuda', not 'q8'";
        assert_eq!(refused, expected);

        let of = |class: &str| {
            let measured = WorkerMetrics { numerics_class: class.into(), ..beat().metrics };
            Heartbeat { owner: format!("of {class}"), metrics: measured, ..beat() }
        };
        let drains = async |class| store.heartbeat(&of(class)).await.unwrap().drain;
        assert!(!drains("cuda").await && !drains("cpu").await);
        assert!(!store.withdraw_class(&queue(), "cpu").await.unwrap(), "the own class stays");
        assert!(store.withdraw_class(&queue(), "cuda").await.unwrap());
        assert!(!store.withdraw_class(&queue(), "cuda").await.unwrap());
        assert!(drains("cuda").await, "its class was withdrawn");
        assert!(!drains("cpu").await && !drains("").await);
        let refused = store.register_class(&queue(), "cuda").await.unwrap_err();
        assert!(matches!(refused, ClassError::Mismatch { .. }), "{refused}");

        for i in 0..ALLOWED_CLASSES_MAX {
            store.allow_class(&queue(), &format!("{i}")).await.unwrap();
        }
        for wrong in ["one too many", "", "a\0b"] {
            let refused = store.allow_class(&queue(), wrong).await.unwrap_err();
            assert!(matches!(refused, StoreError::InvalidValue { .. }), "{refused}");
        }
        assert_eq!(allowed().await.len(), ALLOWED_CLASSES_MAX);
    })
    .await;
}

#[tokio::test]
async fn class_is_reset_when_no_worker_is_alive() {
    all(async |rig: Rig| {
        let store = Arc::clone(&rig.store);
        assert_eq!(store.reset_class(&queue()).await.unwrap(), None, "the queue had no class");
        store.register_class(&queue(), "f16 exact").await.unwrap();
        store.allow_class(&queue(), "f32 exact").await.unwrap();
        let elsewhere = QueueName { format: "tl1".into(), ..queue() };
        for (owner, queue) in [("b", queue()), ("a", queue()), ("c", elsewhere)] {
            let beat = Heartbeat { owner: owner.into(), queue, ..beat() };
            store.heartbeat(&beat).await.unwrap();
        }
        let refused = store.reset_class(&queue()).await.unwrap_err();
        assert!(matches!(refused, ResetClassError::Served { .. }));
        let said = refused.to_string();
        assert_eq!(said, "queue tiny@i2_s is served by a, b: drain them first");
        assert_eq!(store.queue_state(&queue()).await.unwrap().class.as_deref(), Some("f16 exact"));
        store.forget_worker("a").await.unwrap();
        // The other worker ended without being forgotten.
        rig.advance(SILENT_ALIVE_MAX + Duration::from_millis(1));
        assert_eq!(store.reset_class(&queue()).await.unwrap().as_deref(), Some("f16 exact"));
        store.register_class(&queue(), "int8 fast").await.unwrap();
        store.register_class(&queue(), "f32 exact").await.expect_err("allowed beside another one");
    })
    .await;
}

#[tokio::test]
async fn queues_are_listed_with_counts_and_oldest_job() {
    all(async |rig: Rig| {
        let store = Arc::clone(&rig.store);
        let other = QueueName { model: "another".into(), ..queue() };
        store.set_paused(&other, true).await.unwrap();
        let jobs = [job(), job(), job()];
        store.submit(&jobs).await.unwrap();
        let held = store.claim(&[jobs[0].id], by("a")).await.unwrap()[0].claim_ref();
        store.finish(&[finished(held, answer("x"))]).await.unwrap();
        rig.advance(Duration::from_millis(5000));
        let listed = store.queues().await.unwrap();
        let names: Vec<_> = listed.iter().map(|queue| queue.settings.queue.clone()).collect();
        assert_eq!(names, [other, queue()]);
        assert!(listed[0].settings.paused);
        assert_eq!((listed[0].progress, listed[0].oldest_queued), (Default::default(), None));
        assert_eq!(listed[1].progress, store.progress(Some(&queue())).await.unwrap());
        assert_eq!((listed[1].progress.queued, listed[1].progress.completion_tokens), (2, 2));
        assert_eq!(listed[1].oldest_queued, Some(Duration::from_secs(5)));
    })
    .await;
}

#[tokio::test]
async fn workers_that_report_keep_the_store_present_without_a_reconciler() {
    all(async |rig: Rig| {
        let store = Arc::clone(&rig.store);
        let of = job();
        store.submit(std::slice::from_ref(&of)).await.unwrap();
        store.reconcile().await.unwrap();
        store.claim(&[of.id], by("dead")).await.unwrap();
        // The leader died with its jobs: others report, until one of them leads.
        for _ in 0..9 {
            rig.advance(Duration::from_secs(2));
            store.heartbeat(&beat()).await.unwrap();
        }
        let is_postgres = store.reconcile().await.unwrap().lapsed == 1;
        // SQLite has one process, so only its reconciler tells.
        assert!(is_postgres || store.state(of.id).await.unwrap() == Some(JobState::Running));
    })
    .await;
}

#[tokio::test]
async fn heartbeat_returns_drain_and_pause() {
    all(async |rig: Rig| {
        let store = Arc::clone(&rig.store);
        let beat = beat();
        let go_on = Directive { drain: false, paused: false, leads: Leadership::ALL };
        assert_eq!(store.heartbeat(&beat).await.unwrap(), go_on);
        rig.advance(Duration::from_millis(2000));
        let later = Heartbeat { running: 4, ..beat.clone() };
        assert_eq!(store.heartbeat(&later).await.unwrap(), go_on);
        rig.advance(Duration::from_millis(1000));
        let listed = store.workers().await.unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].heartbeat, later);
        assert_eq!(listed[0].started_at, Timestamp(1_700_000_000_000));
        assert_eq!((listed[0].silent, listed[0].drain_requested), (Duration::from_secs(1), false));

        assert!(store.request_drain(&beat.owner).await.unwrap());
        assert!(!store.request_drain("unknown").await.unwrap());
        store.set_paused(&queue(), true).await.unwrap();
        let stop = Directive { drain: true, paused: true, leads: Leadership::default() };
        assert_eq!(store.heartbeat(&Heartbeat { draining: true, ..later }).await.unwrap(), stop);
        store.forget_worker(&beat.owner).await.unwrap();
        assert!(store.workers().await.unwrap().is_empty());

        store.heartbeat(&beat).await.unwrap();
        rig.advance(Duration::from_millis(25 * 60 * 60 * 1000));
        store.maintain().await.unwrap();
        assert!(store.workers().await.unwrap().is_empty(), "a long silent worker is deleted");
    })
    .await;
}

#[tokio::test]
async fn replay_is_a_new_job_and_keeps_the_dead_letter() {
    all(async |Rig { store, .. }| {
        let late = Some(Timestamp(1_700_000_001_000));
        let (dead, live) = (Job { expires_at: late, ..job() }, job());
        fail(&store, std::slice::from_ref(&dead)).await;
        store.submit(std::slice::from_ref(&live)).await.unwrap();
        let replays = store.replay(&[live.id, dead.id, JobId::generate()], None).await.unwrap();
        assert_eq!(replays.len(), 1);
        assert_eq!(replays[0].replay_of, dead.id);
        let again = replays[0].job.clone();
        assert_ne!(again.id, dead.id);
        assert_eq!(again, Job { id: again.id, expires_at: None, ..dead.clone() });
        let record = store.job(again.id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts), (JobState::Queued, 0));
        assert_eq!(store.job(dead.id).await.unwrap().unwrap().state, JobState::Failed);

        let held = store.claim(&[again.id], by("a")).await.unwrap()[0].claim_ref();
        store.finish(&[finished(held, error(ErrorKind::InvalidRequest))]).await.unwrap();
        let letters = store.dead_letters(&queue(), 10, None).await.unwrap();
        let origins: Vec<_> =
            letters.iter().map(|letter| (letter.record.job.id, letter.replay_of)).collect();
        assert_eq!(origins, [(dead.id, None), (again.id, Some(dead.id))]);
    })
    .await;
}

#[tokio::test]
async fn dead_letters_are_paged_and_purged() {
    all(async |Rig { store, .. }| {
        let jobs: Vec<Job> = (0..5).map(|_| job()).collect();
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
        fail(&store, &jobs).await;
        let first = store.dead_letters(&queue(), 3, None).await.unwrap();
        let page: Vec<_> = first.iter().map(|letter| letter.record.job.id).collect();
        assert_eq!(page, ids[..3]);
        assert_eq!(first[0].record.errors.len(), 1);
        let second = store.dead_letters(&queue(), 3, Some(ids[2])).await.unwrap();
        assert_eq!(second.len(), 2);
        let other = QueueName { format: "tl1".into(), ..queue() };
        assert!(store.dead_letters(&other, 3, None).await.unwrap().is_empty());

        let live = job();
        store.submit(std::slice::from_ref(&live)).await.unwrap();
        assert_eq!(store.purge(&[ids[0], ids[1], ids[1], live.id]).await.unwrap(), 2);
        assert_eq!(store.job(ids[0]).await.unwrap(), None);
        assert_eq!(store.dead_letters(&queue(), 10, None).await.unwrap().len(), 3);
        assert_eq!(store.progress(None).await.unwrap().queued, 1);
    })
    .await;
}

#[tokio::test]
async fn deleted_jobs_leave_no_rows_and_lose_their_claims() {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    let store = Arc::new(PostgresStore::connect(&server.url()).await.unwrap());
    let [failed, running, kept] = [job(), job(), job()];
    fail(&(store.clone() as Arc<dyn TestStore>), std::slice::from_ref(&failed)).await;
    store.submit(&[running.clone(), kept.clone()]).await.unwrap();
    let held = store.claim(&[running.id], by("a")).await.unwrap()[0].claim_ref();
    let ids = [failed.id, running.id, running.id];
    assert_eq!(store.delete_jobs(&ids).await.unwrap(), 2);
    assert_eq!(store.delete_jobs(&ids).await.unwrap(), 0);
    assert!(store.finish(&[finished(held, answer("a"))]).await.unwrap().is_empty());
    assert!(store.finished(&[failed.id, running.id]).await.unwrap().is_empty());
    assert_eq!(store.job(kept.id).await.unwrap().unwrap().state, JobState::Queued);
}
