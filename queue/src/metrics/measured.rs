//! [`MeasuredStore`] and [`MeasuredDispatcher`]: the calls of the traits, each timed. One line per call,
//! which passes it on.

use std::{ops::RangeInclusive, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::calls::{CallMetrics, Calls, Failure};
use crate::{
    Claim, ClaimRef, Claimant, Delivery, DispatchError, Dispatcher, Entry, FinishedAttempt,
    FinishedJob, Job, JobId, JobState, Priority, Progress, Pull, QueueName, Reconciled, Settled,
    Store, StoreError, Tenant, Timestamp,
    billing::Price,
    dispatch::{BacklogByPriority, Demand, Missing, Quotas},
    store::{
        ChangedJobs, Charges, DeadLetters, EndMark, EndedJob, JobEnds, JobFilter, JobQueries,
        JobRanges, JobRecord, Maintained, Maintenance, NumericsClasses, Page, QueueHistory,
        QueueSettings, RangedJob, Serving, Unannounced, WaitingJobs, Workers,
        charges::{ChargeFilter, ChargeGroups, ChargeSum, PriceOf},
        classes::{ClassError, RegisteredQueue, ResetClassError},
        dead_letters::{DeadLetter, Pace, Replay},
        history::{Period, Point, Snapshot, Subject},
        job_queries::{AttemptFailure, Count, DeadLetterGroups, JobHistory, JobPage},
        maintenance::ErasedJobs,
        queue_settings::{QueueOverview, QueueState},
        workers::{Directive, Heartbeat, Integrity, Worker},
    },
};

/// A store that measures its calls.
#[derive(Debug)]
pub struct MeasuredStore<S: ?Sized> {
    calls: Calls,
    inner: Arc<S>,
}

impl<S: ?Sized> MeasuredStore<S> {
    /// Measures the calls of a store.
    pub fn new(inner: Arc<S>, calls: &CallMetrics) -> Self {
        Self { calls: calls.store.clone(), inner }
    }

    /// Returns the store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Waits for the answer of a call and records its time, under its name.
    ///
    /// # Errors
    /// Those of the call.
    pub async fn time<T, E: Failure>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.calls.time(call, answer).await
    }
}

/// A dispatcher that measures its calls.
#[derive(Debug)]
pub struct MeasuredDispatcher<S: ?Sized> {
    calls: Calls,
    inner: Arc<S>,
}

impl<S: ?Sized> MeasuredDispatcher<S> {
    /// Measures the calls of a dispatcher.
    pub fn new(inner: Arc<S>, calls: &CallMetrics) -> Self {
        Self { calls: calls.dispatcher.clone(), inner }
    }

    /// Returns the dispatcher.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Waits for the answer of a call and records its time, under its name.
    ///
    /// # Errors
    /// Those of the call.
    pub async fn time<T, E: Failure>(
        &self,
        call: &'static str,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.calls.time(call, answer).await
    }
}

/// Implements traits for a wrapper by passing every call on and recording its time. What is in brackets
/// is passed on without that. The wrapper has the methods `inner` and `time` of [`MeasuredStore`]. `$names` are the names of
/// all calls, for a test.
#[macro_export]
macro_rules! measured {
    ($wrapper:ident, $names:ident, $($trait:ident {
        $([$($item:tt)*])?
        $(fn $call:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)+
    })+) => {
        #[cfg(test)]
        const $names: &[&str] = &[$($(stringify!($call)),+),+];

        $(#[async_trait]
        impl<S: $trait + ?Sized> $trait for $wrapper<S> {
            $($($item)*)?
            $(async fn $call(&self, $($argument: $kind),*) -> $answer {
                self.time(stringify!($call), self.inner().$call($($argument),*)).await
            })+
        })+
    };
}

measured! {
    MeasuredStore, STORE_CALLS,
    Store {
        [fn announced(&self, entries: &[Entry]) { self.inner.announced(entries); }]
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
    JobRanges {
        fn range_progress(ids: RangeInclusive<JobId>) -> Result<Progress, StoreError>;
        fn cancel_range(ids: RangeInclusive<JobId>, max: u32) -> Result<ChangedJobs, StoreError>;
        fn ended_in_range(ids: RangeInclusive<JobId>) -> Result<Vec<EndedJob>, StoreError>;
        fn has_ended(ids: RangeInclusive<JobId>) -> Result<bool, StoreError>;
        fn states_in_range(ids: RangeInclusive<JobId>) -> Result<Vec<RangedJob>, StoreError>;
        fn named_in_range(ids: RangeInclusive<JobId>, custom_ids: &[String])
            -> Result<Vec<RangedJob>, StoreError>;
        fn hold_range(ids: RangeInclusive<JobId>, running: bool, max: u32)
            -> Result<ChangedJobs, StoreError>;
        fn release_range(ids: RangeInclusive<JobId>, expires_at: Timestamp, max: u32)
            -> Result<ChangedJobs, StoreError>;
        fn move_range(ids: RangeInclusive<JobId>, to: &QueueName, max: u32)
            -> Result<ChangedJobs, StoreError>;
        fn ended(ids: &[JobId]) -> Result<Vec<EndedJob>, StoreError>;
        fn ends_after(ids: RangeInclusive<JobId>, mark: EndMark, max: u32)
            -> Result<JobEnds, StoreError>;
        fn ids_in_range(ids: RangeInclusive<JobId>, max: u32) -> Result<Vec<JobId>, StoreError>;
    }
    JobQueries {
        fn jobs(filter: &JobFilter, page: Page<JobId>) -> Result<JobPage, StoreError>;
        fn count_jobs(filter: &JobFilter) -> Result<Count, StoreError>;
        fn job_history(id: JobId) -> Result<Option<JobHistory>, StoreError>;
        fn dead_letter_groups(queue: Option<&QueueName>) -> Result<DeadLetterGroups, StoreError>;
        fn worker_failures(owner: &str, limit: u32) -> Result<Vec<AttemptFailure>, StoreError>;
        fn job_tenants(after: Option<&Tenant>, limit: u32) -> Result<Vec<Tenant>, StoreError>;
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
        fn subject_samples(subject: &Subject, period: Period, from: Timestamp, to: Timestamp)
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
    WaitingJobs {
        fn run_now(ids: &[JobId]) -> Result<Vec<JobId>, StoreError>;
        fn set_priority(id: JobId, priority: Priority) -> Result<bool, StoreError>;
    }
    Charges {
        fn prices() -> Result<Vec<(PriceOf, Price)>, StoreError>;
        fn set_price(of: &PriceOf, price: &Price) -> Result<(), StoreError>;
        fn delete_price(of: &PriceOf) -> Result<bool, StoreError>;
        fn charges(filter: &ChargeFilter, groups: ChargeGroups, max: u32)
            -> Result<Vec<ChargeSum>, StoreError>;
    }
    Maintenance {
        fn maintain() -> Result<Maintained, StoreError>;
        fn erase_jobs(tenant: &Tenant) -> Result<ErasedJobs, StoreError>;
        fn delete_jobs(ids: &[JobId]) -> Result<u64, StoreError>;
    }
}

measured! {
    MeasuredDispatcher, DISPATCHER_CALLS,
    Dispatcher {
        fn enqueue(entries: &[Entry]) -> Result<usize, DispatchError>;
        fn requeue(entries: &[Entry]) -> Result<usize, DispatchError>;
        fn missing(queue: &QueueName) -> Result<Option<Missing>, DispatchError>;
        fn set_missing(queue: &QueueName, missing: Missing) -> Result<(), DispatchError>;
        fn admit(demand: &Demand, quotas: &Quotas) -> Result<BacklogByPriority, DispatchError>;
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
