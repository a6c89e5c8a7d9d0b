//! Queries of operators, bulk actions and samples in Postgres and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite of jobs runs in tests/store.rs")]
mod conformance;
mod stores;

use std::{collections::HashSet, sync::Arc, time::Duration};

use conformance::{LEASE, answer, by, error, finished, job, queue};
use serde_json::json;
use stores::{Rig, all};
use tritmill_queue::{
    ErrorKind, FinishedAttempt, Job, JobError, JobId, JobState, Outcome, Priority, QueueName,
    Tenant,
    store::{
        JobFilter, JobStore as TestStore, Page,
        bulk::{self, BulkAction},
        history::{Period, Subject},
        job_queries::{AttemptEnd, MetadataFilter, SCAN_MAX},
        workers::{Heartbeat, Integrity, WorkerMetrics},
    },
};

fn first(limit: u32) -> Page<JobId> {
    Page { after: None, limit, ascending: false }
}

/// Returns the ids that match a filter, read page by page.
async fn found(store: &Arc<dyn TestStore>, filter: &JobFilter) -> Vec<JobId> {
    let (mut ids, mut page) = (Vec::new(), first(2));
    loop {
        let found = store.jobs(filter, page).await.unwrap();
        ids.extend(found.jobs.iter().map(|job| job.id));
        match found.next {
            Some(_) => page.after = found.next,
            None => break,
        }
    }
    let count = store.count_jobs(filter).await.unwrap();
    assert_eq!((count.jobs, count.or_more), (ids.len() as u64, false), "{filter:?}");
    ids
}

/// Claims jobs and finishes all with the same outcome.
async fn end(store: &Arc<dyn TestStore>, jobs: &[Job], outcome: Outcome) {
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let claims = store.claim(&ids, by("w1")).await.unwrap();
    let done: Vec<FinishedAttempt> =
        claims.iter().map(|claim| finished(claim.claim_ref(), outcome.clone())).collect();
    assert_eq!(store.finish(&done).await.unwrap().len(), jobs.len());
}

fn refused(code: &str, message: &str) -> Outcome {
    let (code, message) = (code.to_owned(), message.to_owned());
    Outcome::Error(JobError { kind: ErrorKind::InvalidRequest, code, message, param: None })
}

#[tokio::test]
async fn jobs_are_filtered_by_any_field_newest_first() {
    all(async |Rig { store, .. }| {
        let other = QueueName { model: "other".into(), format: "tl1".into() };
        let acme = Tenant("acme".into());
        let mut jobs: Vec<Job> = (0..3).map(|_| job()).collect();
        jobs.push(Job { tenant: acme.clone(), ..job() });
        jobs.push(Job { tenant: acme.clone(), queue: other.clone(), ..job() });
        jobs.extend((1..=2).map(|line| Job { custom_id: Some(format!("line {line}")), ..job() }));
        store.submit(&jobs).await.unwrap();
        end(&store, &jobs[..1], answer("a")).await;
        end(&store, &jobs[1..2], refused("too_long", "prompt has 7 tokens")).await;
        store.claim(&[jobs[2].id], by("w2")).await.unwrap();
        store.cancel(&[jobs[3].id]).await.unwrap();
        let check = async |filter: JobFilter, expect: &[usize]| {
            let mut expect: Vec<JobId> = expect.iter().map(|at| jobs[*at].id).collect();
            expect.sort_unstable_by(|a, b| b.cmp(a));
            assert_eq!(found(&store, &filter).await, expect, "{filter:?}");
        };
        let all = JobFilter::default;
        check(all(), &[0, 1, 2, 3, 4, 5, 6]).await;
        check(JobFilter { tenant: Some(acme.clone()), ..all() }, &[3, 4]).await;
        for (state, expect) in [
            (JobState::Completed, &[0][..]),
            (JobState::Failed, &[1]),
            (JobState::Running, &[2]),
            (JobState::Cancelled, &[3]),
            (JobState::Queued, &[4, 5, 6]),
            (JobState::Retrying, &[]),
        ] {
            check(JobFilter { state: Some(state), ..all() }, expect).await;
        }
        let of_other =
            JobFilter { model: Some("other".into()), format: Some("tl1".into()), ..all() };
        check(of_other.clone(), &[4]).await;
        check(JobFilter { state: Some(JobState::Queued), ..of_other.clone() }, &[4]).await;
        check(JobFilter { state: Some(JobState::Failed), ..of_other }, &[]).await;
        check(JobFilter { error_code: Some("too_long".into()), ..all() }, &[1]).await;
        let signature = Some("prompt has # tokens".into());
        check(JobFilter { error_signature: signature, ..all() }, &[1]).await;
        check(JobFilter { custom_id: Some("line 2".into()), ..all() }, &[6]).await;
        let begun =
            |text: &str| JobFilter { custom_id_prefix: Some(text.into()), ..JobFilter::default() };
        check(begun("line"), &[5, 6]).await;
        check(begun("line 2"), &[6]).await;
        check(begun("lines"), &[]).await;
        check(begun("%"), &[]).await;
        check(JobFilter { owner: Some("w1".into()), ..all() }, &[0, 1]).await;
        let id = jobs[2].id.to_string();
        check(all().within(JobId::with_prefix(&id)), &[2]).await;
        let time = JobId::with_prefix(&id[..2]);
        check(all().within(time).within(Some(jobs[3].id..=jobs[4].id)), &[3, 4]).await;
        let other_tenants =
            JobFilter { custom_id: Some("line 2".into()), tenant: Some(acme), ..all() };
        check(other_tenants, &[]).await;
        let range = jobs[5].id..=jobs[6].id;
        check(JobFilter { ids: Some(range.clone()), ..all() }, &[5, 6]).await;
        let quoted = JobFilter { custom_id: Some("' OR true --".into()), ..all() };
        check(quoted, &[]).await;
        let page = store.jobs(&JobFilter { ids: Some(range), ..all() }, first(9)).await.unwrap();
        assert_eq!(page.jobs[1].custom_id.as_deref(), Some("line 1"));
        let failed = store.jobs(&JobFilter::dead_letters(None), first(9)).await.unwrap().jobs;
        assert_eq!(failed[0].error_code.as_deref(), Some("too_long"));
        assert_eq!((failed[0].owner.as_deref(), failed[0].attempts), (Some("w1"), 1));
        assert!(failed[0].finished_at.is_some() && failed[0].started_at.is_some());
    })
    .await;
}

#[tokio::test]
async fn jobs_are_found_by_metadata_of_their_own_or_their_batch() {
    all(async |Rig { store, .. }| {
        let with = |pairs: serde_json::Value| {
            let echo = serde_json::Map::from_iter([("metadata".to_owned(), pairs)]);
            Job { id: JobId::generate(), echo, ..job() }
        };
        let acme = Tenant("acme".into());
        let jobs = [
            with(json!({ "run": "7", "it's \"odd\" %": "a=b" })),
            with(json!({ "run": "8" })),
            Job { tenant: acme.clone(), ..with(json!({ "run": "7" })) },
            with(json!({ "run": "7\0" })),
            with(json!({})),
            Job { id: JobId::generate(), ..job() },
        ];
        store.submit(&jobs).await.unwrap();
        end(&store, &jobs[..1], answer("a")).await;
        let pair = |name: &str, value: &str, batches| JobFilter {
            metadata: Some(MetadataFilter { name: name.into(), value: value.into(), batches }),
            ..JobFilter::default()
        };
        let check = async |filter: JobFilter, expect: &[usize]| {
            let expect: Vec<JobId> = expect.iter().rev().map(|at| jobs[*at].id).collect();
            assert_eq!(found(&store, &filter).await, expect, "{filter:?}");
        };
        // The first is in the table of ended jobs, the others are in that of open ones.
        let seven = pair("run", "7", Vec::new());
        check(seven.clone(), &[0, 2]).await;
        check(pair("run", "", Vec::new()), &[]).await;
        check(pair("ru", "7", Vec::new()), &[]).await;
        check(pair("it's \"odd\" %", "a=b", Vec::new()), &[0]).await;
        check(JobFilter { tenant: Some(acme), ..seven.clone() }, &[2]).await;
        check(JobFilter { state: Some(JobState::Completed), ..seven.clone() }, &[0]).await;
        check(seven.clone().within(Some(jobs[1].id..=jobs[2].id)), &[2]).await;
        // Of the lines of a batch, one has the pair itself: it is found once.
        let lines = jobs[1].id..=jobs[2].id;
        let beside = pair("run", "7", vec![lines, jobs[5].id..=jobs[5].id]);
        check(beside.clone(), &[0, 1, 2, 5]).await;
        check(JobFilter { state: Some(JobState::Queued), ..beside }, &[1, 2, 5]).await;
    })
    .await;
}

#[tokio::test]
async fn waiting_jobs_become_due_and_change_their_priority() {
    all(async |Rig { store, .. }| {
        let now = store.now().await.unwrap();
        let later = Some(now.after(Duration::from_secs(3600)));
        let [scheduled, retrying, queued] = [
            Job { run_at: later, ..job() },
            Job { id: JobId::generate(), ..job() },
            Job { id: JobId::generate(), ..job() },
        ];
        let ids = [scheduled.id, retrying.id, queued.id];
        store.submit(&[scheduled.clone(), retrying.clone(), queued.clone()]).await.unwrap();
        end(&store, std::slice::from_ref(&retrying), error(ErrorKind::Engine)).await;
        for (id, expect) in [(ids[0], true), (ids[1], true), (ids[2], false)] {
            assert_eq!(store.set_priority(id, Priority::High).await.unwrap(), expect);
        }
        assert!(!store.set_priority(JobId::generate(), Priority::Low).await.unwrap());
        let mut due = store.run_now(&ids).await.unwrap();
        due.sort_unstable();
        assert_eq!(due, ids[..2]);
        store.reconcile().await.unwrap();
        for (id, priority) in
            [(ids[0], Priority::High), (ids[1], Priority::High), (ids[2], Priority::default())]
        {
            let record = store.job(id).await.unwrap().unwrap();
            assert_eq!((record.state, record.job.priority), (JobState::Queued, priority));
        }
        let entries = store.queued(&queue(), None, 9).await.unwrap();
        let high = entries.iter().filter(|entry| entry.priority == Priority::High);
        assert_eq!(
            high.map(|entry| entry.id).collect::<HashSet<_>>(),
            ids[..2].iter().copied().collect()
        );
        let claimed = store.claim(&ids[..1], by("w1")).await.unwrap();
        assert_eq!(claimed[0].job.priority, Priority::High);
        assert!(store.run_now(&ids).await.unwrap().is_empty(), "none waits");
    })
    .await;
}

#[tokio::test]
async fn tenants_and_failures_of_workers_are_listed() {
    all(async |Rig { store, .. }| {
        let of =
            |tenant: &str| Job { tenant: Tenant(tenant.into()), id: JobId::generate(), ..job() };
        let jobs = [of("b"), of("a"), of("c"), of("b")];
        store.submit(&jobs).await.unwrap();
        end(&store, &jobs[..2], refused("too_long", "prompt has 7 tokens")).await;
        let names = async |after: Option<&str>, limit| {
            let after = after.map(|name| Tenant(name.into()));
            let found = store.job_tenants(after.as_ref(), limit).await.unwrap();
            found.into_iter().map(|tenant| tenant.0).collect::<Vec<_>>()
        };
        assert_eq!(names(None, 9).await, ["a", "b", "c"]);
        assert_eq!(names(Some("a"), 1).await, ["b"]);
        assert!(names(Some("c"), 9).await.is_empty());
        let failures = store.worker_failures("w1", 9).await.unwrap();
        let ids: Vec<JobId> = failures.iter().map(|failure| failure.id).collect();
        assert_eq!(ids, [jobs[1].id, jobs[0].id]);
        assert_eq!(failures[0].error.code, "too_long");
        assert_eq!(store.worker_failures("w1", 1).await.unwrap().len(), 1);
        assert!(store.worker_failures("w2", 9).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn page_scans_a_bounded_number_of_jobs() {
    all(async |Rig { store, .. }| {
        let oldest = Job { tenant: Tenant("rare".into()), ..job() };
        let mut jobs = vec![oldest.clone()];
        jobs.extend((0..SCAN_MAX).map(|_| Job { id: JobId::generate(), ..oldest.clone() }));
        jobs[1..].iter_mut().for_each(|job| job.tenant = Tenant::default());
        for chunk in jobs.chunks(2000) {
            store.submit(chunk).await.unwrap();
        }
        // No index has the format alone.
        let filter = JobFilter { format: Some("none".into()), ..JobFilter::default() };
        let page = store.jobs(&filter, first(5)).await.unwrap();
        assert_eq!((page.jobs.len(), page.next), (0, Some(jobs[1].id)));
        let count = store.count_jobs(&filter).await.unwrap();
        assert_eq!((count.jobs, count.or_more), (0, true));
        let rest = Page { after: page.next, ..first(5) };
        assert_eq!(store.jobs(&filter, rest).await.unwrap().next, None);
        let all = store.count_jobs(&JobFilter::default()).await.unwrap();
        assert_eq!((all.jobs, all.or_more), (u64::from(SCAN_MAX), true));
        // An index has the tenant: no other job is scanned.
        let rare = JobFilter { tenant: Some(oldest.tenant), ..JobFilter::default() };
        assert_eq!(found(&store, &rare).await, [oldest.id]);
    })
    .await;
}

#[tokio::test]
async fn job_history_has_every_attempt_with_worker_and_times() {
    all(async |rig: Rig| {
        let (store, job) = (&rig.store, Job { custom_id: Some("a".into()), ..job() });
        store.submit(std::slice::from_ref(&job)).await.unwrap();
        rig.advance(Duration::from_secs(2));
        let lost = store.claim(&[job.id], by("w1")).await.unwrap()[0].claim_ref();
        rig.advance(LEASE);
        assert_eq!(store.reconcile().await.unwrap().lapsed, 1);
        let failed = store.claim(&[job.id], by("w2")).await.unwrap()[0].claim_ref();
        rig.advance(Duration::from_secs(1));
        store.finish(&[finished(failed, error(ErrorKind::Engine))]).await.unwrap();
        rig.advance(Duration::from_secs(60));
        store.reconcile().await.unwrap();
        let held = store.claim(&[job.id], by("w3")).await.unwrap()[0].claim_ref();
        let running = store.job_history(job.id).await.unwrap().unwrap();
        let last = running.attempts.last().unwrap();
        assert_eq!((&last.end, last.owner.as_deref()), (&AttemptEnd::Running, Some("w3")));
        assert_eq!(running.lease_until, last.claimed_at.map(|at| at.after(LEASE)));
        rig.advance(Duration::from_secs(3));
        let first_token = Some(Duration::from_millis(400));
        let done = FinishedAttempt { claim: held, outcome: answer("x"), first_token };
        assert!(
            store
                .finish(&[FinishedAttempt { claim: lost, ..done.clone() }])
                .await
                .unwrap()
                .is_empty()
        );
        store.finish(&[done]).await.unwrap();
        let story = store.job_history(job.id).await.unwrap().unwrap();
        let owners: Vec<_> =
            story.attempts.iter().filter_map(|attempt| attempt.owner.as_deref()).collect();
        assert_eq!(owners, ["w1", "w2", "w3"]);
        let [one, two, three] = story.attempts.as_slice() else { panic!("{story:?}") };
        assert!(matches!(&one.end, AttemptEnd::Error(error) if error.code == "lease_lost"));
        assert!(matches!(&two.end, AttemptEnd::Error(error) if error.code == "c"));
        assert_eq!((&three.end, three.first_token), (&AttemptEnd::Completed, first_token));
        assert_eq!(story.started_at, one.claimed_at);
        assert_eq!(one.claimed_at.unwrap(), story.submitted_at.after(Duration::from_secs(2)));
        let took = three.ended_at.unwrap().since(three.claimed_at.unwrap());
        assert_eq!((took, three.epoch), (Duration::from_secs(3), held.epoch));
        assert_eq!(story.record.job.custom_id.as_deref(), Some("a"));
        assert_eq!(store.job_history(JobId::generate()).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn dead_letters_are_grouped_by_error() {
    all(async |Rig { store, .. }| {
        let jobs: Vec<Job> = (0..5).map(|_| job()).collect();
        store.submit(&jobs).await.unwrap();
        for (tokens, job) in jobs[..3].iter().enumerate() {
            let message = format!("prompt has {tokens} tokens");
            end(&store, std::slice::from_ref(job), refused("too_long", &message)).await;
        }
        end(&store, &jobs[3..4], refused("bad_token", "token 7 is not known")).await;
        let groups = store.dead_letter_groups(None).await.unwrap();
        let told: Vec<_> =
            groups.groups.iter().map(|group| (group.error_code.as_str(), group.jobs)).collect();
        assert_eq!(told, [("too_long", 3), ("bad_token", 1)]);
        let most = &groups.groups[0];
        assert_eq!((most.first, most.last), (jobs[0].id, jobs[2].id));
        assert_eq!(most.error_signature, "prompt has # tokens");
        let other = QueueName { format: "tl1".into(), ..queue() };
        assert!(store.dead_letter_groups(Some(&other)).await.unwrap().groups.is_empty());
    })
    .await;
}

#[tokio::test]
async fn bulk_actions_apply_to_filtered_jobs_up_to_a_limit() {
    all(async |Rig { store: shared, .. }| {
        let store = &*shared;
        let jobs: Vec<Job> = (0..6).map(|_| job()).collect();
        store.submit(&jobs).await.unwrap();
        let queued = JobFilter { state: Some(JobState::Queued), ..JobFilter::default() };
        let some = bulk::apply(store, &queued, BulkAction::Cancel, None, 2).await.unwrap();
        assert_eq!((some.done, some.next), (2, Some(jobs[4].id)));
        end(&shared, &jobs[..4], refused("c", "m")).await;
        let dead = JobFilter::default();
        let replay = BulkAction::Replay { per_second: Some(2) };
        let replayed = bulk::apply(store, &dead, replay, None, 3).await.unwrap();
        assert_eq!((replayed.done, replayed.next), (3, Some(jobs[1].id)));
        let mut due: Vec<_> = replayed.jobs.iter().map(|job| job.run_at.unwrap()).collect();
        due.sort();
        assert_eq!(due[1].since(due[0]), Duration::from_millis(500));
        let states: HashSet<JobState> = {
            let page = store.jobs(&JobFilter::default(), first(3)).await.unwrap();
            page.jobs.iter().map(|job| job.state).collect()
        };
        assert_eq!(states, HashSet::from([JobState::Scheduled, JobState::Queued]));
        let purged = bulk::apply(store, &dead, BulkAction::Purge, None, 100).await.unwrap();
        assert_eq!((purged.done, purged.next), (4, None));
        let again = bulk::apply(store, &dead, BulkAction::Purge, None, 100).await.unwrap();
        assert_eq!(again.done, 0);
    })
    .await;
}

fn beat(owner: &str, integrity: Integrity) -> Heartbeat {
    let metrics = WorkerMetrics { integrity, ..WorkerMetrics::default() };
    Heartbeat { owner: owner.into(), metrics, ..conformance::beat() }
}

#[tokio::test]
async fn fault_counters_are_summed_and_survive_their_workers() {
    all(async |Rig { store, .. }| {
        let counted = Integrity { results_fenced: 3, jobs_fed_again: 1, ..Integrity::default() };
        assert_eq!(store.integrity().await.unwrap(), Integrity::default());
        store.heartbeat(&beat("a", Integrity::default())).await.unwrap();
        store.heartbeat(&beat("a", counted)).await.unwrap();
        store.heartbeat(&beat("b", counted)).await.unwrap();
        for _ in 0..2 {
            let sum = store.integrity().await.unwrap();
            assert_eq!((sum.results_fenced, sum.jobs_fed_again), (6, 2));
            store.forget_worker("a").await.unwrap();
        }
        store.forget_worker("b").await.unwrap();
        assert_eq!(store.integrity().await.unwrap().results_fenced, 6);
    })
    .await;
}

#[tokio::test]
async fn samples_count_each_finished_job_once() {
    all(async |rig: Rig| {
        let store = &rig.store;
        let before = job();
        store.submit(std::slice::from_ref(&before)).await.unwrap();
        end(store, &[before], answer("long ago")).await;
        rig.advance(Duration::from_secs(1));
        store.sample().await.unwrap();
        rig.advance(Duration::from_secs(2));
        let mut working = beat("w1", Integrity::default());
        working.metrics.decode_tokens_per_s = 50.0;
        store.heartbeat(&working).await.unwrap();
        let jobs: Vec<Job> = (0..4).map(|_| job()).collect();
        store.submit(&jobs).await.unwrap();
        rig.advance(Duration::from_secs(2));
        end(store, &jobs[..1], answer("x")).await;
        end(store, &jobs[1..2], refused("c", "m")).await;
        rig.advance(Duration::from_secs(2));
        assert!(store.sample().await.unwrap());
        assert!(!store.sample().await.unwrap(), "the last sample is recent");
        let sampled = store.snapshot().await.unwrap().unwrap();
        let one = &sampled.queues[0];
        assert_eq!((&one.queue, one.depth.queued, one.totals.completed), (&queue(), 2, 1));
        assert_eq!(sampled.at.since(one.depth.oldest_queued_at.unwrap()).as_secs(), 4);
        rig.advance(Duration::from_secs(10));
        end(store, &jobs[2..3], answer("y")).await;
        rig.advance(Duration::from_secs(1));
        assert!(store.sample().await.unwrap());
        let now = store.now().await.unwrap();
        let hour = now.before(Duration::from_secs(3600));
        for period in Period::ALL {
            for of in [None, Some(&queue())] {
                let points = store.samples(of, period, hour, now).await.unwrap();
                let mut sum = tritmill_queue::store::history::Sample::default();
                points.iter().for_each(|point| sum.merge(&point.sample));
                assert_eq!((sum.completed, sum.failed, sum.completion_tokens), (2, 1, 4));
                assert_eq!((sum.latencies.start.count(), sum.latencies.run.count()), (3, 2));
                assert!(sum.slots_sum >= 8 && sum.queued_max == 2, "{sum:?}");
            }
        }
        for subject in [Subject::Tenant(Tenant::default()), Subject::Worker("w1".into())] {
            for period in Subject::PERIODS {
                let points = store.subject_samples(&subject, period, hour, now).await.unwrap();
                let mut sum = tritmill_queue::store::history::Sample::default();
                points.iter().for_each(|point| sum.merge(&point.sample));
                assert_eq!((sum.completed, sum.failed), (2, 1), "{subject:?}");
                assert_eq!(sum.latencies.run.count(), 2, "{subject:?}");
                match subject {
                    Subject::Tenant(_) => assert_eq!(sum.completion_tokens, 4),
                    // Its tokens are those of its heartbeat: 50 per second.
                    _ => assert!(sum.completion_tokens >= 250 && sum.slots_sum >= 8, "{sum:?}"),
                }
            }
        }
        let stranger = Subject::Tenant(Tenant("stranger".into()));
        let none = store.subject_samples(&stranger, Period::Minute, hour, now).await.unwrap();
        assert!(none.is_empty());
        let other = QueueName { format: "tl1".into(), ..queue() };
        let none = store.samples(Some(&other), Period::Minute, hour, now).await.unwrap();
        assert!(none.is_empty());
        rig.advance(Period::Hour.kept() + Duration::from_secs(3600));
        store.maintain().await.unwrap();
        let long = now.before(Duration::from_secs(86_400));
        assert!(store.samples(None, Period::Hour, long, now).await.unwrap().is_empty());
        let tenant = Subject::Tenant(Tenant::default());
        let old = store.subject_samples(&tenant, Period::Hour, long, now).await.unwrap();
        assert!(old.is_empty());
    })
    .await;
}

#[tokio::test]
async fn erased_jobs_of_a_tenant_leave_no_rows_and_others_are_kept() {
    all(async |Rig { store, .. }| {
        let acme = Tenant("acme".into());
        let theirs: Vec<Job> = (0..3).map(|_| Job { tenant: acme.clone(), ..job() }).collect();
        let others = job();
        store.submit(&theirs).await.unwrap();
        store.submit(std::slice::from_ref(&others)).await.unwrap();
        end(&store, &theirs[..1], answer("a")).await;
        let held = store.claim(&[theirs[1].id], by("w")).await.unwrap()[0].claim_ref();
        store.set_quota(&queue(), Some(&acme), Some(7)).await.unwrap();
        let erased = store.erase_jobs(&acme).await.unwrap();
        assert_eq!((erased.jobs, erased.done), (3, true));
        assert!(store.finish(&[finished(held, answer("b"))]).await.unwrap().is_empty());
        assert_eq!(store.job_history(theirs[0].id).await.unwrap(), None);
        assert_eq!(store.quotas(&queue()).await.unwrap().of_tenant(&acme), None);
        assert_eq!(found(&store, &JobFilter::default()).await, [others.id]);
        assert_eq!(store.erase_jobs(&acme).await.unwrap().jobs, 0);
    })
    .await;
}
