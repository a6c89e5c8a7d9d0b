//! The rules, one function each.

use std::time::Duration;

use tritmill_queue::{
    ClaimRef, Entry, ErrorKind, FinishedAttempt, Job, JobId, JobState, Outcome, Prompt, QueueName,
    Store, job::ATTEMPTS_DEFAULT,
};

#[allow(unused_imports, reason = "not every test binary runs the suite")]
pub use super::leases::*;
use super::{Fixture, LEASE, answer, by, error, finished, job, lapse, queue};

pub(super) async fn state(store: &impl Store, id: JobId) -> JobState {
    store.state(id).await.unwrap().unwrap()
}

pub(super) async fn claim_one(store: &impl Store, id: JobId, owner: &str) -> ClaimRef {
    store.claim(&[id], by(owner)).await.unwrap()[0].claim_ref()
}

pub async fn time_is_the_stores_clock<F: Fixture>(fixture: F) {
    let store = fixture.open().await;
    let before = store.now().await.unwrap();
    fixture.advance(LEASE);
    let after = store.now().await.unwrap();
    assert!(after >= before.after(LEASE), "{before:?} {after:?}");
}

pub async fn submitted_job_is_returned_unchanged(fixture: impl Fixture) {
    let store = fixture.open().await;
    let mut job = job();
    job.prompt = Prompt::Text("zero \u{0} quote ' \" and 𝄞".into());
    job.sampling.logit_bias = vec![(7, -1.5)];
    store.submit(&[job.clone(), job.clone()]).await.unwrap();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.job, record.state, record.epoch), (job, JobState::Queued, 0));
    assert_eq!(store.progress(None).await.unwrap().queued, 1);
    assert_eq!(store.job(JobId::generate()).await.unwrap(), None);
}

pub async fn claim_is_exclusive_during_its_lease(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs: Vec<Job> = (0..5).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids, by("a")).await.unwrap();
    assert_eq!(claims.iter().map(|claim| claim.job.id).collect::<Vec<_>>(), ids);
    assert!(claims.iter().all(|claim| claim.epoch == 1 && claim.attempts == 0));
    assert!(store.claim(&ids, by("b")).await.unwrap().is_empty());
    fixture.advance(LEASE - Duration::from_millis(1));
    assert!(store.claim(&ids, by("b")).await.unwrap().is_empty());
}

pub async fn renewal_extends_the_lease(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    for _ in 0..3 {
        fixture.advance(LEASE - Duration::from_secs(1));
        assert!(store.renew(&[held], LEASE).await.unwrap().is_empty());
    }
    assert_eq!(store.reconcile().await.unwrap().moved, 0);
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
}

pub async fn write_under_an_old_epoch_is_fenced(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let late = claim_one(&store, job.id, "a").await;
    lapse(&fixture, &store).await;
    let live = claim_one(&store, job.id, "b").await;
    assert!(store.finish(&[finished(late, answer("late"))]).await.unwrap().is_empty());
    assert_eq!(store.renew(&[late, live], LEASE).await.unwrap(), [late]);
    assert!(store.hand_back(&[late]).await.unwrap().is_empty());
    assert_eq!(store.finish(&[finished(live, answer("live"))]).await.unwrap().len(), 1);
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.outcome), (JobState::Completed, Some(answer("live"))));
}

pub async fn job_is_finished_exactly_once(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    let twice = [finished(held, answer("first")), finished(held, answer("second"))];
    assert_eq!(store.finish(&twice).await.unwrap().len(), 1);
    assert!(store.finish(&twice).await.unwrap().is_empty());
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
    assert!(store.cancel(&[job.id]).await.unwrap().is_empty());
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!(record.outcome, Some(answer("first")));
    let progress = store.progress(Some(&queue())).await.unwrap();
    let tokens = (progress.completed, progress.prompt_tokens, progress.completion_tokens);
    assert_eq!(tokens, (1, 3, 2));
}

pub async fn bulk_finish_checks_each_epoch(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs: Vec<Job> = (0..4).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids, by("a")).await.unwrap();
    let mut attempts: Vec<FinishedAttempt> =
        claims.iter().map(|claim| finished(claim.claim_ref(), answer("x"))).collect();
    attempts[1].claim.epoch -= 1;
    attempts[2].outcome = error(ErrorKind::InvalidRequest);
    attempts[3].outcome = Outcome::Expired;
    let settled = store.finish(&attempts).await.unwrap();
    let states: Vec<_> = settled.iter().map(|settled| (settled.id, settled.state)).collect();
    let expected =
        [(ids[0], JobState::Completed), (ids[2], JobState::Failed), (ids[3], JobState::Expired)];
    assert_eq!(states, expected);
    assert_eq!(state(&store, ids[1]).await, JobState::Running);
}

fn entry_ids(entries: &[Entry]) -> Vec<JobId> {
    entries.iter().map(|entry| entry.id).collect()
}

pub async fn errors_are_retried_with_backoff_until_dead_letter(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for attempt in 1..ATTEMPTS_DEFAULT {
        let held = claim_one(&store, job.id, "a").await;
        store.finish(&[finished(held, error(ErrorKind::Engine))]).await.unwrap();
        assert_eq!(state(&store, job.id).await, JobState::Retrying, "attempt {attempt}");
        assert_eq!(store.reconcile().await.unwrap().moved, 0, "the backoff has not passed");
        assert!(store.claim(&[job.id], by("a")).await.unwrap().is_empty());
        fixture.advance(Duration::from_secs(60));
        assert_eq!(entry_ids(&store.reconcile().await.unwrap().queued), [job.id]);
    }
    let held = claim_one(&store, job.id, "a").await;
    store.finish(&[finished(held, error(ErrorKind::Engine))]).await.unwrap();
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Failed, ATTEMPTS_DEFAULT));
    assert_eq!(record.errors.len(), ATTEMPTS_DEFAULT as usize);
    assert_eq!(record.outcome, Some(error(ErrorKind::Engine)));
}

pub async fn lost_leases_lead_to_dead_letter(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    // The first two workers ran other jobs too.
    for _ in 0..2 + ATTEMPTS_DEFAULT {
        claim_one(&store, job.id, "dies").await;
        lapse(&fixture, &store).await;
    }
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Failed, ATTEMPTS_DEFAULT));
    assert!(record.errors.len() >= ATTEMPTS_DEFAULT as usize);
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
}

pub async fn hand_back_costs_no_attempt_and_fences_the_claim(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for _ in 0..ATTEMPTS_DEFAULT + 2 {
        let held = claim_one(&store, job.id, "a").await;
        assert_eq!(store.hand_back(&[held]).await.unwrap(), [job.id]);
        assert!(store.finish(&[finished(held, answer("late"))]).await.unwrap().is_empty());
    }
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Queued, 0));
}

pub async fn cancelled_job_cannot_be_claimed_or_finished(fixture: impl Fixture) {
    let store = fixture.open().await;
    let (queued, running) = (job(), job());
    store.submit(&[queued.clone(), running.clone()]).await.unwrap();
    let held = claim_one(&store, running.id, "a").await;
    let ids = [queued.id, running.id];
    assert_eq!(store.cancel(&ids).await.unwrap().len(), 2);
    assert!(store.cancel(&ids).await.unwrap().is_empty());
    assert!(store.claim(&ids, by("b")).await.unwrap().is_empty());
    assert_eq!(store.renew(&[held], LEASE).await.unwrap(), [held]);
    assert!(store.finish(&[finished(held, answer("late"))]).await.unwrap().is_empty());
    assert_eq!(store.progress(None).await.unwrap().cancelled, 2);
}

pub async fn scheduled_job_waits_and_overdue_job_expires(fixture: impl Fixture) {
    let store = fixture.open().await;
    let probe = job();
    store.submit(std::slice::from_ref(&probe)).await.unwrap();
    let now = tritmill_queue::Timestamp(1_700_000_000_000);
    let (mut later, mut brief, mut due) = (job(), job(), job());
    later.run_at = Some(now.after(Duration::from_secs(10)));
    brief.expires_at = Some(now.after(Duration::from_secs(10)));
    due.run_at = Some(now);
    store.submit(&[later.clone(), brief.clone(), due.clone()]).await.unwrap();
    assert!(store.claim(&[later.id], by("a")).await.unwrap().is_empty());
    assert_eq!(store.claim(&[due.id], by("a")).await.unwrap().len(), 1);
    assert_eq!(state(&store, later.id).await, JobState::Scheduled);
    fixture.advance(Duration::from_secs(10));
    assert!(store.claim(&[brief.id], by("a")).await.unwrap().is_empty());
    let done = store.reconcile().await.unwrap();
    assert_eq!((done.moved, entry_ids(&done.queued)), (2, vec![later.id]));
    assert_eq!(done.queued[0].queue, queue());
    assert_eq!(state(&store, later.id).await, JobState::Queued);
    assert_eq!(state(&store, brief.id).await, JobState::Expired);
}

pub async fn unfinished_jobs_survive_a_restart(fixture: impl Fixture) {
    let jobs: Vec<Job> = (0..10).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    let held = {
        let store = fixture.open().await;
        store.submit(&jobs).await.unwrap();
        let claims = store.claim(&ids[..4], by("a")).await.unwrap();
        let done = finished(claims[0].claim_ref(), answer("x"));
        store.finish(&[done]).await.unwrap();
        claims[1].claim_ref()
    };
    let store = fixture.open().await;
    assert_eq!(store.unfinished(&queue()).await.unwrap(), 9);
    assert_eq!(lapse(&fixture, &store).await, ids[1..4]);
    let mut fed = Vec::new();
    loop {
        let page = store.queued(&queue(), fed.last().copied(), 4).await.unwrap();
        if page.is_empty() {
            break;
        }
        fed.extend(page.into_iter().map(|entry| entry.id));
    }
    assert_eq!(fed, ids[1..]);
    assert_eq!(store.finish(&[finished(held, answer("late"))]).await.unwrap().len(), 1);
    let other = QueueName { format: "tl1".into(), ..queue() };
    assert!(store.queued(&other, None, 4).await.unwrap().is_empty());
}

pub async fn finished_returns_only_terminal_jobs(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs: Vec<Job> = (0..5).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    store.submit(&jobs).await.unwrap();
    assert!(store.finished(&ids).await.unwrap().is_empty());
    let claims = store.claim(&ids[..3], by("a")).await.unwrap();
    let refusal = error(ErrorKind::InvalidRequest);
    let done = [
        finished(claims[0].claim_ref(), answer("x")),
        finished(claims[1].claim_ref(), refusal.clone()),
    ];
    store.finish(&done).await.unwrap();
    store.cancel(&ids[3..4]).await.unwrap();
    let mut finished = store.finished(&ids).await.unwrap();
    finished.sort_by_key(|job| job.id);
    let finished: Vec<_> =
        finished.into_iter().map(|job| (job.id, job.state, job.outcome)).collect();
    let expected = [
        (ids[0], JobState::Completed, Some(answer("x"))),
        (ids[1], JobState::Failed, Some(refusal)),
        (ids[3], JobState::Cancelled, None),
    ];
    assert_eq!(finished, expected);
}

pub async fn old_epoch_in_a_call_does_not_hide_the_live_one(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let live = claim_one(&store, job.id, "a").await;
    let late = ClaimRef { epoch: live.epoch - 1, ..live };
    let both = [finished(late, answer("late")), finished(live, answer("live"))];
    assert_eq!(store.finish(&both).await.unwrap().len(), 1);
    assert_eq!(store.job(job.id).await.unwrap().unwrap().outcome, Some(answer("live")));
}

pub async fn next_claim_returns_the_checkpoint(fixture: impl Fixture) {
    let store = fixture.open().await;
    let jobs: Vec<Job> = (0..3).map(|_| job()).collect();
    let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
    store.submit(&jobs).await.unwrap();
    let claims = store.claim(&ids, by("a")).await.unwrap();
    assert!(claims.iter().all(|claim| claim.checkpoint.is_none()));
    let held: Vec<ClaimRef> = claims.iter().map(tritmill_queue::Claim::claim_ref).collect();
    let save = |text: &str| -> Vec<(ClaimRef, Vec<u8>)> {
        held[..2].iter().map(|held| (*held, text.as_bytes().to_vec())).collect()
    };
    assert!(store.checkpoint(&save("first")).await.unwrap().is_empty());
    assert!(store.checkpoint(&save("first and second")).await.unwrap().is_empty());
    // One job loses its lease, the other is handed back.
    store.hand_back(&held[1..2]).await.unwrap();
    lapse(&fixture, &store).await;
    let claims = store.claim(&ids, by("b")).await.unwrap();
    let saved: Vec<_> = claims.iter().map(|claim| claim.checkpoint.as_deref()).collect();
    let expected = Some(b"first and second".as_slice());
    assert_eq!(saved, [expected, expected, None]);
}

pub async fn checkpoint_under_an_old_epoch_is_fenced(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let late = claim_one(&store, job.id, "a").await;
    store.hand_back(&[late]).await.unwrap();
    assert_eq!(store.checkpoint(&[(late, b"late".to_vec())]).await.unwrap(), [late]);
    let claims = store.claim(&[job.id], by("b")).await.unwrap();
    assert_eq!(claims[0].checkpoint, None);
    let live = claims[0].claim_ref();
    let both = [(late, b"late".to_vec()), (live, b"live".to_vec())];
    assert_eq!(store.checkpoint(&both).await.unwrap(), [late]);
}

pub async fn finish_deletes_the_checkpoint(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let held = claim_one(&store, job.id, "a").await;
    store.checkpoint(&[(held, b"what made the engine fail".to_vec())]).await.unwrap();
    store.finish(&[finished(held, error(ErrorKind::Engine))]).await.unwrap();
    fixture.advance(Duration::from_secs(60));
    store.reconcile().await.unwrap();
    let claims = store.claim(&[job.id], by("b")).await.unwrap();
    assert_eq!(claims[0].checkpoint, None);
}

pub async fn empty_calls_do_nothing(fixture: impl Fixture) {
    let store = fixture.open().await;
    store.submit(&[]).await.unwrap();
    assert!(store.claim(&[], by("a")).await.unwrap().is_empty());
    assert!(store.renew(&[], LEASE).await.unwrap().is_empty());
    assert!(store.checkpoint(&[]).await.unwrap().is_empty());
    assert!(store.finish(&[]).await.unwrap().is_empty());
    assert!(store.hand_back(&[]).await.unwrap().is_empty());
    assert!(store.cancel(&[JobId::generate()]).await.unwrap().is_empty());
    assert_eq!(store.reconcile().await.unwrap().moved, 0);
}
