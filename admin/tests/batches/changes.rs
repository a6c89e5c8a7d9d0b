//! Changes of batches on request: pause, resume and retry, also twice and beside a cancel.

use tritmill_admin::store::{
    batch_changes::RetryKey,
    step_state::{Rerun, RerunLines},
};
use tritmill_queue::{ErrorKind, JobId, JobState, store::RangedJob};

use super::*;

/// A batch in progress that has submitted its lines, and the claim of its driver.
async fn in_progress(store: &Arc<dyn TestStore>, owner: &Tenant, lines: u32) -> BatchClaim {
    let new = create(store, owner).await;
    let mut held = claim(store).await.unwrap();
    assert_eq!(held.batch.id, new.id);
    held.batch.enter(BatchState::InProgress, store.now().await.unwrap());
    held.batch.lines = lines.into();
    held.batch.submitted = FilePosition { line: lines.into(), offset_bytes: 1 };
    let jobs: Vec<Job> = (1..=lines).map(|line| line_job(&held.batch, line)).collect();
    let writes = BatchWrites { jobs: &jobs, ..BatchWrites::default() };
    assert!(store.save_batch(&held, writes).await.unwrap());
    held
}

fn line_job(batch: &Batch, line: u32) -> Job {
    Job {
        id: batch.id.job(line),
        custom_id: Some(format!("q{line}")),
        expires_at: Some(batch.expires_at),
        ..job()
    }
}

/// Ends a batch as its driver does.
async fn end(store: &Arc<dyn TestStore>, mut held: BatchClaim, state: BatchState) {
    let now = store.now().await.unwrap();
    held.batch.steps = StepState::default();
    held.batch.enter(state, now);
    assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
    release(store, &held).await;
}

async fn done(store: &Arc<dyn TestStore>, owner: &Tenant, id: BatchId, what: BatchChange) -> Batch {
    match change(store, owner, id, what).await.unwrap() {
        Changed::Done(batch) => *batch,
        other => panic!("{other:?}"),
    }
}

async fn refused(store: &Arc<dyn TestStore>, batch: &Batch, what: BatchChange) -> BatchState {
    match change(store, &batch.tenant, batch.id, what).await.unwrap() {
        Changed::Refused(batch) => batch.state,
        other => panic!("{other:?}"),
    }
}

async fn states(store: &Arc<dyn TestStore>, id: BatchId) -> Vec<(u32, JobState)> {
    let jobs = store.states_in_range(id.all_jobs()).await.unwrap();
    jobs.into_iter().map(|job| (id.line(job.id).unwrap(), job.state)).collect()
}

/// Runs a queued job of a batch to its end.
async fn run(store: &Arc<dyn TestStore>, id: JobId, outcome: tritmill_queue::Outcome) {
    let held = store.claim(&[id], by("w")).await.unwrap();
    let settled = store.finish(&[finished(held[0].claim_ref(), outcome)]).await.unwrap();
    assert_eq!(settled.len(), 1);
}

fn failure() -> tritmill_queue::Outcome {
    conformance::error(ErrorKind::InvalidRequest)
}

const PAUSE: BatchChange = BatchChange::Pause { now: false };

#[tokio::test]
async fn held_jobs_do_not_start_and_go_on_with_their_checkpoint_and_a_later_deadline() {
    all(async |rig: Rig| {
        let (store, acme, hour) = (&rig.store, tenant("acme"), Duration::from_secs(3600));
        let mut held = in_progress(store, &acme, 4).await;
        let id = held.batch.id;
        let all = || id.all_jobs();
        let deadline = store.now().await.unwrap().after(hour);
        store.release_range(all(), deadline, 9).await.unwrap();
        run(store, id.job(1), answer("a")).await;
        let claims = store.claim(&[id.job(2), id.job(3)], by("w")).await.unwrap();
        let [second, third] = [0, 1].map(|at| claims[at].claim_ref());
        assert!(store.checkpoint(&[(third, vec![7])]).await.unwrap().is_empty());
        // Queued jobs are held, and running ones go to their end.
        let changed = store.hold_range(all(), false, 1).await.unwrap();
        assert!(changed.more);
        while store.hold_range(all(), false, 1).await.unwrap().more {}
        use JobState::{Completed, Queued, Running, Scheduled};
        let expected = [(1, Completed), (2, Running), (3, Running), (4, Scheduled)];
        assert_eq!(states(store, id).await, expected);
        assert!(store.claim(&[id.job(4)], by("w")).await.unwrap().is_empty(), "it is held");
        assert_eq!(store.finish(&[finished(second, answer("b"))]).await.unwrap().len(), 1);
        // Running jobs are held as well.
        let changed = store.hold_range(all(), true, 9).await.unwrap();
        assert_eq!(changed, ChangedJobs { jobs: 1, more: false });
        assert_eq!(store.renew(&[third], LEASE).await.unwrap(), [third], "its work stops");
        assert!(store.finish(&[finished(third, answer("late"))]).await.unwrap().is_empty());
        assert_eq!(store.hold_range(all(), true, 9).await.unwrap().jobs, 0, "nothing is left");
        rig.advance(hour * 2);
        store.reconcile().await.unwrap();
        let expected = [(1, Completed), (2, Completed), (3, Scheduled), (4, Scheduled)];
        assert_eq!(states(store, id).await, expected, "the deadline stands still");
        held.batch.expires_at = store.now().await.unwrap().after(hour);
        let released = store.release_range(all(), held.batch.expires_at, 9).await.unwrap();
        assert_eq!(released, ChangedJobs { jobs: 2, more: false });
        assert_eq!(store.release_range(all(), held.batch.expires_at, 9).await.unwrap().jobs, 0);
        let queued = store.reconcile().await.unwrap().queued;
        let mut ids: Vec<JobId> = queued.into_iter().map(|entry| entry.id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [id.job(3), id.job(4)]);
        assert_eq!(states(store, id).await[2..], [(3, Queued), (4, Queued)]);
        let claims = store.claim(&[id.job(3), id.job(4)], by("w")).await.unwrap();
        assert_eq!((&claims[0].checkpoint, &claims[1].checkpoint), (&Some(vec![7]), &None));
        assert_eq!(claims[0].expires_in, Some(hour));
    })
    .await;
}

#[tokio::test]
async fn ended_jobs_run_again_in_the_transaction_of_a_step() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let held = in_progress(store, &acme, 3).await;
        let id = held.batch.id;
        assert!(!store.has_ended(id.all_jobs()).await.unwrap());
        run(store, id.job(1), answer("a")).await;
        assert!(store.has_ended(id.all_jobs()).await.unwrap());
        run(store, id.job(2), failure()).await;
        let running = store.claim(&[id.job(3)], by("w")).await.unwrap()[0].claim_ref();
        let again = [id.job(2)];
        let jobs = [line_job(&held.batch, 2)];
        let writes = BatchWrites { jobs: &jobs, again: &again, ..BatchWrites::default() };
        let stale = BatchClaim { epoch: held.epoch - 1, ..held.clone() };
        assert!(!store.save_batch(&stale, writes).await.unwrap());
        use JobState::{Completed, Failed, Queued, Running};
        assert_eq!(states(store, id).await, [(1, Completed), (2, Failed), (3, Running)]);
        for _ in 0..2 {
            // Repeated, as after a lost response.
            assert!(store.save_batch(&held, writes).await.unwrap());
        }
        assert_eq!(states(store, id).await, [(1, Completed), (2, Queued), (3, Running)]);
        let record = store.job(id.job(2)).await.unwrap().unwrap();
        assert_eq!((record.attempts, record.outcome, record.errors.len()), (0, None, 0));
        run(store, id.job(2), answer("b")).await;
        // A job that has not ended stays as it is.
        let (again, jobs) = ([id.job(3)], [line_job(&held.batch, 3)]);
        let writes = BatchWrites { jobs: &jobs, again: &again, ..BatchWrites::default() };
        assert!(store.save_batch(&held, writes).await.unwrap());
        assert_eq!(store.finish(&[finished(running, answer("c"))]).await.unwrap().len(), 1);
        let ends = store.ended_in_range(id.all_jobs()).await.unwrap();
        assert!(ends.iter().all(|end| end.state == Completed && end.outcome.is_some()));
        assert_eq!(store.range_progress(id.all_jobs()).await.unwrap().completed, 3);
        let names = ["q3", "q1", "other"].map(str::to_owned);
        let found = store.named_in_range(id.all_jobs(), &names).await.unwrap();
        let name = |job: &RangedJob| (job.custom_id.clone().unwrap(), id.line(job.id).unwrap());
        let found: Vec<_> = found.iter().map(name).collect();
        assert_eq!(found, [("q1".to_owned(), 1), ("q3".to_owned(), 3)]);
    })
    .await;
}

#[tokio::test]
async fn pause_stops_the_clock_of_the_deadline_and_its_states_are_checked() {
    all(async |rig: Rig| {
        let (store, acme, hour) = (&rig.store, tenant("acme"), Duration::from_secs(3600));
        let mut held = in_progress(store, &acme, 1).await;
        held.batch.expires_at = store.now().await.unwrap().after(hour);
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let (id, expires_at) = (held.batch.id, held.batch.expires_at);
        assert_eq!(refused(store, &held.batch, BatchChange::Resume).await, BatchState::InProgress);
        let paused = done(store, &acme, id, PAUSE).await;
        assert_eq!((paused.state, paused.at.paused), (BatchState::Paused, store.now().await.ok()));
        assert!(!store.save_batch(&held, BatchWrites::default()).await.unwrap(), "it is fenced");
        assert_eq!(done(store, &acme, id, PAUSE).await, paused, "it is paused already");
        let at_once = done(store, &acme, id, BatchChange::Pause { now: true }).await;
        assert!(at_once.steps.holds_running && at_once.steps.is_held);
        assert_eq!(done(store, &acme, id, PAUSE).await, at_once);
        let held = claim(store).await.unwrap();
        assert_eq!(held.batch, at_once, "its driver holds its jobs");
        let input = at_once.input;
        assert_eq!(store.delete_file(&acme, input).await.unwrap(), FileDeletion::InUse);
        rig.advance(hour * 3);
        let resumed = done(store, &acme, id, BatchChange::Resume).await;
        assert_eq!((resumed.state, resumed.at.paused), (BatchState::Validating, None));
        assert_eq!(resumed.expires_at, expires_at.after(hour * 3));
        assert!(resumed.steps.is_valid && resumed.steps.is_held && !resumed.steps.holds_running);
        assert_eq!(refused(store, &resumed, BatchChange::Resume).await, BatchState::Validating);
        // A cancel ends the pause.
        done(store, &acme, id, PAUSE).await;
        let cancelling = done(store, &acme, id, BatchChange::Cancel).await;
        assert_eq!((cancelling.state, cancelling.at.paused), (BatchState::Cancelling, None));
        let retry = BatchChange::retry_all;
        for change in [PAUSE, BatchChange::Resume, retry()] {
            assert_eq!(refused(store, &cancelling, change).await, BatchState::Cancelling);
        }
        let held = claim(store).await.unwrap();
        end(store, held, BatchState::Completed).await;
        let ended = store.batch(&acme, id).await.unwrap().unwrap();
        for change in [PAUSE, BatchChange::Resume, BatchChange::Cancel] {
            assert_eq!(refused(store, &ended, change).await, BatchState::Completed);
        }
        assert_eq!(change(store, &tenant("other"), id, PAUSE).await, None);
        // Before its validation it can be paused, but nothing can be retried.
        let new = create(store, &acme).await;
        assert_eq!(refused(store, &new, retry()).await, BatchState::Validating);
        done(store, &acme, new.id, PAUSE).await;
        assert_eq!(refused(store, &new, retry()).await, BatchState::Paused);
        let resumed = done(store, &acme, new.id, BatchChange::Resume).await;
        assert!(!resumed.steps.is_valid, "its lines are checked first");
    })
    .await;
}

#[tokio::test]
async fn retry_opens_an_ended_batch_again_once_per_key() {
    all(async |rig: Rig| {
        let (store, acme, day) = (&rig.store, tenant("acme"), Duration::from_secs(86_400));
        let held = in_progress(store, &acme, 2).await;
        let id = held.batch.id;
        end(store, held, BatchState::Expired).await;
        rig.advance(day);
        let now = store.now().await.unwrap();
        let retry = |key: &str, lines: &RerunLines| BatchChange::Retry {
            lines: lines.clone(),
            key: Some(RetryKey { key: key.to_owned(), request_hash: [key.len() as u8; 32] }),
        };
        let all_lines = RerunLines::Unanswered;
        let full = store.change_batch(&acme, id, &retry("k", &all_lines), 0).await.unwrap();
        assert_eq!(full, Some(Changed::Full));
        let open = done(store, &acme, id, retry("k", &all_lines)).await;
        assert_eq!((open.state, open.reopened), (BatchState::Validating, 1));
        assert_eq!((open.at.expired, open.left_by), (None, Some(BatchState::Expired)));
        assert_eq!((open.expires_at, open.overdue), (now.after(day), false));
        assert_eq!(open.submitted, FilePosition::default());
        let rerun = |reached| Rerun { lines: all_lines.clone(), at: now, reached };
        assert_eq!(open.steps.reruns, [rerun(Some(u64::MAX))]);
        assert_eq!(done(store, &acme, id, retry("k", &all_lines)).await, open, "the same request");
        let other = BatchChange::Retry {
            lines: all_lines.clone(),
            key: Some(RetryKey { key: "k".to_owned(), request_hash: [9; 32] }),
        };
        assert_eq!(change(store, &acme, id, other).await, Some(Changed::KeyConflict));
        // A second retry waits for its turn.
        let twice = done(store, &acme, id, retry("kk", &all_lines)).await;
        assert_eq!(twice.steps.reruns, [rerun(Some(u64::MAX)), rerun(None)]);
        assert_eq!(twice.reopened, 1);
        for _ in 2..16 {
            done(store, &acme, id, BatchChange::retry_all()).await;
        }
        let many = change(store, &acme, id, BatchChange::retry_all()).await;
        assert_eq!(many, Some(Changed::ManyRetries));
    })
    .await;
}

#[tokio::test]
async fn retry_beside_a_cancel_leaves_one_of_both() {
    all(async |Rig { store, .. }| {
        let acme = tenant("acme");
        for _ in 0..8 {
            let held = in_progress(&store, &acme, 1).await;
            let id = held.batch.id;
            release(&store, &held).await;
            let (retried, cancelled) = tokio::join!(
                change(&store, &acme, id, BatchChange::retry_all()),
                change(&store, &acme, id, BatchChange::Cancel),
            );
            assert!(matches!(cancelled, Some(Changed::Done(_))), "{cancelled:?}");
            assert!(matches!(retried, Some(Changed::Done(_) | Changed::Refused(_))));
            let mut batch = store.batch(&acme, id).await.unwrap().unwrap();
            assert_eq!(batch.state, BatchState::Cancelling);
            let held = claim(&store).await.unwrap();
            assert_eq!(store.cancel_range(id.all_jobs(), 9).await.unwrap().jobs, 1);
            end(&store, held, BatchState::Cancelled).await;
            batch = done(&store, &acme, id, BatchChange::Resume).await;
            assert_eq!(batch.state, BatchState::Validating);
            assert_eq!(batch.steps.reruns[0].lines, RerunLines::Cancelled);
            assert_eq!(batch.at.cancelled, None);
            done(&store, &acme, id, BatchChange::Cancel).await;
            let held = claim(&store).await.unwrap();
            end(&store, held, BatchState::Cancelled).await;
        }
    })
    .await;
}

#[tokio::test]
async fn waiting_jobs_move_to_another_queue_and_their_old_deliveries_are_not_claimed() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let held = in_progress(store, &acme, 5).await;
        let id = held.batch.id;
        let to = tritmill_queue::QueueName { model: "small".to_owned(), format: "tl1".to_owned() };
        run(store, id.job(1), answer("a")).await;
        let claims = store.claim(&[id.job(2), id.job(3)], by("w")).await.unwrap();
        let (running, retried) = (claims[0].claim_ref(), claims[1].claim_ref());
        assert!(store.checkpoint(&[(retried, vec![7])]).await.unwrap().is_empty());
        assert_eq!(store.hand_back(&[retried]).await.unwrap(), [retried.id]);
        let old = claims[0].job.queue.clone();
        let moved = store.move_range(id.all_jobs(), &to, 2).await.unwrap();
        assert_eq!(moved, ChangedJobs { jobs: 2, more: true });
        assert_eq!(store.move_range(id.all_jobs(), &to, 2).await.unwrap().jobs, 1);
        assert_eq!(store.move_range(id.all_jobs(), &to, 2).await.unwrap().jobs, 0);
        let queued = store.reconcile().await.unwrap().queued;
        assert!(queued.iter().all(|entry| entry.queue == to), "{queued:?}");
        assert_eq!(queued.len(), 3);
        // Deliveries of the old queue.
        let ids = [id.job(3), id.job(4), id.job(5)];
        let of_queue = |queue| Claimant { queue: Some(queue), ..by("w") };
        assert_eq!(store.claim(&ids, of_queue(&old)).await.unwrap(), []);
        let claims = store.claim(&ids, of_queue(&to)).await.unwrap();
        assert_eq!(claims.len(), 3);
        for claim in &claims {
            assert_eq!((&claim.job.queue, &claim.checkpoint), (&to, &None), "{:?}", claim.job.id);
        }
        // One that runs stays, and its answer counts.
        assert_eq!(store.finish(&[finished(running, answer("b"))]).await.unwrap().len(), 1);
        // A job that is held stays as well.
        while store.hold_range(id.all_jobs(), true, 9).await.unwrap().more {}
        assert_eq!(store.move_range(id.all_jobs(), &old, 9).await.unwrap().jobs, 0);
    })
    .await;
}
