//! Keys, sessions, files and the audit log in Postgres and SQLite.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

#[path = "../../queue/tests/stores/mod.rs"]
mod stores;

use std::time::Duration;

use stores::{Rig, all};
use tritmill_admin::store::{
    ApiKey, FileId, FrontStore as TestStore, KeyRole,
    audit::AuditEntry,
    files::{
        ChunkContent, Completion, FILE_CHUNK_BYTES, FileDeletion, FilePurpose, INCOMPLETE_MAX,
        StoredChunk, StoredFile, UploadKey,
    },
    sessions::SESSIONS_PER_KEY_MAX,
};
use tritmill_queue::{
    Tenant, Timestamp,
    store::{Page, SqliteStore},
};
use uuid::Uuid;

fn tenant(name: &str) -> Tenant {
    Tenant(name.to_owned())
}

fn key(role: KeyRole) -> ApiKey {
    let (tenant, created_at) = (tenant("acme"), Timestamp::default());
    ApiKey {
        id: Uuid::now_v7(),
        tenant,
        role,
        name: "k".into(),
        created_at,
        revoked_at: None,
        expires_at: None,
        last_used_at: None,
    }
}

#[tokio::test]
async fn key_is_valid_until_revoked_and_only_one_is_first() {
    all(async |Rig { store, .. }| {
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
async fn key_expires_and_its_use_is_noted() {
    all(async |rig: Rig| {
        let (store, hour) = (&rig.store, Duration::from_secs(3600));
        let now = store.now().await.unwrap();
        let one = ApiKey { expires_at: Some(now.after(hour)), ..key(KeyRole::Manage) };
        let other = ApiKey { tenant: tenant("other"), ..key(KeyRole::Metrics) };
        store.add_key(&one, &[1; 32]).await.unwrap();
        store.add_key(&other, &[2; 32]).await.unwrap();
        store.add_session(&[10; 32], one.id, hour * 9).await.unwrap();
        rig.advance(hour / 2);
        store.note_key_use(one.id).await.unwrap();
        let of_acme = store.keys_of(&tenant("acme")).await.unwrap();
        assert_eq!(of_acme.iter().map(|key| key.id).collect::<Vec<_>>(), [one.id]);
        assert_eq!(of_acme[0].last_used_at, Some(now.after(hour / 2)));
        assert_eq!(of_acme[0].expires_at, one.expires_at);
        assert!(store.key(&[1; 32]).await.unwrap().is_some());
        assert!(store.session(&[10; 32]).await.unwrap().is_some());
        assert_eq!(store.tenant_account(&tenant("acme")).await.unwrap().used.keys, 1);
        rig.advance(hour / 2);
        assert_eq!(store.key(&[1; 32]).await.unwrap(), None, "it has expired");
        assert_eq!(store.session(&[10; 32]).await.unwrap(), None, "its key has expired");
        assert_eq!(store.tenant_account(&tenant("acme")).await.unwrap().used.keys, 0);
        assert_eq!(store.key(&[2; 32]).await.unwrap().unwrap().last_used_at, None);
    })
    .await;
}

#[tokio::test]
async fn session_is_valid_until_it_ends_or_its_key_is_revoked() {
    all(async |rig: Rig| {
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

#[tokio::test]
async fn keys_and_sessions_of_the_first_release_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (file, schema) = (folder.path().join("jobs.sqlite"), folder.path().join("schema"));
    std::fs::create_dir(&schema).unwrap();
    let first = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations/sqlite/0001_schema.sql");
    std::fs::copy(first, schema.join("0001_schema.sql")).unwrap();
    let url = format!("sqlite://{}?mode=rwc", file.display());
    let pool = sqlx::SqlitePool::connect(&url).await.unwrap();
    sqlx::migrate::Migrator::new(schema).await.unwrap().run(&pool).await.unwrap();
    let id = Uuid::now_v7();
    let key = "INSERT INTO api_keys (id, hash, tenant, role, name, created_at)
               VALUES ($1, $2, 'acme', 'submit', 'k', 7)";
    sqlx::query(key).bind(id).bind([1_u8; 32].as_slice()).execute(&pool).await.unwrap();
    let session = "INSERT INTO sessions (hash, key_id, expires_at) VALUES ($1, $2, $3)";
    let session = sqlx::query(session).bind([10_u8; 32].as_slice()).bind(id).bind(i64::MAX);
    session.execute(&pool).await.unwrap();
    pool.close().await;

    let store: Box<dyn TestStore> = Box::new(SqliteStore::open(&file).await.unwrap());
    let kept = store.key(&[1; 32]).await.unwrap().unwrap();
    assert_eq!((kept.id, kept.role, kept.expires_at), (id, KeyRole::Submit, None));
    assert_eq!(store.session(&[10; 32]).await.unwrap().unwrap(), kept);
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
    all(async |rig: Rig| {
        let (store, acme, other) = (&rig.store, tenant("acme"), tenant("other"));
        let new = file(&acme);
        store.create_file(&new).await.unwrap();
        store.put_chunk(new.id, 0, ChunkContent::Bytes(&[7; FILE_CHUNK_BYTES])).await.unwrap();
        store.put_chunk(new.id, 1, ChunkContent::Bytes(b"torn")).await.unwrap();
        // Repeated, as after a lost response.
        store.put_chunk(new.id, 1, ChunkContent::Bytes(b"end")).await.unwrap();
        assert_eq!(store.file(&acme, new.id).await.unwrap(), None);
        assert!(store.files(&acme, None, ALL).await.unwrap().is_empty());
        // More than one statement of a sweep deletes.
        for number in 3..40 {
            store.put_chunk(new.id, number, ChunkContent::Bytes(b"more")).await.unwrap();
        }
        let (size, hour) = (FILE_CHUNK_BYTES as u64 + 3, Duration::from_secs(3600));
        let until = store.now().await.unwrap().after(hour);
        store.complete_file(new.id, size, Some(until)).await.unwrap();
        store.put_chunk(new.id, 1, ChunkContent::Bytes(b"late")).await.unwrap();
        store.abandon_file(new.id).await.unwrap();
        assert_eq!(store.file(&acme, new.id).await.unwrap().unwrap().size_bytes, size);
        assert_eq!(store.file(&other, new.id).await.unwrap(), None);
        assert_eq!(store.delete_file(&other, new.id).await.unwrap(), FileDeletion::NotFound);
        assert_eq!(
            store.chunk(new.id, 1).await.unwrap().unwrap(),
            StoredChunk::Bytes(b"end".to_vec())
        );
        assert_eq!(store.chunk(new.id, 2).await.unwrap(), None);
        let outside = file(&acme);
        store.create_file(&outside).await.unwrap();
        store.put_chunk(outside.id, 0, ChunkContent::Bytes(b"here")).await.unwrap();
        store.put_chunk(outside.id, 0, ChunkContent::Object("a/b")).await.unwrap();
        store.put_chunk(outside.id, 1, ChunkContent::Bytes(b"here")).await.unwrap();
        let placed = store.chunk(outside.id, 0).await.unwrap();
        assert_eq!(placed, Some(StoredChunk::Object("a/b".to_owned())));
        assert_eq!(store.chunk_objects(outside.id).await.unwrap().unwrap(), ["a/b"]);
        assert!(store.chunk_objects(new.id).await.unwrap().unwrap().is_empty());
        store.abandon_file(outside.id).await.unwrap();
        assert_eq!(store.chunk_objects(outside.id).await.unwrap(), None);
        rig.advance(hour);
        assert_eq!(store.file(&acme, new.id).await.unwrap(), None);
        assert_eq!(store.sweep_files().await.unwrap(), 1);
        for number in [0, 20, 39] {
            assert_eq!(store.chunk(new.id, number).await.unwrap(), None);
        }
        let torn = file(&acme);
        store.create_file(&torn).await.unwrap();
        assert_eq!(store.sweep_files().await.unwrap(), 0);
        rig.advance(INCOMPLETE_MAX + Duration::from_millis(1));
        assert_eq!(store.sweep_files().await.unwrap(), 1);
    })
    .await;
}

#[tokio::test]
async fn idempotency_key_has_one_file_while_it_is_there() {
    all(async |rig: Rig| {
        let (store, acme, hour) = (&rig.store, tenant("acme"), Duration::from_secs(3600));
        let upload = async |owner: &Tenant, key: &str, request_hash: [u8; 32]| {
            let until = store.now().await.unwrap().after(hour);
            let new = StoredFile { size_bytes: 7, expires_at: Some(until), ..file(owner) };
            store.create_file(&new).await.unwrap();
            let key = UploadKey { key, request_hash: &request_hash };
            (new.id, store.complete_file_once(&new, key).await.unwrap())
        };
        let (first, completed) = upload(&acme, "a", [1; 32]).await;
        assert_eq!(completed, Completion::New);
        assert_eq!(store.file(&acme, first).await.unwrap().unwrap().size_bytes, 7);
        let (again, completed) = upload(&acme, "a", [1; 32]).await;
        let Completion::Known(known) = completed else { panic!("{completed:?}") };
        assert_eq!((known.id, known.size_bytes), (first, 7));
        assert_eq!(store.file(&acme, again).await.unwrap(), None, "it is not completed");
        assert_eq!(upload(&acme, "a", [2; 32]).await.1, Completion::Conflict);
        assert_eq!(upload(&acme, "b", [2; 32]).await.1, Completion::New);
        assert_eq!(upload(&tenant("other"), "a", [3; 32]).await.1, Completion::New);
        store.delete_file(&acme, first).await.unwrap();
        assert_eq!(upload(&acme, "a", [2; 32]).await.1, Completion::New, "its file was deleted");
        rig.advance(hour);
        assert_eq!(upload(&acme, "b", [4; 32]).await.1, Completion::New, "its file has expired");
        let both = tokio::join!(upload(&acme, "c", [5; 32]), upload(&acme, "c", [5; 32]));
        let news = [both.0.1, both.1.1].iter().filter(|end| **end == Completion::New).count();
        assert_eq!(news, 1);
    })
    .await;
}

#[tokio::test]
async fn lists_are_paged_in_both_orders() {
    all(async |Rig { store, .. }| {
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

#[tokio::test]
async fn erased_tenant_leaves_no_key_and_no_file_and_others_are_kept() {
    all(async |Rig { store, .. }| {
        let (theirs, others) = (key(KeyRole::Submit), key(KeyRole::Submit));
        let others = ApiKey { tenant: tenant("other"), ..others };
        store.add_key(&theirs, &[1; 32]).await.unwrap();
        store.add_key(&others, &[2; 32]).await.unwrap();
        for owner in [&theirs, &others] {
            let file = file(&owner.tenant);
            store.create_file(&file).await.unwrap();
            store.complete_file(file.id, 0, None).await.unwrap();
        }
        let erased = store.erase_tenant(&theirs.tenant).await.unwrap();
        assert_eq!((erased.keys, erased.files, erased.batches, erased.jobs), (1, 1, 0, 0));
        assert!(erased.done);
        assert_eq!(store.key(&[1; 32]).await.unwrap(), None);
        assert_eq!(store.key(&[2; 32]).await.unwrap().unwrap().id, others.id);
        let page = Page { after: None, limit: 9, ascending: true };
        assert_eq!(store.files(&theirs.tenant, None, page).await.unwrap(), []);
        assert_eq!(store.files(&others.tenant, None, page).await.unwrap().len(), 1);
    })
    .await;
}

#[tokio::test]
async fn audit_log_is_newest_first() {
    all(async |rig: Rig| {
        let store = &rig.store;
        let mut ids = Vec::new();
        for target in ["a", "b", "c"] {
            let line = AuditEntry {
                id: Uuid::now_v7(),
                at: Timestamp::default(),
                key: None,
                key_name: "night shift".into(),
                address: Some("192.0.2.7".into()),
                action: "queue.pause".into(),
                target: target.into(),
                detail: serde_json::json!({ "why": "smoke" }),
            };
            store.record_audit(&line).await.unwrap();
            ids.push(line.id);
            rig.advance(Duration::from_secs(1));
        }
        let page = Page { after: None, limit: 2, ascending: false };
        let acts = store.audit_log(page).await.unwrap();
        let seen: Vec<Uuid> = acts.iter().map(|line| line.id).collect();
        assert_eq!(seen, [ids[2], ids[1]]);
        assert_eq!(acts[0].at.since(acts[1].at), Duration::from_secs(1));
        assert_eq!(acts[0].address.as_deref(), Some("192.0.2.7"));
        assert_eq!((acts[0].detail["why"].as_str(), &*acts[0].target), (Some("smoke"), "c"));
        let rest = store.audit_log(Page { after: Some(ids[1]), ..page }).await.unwrap();
        assert_eq!(rest.len(), 1);
    })
    .await;
}
