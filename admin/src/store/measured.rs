//! The calls of the traits of this module, each timed.

use std::time::Duration;

use async_trait::async_trait;
use tritmill_queue::{
    Claimant, JobId, StoreError, Tenant, Timestamp, measured, metrics::MeasuredStore, store::Page,
};
use uuid::Uuid;

use super::{
    ApiKey, Audit, Batch, BatchEnds, BatchId, BatchSteps, Batches, Budgets, CallKeys, FileId,
    Files, KeyHash, Keys, Notices, OpenBatches, Schedules, Sessions, Tenants,
    audit::AuditEntry,
    batch_changes::{BatchChange, Changed},
    batch_ends::{EndsPage, KnownEnd, LineEnd},
    batch_steps::{BatchClaim, BatchStart, BatchWrites, Claimable, CustomIdHash},
    batches::{BatchDeletion, BatchFilter, Creation},
    budgets::{Budget, BudgetOf},
    call_keys::{CallKey, KeyedCall},
    events::Event,
    files::{
        ChunkContent, Completion, FileDeletion, FilePurpose, StoredChunk, StoredFile, UploadKey,
    },
    notices::{
        Channel, FailingReceiver, Notice, NoticeBounds, NoticeClaim, NoticeCounts, NoticeFilter,
        NoticeId, Outcome, Receiver,
    },
    open_batches::{AddedLines, Adding},
    schedules::{Schedule, ScheduleId},
    tenants::{Erased, StoredFiles, TenantAccount, TenantLimits},
    webhooks::Webhook,
};

measured! {
    MeasuredStore, CALLS,
    Budgets {
        fn budgets(tenant: Option<&Tenant>) -> Result<Vec<Budget>, StoreError>;
        fn set_budget(budget: &Budget) -> Result<(), StoreError>;
        fn delete_budget(of: &BudgetOf) -> Result<bool, StoreError>;
    }
    Keys {
        fn add_key(key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError>;
        fn add_first_key(key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError>;
        fn key(hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;
        fn keys() -> Result<Vec<ApiKey>, StoreError>;
        fn keys_of(tenant: &Tenant) -> Result<Vec<ApiKey>, StoreError>;
        fn note_key_use(id: Uuid) -> Result<(), StoreError>;
        fn revoke_key(id: Uuid) -> Result<bool, StoreError>;
    }
    Schedules {
        fn add_schedule(schedule: &Schedule, max: u32) -> Result<bool, StoreError>;
        fn schedules(tenant: Option<&Tenant>, page: Page<ScheduleId>)
            -> Result<Vec<Schedule>, StoreError>;
        fn schedule(tenant: &Tenant, id: ScheduleId) -> Result<Option<Schedule>, StoreError>;
        fn due_schedules(max: u32) -> Result<Vec<Schedule>, StoreError>;
        fn save_schedule(schedule: &Schedule, before: Option<Timestamp>)
            -> Result<bool, StoreError>;
        fn delete_schedule(tenant: &Tenant, id: ScheduleId) -> Result<bool, StoreError>;
    }
    Sessions {
        fn admit_login(key: &ApiKey, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;
        fn add_session(hash: &KeyHash, key: Uuid, lifetime: Duration) -> Result<(), StoreError>;
        fn session(hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;
        fn end_session(hash: &KeyHash) -> Result<(), StoreError>;
    }
    Files {
        fn create_file(file: &StoredFile) -> Result<StoredFile, StoreError>;
        fn put_chunk(id: FileId, number: u32, content: ChunkContent<'_>)
            -> Result<(), StoreError>;
        fn complete_file(id: FileId, size_bytes: u64, expires_at: Option<Timestamp>)
            -> Result<(), StoreError>;
        fn complete_file_once(file: &StoredFile, key: UploadKey<'_>)
            -> Result<Completion, StoreError>;
        fn file(tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError>;
        fn files(tenant: &Tenant, purpose: Option<FilePurpose>, page: Page<FileId>)
            -> Result<Vec<StoredFile>, StoreError>;
        fn chunk(id: FileId, number: u32) -> Result<Option<StoredChunk>, StoreError>;
        fn chunk_objects(id: FileId) -> Result<Option<Vec<String>>, StoreError>;
        fn delete_file(tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError>;
        fn abandon_file(id: FileId) -> Result<(), StoreError>;
        fn sweep_files() -> Result<u64, StoreError>;
    }
    CallKeys {
        fn claim_call(tenant: &Tenant, key: CallKey<'_>, job: JobId)
            -> Result<KeyedCall, StoreError>;
        fn replace_call(tenant: &Tenant, key: &str, jobs: (JobId, JobId))
            -> Result<bool, StoreError>;
        fn has_call(tenant: &Tenant, key: CallKey<'_>) -> Result<bool, StoreError>;
        fn sweep_calls() -> Result<u64, StoreError>;
    }
    Batches {
        fn create_batch(batch: &Batch, open_max: u32) -> Result<Creation, StoreError>;
        fn keyed_batch(tenant: &Tenant, key: &str) -> Result<Option<Batch>, StoreError>;
        fn batch(tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;
        fn batch_of_any_tenant(id: BatchId) -> Result<Option<Batch>, StoreError>;
        fn find_batches(filter: &BatchFilter, page: Page<BatchId>)
            -> Result<Vec<Batch>, StoreError>;
        fn change_batch(tenant: &Tenant, id: BatchId, change: &BatchChange, open_max: u32)
            -> Result<Option<Changed>, StoreError>;
        fn archive_batch(tenant: &Tenant, id: BatchId, archived: bool)
            -> Result<Option<Batch>, StoreError>;
        fn delete_batch(tenant: &Tenant, id: BatchId) -> Result<BatchDeletion, StoreError>;
        fn erase_deleted_batches() -> Result<bool, StoreError>;
    }
    BatchEnds {
        fn ends(id: BatchId, page: EndsPage<'_>) -> Result<Vec<(u64, LineEnd)>, StoreError>;
        fn known_ends(id: BatchId, lines: &[u32]) -> Result<Vec<KnownEnd>, StoreError>;
    }
    BatchSteps {
        fn claim_batches(which: Claimable, by: Claimant<'_>, max: u32)
            -> Result<Vec<BatchClaim>, StoreError>;
        fn has_suspect_batches() -> Result<bool, StoreError>;
        fn renew_batch(id: BatchId, epoch: i64, lease: Duration) -> Result<bool, StoreError>;
        fn release_batch(id: BatchId, epoch: i64, after: Duration) -> Result<(), StoreError>;
        fn charge_batch(id: BatchId, epoch: i64, after: Duration) -> Result<(), StoreError>;
        fn start_batch(claim: &BatchClaim, active_max: u32) -> Result<BatchStart, StoreError>;
        fn save_batch(claim: &BatchClaim, writes: BatchWrites<'_>) -> Result<bool, StoreError>;
        fn known_custom_ids(id: BatchId, hashes: &[CustomIdHash])
            -> Result<Vec<(CustomIdHash, u32)>, StoreError>;
        fn forget_custom_ids(id: BatchId, max: u32) -> Result<u64, StoreError>;
        fn sweep_batches() -> Result<(), StoreError>;
    }
    OpenBatches {
        fn add_lines(tenant: &Tenant, id: BatchId, lines: &AddedLines)
            -> Result<Option<Adding>, StoreError>;
    }
    Notices {
        fn add_event(event: &Event, to: &[Receiver]) -> Result<(), StoreError>;
        fn claim_notices(channel: Channel, by: Claimant<'_>, bounds: NoticeBounds<'_>)
            -> Result<Vec<NoticeClaim>, StoreError>;
        fn end_attempt(claim: &NoticeClaim, outcome: &Outcome) -> Result<bool, StoreError>;
        fn notices(filter: &NoticeFilter, page: Page<NoticeId>)
            -> Result<Vec<Notice>, StoreError>;
        fn redeliver_notice(tenant: Option<&Tenant>, id: NoticeId)
            -> Result<Option<Notice>, StoreError>;
        fn failing_receiver(tenant: &Tenant, address: &str)
            -> Result<Option<FailingReceiver>, StoreError>;
        fn count_notices() -> Result<NoticeCounts, StoreError>;
        fn sweep_notices() -> Result<(), StoreError>;
    }
    Audit {
        fn record_audit(entry: &AuditEntry) -> Result<(), StoreError>;
        fn audit_log(page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError>;
    }
    Tenants {
        fn tenant_webhook(tenant: &Tenant) -> Result<Option<Webhook>, StoreError>;
        fn set_tenant_webhook(tenant: &Tenant, webhook: Option<&Webhook>)
            -> Result<(), StoreError>;
        fn tenant_limits(tenant: &Tenant) -> Result<TenantLimits, StoreError>;
        fn tenant_account(tenant: &Tenant) -> Result<TenantAccount, StoreError>;
        fn limited_tenants() -> Result<Vec<TenantAccount>, StoreError>;
        fn set_tenant_limits(tenant: &Tenant, limits: TenantLimits) -> Result<(), StoreError>;
        fn erase_tenant(tenant: &Tenant) -> Result<Erased, StoreError>;
        fn stored_files(tenant: &Tenant) -> Result<StoredFiles, StoreError>;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A method with a default body that is not passed on would silently lose what the store does.
    #[test]
    fn every_call_of_the_traits_is_passed_on() {
        let sources = [
            include_str!("keys.rs"),
            include_str!("sessions.rs"),
            include_str!("files.rs"),
            include_str!("batches.rs"),
            include_str!("batch_ends.rs"),
            include_str!("batch_steps.rs"),
            include_str!("open_batches.rs"),
            include_str!("notices.rs"),
            include_str!("audit.rs"),
            include_str!("tenants.rs"),
        ];
        for source in sources {
            let (_, body) = source.split_once(": Send + Sync {\n").expect("a trait");
            let (body, _) = body.split_once("\n}\n").expect("its end");
            let name = |line: &'static str| line.strip_prefix("async fn ")?.split('(').next();
            let missing: Vec<&str> = body
                .split("\n    ")
                .filter_map(name)
                .filter(|name| !CALLS.contains(name))
                .collect();
            assert!(missing.is_empty(), "not passed on: {missing:?}");
        }
    }
}
