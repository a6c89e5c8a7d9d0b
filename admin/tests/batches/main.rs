//! Batches in Postgres and SQLite: claims by turns, leases, and what a step writes.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod chains;
mod changes;
#[allow(dead_code, unused_macros, reason = "the suite of jobs runs in tests/store.rs")]
#[path = "../../../queue/tests/conformance/mod.rs"]
mod conformance;
mod driven;
mod ends;
mod lists;
mod notices;
mod open;
mod schedules;
mod steps;
#[path = "../../../queue/tests/stores/mod.rs"]
mod stores;
mod urls;

use std::{sync::Arc, time::Duration};

use conformance::{LEASE, answer, by, finished, job, queue};
use stores::{Rig, all};
use tritmill_admin::store::{
    Batch, BatchId, BatchState, FileId, FrontStore as TestStore,
    batch_changes::{BatchChange, Changed},
    batch_steps::{BatchClaim, BatchWrites, Claimable, FileChunk, NamedLine},
    batches::{BatchFilter, Creation},
    files::{ChunkContent, FileDeletion, FilePurpose, StoredChunk, StoredFile},
    step_state::{FilePosition, StepState},
};
use tritmill_queue::{
    Job, Priority, Tenant, Timestamp,
    store::{ChangedJobs, Claimant, Page},
};

const MANY: u32 = 1000;

fn tenant(name: &str) -> Tenant {
    Tenant(name.to_owned())
}

fn file(owner: &Tenant) -> StoredFile {
    StoredFile {
        id: FileId::generate(),
        tenant: owner.clone(),
        purpose: FilePurpose::Batch,
        filename: "in.jsonl".into(),
        size_bytes: 0,
        created_at: Timestamp::default(),
        expires_at: None,
    }
}

fn batch(owner: &Tenant, input: FileId) -> Batch {
    let (endpoint, window) = ("/v1/completions".to_owned(), "24h".to_owned());
    Batch {
        input,
        priority: Priority::Low,
        expires_at: Timestamp(i64::MAX),
        ..Batch::new(owner.clone(), endpoint, window, Timestamp(1))
    }
}

/// The batches of a tenant.
fn of(tenant: &Tenant) -> BatchFilter {
    BatchFilter { tenant: Some(tenant.clone()), ..BatchFilter::default() }
}

/// Creates a complete file and a batch with it.
async fn create(store: &Arc<dyn TestStore>, owner: &Tenant) -> Batch {
    let input = file(owner);
    store.create_file(&input).await.unwrap();
    store.complete_file(input.id, 1, None).await.unwrap();
    let new = batch(owner, input.id);
    assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
    new
}

/// Claims a batch, released or suspect.
async fn claim(store: &Arc<dyn TestStore>) -> Option<BatchClaim> {
    let released = claim_of(store, Claimable::Released, 1).await.pop();
    match released {
        None => claim_of(store, Claimable::Suspect, 1).await.pop(),
        found => found,
    }
}

async fn claim_of(store: &Arc<dyn TestStore>, which: Claimable, max: u32) -> Vec<BatchClaim> {
    store.claim_batches(which, by("driver"), max).await.unwrap()
}

/// Changes a batch; returns it as it is then, or `None` if the tenant has no such batch.
async fn change(
    store: &Arc<dyn TestStore>,
    owner: &Tenant,
    id: BatchId,
    change: BatchChange,
) -> Option<Changed> {
    store.change_batch(owner, id, &change, MANY).await.unwrap()
}

/// Cancels a batch, if its state allows it.
async fn cancel(store: &Arc<dyn TestStore>, owner: &Tenant, id: BatchId) -> Option<Batch> {
    change(store, owner, id, BatchChange::Cancel).await.map(|changed| match changed {
        Changed::Done(batch) | Changed::Refused(batch) => *batch,
        other => panic!("{other:?}"),
    })
}

/// Releases a claim; the next step is due at once.
async fn release(store: &Arc<dyn TestStore>, claim: &BatchClaim) {
    store.release_batch(claim.batch.id, claim.epoch, Duration::ZERO).await.unwrap();
}

#[tokio::test]
async fn batch_has_one_driver_and_old_epochs_are_fenced() {
    all(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let new = create(store, &acme).await;
        let mut first = claim(store).await.unwrap();
        assert_eq!(first.batch, new);
        assert!(claim(store).await.is_none());
        rig.advance(LEASE);
        let second = claim(store).await.unwrap();
        first.batch.enter(BatchState::InProgress, Timestamp(5));
        let lines: Vec<Job> = vec![Job { id: new.id.job(1), ..job() }];
        let along = BatchWrites { jobs: &lines, ..BatchWrites::default() };
        assert!(!store.save_batch(&first, along).await.unwrap());
        assert!(!store.renew_batch(new.id, first.epoch, LEASE).await.unwrap());
        assert_eq!(store.range_progress(new.id.all_jobs()).await.unwrap().queued, 0);
        assert_eq!(store.batch(&acme, new.id).await.unwrap().unwrap(), new);
        let held = BatchClaim { epoch: second.epoch, ..first };
        // Repeated, as after a lost response.
        assert!(store.save_batch(&held, along).await.unwrap());
        assert!(store.save_batch(&held, along).await.unwrap());
        assert_eq!(store.range_progress(new.id.all_jobs()).await.unwrap().queued, 1);
        assert!(store.renew_batch(new.id, second.epoch, LEASE).await.unwrap());
        release(store, &second).await;
        assert_eq!(claim(store).await.unwrap().batch, held.batch);
    })
    .await;
}

#[tokio::test]
async fn cancelled_batch_ends_its_drivers_claim() {
    all(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let new = create(&store, &acme).await;
        let held = claim(&store).await.unwrap();
        assert_eq!(cancel(&store, &other, new.id).await, None);
        assert_eq!(store.batch(&other, new.id).await.unwrap(), None);
        let in_use = store.delete_file(&acme, new.input).await.unwrap();
        assert_eq!(in_use, FileDeletion::InUse);
        let cancelling = cancel(&store, &acme, new.id).await.unwrap();
        assert_eq!(cancelling.state, BatchState::Cancelling);
        assert!(!store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let mut held = claim(&store).await.unwrap();
        held.batch.enter(BatchState::Cancelled, Timestamp(9));
        let output = file(&acme);
        store.create_file(&output).await.unwrap();
        let files = [(output.id, 0, None)];
        assert!(
            store
                .save_batch(&held, BatchWrites { files: &files, ..BatchWrites::default() })
                .await
                .unwrap()
        );
        assert!(store.file(&acme, output.id).await.unwrap().is_some());
        release(&store, &held).await;
        assert!(claim(&store).await.is_none(), "it is finished");
        let again = cancel(&store, &acme, new.id).await.unwrap();
        assert_eq!(again.state, BatchState::Cancelled);
        assert_eq!(store.delete_file(&acme, new.input).await.unwrap(), FileDeletion::Deleted);
        let page = Page { after: None, limit: 9, ascending: false };
        assert_eq!(store.find_batches(&of(&acme), page).await.unwrap().len(), 1);
        assert!(store.find_batches(&of(&other), page).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn expired_input_is_kept_until_its_batch_is_finished() {
    all(async |rig: Rig| {
        let (store, acme, hour) = (&rig.store, tenant("acme"), Duration::from_secs(3600));
        let input = file(&acme);
        store.create_file(&input).await.unwrap();
        store.put_chunk(input.id, 0, ChunkContent::Bytes(b"{}")).await.unwrap();
        let until = store.now().await.unwrap().after(hour);
        store.complete_file(input.id, 2, Some(until)).await.unwrap();
        let new = batch(&acme, input.id);
        assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
        rig.advance(hour * 2);
        assert_eq!(store.file(&acme, input.id).await.unwrap(), None, "its tenant does not see it");
        assert_eq!(store.sweep_files().await.unwrap(), 0);
        assert_eq!(
            store.chunk(input.id, 0).await.unwrap().unwrap(),
            StoredChunk::Bytes(b"{}".to_vec())
        );
        let mut held = claim(store).await.unwrap();
        held.batch.enter(BatchState::Failed, Timestamp(9));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert_eq!(store.sweep_files().await.unwrap(), 1);
        assert_eq!(store.chunk(input.id, 0).await.unwrap(), None);
    })
    .await;
}

#[tokio::test]
async fn idempotency_key_makes_one_batch_per_tenant() {
    all(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let first = create(&store, &acme).await;
        let keyed = |of: &Tenant| Batch {
            id: BatchId::generate(),
            tenant: of.clone(),
            idempotency_key: Some("k".to_owned()),
            ..first.clone()
        };
        let new = keyed(&acme);
        assert_eq!(store.create_batch(&new, MANY).await.unwrap(), Creation::New);
        let known = store.create_batch(&keyed(&acme), MANY).await.unwrap();
        assert_eq!(known, Creation::Known(Box::new(new.clone())));
        assert_eq!(store.keyed_batch(&acme, "k").await.unwrap(), Some(new));
        assert_eq!(store.keyed_batch(&acme, "other").await.unwrap(), None);
        assert_eq!(store.keyed_batch(&other, "k").await.unwrap(), None);
        let known = store.create_batch(&keyed(&acme), 1).await.unwrap();
        assert!(matches!(known, Creation::Known(_)), "a known batch is returned at the limit, too");
        assert_eq!(store.create_batch(&keyed(&other), MANY).await.unwrap(), Creation::New);
        let page = Page { after: None, limit: 9, ascending: false };
        assert_eq!(store.find_batches(&of(&acme), page).await.unwrap().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn jobs_of_a_batch_are_counted_read_and_cancelled_by_its_id() {
    all(async |Rig { store, .. }| {
        let id = BatchId::generate();
        let mut jobs: Vec<Job> =
            (1..=3).map(|line| Job { id: id.job(line), queue: queue(), ..job() }).collect();
        jobs.push(job());
        store.submit(&jobs).await.unwrap();
        let claims = store.claim(&[id.job(2)], by("w")).await.unwrap();
        store.finish(&[finished(claims[0].claim_ref(), answer("a"))]).await.unwrap();
        let cancelled = store.cancel_range(id.all_jobs(), 1).await.unwrap();
        assert_eq!(cancelled, ChangedJobs { jobs: 1, more: true });
        let cancelled = store.cancel_range(id.all_jobs(), 9).await.unwrap();
        assert_eq!(cancelled, ChangedJobs { jobs: 1, more: false });
        assert_eq!(store.cancel_range(id.all_jobs(), 9).await.unwrap().jobs, 0);
        let progress = store.range_progress(id.all_jobs()).await.unwrap();
        assert_eq!((progress.completed, progress.cancelled, progress.queued), (1, 2, 0));
        let ends = store.ended_in_range(id.jobs(2, 3)).await.unwrap();
        let read: Vec<_> =
            ends.iter().map(|end| (id.line(end.id), end.outcome.is_some())).collect();
        assert_eq!(read, [(Some(2), true), (Some(3), false)]);
    })
    .await;
}
