//! Latency of operator queries with a million jobs, in Postgres and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite of jobs runs in tests/store.rs")]
mod conformance;
mod stores;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use conformance::{answer, by, error, finished, job, queue};
use stores::{Rig, all};
use tritmill_queue::{
    ErrorKind, Job, JobId, JobState, Tenant,
    store::{JobFilter, JobStore as TestStore, Page, history::Period},
};

const JOBS: usize = 1_000_000;
const CHUNK: usize = 2000;
const REPEATS: usize = 50;
/// Longest acceptable time of one query of a dashboard page.
const LIMIT: Duration = Duration::from_millis(100);

/// Submits a million jobs of a hundred tenants, most in state queued; returns a failed one.
async fn fill(store: &Arc<dyn TestStore>) -> JobId {
    let mut some = None;
    for chunk in 0..JOBS / CHUNK {
        let tenant = Tenant(format!("tenant {}", chunk % 100));
        let jobs: Vec<Job> = (0..CHUNK).map(|_| Job { tenant: tenant.clone(), ..job() }).collect();
        store.submit(&jobs).await.unwrap();
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
        if chunk % 5 == 0 {
            let claims = store.claim(&ids[..CHUNK / 2], by("w")).await.unwrap();
            let outcome = |at: usize| match at % 20 {
                0 => error(ErrorKind::InvalidRequest),
                _ => answer("x"),
            };
            let done: Vec<_> = (0..)
                .zip(&claims)
                .map(|(at, claim)| finished(claim.claim_ref(), outcome(at)))
                .collect();
            store.finish(&done).await.unwrap();
            store.cancel(&ids[CHUNK - 20..]).await.unwrap();
            some = Some(ids[0]);
        }
    }
    some.unwrap()
}

/// Runs something a hundred times; prints and returns the second slowest time.
async fn time<F: Future<Output = ()>>(what: &str, read: impl Fn() -> F) -> Duration {
    let mut times = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        let started = Instant::now();
        read().await;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    let (p50, p99) = (times[REPEATS / 2], times[REPEATS - 1]);
    println!(
        "{what:<40} p50 {:>8.2} ms   worst {:>8.2} ms",
        p50.as_secs_f64() * 1e3,
        p99.as_secs_f64() * 1e3
    );
    p99
}

#[tokio::test]
#[ignore = "takes minutes: a million jobs in each store"]
async fn operator_queries_are_fast_with_a_million_jobs() {
    all(async |rig: Rig| {
        let store = &rig.store;
        let failed = fill(store).await;
        rig.advance(Duration::from_secs(60));
        store.sample().await.unwrap();
        rig.advance(Duration::from_secs(60));
        store.sample().await.unwrap();
        println!("--");
        let all = JobFilter::default;
        let of = |state| JobFilter { state: Some(state), ..JobFilter::default() };
        let filters = [
            ("all", all()),
            ("of a tenant", JobFilter { tenant: Some(Tenant("tenant 7".into())), ..all() }),
            ("queued", of(JobState::Queued)),
            ("completed", of(JobState::Completed)),
            ("failed", of(JobState::Failed)),
            ("cancelled", of(JobState::Cancelled)),
            ("running, of which there are none", of(JobState::Running)),
            ("of a model that has none", JobFilter { model: Some("none".into()), ..all() }),
            ("of a code", JobFilter { error_code: Some("c".into()), ..all() }),
            ("of a name that none has", JobFilter { custom_id: Some("x".into()), ..all() }),
        ];
        let mut worst = Duration::ZERO;
        for (what, filter) in &filters {
            let page = Page { after: None, limit: 50, ascending: false };
            let list = async || {
                store.jobs(filter, page).await.unwrap();
            };
            worst = worst.max(time(&format!("list: {what}"), list).await);
            let count = async || {
                store.count_jobs(filter).await.unwrap();
            };
            worst = worst.max(time(&format!("count: {what}"), count).await);
        }
        worst = worst.max(
            time("story", async || {
                store.job_history(failed).await.unwrap();
            })
            .await,
        );
        let groups = async || {
            store.dead_letter_groups(None).await.unwrap();
        };
        worst = worst.max(time("dead letters by error", groups).await);
        worst = worst.max(
            time("queues", async || {
                store.snapshot().await.unwrap();
            })
            .await,
        );
        let now = store.now().await.unwrap();
        let history = async || {
            let hour = now.before(Duration::from_secs(3600));
            store.samples(Some(&queue()), Period::Seconds, hour, now).await.unwrap();
        };
        worst = worst.max(time("history", history).await);
        let sample = async || {
            rig.advance(Duration::from_secs(3));
            store.sample().await.unwrap();
        };
        time("a sample, by one process every 2 s", sample).await;
        assert!(worst < LIMIT, "{worst:?}");
    })
    .await;
}
