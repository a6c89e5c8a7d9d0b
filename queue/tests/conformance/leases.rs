//! Rules about lost leases, lost workers and lost answers.

use std::time::Duration;

use tritmill_queue::{ClaimRef, JobState, Store};

use super::{
    Fixture, LEASE, answer, by, finished, job, lapse,
    rules::{claim_one, state},
};

pub async fn lost_lease_requeues_the_job_and_costs_no_attempt(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    claim_one(&store, job.id, "a").await;
    assert_eq!(lapse(&fixture, &store).await, [job.id]);
    let claims = store.claim(&[job.id], by("b")).await.unwrap();
    assert_eq!((claims[0].epoch, claims[0].attempts, claims[0].alone), (2, 0, false));
}

pub async fn late_result_counts_until_the_job_is_claimed_again(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs = [job(), job()];
    store.submit(&jobs).await.unwrap();
    let late = [claim_one(&store, jobs[0].id, "a").await, claim_one(&store, jobs[1].id, "a").await];
    lapse(&fixture, &store).await;
    claim_one(&store, jobs[1].id, "b").await;
    let results = [finished(late[0], answer("late")), finished(late[1], answer("too late"))];
    assert_eq!(store.finish(&results).await.unwrap().len(), 1);
    assert!(store.finish(&results).await.unwrap().is_empty(), "once");
    assert_eq!(state(&store, jobs[0].id).await, JobState::Completed);
    assert_eq!(state(&store, jobs[1].id).await, JobState::Running);
    assert_eq!(store.progress(None).await.unwrap().queued, 0);
}

pub async fn late_renewal_takes_the_job_back(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    for _ in 0..3 {
        lapse(&fixture, &store).await;
        assert_eq!(state(&store, job.id).await, JobState::Queued);
        assert!(store.renew(&[held], LEASE).await.unwrap().is_empty());
        assert_eq!(state(&store, job.id).await, JobState::Running);
    }
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
    assert_eq!(store.finish(&[finished(held, answer("x"))]).await.unwrap().len(), 1);
}

pub async fn claims_of_any_age_are_renewed_together(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs = [job(), job(), job()];
    store.submit(&jobs).await.unwrap();
    let old = claim_one(&store, jobs[0].id, "a").await;
    fixture.advance(LEASE / 2);
    let new = claim_one(&store, jobs[1].id, "a").await;
    let lost = ClaimRef { epoch: 7, ..claim_one(&store, jobs[2].id, "a").await };
    assert_eq!(store.renew(&[old, new, lost], LEASE).await.unwrap(), [lost]);
    let results = [finished(old, answer("x")), finished(new, answer("x"))];
    assert_eq!(store.finish(&results).await.unwrap().len(), 2);
}

pub async fn leases_are_extended_after_an_outage(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    store.reconcile().await.unwrap();
    fixture.advance(Duration::from_secs(600));
    assert_eq!(store.reconcile().await.unwrap().lapsed, 0);
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
    assert!(store.renew(&[held], LEASE).await.unwrap().is_empty());
    // A worker that does not come back loses its jobs nevertheless.
    assert_eq!(lapse(&fixture, &store).await, [job.id]);
}

pub async fn job_that_lost_two_workers_runs_alone(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for lost in 0..4 {
        let claims = store.claim(&[job.id], by("dies")).await.unwrap();
        let attempts = u32::max(lost, 2) - 2;
        assert_eq!((claims[0].alone, claims[0].attempts), (lost >= 2, attempts), "{lost}");
        lapse(&fixture, &store).await;
    }
}

pub async fn suspects_run_alone_at_once(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    assert_eq!(store.hand_back_suspects(&[held]).await.unwrap(), [job.id]);
    assert!(store.hand_back_suspects(&[held]).await.unwrap().is_empty());
    let claims = store.claim(&[job.id], by("b")).await.unwrap();
    assert_eq!((claims[0].alone, claims[0].attempts), (true, 0));
}

pub async fn claim_with_a_lost_answer_is_handed_back(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let granted = claim_one(&store, job.id, "a").await;
    let unsure = ClaimRef { epoch: 0, ..granted };
    let other = ClaimRef { claim_id: granted.claim_id ^ 1, ..unsure };
    assert!(store.hand_back(&[other]).await.unwrap().is_empty());
    assert_eq!(store.hand_back(&[unsure]).await.unwrap(), [job.id]);
    assert!(store.hand_back(&[unsure]).await.unwrap().is_empty());
    assert_eq!(state(&store, job.id).await, JobState::Queued);
}

pub async fn other_claim_id_is_fenced(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    let other = ClaimRef { claim_id: held.claim_id ^ 1, ..held };
    assert!(store.finish(&[finished(other, answer("other"))]).await.unwrap().is_empty());
    assert_eq!(store.renew(&[other], LEASE).await.unwrap(), [other]);
    assert_eq!(store.checkpoint(&[(other, b"other".to_vec())]).await.unwrap(), [other]);
    assert_eq!(store.finish(&[finished(held, answer("held"))]).await.unwrap().len(), 1);
}
