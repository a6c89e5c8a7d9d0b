//! What every store must do. `store_conformance!(name, Fixture)` makes one test per rule.

use std::time::Duration;

use tritmill_queue::{
    Choice, ClaimRef, Claimant, Completion, Entry, ErrorKind, FinishReason, FinishedAttempt, Job,
    JobError, JobId, JobState, Outcome, Priority, Prompt, QueueName, Sampling, Store, Tenant,
    Usage, job::ATTEMPTS_DEFAULT,
};

/// A store that can be opened again, and its clock.
pub trait Fixture {
    /// The store under test.
    type Store: Store;
    /// An empty database.
    fn create() -> Self;
    /// Opens it, as a process does when it starts.
    async fn open(&self) -> Self::Store;
    /// Moves the store's clock.
    fn advance(&self, by: Duration);
}

pub const LEASE: Duration = Duration::from_secs(15);

pub fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

pub fn job() -> Job {
    Job {
        id: JobId::generate(),
        tenant: Tenant::default(),
        queue: queue(),
        priority: Priority::Normal,
        prompt: Prompt::Text("once".into()),
        sampling: Sampling::default(),
        seed: u64::MAX,
        attempts_max: ATTEMPTS_DEFAULT,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        custom_id: None,
    }
}

pub async fn time_goes_by_the_stores_clock<F: Fixture>(fixture: F) {
    let store = fixture.open().await;
    let before = store.now().await.unwrap();
    fixture.advance(LEASE);
    let after = store.now().await.unwrap();
    assert!(after >= before.after(LEASE), "{before:?} {after:?}");
}

pub fn by(owner: &str) -> Claimant<'_> {
    Claimant { owner, lease: LEASE }
}

pub fn answer(text: &str) -> Outcome {
    Outcome::Completed(Completion {
        model: "tiny".into(),
        fingerprint: "f".into(),
        choices: vec![Choice {
            index: 0,
            text: text.into(),
            finish_reason: FinishReason::Stop,
            logprobs: None,
        }],
        usage: Usage { prompt_tokens: 3, completion_tokens: 2 },
    })
}

pub fn error(kind: ErrorKind) -> Outcome {
    Outcome::Error(JobError { kind, code: "c".into(), message: "m".into(), param: None })
}

pub fn finished(claim: ClaimRef, outcome: Outcome) -> FinishedAttempt {
    FinishedAttempt { claim, outcome, first_token: None }
}

async fn state(store: &impl Store, id: JobId) -> JobState {
    store.job(id).await.unwrap().unwrap().state
}

async fn claim_one(store: &impl Store, id: JobId, owner: &str) -> ClaimRef {
    store.claim(&[id], by(owner)).await.unwrap()[0].claim_ref()
}

pub async fn a_submitted_job_comes_back_as_it_was(fixture: impl Fixture) {
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

pub async fn a_claim_is_exclusive_while_its_lease_lives(fixture: impl Fixture) {
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

pub async fn a_lease_that_is_over_can_be_claimed_and_counts_an_attempt(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    claim_one(&store, job.id, "a").await;
    fixture.advance(LEASE);
    let claims = store.claim(&[job.id], by("b")).await.unwrap();
    assert_eq!((claims[0].epoch, claims[0].attempts), (2, 1));
}

pub async fn a_renewed_lease_lives_on(fixture: impl Fixture) {
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

pub async fn a_late_writer_cannot_write(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let late = claim_one(&store, job.id, "a").await;
    fixture.advance(LEASE);
    let live = claim_one(&store, job.id, "b").await;
    assert!(store.finish(&[finished(late, answer("late"))]).await.unwrap().is_empty());
    assert_eq!(store.renew(&[late, live], LEASE).await.unwrap(), [late]);
    assert!(store.hand_back(&[late]).await.unwrap().is_empty());
    assert_eq!(store.finish(&[finished(live, answer("live"))]).await.unwrap().len(), 1);
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.outcome), (JobState::Completed, Some(answer("live"))));
}

pub async fn a_job_is_finished_exactly_once(fixture: impl Fixture) {
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

pub async fn a_bulk_finish_settles_each_job_by_its_own_epoch(fixture: impl Fixture) {
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

pub async fn errors_are_retried_after_a_backoff_until_the_dead_letter(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for attempt in 1..ATTEMPTS_DEFAULT {
        let held = claim_one(&store, job.id, "a").await;
        store.finish(&[finished(held, error(ErrorKind::Engine))]).await.unwrap();
        assert_eq!(state(&store, job.id).await, JobState::Retrying, "attempt {attempt}");
        assert_eq!(store.reconcile().await.unwrap().moved, 0, "the backoff is not over");
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

pub async fn lost_leases_end_in_the_dead_letter_too(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    for _ in 0..ATTEMPTS_DEFAULT {
        claim_one(&store, job.id, "dies").await;
        fixture.advance(LEASE);
        store.reconcile().await.unwrap();
    }
    let record = store.job(job.id).await.unwrap().unwrap();
    assert_eq!(record.state, JobState::Failed);
    assert_eq!(record.errors.len(), ATTEMPTS_DEFAULT as usize);
    assert!(store.claim(&[job.id], by("b")).await.unwrap().is_empty());
}

pub async fn handing_back_is_free_and_fences_the_claim(fixture: impl Fixture) {
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

pub async fn a_cancelled_job_cannot_be_claimed_or_finished(fixture: impl Fixture) {
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

pub async fn a_scheduled_job_waits_and_a_late_one_expires(fixture: impl Fixture) {
    let store = fixture.open().await;
    let probe = job();
    store.submit(std::slice::from_ref(&probe)).await.unwrap();
    let now = tritmill_queue::Timestamp(1_700_000_000_000);
    let (mut later, mut brief) = (job(), job());
    later.run_at = Some(now.after(Duration::from_secs(10)));
    brief.expires_at = Some(now.after(Duration::from_secs(10)));
    store.submit(&[later.clone(), brief.clone()]).await.unwrap();
    assert!(store.claim(&[later.id], by("a")).await.unwrap().is_empty());
    assert_eq!(state(&store, later.id).await, JobState::Scheduled);
    fixture.advance(Duration::from_secs(10));
    assert!(store.claim(&[brief.id], by("a")).await.unwrap().is_empty());
    let done = store.reconcile().await.unwrap();
    assert_eq!((done.moved, entry_ids(&done.queued)), (2, vec![later.id]));
    assert_eq!(done.queued[0].queue, queue());
    assert_eq!(state(&store, later.id).await, JobState::Queued);
    assert_eq!(state(&store, brief.id).await, JobState::Expired);
}

pub async fn a_restart_feeds_what_is_unfinished(fixture: impl Fixture) {
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
    fixture.advance(LEASE);
    let done = store.reconcile().await.unwrap();
    assert_eq!((done.moved, entry_ids(&done.queued)), (3, ids[1..4].to_vec()));
    let mut fed = Vec::new();
    loop {
        let page = store.queued(&queue(), fed.last().copied(), 4).await.unwrap();
        if page.is_empty() {
            break;
        }
        fed.extend(page.into_iter().map(|entry| entry.id));
    }
    assert_eq!(fed, ids[1..]);
    assert!(store.finish(&[finished(held, answer("late"))]).await.unwrap().is_empty());
    let other = QueueName { format: "tl1".into(), ..queue() };
    assert!(store.queued(&other, None, 4).await.unwrap().is_empty());
}

pub async fn only_what_is_over_has_ended(fixture: impl Fixture) {
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
    let mut ended = store.finished(&ids).await.unwrap();
    ended.sort_by_key(|ended| ended.id);
    let ended: Vec<_> = ended.into_iter().map(|one| (one.id, one.state, one.outcome)).collect();
    let expected = [
        (ids[0], JobState::Completed, Some(answer("x"))),
        (ids[1], JobState::Failed, Some(refusal)),
        (ids[3], JobState::Cancelled, None),
    ];
    assert_eq!(ended, expected);
}

pub async fn an_attempt_under_an_old_epoch_hides_nothing(fixture: impl Fixture) {
    let store = fixture.open().await;
    let job = job();
    store.submit(std::slice::from_ref(&job)).await.unwrap();
    let live = claim_one(&store, job.id, "a").await;
    let late = ClaimRef { epoch: live.epoch - 1, ..live };
    let both = [finished(late, answer("late")), finished(live, answer("live"))];
    assert_eq!(store.finish(&both).await.unwrap().len(), 1);
    assert_eq!(store.job(job.id).await.unwrap().unwrap().outcome, Some(answer("live")));
}

pub async fn a_checkpoint_comes_back_with_the_next_claim(fixture: impl Fixture) {
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
    // One comes back by the loss of its lease, the other by hand.
    store.hand_back(&held[1..2]).await.unwrap();
    fixture.advance(LEASE);
    store.reconcile().await.unwrap();
    let claims = store.claim(&ids, by("b")).await.unwrap();
    let saved: Vec<_> = claims.iter().map(|claim| claim.checkpoint.as_deref()).collect();
    let expected = Some(b"first and second".as_slice());
    assert_eq!(saved, [expected, expected, None]);
}

pub async fn only_the_holder_saves_a_checkpoint(fixture: impl Fixture) {
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

pub async fn an_attempt_that_ends_clears_its_checkpoint(fixture: impl Fixture) {
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

pub async fn nothing_is_asked_about_nothing(fixture: impl Fixture) {
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

/// One test per rule of the suite.
#[macro_export]
macro_rules! store_conformance {
    ($name:ident, $fixture:ty) => {
        $crate::store_conformance!(@rules $name, $fixture;
            a_submitted_job_comes_back_as_it_was
            a_claim_is_exclusive_while_its_lease_lives
            a_lease_that_is_over_can_be_claimed_and_counts_an_attempt
            a_renewed_lease_lives_on
            a_late_writer_cannot_write
            a_job_is_finished_exactly_once
            a_bulk_finish_settles_each_job_by_its_own_epoch
            errors_are_retried_after_a_backoff_until_the_dead_letter
            lost_leases_end_in_the_dead_letter_too
            time_goes_by_the_stores_clock
            handing_back_is_free_and_fences_the_claim
            a_cancelled_job_cannot_be_claimed_or_finished
            a_scheduled_job_waits_and_a_late_one_expires
            a_restart_feeds_what_is_unfinished
            only_what_is_over_has_ended
            an_attempt_under_an_old_epoch_hides_nothing
            a_checkpoint_comes_back_with_the_next_claim
            only_the_holder_saves_a_checkpoint
            an_attempt_that_ends_clears_its_checkpoint
            nothing_is_asked_about_nothing
        );
    };
    (@rules $name:ident, $fixture:ty; $($rule:ident)+) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $rule() {
                    $crate::conformance::$rule(<$fixture as $crate::Fixture>::create()).await;
                }
            )+
        }
    };
}
