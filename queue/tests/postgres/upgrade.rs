//! The end of a rolling upgrade: open jobs get a table of their own while processes work.

use tritmill_queue::{
    JobState, Store as _,
    store::{
        Claim, JobFilter, JobQueries as _, Maintenance as _, Page, QueueHistory as _, Workers as _,
        workers::{Heartbeat, WorkerMetrics},
    },
};

use super::{
    conformance::{answer, by, error, finished, job},
    *,
};

/// Returns a database of the previous release, and two processes on it.
async fn upgrading() -> (Postgres, PostgresStore, PostgresStore) {
    let server = Postgres::start().unwrap();
    PostgresStore::migrate(&server.url()).await.unwrap();
    execute(&server, "DELETE FROM settings WHERE name = 'open_jobs'").await;
    let one = PostgresStore::connect(&server.url()).await.unwrap();
    let two = PostgresStore::connect(&server.url()).await.unwrap();
    (server, one, two)
}

#[tokio::test]
async fn jobs_of_both_layouts_are_claimed_and_finished_by_all_processes() {
    let (server, one, two) = upgrading().await;
    let early: Vec<Job> = (0..6).map(|_| job()).collect();
    one.submit(&early).await.unwrap();
    let running = one.claim(&ids(&early[..3]), by("one")).await.unwrap();
    let running: Vec<ClaimRef> = running.iter().map(Claim::claim_ref).collect();
    assert!(two.finish_upgrade().await.unwrap().is_empty());
    // This process has not noticed yet, the other one works in the new layout.
    let late: Vec<Job> = (0..3).map(|_| job()).collect();
    two.submit(&late).await.unwrap();
    two.submit(&early).await.unwrap();
    assert_eq!(number(&server, "SELECT count(*) FROM open_jobs").await, 3, "known jobs stay");
    let claims = one.claim(&ids(&late), by("one")).await.unwrap();
    assert_eq!(claims.len(), 3, "found in the new table");
    assert!(one.renew(&running, LEASE).await.unwrap().is_empty(), "moved, and renewed there");
    let settled = two.finish(&[finished(running[0], answer("x"))]).await.unwrap();
    assert_eq!(settled[0].state, JobState::Completed);
    let settled = one.finish(&[finished(running[1], error(ErrorKind::Engine))]).await.unwrap();
    assert_eq!(settled[0].state, JobState::Retrying);
    assert_eq!(two.hand_back(&running[2..]).await.unwrap(), [early[2].id]);
    assert_eq!(one.cancel(&[early[3].id, late[0].id]).await.unwrap().len(), 2);
    assert_eq!(two.claim(&ids(&early[4..5]), by("two")).await.unwrap().len(), 1);
    // The reconciler moves the last one.
    assert_eq!(number(&server, "SELECT count(*) FROM jobs WHERE state = 'queued'").await, 1);
    two.reconcile().await.unwrap();
    assert_eq!(number(&server, "SELECT count(*) FROM jobs WHERE state = 'queued'").await, 0);
    let progress = one.progress(Some(&queue())).await.unwrap();
    let counted = (progress.queued, progress.running, progress.retrying, progress.completed);
    assert_eq!((counted, progress.cancelled), ((2, 3, 1, 1), 2));
    // Ten minutes later calls stop looking for open jobs in the old table.
    execute(&server, "UPDATE settings SET value = 0 WHERE name = 'open_jobs_since'").await;
    PostgresStore::connect(&server.url()).await.unwrap().reconcile().await.unwrap();
    assert_eq!(number(&server, "SELECT value FROM settings WHERE name = 'open_jobs'").await, 2);
}

#[tokio::test]
async fn upgrade_is_not_finished_while_an_older_worker_is_alive() {
    let (server, one, _) = upgrading().await;
    let metrics = WorkerMetrics { release: "0.2.0".into(), ..WorkerMetrics::default() };
    let heartbeat = Heartbeat { owner: "older".into(), metrics, ..beat() };
    one.heartbeat(&heartbeat).await.unwrap();
    execute(&server, "UPDATE workers SET vitals = vitals - 'release'").await;
    assert_eq!(one.finish_upgrade().await.unwrap(), ["older"]);
    one.heartbeat(&heartbeat).await.unwrap();
    assert!(one.finish_upgrade().await.unwrap().is_empty());
}

#[tokio::test]
async fn lists_have_the_jobs_of_both_tables_in_order() {
    let (server, one, two) = upgrading().await;
    let early: Vec<Job> = (0..4).map(|_| job()).collect();
    one.submit(&early).await.unwrap();
    let held = one.claim(&ids(&early[..1]), by("one")).await.unwrap()[0].claim_ref();
    one.finish(&[finished(held, answer("x"))]).await.unwrap();
    two.finish_upgrade().await.unwrap();
    two.sample().await.unwrap();
    let late: Vec<Job> = (0..4).map(|_| job()).collect();
    two.submit(&late).await.unwrap();
    let held = two.claim(&ids(&late[..1]), by("two")).await.unwrap()[0].claim_ref();
    two.finish(&[finished(held, answer("x"))]).await.unwrap();
    let mut all = ids(&[early.clone(), late.clone()].concat());
    all.sort_unstable();
    all.reverse();
    let list = async |state, limit| {
        let filter = JobFilter { state, ..JobFilter::default() };
        let page = two.jobs(&filter, Page { after: None, ascending: false, limit }).await.unwrap();
        page.jobs.into_iter().map(|job| job.id).collect::<Vec<_>>()
    };
    assert_eq!(list(None, 100).await, all);
    assert_eq!(list(None, 3).await, all[..3]);
    assert_eq!(list(Some(JobState::Queued), 100).await.len(), 6);
    assert_eq!(list(Some(JobState::Completed), 100).await, [late[0].id, early[0].id]);
    two.reconcile().await.unwrap();
    assert_eq!(list(None, 100).await, all);
    // Samples count what ended in the new layout once.
    two.sample().await.unwrap();
    assert_eq!(number(&server, "SELECT count(*) FROM recent_ends").await, 1, "not due yet");
    execute(&server, "UPDATE sampler SET taken_at = 0").await;
    assert!(two.sample().await.unwrap());
    assert_eq!(number(&server, "SELECT count(*) FROM recent_ends").await, 0);
    let snapshot = two.snapshot().await.unwrap().unwrap();
    assert_eq!(snapshot.queues[0].totals.completed, 1);
    assert_eq!(snapshot.queues[0].depth.queued, 6);
    two.maintain().await.unwrap();
}
