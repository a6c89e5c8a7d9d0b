//! Notices: written with the change that they tell of, claimed in turn, retried, and kept from receivers that fail.

use tritmill_admin::store::{
    budgets::{Budget, BudgetOf, BudgetPeriod},
    events::{Event, NoticeKind, SpentBudget, Subject},
    notices::{
        Channel, Notice, NoticeBounds, NoticeClaim, NoticeFilter, Outcome, REST_FROM, RETRY_FOR,
        Receiver,
    },
    webhooks::{Webhook, WebhookSecret},
};

use super::*;

const ANY: NoticeBounds<'_> =
    NoticeBounds { max: 9, per_host: 9, per_tenant: 9, busy_hosts: &[], busy_tenants: &[] };
const HOUR: Duration = Duration::from_secs(3600);

fn secret() -> WebhookSecret {
    WebhookSecret("s".to_owned())
}

/// A claimed batch with a webhook at this host.
async fn with_webhook(store: &Arc<dyn TestStore>, owner: &Tenant, host: &str) -> BatchClaim {
    create(store, owner).await;
    let mut held = claim(store).await.unwrap();
    held.batch.webhook = Some(Webhook::new(format!("https://{host}/"), secret()));
    assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
    held
}

/// Creates finished batches with webhooks at these hosts; returns their ids.
async fn finished_at(store: &Arc<dyn TestStore>, owner: &Tenant, hosts: &[&str]) -> Vec<BatchId> {
    let mut ids = Vec::new();
    for host in hosts {
        let mut held = with_webhook(store, owner, host).await;
        held.batch.enter(BatchState::Completed, store.now().await.unwrap());
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        release(store, &held).await;
        ids.push(held.batch.id);
    }
    ids
}

async fn due(store: &Arc<dyn TestStore>) -> Vec<NoticeClaim> {
    store.claim_notices(Channel::Webhook, by("a"), ANY).await.unwrap()
}

async fn only(store: &Arc<dyn TestStore>) -> NoticeClaim {
    let mut due = due(store).await;
    assert_eq!(due.len(), 1, "{due:?}");
    due.remove(0)
}

async fn notices(store: &Arc<dyn TestStore>, owner: &Tenant) -> Vec<Notice> {
    let filter = NoticeFilter { tenant: Some(owner.clone()), batch: None };
    store.notices(&filter, Page { after: None, limit: 99, ascending: true }).await.unwrap()
}

fn failed() -> Outcome {
    Outcome::Failed("answered 500".to_owned())
}

#[tokio::test]
async fn end_of_a_batch_is_told_once_and_until_it_is_delivered() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let mut held = with_webhook(store, &acme, "a.example").await;
        assert!(due(store).await.is_empty(), "the batch is unfinished");
        held.batch.enter(BatchState::Completed, Timestamp(9));
        // Repeated, as after a lost response.
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let stale = BatchClaim { epoch: held.epoch - 1, ..held.clone() };
        assert!(!store.save_batch(&stale, BatchWrites::default()).await.unwrap());
        release(store, &held).await;
        let first = only(store).await;
        assert_eq!(first.notice.kind, NoticeKind::BatchCompleted);
        assert_eq!(
            (first.notice.batch, first.notice.created_at),
            (Some(held.batch.id), Timestamp(9))
        );
        let Subject::Batch { batch, .. } = &first.notice.subject else { panic!("a batch") };
        assert_eq!((batch.state, &batch.webhook), (BatchState::Completed, &None));
        assert!(due(store).await.is_empty(), "it is claimed");
        rig.advance(LEASE * 2);
        let second = only(store).await;
        assert_eq!(second.notice, first.notice);
        assert!(!store.end_attempt(&first, &Outcome::Delivered).await.unwrap(), "it came too late");
        assert!(store.end_attempt(&second, &failed()).await.unwrap());
        assert!(due(store).await.is_empty(), "the next attempt is not due");
        rig.advance(Duration::from_secs(2));
        let third = only(store).await;
        assert_eq!((third.notice.delivery.attempts, &third.notice.event), (1, &first.notice.event));
        let told = store.batch(&acme, held.batch.id).await.unwrap().unwrap().told.unwrap();
        assert_eq!((told.state(), told.error.as_deref()), ("pending", Some("answered 500")));
        assert!(store.end_attempt(&third, &Outcome::Delivered).await.unwrap());
        rig.advance(HOUR);
        assert!(due(store).await.is_empty(), "delivery has ended");
        let told = store.batch(&acme, held.batch.id).await.unwrap().unwrap().told.unwrap();
        assert_eq!((told.state(), told.attempts, told.due_at), ("delivered", 2, None));
        assert_eq!(store.count_notices().await.unwrap(), Default::default());
    })
    .await;
}

#[tokio::test]
async fn pauses_and_resumes_are_told_and_repeated_requests_are_not() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let held = with_webhook(store, &acme, "a.example").await;
        let id = held.batch.id;
        release(store, &held).await;
        let pause = || change(store, &acme, id, BatchChange::Pause { now: false });
        let resume = || change(store, &acme, id, BatchChange::Resume);
        for _ in 0..2 {
            pause().await.unwrap();
            pause().await.unwrap();
            change(store, &acme, id, BatchChange::Pause { now: true }).await.unwrap();
            rig.advance(Duration::from_millis(1));
            resume().await.unwrap();
            assert!(matches!(resume().await.unwrap(), Changed::Refused(_)));
            rig.advance(Duration::from_millis(1));
        }
        let all = notices(store, &acme).await;
        let kinds: Vec<NoticeKind> = all.iter().map(|notice| notice.kind).collect();
        let (paused, resumed) = (NoticeKind::BatchPaused, NoticeKind::BatchResumed);
        assert_eq!(kinds, [paused, resumed, paused, resumed]);
        let Subject::Batch { batch, .. } = &all[2].subject else { panic!("a batch") };
        assert_eq!(batch.state, BatchState::Paused, "as it was then");
        let mut events: Vec<&str> = all.iter().map(|notice| notice.event.as_str()).collect();
        events.dedup();
        assert_eq!(events.len(), 4);
        cancel(store, &acme, id).await.unwrap();
        let mut held = claim(store).await.unwrap();
        held.batch.enter(BatchState::Cancelled, Timestamp(9));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        release(store, &held).await;
        resume().await.unwrap();
        let kinds: Vec<NoticeKind> = notices(store, &acme).await.iter().map(|it| it.kind).collect();
        assert_eq!(kinds[4..], [NoticeKind::BatchCancelled, resumed]);
        cancel(store, &acme, id).await.unwrap();
        let mut held = claim(store).await.unwrap();
        held.batch.enter(BatchState::Cancelled, Timestamp(9));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        // What is told already goes with the batch, the rest does not.
        rig.advance(Duration::from_millis(1));
        assert!(store.end_attempt(&due(store).await[0], &Outcome::Delivered).await.unwrap());
        store.delete_batch(&acme, id).await.unwrap();
        let left = notices(store, &acme).await;
        assert!(left.len() == 6 && left.iter().all(|it| it.batch.is_none()), "{left:?}");
    })
    .await;
}

#[tokio::test]
async fn notices_go_round_tenants_and_hosts() {
    all(async |rig: Rig| {
        let (store, tick) = (&rig.store, Duration::from_millis(1));
        let [many, few] = ["many", "few"].map(tenant);
        let slow = finished_at(store, &many, &["slow.example"; 6]).await;
        let fast = finished_at(store, &many, &["fast.example"]).await;
        let other = finished_at(store, &few, &["slow.example", "c.example"]).await;
        let told = async |bounds| {
            rig.advance(LEASE + tick);
            let claims = store.claim_notices(Channel::Webhook, by("a"), bounds).await.unwrap();
            let mut ids: Vec<BatchId> =
                claims.iter().filter_map(|claim| claim.notice.batch).collect();
            ids.sort_unstable();
            ids
        };
        assert_eq!(told(ANY).await.len(), 9);
        assert_eq!(told(NoticeBounds { per_host: 2, ..ANY }).await.len(), 4);
        let busy_hosts = ["slow.example".to_owned()];
        let without_slow = NoticeBounds { busy_hosts: &busy_hosts, ..ANY };
        assert_eq!(told(without_slow).await, [fast[0], other[1]]);
        let busy_tenants = [many.clone()];
        assert_eq!(told(NoticeBounds { busy_tenants: &busy_tenants, ..ANY }).await, other);
        let of_each = told(NoticeBounds { per_tenant: 1, ..ANY }).await;
        assert!(of_each.len() == 2 && slow.contains(&of_each[0]) && other.contains(&of_each[1]));
        let one = NoticeBounds { max: 1, ..ANY };
        let turns = [told(one).await, told(one).await, told(one).await];
        let is_of_few: Vec<bool> = turns.iter().map(|turn| other.contains(&turn[0])).collect();
        assert!(is_of_few[0] != is_of_few[1] && is_of_few[0] == is_of_few[2], "in turn: {turns:?}");
    })
    .await;
}

#[tokio::test]
async fn receiver_that_fails_rests_and_another_does_not() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        finished_at(store, &acme, &["dead.example"; 8]).await;
        let claims = due(store).await;
        assert_eq!(claims.len(), 8);
        for claim in &claims[..REST_FROM as usize] {
            assert!(store.end_attempt(claim, &failed()).await.unwrap());
        }
        let dead = "https://dead.example/";
        let failing = store.failing_receiver(&acme, dead).await.unwrap().unwrap();
        assert_eq!((failing.failures, failing.gone_at), (REST_FROM, None));
        assert!(failing.rests_until.unwrap() > store.now().await.unwrap());
        assert_eq!(store.failing_receiver(&tenant("other"), dead).await.unwrap(), None);
        finished_at(store, &acme, &["dead.example", "live.example"]).await;
        // Those that were claimed when their process died are not due, either.
        rig.advance(LEASE + Duration::from_secs(20));
        let live = only(store).await;
        assert_eq!(live.notice.to.address(), "https://live.example/");
        let counts = store.count_notices().await.unwrap();
        assert_eq!((counts.pending, counts.failing, counts.resting), (10, 1, 1));
        rig.advance(Duration::from_secs(60));
        let claims = due(store).await;
        let first = claims.iter().find(|claim| claim.notice.to.address() == dead).unwrap();
        assert!(store.end_attempt(first, &failed()).await.unwrap());
        let longer =
            store.failing_receiver(&acme, dead).await.unwrap().unwrap().rests_until.unwrap();
        let now = store.now().await.unwrap();
        assert!(longer.since(now) > Duration::from_secs(90), "it rests longer");
        rig.advance(longer.since(now));
        let claims = due(store).await;
        let first = claims.iter().find(|claim| claim.notice.to.address() == dead).unwrap();
        assert!(store.end_attempt(first, &Outcome::Delivered).await.unwrap());
        assert_eq!(store.failing_receiver(&acme, dead).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn receiver_that_is_gone_gets_nothing_until_it_is_asked_for() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        finished_at(store, &acme, &["a.example"; 2]).await;
        let claims = due(store).await;
        let gone = Outcome::Gone("answered 410".to_owned());
        assert!(store.end_attempt(&claims[0], &gone).await.unwrap());
        finished_at(store, &acme, &["a.example"]).await;
        rig.advance(HOUR);
        assert!(due(store).await.is_empty());
        let all = notices(store, &acme).await;
        let states: Vec<_> = all.iter().map(|notice| notice.delivery.state()).collect();
        assert_eq!(states, ["failed"; 3]);
        assert_eq!(all[2].delivery.error.as_deref(), Some("not sent: it answered 410"));
        let other = tenant("other");
        assert_eq!(store.redeliver_notice(Some(&other), all[2].id).await.unwrap(), None);
        let again = store.redeliver_notice(Some(&acme), all[2].id).await.unwrap().unwrap();
        assert_eq!((again.delivery.state(), again.delivery.attempts), ("pending", 0));
        assert_eq!(store.failing_receiver(&acme, "https://a.example/").await.unwrap(), None);
        let claimed = only(store).await;
        assert_eq!(claimed.notice.event, all[2].event);
        assert!(store.end_attempt(&claimed, &gone).await.unwrap());
        let webhook = Webhook::new("https://a.example/".to_owned(), secret());
        store.set_tenant_webhook(&acme, Some(&webhook)).await.unwrap();
        finished_at(store, &acme, &["a.example"]).await;
        only(store).await;
    })
    .await;
}

#[tokio::test]
async fn webhook_is_told_of_the_events_that_it_wants() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let mut held = with_webhook(store, &acme, "a.example").await;
        held.batch.webhook.as_mut().unwrap().events =
            vec![NoticeKind::BatchPaused, NoticeKind::BatchFailed];
        held.batch.mail_to = vec!["one@a.example".to_owned()];
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        for wanted in [BatchChange::Pause { now: false }, BatchChange::Resume] {
            change(store, &acme, held.batch.id, wanted).await;
        }
        let mut held = claim(store).await.unwrap();
        held.batch.enter(BatchState::Completed, Timestamp(9));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let told = |channel| {
            let of = move |all: Vec<Notice>| -> Vec<NoticeKind> {
                let of_channel = all.into_iter().filter(|notice| notice.to.channel() == channel);
                of_channel.map(|notice| notice.kind).collect()
            };
            async move { of(notices(store, &tenant("acme")).await) }
        };
        assert_eq!(told(Channel::Webhook).await, [NoticeKind::BatchPaused]);
        assert_eq!(told(Channel::Mail).await.len(), 3, "mails tell of all");
        // A tenant's is stored with them.
        let mut webhook = Webhook::new("https://a.example/".to_owned(), secret());
        for events in [vec![NoticeKind::BudgetSpent, NoticeKind::BatchExpired], Vec::new()] {
            webhook.events = events;
            store.set_tenant_webhook(&acme, Some(&webhook)).await.unwrap();
            let known = store.tenant_webhook(&acme).await.unwrap().unwrap();
            assert_eq!(known, Webhook { is_of_tenant: true, ..webhook.clone() });
        }
    })
    .await;
}

#[tokio::test]
async fn events_of_budgets_are_told_once_to_each_receiver() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let of = BudgetOf { tenant: acme.clone(), key: None, period: BudgetPeriod::Day };
        let currency = "EUR".parse().unwrap();
        let budget = Budget { of, currency, soft: Some(5), hard: None, set_at: Timestamp(3) };
        store.set_budget(&budget).await.unwrap();
        let known = store.budgets(Some(&acme)).await.unwrap();
        assert_eq!(known, [budget]);
        let spent = SpentBudget { budget: known[0].clone(), spent: 7, period: (9, 10) };
        let event = Event {
            id: "evt_1".to_owned(),
            tenant: acme.clone(),
            kind: NoticeKind::BudgetSoftReached,
            at: store.now().await.unwrap(),
            subject: Subject::Budget(Box::new(spent)),
        };
        let webhook = Receiver::Webhook { url: "https://a.example/".into(), secret: secret() };
        let mail = |name: &str| Receiver::Mail(format!("{name}@a.example"));
        store.add_event(&event, &[webhook.clone(), mail("one")]).await.unwrap();
        store.add_event(&event, &[webhook, mail("one"), mail("two")]).await.unwrap();
        let all = notices(store, &acme).await;
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|notice| notice.subject == event.subject && notice.batch.is_none()));
        only(store).await;
        let mails = store.claim_notices(Channel::Mail, by("a"), ANY).await.unwrap();
        assert_eq!(mails.len(), 2);
        let refused = Outcome::Refused("550 unknown".to_owned());
        assert!(store.end_attempt(&mails[0], &refused).await.unwrap());
        // The other one is never sent: mails were switched off.
        rig.advance(RETRY_FOR * 2 + HOUR);
        store.sweep_notices().await.unwrap();
        assert_eq!(store.count_notices().await.unwrap().pending, 0);
        rig.advance(RETRY_FOR * 8);
        store.sweep_notices().await.unwrap();
        assert_eq!(notices(store, &acme).await.len(), 3, "no receiver is told again this month");
        rig.advance(RETRY_FOR * 70);
        store.sweep_notices().await.unwrap();
        assert!(notices(store, &acme).await.is_empty());
    })
    .await;
}
