//! The suite of rules for every store. `store_conformance!(name, Fixture)` makes one test per rule.

mod leases;
pub mod rules;

use std::time::Duration;

use tritmill_queue::{
    Choice, ClaimRef, Claimant, Completion, ErrorKind, FinishReason, FinishedAttempt, Job,
    JobError, JobId, Outcome, Priority, Prompt, QueueName, Sampling, Store, Tenant, Usage,
    job::ATTEMPTS_DEFAULT,
    store::workers::{Heartbeat, WorkerMetrics},
};

/// A store that can be reopened, and its clock.
pub trait Fixture {
    /// The store under test.
    type Store: Store;
    /// Creates an empty database.
    fn create() -> Self;
    /// Opens the store, as a starting process does.
    async fn open(&self) -> Self::Store;
    /// Advances the store's clock.
    fn advance(&self, by: Duration);
}

pub const LEASE: Duration = Duration::from_secs(15);

/// Lets a lease pass while a reconciler looks every second; returns the jobs that it queued.
pub async fn lapse(fixture: &impl Fixture, store: &impl Store) -> Vec<JobId> {
    let mut queued = Vec::new();
    for _ in 0..=LEASE.as_secs() {
        let done = store.reconcile().await.unwrap();
        queued.extend(done.queued.into_iter().map(|entry| entry.id));
        fixture.advance(Duration::from_secs(1));
    }
    queued
}

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
        task: tritmill_queue::Task::Generate,
        echo: serde_json::Map::new(),
        line_key: None,
        billing: tritmill_queue::Billing::default(),
        line_shape: None,
        custom_id: None,
    }
}

pub fn by(owner: &str) -> Claimant<'_> {
    Claimant::new(owner, LEASE)
}

/// A worker's heartbeat.
#[allow(dead_code, reason = "the suite has no workers")]
pub fn beat() -> Heartbeat {
    Heartbeat {
        owner: "host-1-abc".into(),
        queue: queue(),
        host: "host".into(),
        pid: 1,
        running: 3,
        slots: 32,
        draining: false,
        tokens_per_s: 12.5,
        metrics: WorkerMetrics::default(),
    }
}

pub fn answer(text: &str) -> Outcome {
    Outcome::Completed(Completion {
        model: "tiny".into(),
        fingerprint: "f".into(),
        choices: vec![Choice::new(0, text, FinishReason::Stop)],
        usage: Usage {
            prompt_tokens: 3,
            completion_tokens: 2,
            cached_tokens: 0,
            reasoning_tokens: 0,
        },
        ..Completion::default()
    })
}

pub fn error(kind: ErrorKind) -> Outcome {
    Outcome::Error(JobError { kind, code: "c".into(), message: "m".into(), param: None })
}

pub fn finished(claim: ClaimRef, outcome: Outcome) -> FinishedAttempt {
    FinishedAttempt { claim, outcome, first_token: None }
}

/// One test per rule of the suite.
#[macro_export]
macro_rules! store_conformance {
    ($name:ident, $fixture:ty) => {
        $crate::store_conformance!(@rules $name, $fixture;
            time_is_the_stores_clock
            submitted_job_is_returned_unchanged
            claim_is_exclusive_during_its_lease
            lost_lease_requeues_the_job_and_costs_no_attempt
            late_result_counts_until_the_job_is_claimed_again
            late_renewal_takes_the_job_back
            claims_of_any_age_are_renewed_together
            leases_are_extended_after_an_outage
            job_that_lost_two_workers_runs_alone
            suspects_run_alone_at_once
            claim_with_a_lost_answer_is_handed_back
            other_claim_id_is_fenced
            renewal_extends_the_lease
            write_under_an_old_epoch_is_fenced
            job_is_finished_exactly_once
            bulk_finish_checks_each_epoch
            errors_are_retried_with_backoff_until_dead_letter
            lost_leases_lead_to_dead_letter
            hand_back_costs_no_attempt_and_fences_the_claim
            cancelled_job_cannot_be_claimed_or_finished
            scheduled_job_waits_and_overdue_job_expires
            unfinished_jobs_survive_a_restart
            finished_returns_only_terminal_jobs
            old_epoch_in_a_call_does_not_hide_the_live_one
            next_claim_returns_the_checkpoint
            checkpoint_under_an_old_epoch_is_fenced
            finish_deletes_the_checkpoint
            empty_calls_do_nothing
        );
    };
    (@rules $name:ident, $fixture:ty; $($rule:ident)+) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $rule() {
                    $crate::conformance::rules::$rule(<$fixture as $crate::Fixture>::create()).await;
                }
            )+
        }
    };
}
