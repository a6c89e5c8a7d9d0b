//! [`MeasuredStore`] and [`MeasuredDispatcher`]: the calls of the traits, each timed. One line per call,
//! which passes it on.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use uuid::Uuid;

use super::calls::{Call, CallMetrics, Calls};
use crate::{
    Claim, ClaimRef, Claimant, DatabaseIndex, Delivery, DispatchError, Dispatcher, Entry,
    FinishedAttempt, FinishedJob, Job, JobId, JobState, Progress, Pull, QueueName, Reconciled,
    Settled, Store, StoreError, Tenant, Timestamp,
    dispatch::{Demand, Line, Missing, Quotas},
    store::{
        ApiKey, Audit, Batch, BatchId, BatchSteps, Batches, DeadLetters, FileId, Files, JobFilter,
        JobQueries, JobRecord, Keys, Maintained, Maintenance, NumericsClasses, Page, QueueHistory,
        QueueSettings, Serving, Sessions, Unannounced, Workers,
        audit::AuditEntry,
        batch_steps::{
            BatchClaim, BatchStart, BatchWrites, Claimable, CustomIdHash, WebhookBounds,
        },
        batches::{BatchFilter, CancelledJobs, Creation, FinishedLine},
        classes::{ClassError, RegisteredQueue, ResetClassError},
        dead_letters::{DeadLetter, Pace, Replay},
        files::{FileDeletion, FilePurpose, StoredFile},
        history::{Period, Point, Snapshot},
        job_queries::{Count, DeadLetterGroups, JobHistory, JobPage},
        keys::KeyHash,
        maintenance::Erased,
        queue_settings::{QueueOverview, QueueState},
        workers::{Directive, Heartbeat, Integrity, Worker},
    },
};

/// A store that measures its calls.
#[derive(Debug)]
pub struct MeasuredStore<S: ?Sized> {
    calls: Arc<StoreCalls>,
    inner: Arc<S>,
}

impl<S: ?Sized> MeasuredStore<S> {
    /// Measures the calls of a store.
    pub fn new(inner: Arc<S>, calls: &CallMetrics) -> Self {
        Self { calls: Arc::clone(&calls.store), inner }
    }
}

/// A dispatcher that measures its calls.
#[derive(Debug)]
pub struct MeasuredDispatcher<S: ?Sized> {
    calls: Arc<DispatcherCalls>,
    inner: Arc<S>,
}

impl<S: ?Sized> MeasuredDispatcher<S> {
    /// Measures the calls of a dispatcher.
    pub fn new(inner: Arc<S>, calls: &CallMetrics) -> Self {
        Self { calls: Arc::clone(&calls.dispatcher), inner }
    }
}

/// Implements traits for a wrapper by passing every call on and recording its time. What is in brackets
/// is passed on without that. `$calls` has the histograms of all calls.
macro_rules! measured {
    ($wrapper:ident, $calls:ident, $($trait:ident {
        $([$($item:tt)*])?
        $(fn $call:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)+
    })+) => {
        /// Histograms by call.
        #[derive(Debug)]
        pub(super) struct $calls {
            pub all: Calls,
            $($($call: Call,)+)+
        }

        impl Default for $calls {
            fn default() -> Self {
                let all = Calls::default();
                Self { all, $($($call: Call::new(stringify!($call)),)+)+ }
            }
        }

        #[cfg(test)]
        impl $calls {
            /// Names of the calls.
            const NAMES: &[&str] = &[$($(stringify!($call)),+),+];
        }

        $(#[async_trait]
        impl<S: $trait + ?Sized> $trait for $wrapper<S> {
            $($($item)*)?
            $(async fn $call(&self, $($argument: $kind),*) -> $answer {
                self.calls.$call.time(&self.calls.all, self.inner.$call($($argument),*)).await
            })+
        })+
    };
}

measured! {
    MeasuredStore, StoreCalls,
    Store {
        [fn announced(&self, entries: &[Entry]) { self.inner.announced(entries); }
         fn next_database(&self) -> DatabaseIndex { self.inner.next_database() }]
        fn submit(jobs: &[Job]) -> Result<(), StoreError>;
        fn claim(ids: &[JobId], by: Claimant<'_>) -> Result<Vec<Claim>, StoreError>;
        fn renew(claims: &[ClaimRef], lease: Duration) -> Result<Vec<ClaimRef>, StoreError>;
        fn checkpoint(saved: &[(ClaimRef, Vec<u8>)]) -> Result<Vec<ClaimRef>, StoreError>;
        fn finish(finished: &[FinishedAttempt]) -> Result<Vec<Settled>, StoreError>;
        fn hand_back(claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError>;
        fn hand_back_suspects(claims: &[ClaimRef]) -> Result<Vec<JobId>, StoreError>;
        fn cancel(ids: &[JobId]) -> Result<Vec<JobId>, StoreError>;
        fn reconcile() -> Result<Reconciled, StoreError>;
        fn unannounced(queue: &QueueName) -> Result<Unannounced, StoreError>;
        fn forget_announcements(done: &Unannounced) -> Result<(), StoreError>;
        fn queued(queue: &QueueName, after: Option<JobId>, limit: u32)
            -> Result<Vec<Entry>, StoreError>;
        fn queued_heads(queue: &QueueName, each: u32, limit: u32)
            -> Result<(Missing, Vec<Entry>), StoreError>;
        fn now() -> Result<Timestamp, StoreError>;
        fn state(id: JobId) -> Result<Option<JobState>, StoreError>;
        fn job(id: JobId) -> Result<Option<JobRecord>, StoreError>;
        fn finished(ids: &[JobId]) -> Result<Vec<FinishedJob>, StoreError>;
        fn unfinished(queue: &QueueName) -> Result<u64, StoreError>;
        fn progress(queue: Option<&QueueName>) -> Result<Progress, StoreError>;
    }
    Keys {
        fn add_key(key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError>;
        fn add_first_key(key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError>;
        fn key(hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;
        fn keys() -> Result<Vec<ApiKey>, StoreError>;
        fn revoke_key(id: Uuid) -> Result<bool, StoreError>;
    }
    Sessions {
        fn add_session(hash: &KeyHash, key: Uuid, lifetime: Duration) -> Result<(), StoreError>;
        fn session(hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;
        fn end_session(hash: &KeyHash) -> Result<(), StoreError>;
    }
    Files {
        fn create_file(file: &StoredFile) -> Result<StoredFile, StoreError>;
        fn put_chunk(id: FileId, number: u32, bytes: &[u8]) -> Result<(), StoreError>;
        fn complete_file(id: FileId, size_bytes: u64, expires_at: Option<Timestamp>)
            -> Result<(), StoreError>;
        fn file(tenant: &Tenant, id: FileId) -> Result<Option<StoredFile>, StoreError>;
        fn files(tenant: &Tenant, purpose: Option<FilePurpose>, page: Page<FileId>)
            -> Result<Vec<StoredFile>, StoreError>;
        fn chunk(id: FileId, number: u32) -> Result<Option<Vec<u8>>, StoreError>;
        fn delete_file(tenant: &Tenant, id: FileId) -> Result<FileDeletion, StoreError>;
        fn abandon_file(id: FileId) -> Result<(), StoreError>;
        fn sweep_files() -> Result<u64, StoreError>;
    }
    Batches {
        fn create_batch(batch: &Batch, open_max: u32) -> Result<Creation, StoreError>;
        fn batch(tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;
        fn batch_of_any_tenant(id: BatchId) -> Result<Option<Batch>, StoreError>;
        fn batches(tenant: &Tenant, page: Page<BatchId>) -> Result<Vec<Batch>, StoreError>;
        fn find_batches(filter: &BatchFilter, page: Page<BatchId>)
            -> Result<Vec<Batch>, StoreError>;
        fn cancel_batch(tenant: &Tenant, id: BatchId) -> Result<Option<Batch>, StoreError>;
        fn batch_progress(id: BatchId) -> Result<Progress, StoreError>;
        fn cancel_batch_jobs(id: BatchId, max: u32) -> Result<CancelledJobs, StoreError>;
        fn finished_lines(id: BatchId, first: u32, last: u32)
            -> Result<Vec<FinishedLine>, StoreError>;
    }
    BatchSteps {
        fn claim_batches(which: Claimable, by: Claimant<'_>, max: u32)
            -> Result<Vec<BatchClaim>, StoreError>;
        fn has_suspect_batches() -> Result<bool, StoreError>;
        fn claim_webhooks(by: Claimant<'_>, bounds: WebhookBounds<'_>)
            -> Result<Vec<BatchClaim>, StoreError>;
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
    JobQueries {
        fn jobs(filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError>;
        fn count_jobs(filter: &JobFilter) -> Result<Count, StoreError>;
        fn job_history(id: JobId) -> Result<Option<JobHistory>, StoreError>;
        fn dead_letter_groups(queue: Option<&QueueName>) -> Result<DeadLetterGroups, StoreError>;
    }
    Audit {
        fn record_audit(entry: &AuditEntry) -> Result<(), StoreError>;
        fn audit_log(page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError>;
    }
    QueueSettings {
        fn queue_state(queue: &QueueName) -> Result<QueueState, StoreError>;
        fn queue_states() -> Result<Vec<QueueState>, StoreError>;
        fn queues() -> Result<Vec<QueueOverview>, StoreError>;
        fn set_paused(queue: &QueueName, paused: bool) -> Result<(), StoreError>;
        fn set_limit(queue: &QueueName, limit_tokens: Option<u64>) -> Result<(), StoreError>;
        fn set_max_wait(queue: &QueueName, max_wait: Option<Duration>) -> Result<(), StoreError>;
        fn quotas(queue: &QueueName) -> Result<Quotas, StoreError>;
        fn set_quota(queue: &QueueName, tenant: Option<&Tenant>, limit_tokens: Option<u64>)
            -> Result<(), StoreError>;
    }
    QueueHistory {
        fn sample() -> Result<bool, StoreError>;
        fn snapshot() -> Result<Option<Snapshot>, StoreError>;
        fn samples(queue: Option<&QueueName>, period: Period, from: Timestamp, to: Timestamp)
            -> Result<Vec<Point>, StoreError>;
    }
    NumericsClasses {
        fn register_class(queue: &QueueName, class: &str) -> Result<(), ClassError>;
        fn allow_class(queue: &QueueName, class: &str) -> Result<bool, StoreError>;
        fn withdraw_class(queue: &QueueName, class: &str) -> Result<bool, StoreError>;
        fn reset_class(queue: &QueueName) -> Result<Option<String>, ResetClassError>;
        fn registered_queues() -> Result<Vec<RegisteredQueue>, StoreError>;
    }
    Workers {
        fn heartbeat(heartbeat: &Heartbeat) -> Result<Directive, StoreError>;
        fn workers() -> Result<Vec<Worker>, StoreError>;
        fn serving(queue: &QueueName) -> Result<Serving, StoreError>;
        fn request_drain(owner: &str) -> Result<bool, StoreError>;
        fn forget_worker(owner: &str) -> Result<(), StoreError>;
        fn integrity() -> Result<Integrity, StoreError>;
    }
    DeadLetters {
        fn dead_letters(queue: &QueueName, limit: u32, after: Option<JobId>)
            -> Result<Vec<DeadLetter>, StoreError>;
        fn replay(ids: &[JobId], pace: Option<Pace>) -> Result<Vec<Replay>, StoreError>;
        fn purge(ids: &[JobId]) -> Result<u64, StoreError>;
    }
    Maintenance {
        fn maintain() -> Result<Maintained, StoreError>;
        fn erase_tenant(tenant: &Tenant) -> Result<Erased, StoreError>;
    }
}

measured! {
    MeasuredDispatcher, DispatcherCalls,
    Dispatcher {
        fn enqueue(entries: &[Entry]) -> Result<usize, DispatchError>;
        fn requeue(entries: &[Entry]) -> Result<usize, DispatchError>;
        fn missing(queue: &QueueName) -> Result<Option<Missing>, DispatchError>;
        fn set_missing(queue: &QueueName, missing: Missing) -> Result<(), DispatchError>;
        fn admit(demand: &Demand, quotas: &Quotas) -> Result<Line, DispatchError>;
        fn pull(pull: Pull<'_>) -> Result<Vec<Delivery>, DispatchError>;
        fn acknowledge(consumer: &str, deliveries: &[Delivery]) -> Result<usize, DispatchError>;
        fn hand_back(consumer: &str, deliveries: &[Delivery]) -> Result<usize, DispatchError>;
        fn renew(consumer: &str, deliveries: &[Delivery]) -> Result<Vec<Delivery>, DispatchError>;
        fn reclaim(pull: Pull<'_>, idle: Duration) -> Result<Vec<Delivery>, DispatchError>;
        fn depth(queue: &QueueName) -> Result<usize, DispatchError>;
    }
}

#[cfg(test)]
mod tests;
