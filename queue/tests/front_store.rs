//! Keys, sessions, files and batches in Postgres and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[allow(dead_code, unused_macros, reason = "the suite of jobs runs in tests/store.rs")]
mod conformance;
mod stores;

use std::{sync::Arc, time::Duration};

use conformance::{LEASE, answer, by, finished, job, queue};
use stores::{Rig, both};
use tritmill_queue::{
    Job, Priority, Tenant, Timestamp,
    store::{
        ApiKey, Batch, BatchId, BatchState, FileId, FrontStore, KeyRole, Page,
        batches::{BatchClaim, BatchTimes, BatchWrites, FilePosition},
        files::{FILE_CHUNK_BYTES, FileDeletion, FilePurpose, INCOMPLETE_MAX, StoredFile},
        sessions::SESSIONS_PER_KEY_MAX,
        webhooks::{Webhook, WebhookSecret},
    },
};
use uuid::Uuid;

fn tenant(name: &str) -> Tenant {
    Tenant(name.to_owned())
}

fn key(role: KeyRole) -> ApiKey {
    let (tenant, created_at) = (tenant("acme"), Timestamp::default());
    ApiKey { id: Uuid::now_v7(), tenant, role, name: "k".into(), created_at, revoked_at: None }
}

#[tokio::test]
async fn key_is_valid_until_revoked_and_only_one_is_first() {
    both(async |Rig { store, .. }| {
        let (one, two) = (key(KeyRole::Operate), key(KeyRole::Read));
        assert!(store.add_first_key(&one, &[1; 32]).await.unwrap());
        assert!(!store.add_first_key(&two, &[2; 32]).await.unwrap());
        assert_eq!(store.key(&[2; 32]).await.unwrap(), None);
        store.add_key(&two, &[2; 32]).await.unwrap();
        let found = store.key(&[2; 32]).await.unwrap().unwrap();
        assert_eq!((found.id, found.role, found.tenant), (two.id, KeyRole::Read, two.tenant));
        assert!(store.revoke_key(two.id).await.unwrap());
        assert!(!store.revoke_key(two.id).await.unwrap());
        assert_eq!(store.key(&[2; 32]).await.unwrap(), None);
        let keys = store.keys().await.unwrap();
        assert_eq!(
            keys.iter().map(|key| key.revoked_at.is_some()).collect::<Vec<_>>(),
            [false, true]
        );
    })
    .await;
}

#[tokio::test]
async fn session_is_valid_until_it_ends_or_its_key_is_revoked() {
    both(async |rig: Rig| {
        let (store, hour) = (&rig.store, Duration::from_secs(3600));
        let one = key(KeyRole::Submit);
        store.add_key(&one, &[1; 32]).await.unwrap();
        store.add_session(&[10; 32], one.id, hour).await.unwrap();
        rig.advance(hour / 2);
        store.add_session(&[11; 32], one.id, hour).await.unwrap();
        let found = store.session(&[10; 32]).await.unwrap().unwrap();
        assert_eq!((found.id, found.role, found.tenant), (one.id, one.role, one.tenant.clone()));
        assert_eq!(
            store.session(&[1; 32]).await.unwrap(),
            None,
            "the hash of a key is not a session"
        );
        assert_eq!(store.key(&[10; 32]).await.unwrap(), None, "the hash of a session is not a key");
        rig.advance(hour / 2);
        assert_eq!(store.session(&[10; 32]).await.unwrap(), None, "it has expired");
        assert!(store.session(&[11; 32]).await.unwrap().is_some());
        store.end_session(&[11; 32]).await.unwrap();
        assert_eq!(store.session(&[11; 32]).await.unwrap(), None, "it was ended");
        for session in 0..=u8::try_from(SESSIONS_PER_KEY_MAX).unwrap() {
            store.add_session(&[100 + session; 32], one.id, hour).await.unwrap();
            rig.advance(Duration::from_millis(1));
        }
        assert_eq!(
            store.session(&[100; 32]).await.unwrap(),
            None,
            "the oldest session of a key ends"
        );
        assert!(store.session(&[101; 32]).await.unwrap().is_some());
        store.revoke_key(one.id).await.unwrap();
        assert_eq!(store.session(&[101; 32]).await.unwrap(), None, "the key is revoked");
    })
    .await;
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

const ALL: Page<FileId> = Page { after: None, limit: 100, ascending: false };

#[tokio::test]
async fn file_is_visible_to_its_tenant_from_completion_to_expiry() {
    both(async |rig: Rig| {
        let (store, acme, other) = (&rig.store, tenant("acme"), tenant("other"));
        let new = file(&acme);
        store.create_file(&new).await.unwrap();
        store.put_chunk(new.id, 0, &[7; FILE_CHUNK_BYTES]).await.unwrap();
        store.put_chunk(new.id, 1, b"torn").await.unwrap();
        // Repeated, as after a lost response.
        store.put_chunk(new.id, 1, b"end").await.unwrap();
        assert_eq!(store.file(&acme, new.id).await.unwrap(), None);
        assert!(store.files(&acme, None, ALL).await.unwrap().is_empty());
        let (size, hour) = (FILE_CHUNK_BYTES as u64 + 3, Duration::from_secs(3600));
        let until = store.now().await.unwrap().after(hour);
        store.complete_file(new.id, size, Some(until)).await.unwrap();
        store.put_chunk(new.id, 1, b"late").await.unwrap();
        store.abandon_file(new.id).await.unwrap();
        assert_eq!(store.file(&acme, new.id).await.unwrap().unwrap().size_bytes, size);
        assert_eq!(store.file(&other, new.id).await.unwrap(), None);
        assert_eq!(store.delete_file(&other, new.id).await.unwrap(), FileDeletion::NotFound);
        assert_eq!(store.chunk(new.id, 1).await.unwrap().unwrap(), b"end");
        assert_eq!(store.chunk(new.id, 2).await.unwrap(), None);
        rig.advance(hour);
        assert_eq!(store.file(&acme, new.id).await.unwrap(), None);
        assert_eq!(store.sweep_files().await.unwrap(), 1);
        assert_eq!(store.chunk(new.id, 0).await.unwrap(), None);
        let torn = file(&acme);
        store.create_file(&torn).await.unwrap();
        assert_eq!(store.sweep_files().await.unwrap(), 0);
        rig.advance(INCOMPLETE_MAX + Duration::from_millis(1));
        assert_eq!(store.sweep_files().await.unwrap(), 1);
    })
    .await;
}

#[tokio::test]
async fn lists_are_paged_in_both_orders() {
    both(async |Rig { store, .. }| {
        let acme = tenant("acme");
        let mut ids = Vec::new();
        for _ in 0..5 {
            let new = file(&acme);
            store.create_file(&new).await.unwrap();
            store.complete_file(new.id, 1, None).await.unwrap();
            ids.push(new.id);
        }
        let page = async |after, ascending| {
            let page = Page { after, limit: 2, ascending };
            let files = store.files(&acme, Some(FilePurpose::Batch), page).await.unwrap();
            files.iter().map(|file| file.id).collect::<Vec<_>>()
        };
        assert_eq!(page(None, false).await, [ids[4], ids[3]]);
        assert_eq!(page(Some(ids[3]), false).await, [ids[2], ids[1]]);
        assert_eq!(page(Some(ids[3]), true).await, [ids[4]]);
        let none = store.files(&acme, Some(FilePurpose::BatchOutput), ALL).await.unwrap();
        assert!(none.is_empty());
    })
    .await;
}

fn batch(owner: &Tenant, input: FileId) -> Batch {
    Batch {
        id: BatchId::generate(),
        tenant: owner.clone(),
        state: BatchState::Validating,
        endpoint: "/v1/completions".into(),
        input,
        completion_window: "24h".into(),
        priority: Priority::Low,
        metadata: None,
        output_expires_s: None,
        created_at: Timestamp(1),
        expires_at: Timestamp(i64::MAX),
        at: BatchTimes::default(),
        queue: None,
        lines: 0,
        refused: 0,
        submitted: FilePosition::default(),
        completed: 0,
        failed: 0,
        errors: Vec::new(),
        output: None,
        error_file: None,
        overdue: false,
        idempotency_key: None,
        webhook: None,
    }
}

/// Creates a complete file and a batch with it.
async fn create(store: &Arc<dyn FrontStore>, owner: &Tenant) -> Batch {
    let input = file(owner);
    store.create_file(&input).await.unwrap();
    store.complete_file(input.id, 1, None).await.unwrap();
    let new = batch(owner, input.id);
    assert_eq!(store.create_batch(&new).await.unwrap(), None);
    new
}

async fn claim(store: &Arc<dyn FrontStore>) -> Option<BatchClaim> {
    store.claim_batches("driver", LEASE, 1).await.unwrap().pop()
}

#[tokio::test]
async fn batch_has_one_driver_and_old_epochs_are_fenced() {
    both(async |rig: Rig| {
        let (store, acme) = (&rig.store, tenant("acme"));
        let new = create(store, &acme).await;
        let mut first = claim(store).await.unwrap();
        assert_eq!(first.batch, new);
        assert!(claim(store).await.is_none());
        rig.advance(LEASE);
        let second = claim(store).await.unwrap();
        first.batch.enter(BatchState::InProgress, Timestamp(5));
        let lines: Vec<Job> = vec![Job { id: new.id.job(1), ..job() }];
        let along = BatchWrites { jobs: &lines, files: &[] };
        assert!(!store.save_batch(&first, along).await.unwrap());
        assert!(!store.renew_batch(new.id, first.epoch, LEASE).await.unwrap());
        assert_eq!(store.batch_progress(new.id).await.unwrap().queued, 0);
        assert_eq!(store.batch(&acme, new.id).await.unwrap().unwrap(), new);
        let held = BatchClaim { epoch: second.epoch, ..first };
        // Repeated, as after a lost response.
        assert!(store.save_batch(&held, along).await.unwrap());
        assert!(store.save_batch(&held, along).await.unwrap());
        assert_eq!(store.batch_progress(new.id).await.unwrap().queued, 1);
        assert!(store.renew_batch(new.id, second.epoch, LEASE).await.unwrap());
        store.release_batch(new.id, second.epoch).await.unwrap();
        assert_eq!(claim(store).await.unwrap().batch, held.batch);
    })
    .await;
}

#[tokio::test]
async fn cancelled_batch_ends_its_drivers_claim() {
    both(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let new = create(&store, &acme).await;
        let held = claim(&store).await.unwrap();
        assert_eq!(store.cancel_batch(&other, new.id).await.unwrap(), None);
        assert_eq!(store.batch(&other, new.id).await.unwrap(), None);
        let in_use = store.delete_file(&acme, new.input).await.unwrap();
        assert_eq!(in_use, FileDeletion::InUse);
        let cancelling = store.cancel_batch(&acme, new.id).await.unwrap().unwrap();
        assert_eq!(cancelling.state, BatchState::Cancelling);
        assert!(!store.save_batch(&held, BatchWrites::default()).await.unwrap());
        let mut held = claim(&store).await.unwrap();
        held.batch.enter(BatchState::Cancelled, Timestamp(9));
        let output = file(&acme);
        store.create_file(&output).await.unwrap();
        let files = [(output.id, 0, None)];
        assert!(store.save_batch(&held, BatchWrites { jobs: &[], files: &files }).await.unwrap());
        assert!(store.file(&acme, output.id).await.unwrap().is_some());
        store.release_batch(new.id, held.epoch).await.unwrap();
        assert!(claim(&store).await.is_none(), "it is finished");
        let again = store.cancel_batch(&acme, new.id).await.unwrap().unwrap();
        assert_eq!(again.state, BatchState::Cancelled);
        assert_eq!(store.delete_file(&acme, new.input).await.unwrap(), FileDeletion::Deleted);
        let page = Page { after: None, limit: 9, ascending: false };
        assert_eq!(store.batches(&acme, page).await.unwrap().len(), 1);
        assert!(store.batches(&other, page).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test]
async fn idempotency_key_makes_one_batch_per_tenant() {
    both(async |Rig { store, .. }| {
        let (acme, other) = (tenant("acme"), tenant("other"));
        let first = create(&store, &acme).await;
        let keyed = |of: &Tenant| Batch {
            id: BatchId::generate(),
            tenant: of.clone(),
            idempotency_key: Some("k".to_owned()),
            ..first.clone()
        };
        let new = keyed(&acme);
        assert_eq!(store.create_batch(&new).await.unwrap(), None);
        assert_eq!(store.create_batch(&keyed(&acme)).await.unwrap(), Some(new));
        assert_eq!(store.create_batch(&keyed(&other)).await.unwrap(), None);
        let page = Page { after: None, limit: 9, ascending: false };
        assert_eq!(store.batches(&acme, page).await.unwrap().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn webhook_is_due_from_the_end_of_the_batch_until_delivered() {
    both(async |rig: Rig| {
        let store = &rig.store;
        let mut batch = create(store, &tenant("acme")).await;
        let mut held = claim(store).await.unwrap();
        let secret = WebhookSecret("s".to_owned());
        let url = "https://a.example/".to_owned();
        let told = || async { store.claim_webhooks("a", LEASE, 9).await.unwrap() };
        held.batch.webhook =
            Some(Webhook { url, secret, attempts: 0, next_at: None, ended_at: None, error: None });
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert!(told().await.is_empty(), "the batch is unfinished");
        held.batch.enter(BatchState::Completed, Timestamp(9));
        assert!(store.save_batch(&held, BatchWrites::default()).await.unwrap());
        assert!(told().await.is_empty(), "the driver still has the claim");
        store.release_batch(batch.id, held.epoch).await.unwrap();
        let mut telling = told().await.pop().unwrap();
        assert_eq!(telling.batch, held.batch);
        assert!(told().await.is_empty(), "it is claimed");
        rig.advance(LEASE * 2);
        let again = told().await.pop().unwrap();
        assert!(
            !store.save_batch(&telling, BatchWrites::default()).await.unwrap(),
            "it came too late"
        );
        telling = again;
        let later = store.now().await.unwrap().after(Duration::from_secs(60));
        telling.batch.webhook.as_mut().unwrap().next_at = Some(later);
        assert!(store.save_batch(&telling, BatchWrites::default()).await.unwrap());
        store.release_batch(batch.id, telling.epoch).await.unwrap();
        assert!(told().await.is_empty(), "the next call is not due");
        rig.advance(Duration::from_secs(61));
        let mut telling = told().await.pop().unwrap();
        telling.batch.webhook.as_mut().unwrap().ended_at = Some(later);
        assert!(store.save_batch(&telling, BatchWrites::default()).await.unwrap());
        store.release_batch(batch.id, telling.epoch).await.unwrap();
        rig.advance(LEASE * 2);
        assert!(told().await.is_empty(), "delivery has ended");
        batch = store.batch(&batch.tenant, batch.id).await.unwrap().unwrap();
        assert_eq!(batch, telling.batch);
    })
    .await;
}

#[tokio::test]
async fn jobs_of_a_batch_are_counted_read_and_cancelled_by_its_id() {
    both(async |Rig { store, .. }| {
        let id = BatchId::generate();
        let mut jobs: Vec<Job> =
            (1..=3).map(|line| Job { id: id.job(line), queue: queue(), ..job() }).collect();
        jobs.push(job());
        store.submit(&jobs).await.unwrap();
        let claims = store.claim(&[id.job(2)], by("w")).await.unwrap();
        store.finish(&[finished(claims[0].claim_ref(), answer("a"))]).await.unwrap();
        assert_eq!(store.cancel_batch_jobs(id).await.unwrap(), 2);
        assert_eq!(store.cancel_batch_jobs(id).await.unwrap(), 0);
        let progress = store.batch_progress(id).await.unwrap();
        assert_eq!((progress.completed, progress.cancelled, progress.queued), (1, 2, 0));
        let ends = store.finished_lines(id, 2, 3).await.unwrap();
        let read: Vec<_> = ends.iter().map(|end| (end.line, end.outcome.is_some())).collect();
        assert_eq!(read, [(2, true), (3, false)]);
    })
    .await;
}
