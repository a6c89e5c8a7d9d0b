//! What a worker holds: claims in the engine, and ended claims that are not committed yet.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tracing::{Span, field::Empty};
use tritmill_queue::{
    Claim, ClaimRef, Delivery, FinishedAttempt, Outcome, Prompt, trace::mark_failed,
};

use super::{io::Commit, streamed::StreamedChoice};
use crate::translate::Expected;

/// The lease of a claim.
#[derive(Debug, Clone)]
pub(in crate::worker) struct Lease {
    pub held: ClaimRef,
    pub delivery: Delivery,
    /// Time just before the last successful claim or renewal was requested: the lease ends no
    /// earlier than counted from this time.
    pub renewed_at: Instant,
}

/// A claim that is in the engine or about to be submitted to it.
#[derive(Debug)]
pub(super) struct RunningClaim {
    pub lease: Lease,
    /// Time just before the claim was requested.
    claimed_at: Instant,
    /// Index of the device that runs it.
    pub device: usize,
    pub prompt: Prompt,
    /// What is done with its answers.
    pub expected: Expected,
    /// Text of its choices that was published, by choice.
    pub streamed: BTreeMap<u32, StreamedChoice>,
    /// Tokens that the job counts as in the backlog.
    cost: u32,
    /// Choices it asked for: the slots it takes.
    choices: usize,
    pub first_token_at: Option<Instant>,
    /// Span of its log lines: job, queue, attempt and trace.
    pub span: Span,
    /// Whether its job must run without others, and so is the cause if the engine breaks.
    pub is_alone: bool,
    /// Whether the engine has its request.
    pub submitted: bool,
    /// Whether the engine was asked to cancel its request.
    pub stopping: bool,
    /// Whether to hand the claim back when its work has stopped.
    pub hand_back: bool,
}

/// An ended claim and what to record of it.
#[derive(Debug)]
pub(super) struct EndedClaim {
    pub lease: Lease,
    pub disposition: Disposition,
    pub span: Span,
    /// Tokens that the job counts as in the backlog.
    pub cost: u32,
    /// Time from the claim to its first token, if it has one.
    pub first_token: Option<Duration>,
    /// Time from the claim to its end.
    pub elapsed: Duration,
}

/// What to do about an ended claim.
#[derive(Debug)]
pub(super) enum Disposition {
    /// Record this outcome.
    Record(Outcome),
    /// Nothing: the store has recorded its end already.
    Forget,
    /// Hand the claim back.
    HandBack,
    /// Hand the claim back; its job may have broken the engine.
    HandBackSuspect,
}

impl Disposition {
    /// Returns the kind of end, for logs. Prompts and answers are not logged.
    fn label(&self) -> &'static str {
        match self {
            Self::Record(Outcome::Completed(_)) => "completed",
            Self::Record(Outcome::Error(_)) => "error",
            Self::Record(Outcome::Expired) => "expired",
            Self::Forget => "forgotten",
            Self::HandBack => "handed back",
            Self::HandBackSuspect => "handed back as a suspect",
        }
    }
}

/// What a device holds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    /// Running claims.
    pub claims: usize,
    /// Slots that they take.
    pub choices: usize,
}

/// Claims by their stage. All iteration is in the order of ids, so that equal inputs lead to equal
/// commands.
#[derive(Debug)]
pub(super) struct InFlight {
    running: BTreeMap<ClaimRef, RunningClaim>,
    /// Ended claims that are not committed.
    ended: Vec<EndedClaim>,
    /// Ended claims in the current commit.
    committing: Vec<EndedClaim>,
    /// Time at which the oldest claim in `ended` ended.
    oldest_end: Option<Instant>,
    /// Loads by device.
    loads: Vec<Load>,
}

impl InFlight {
    /// Creates an empty state for this many devices.
    pub fn new(devices: usize) -> Self {
        Self {
            running: BTreeMap::new(),
            ended: Vec::new(),
            committing: Vec::new(),
            oldest_end: None,
            loads: vec![Load::default(); devices],
        }
    }

    /// Adds a claim that is about to run on a device.
    pub fn start(&mut self, claim: &Claim, lease: Lease, device: usize) {
        let choices = claim.job.choice_count() as usize;
        self.loads[device].claims += 1;
        self.loads[device].choices += choices;
        let span = span(claim);
        span.in_scope(|| tracing::debug!("claimed"));
        let running = RunningClaim {
            claimed_at: lease.renewed_at,
            lease,
            device,
            prompt: claim.job.prompt.clone(),
            expected: Expected::default(),
            streamed: BTreeMap::new(),
            cost: claim.job.cost(),
            choices,
            first_token_at: None,
            span,
            is_alone: claim.alone,
            submitted: false,
            stopping: false,
            hand_back: false,
        };
        self.running.insert(claim.claim_ref(), running);
    }

    /// Adds a claim that may have been granted although its answer was lost. It is handed back.
    pub fn add_unsure(&mut self, lease: Lease, now: Instant) {
        self.ended.push(EndedClaim {
            lease,
            disposition: Disposition::HandBack,
            span: Span::none(),
            cost: 0,
            first_token: None,
            elapsed: Duration::ZERO,
        });
        self.oldest_end.get_or_insert(now);
    }

    /// Returns a running claim.
    pub fn get(&self, held: ClaimRef) -> Option<&RunningClaim> {
        self.running.get(&held)
    }

    /// Returns a running claim.
    pub fn get_mut(&mut self, held: ClaimRef) -> Option<&mut RunningClaim> {
        self.running.get_mut(&held)
    }

    /// Moves a claim from running to ended.
    pub fn end(&mut self, held: ClaimRef, disposition: Disposition, now: Instant) {
        let Some(claim) = self.running.remove(&held) else { return };
        let RunningClaim { lease, claimed_at, device, choices, cost, first_token_at, span, .. } =
            claim;
        self.loads[device].claims -= 1;
        self.loads[device].choices -= choices;
        let first_token = first_token_at.map(|at| at.saturating_duration_since(claimed_at));
        record_end(&span, &disposition, first_token);
        span.in_scope(|| tracing::debug!(how = disposition.label(), "ended"));
        let elapsed = now.saturating_duration_since(claimed_at);
        self.ended.push(EndedClaim { lease, disposition, span, cost, first_token, elapsed });
        self.oldest_end.get_or_insert(now);
    }

    /// Moves all ended claims to a commit, which must end with [`Self::take_committed`] or
    /// [`Self::restore`]. Returns what to write; `None` if nothing has ended.
    pub fn start_commit(&mut self) -> Option<Commit> {
        if self.ended.is_empty() {
            return None;
        }
        self.oldest_end = None;
        self.committing = std::mem::take(&mut self.ended);
        let mut commit = Commit::default();
        for EndedClaim { lease: Lease { held, .. }, disposition, first_token, .. } in
            &self.committing
        {
            match disposition {
                Disposition::Record(outcome) => commit.finished.push(FinishedAttempt {
                    claim: *held,
                    outcome: outcome.clone(),
                    first_token: *first_token,
                }),
                Disposition::Forget => {}
                Disposition::HandBack => commit.back.push(*held),
                Disposition::HandBackSuspect => commit.suspects.push(*held),
            }
        }
        Some(commit)
    }

    /// Takes the claims of a commit that succeeded.
    pub fn take_committed(&mut self) -> Vec<EndedClaim> {
        std::mem::take(&mut self.committing)
    }

    /// Puts back the claims of a failed commit, before the claims that have ended since.
    pub fn restore(&mut self, now: Instant) {
        let ended = std::mem::take(&mut self.ended);
        self.ended = std::mem::take(&mut self.committing);
        self.ended.extend(ended);
        self.oldest_end = (!self.ended.is_empty()).then_some(now);
    }

    /// Returns the time at which the ended claims must be committed.
    pub fn flush_at(&self, wait: Duration) -> Option<Instant> {
        self.oldest_end.map(|oldest| oldest + wait)
    }

    /// Returns the number of ended claims that are in no commit yet.
    pub fn ended_count(&self) -> usize {
        self.ended.len()
    }

    /// Returns the running claims.
    pub fn running(&self) -> impl Iterator<Item = (ClaimRef, &RunningClaim)> {
        self.running.iter().map(|(held, claim)| (*held, claim))
    }

    /// Returns the running claims of a device.
    pub fn running_on(&self, device: usize) -> Vec<ClaimRef> {
        self.running().filter(|(_, claim)| claim.device == device).map(|(held, _)| held).collect()
    }

    /// Returns the number of results that are not committed yet.
    pub fn uncommitted_count(&self) -> usize {
        self.ended.len() + self.committing.len()
    }

    /// Returns the number of claims in the engine, or about to be.
    pub fn running_count(&self) -> usize {
        self.running.len()
    }

    /// Returns whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.uncommitted_count() == 0
    }

    /// Returns the load of a device.
    pub fn load(&self, device: usize) -> Load {
        self.loads[device]
    }

    /// Returns every lease to renew.
    pub fn leases(&self) -> impl Iterator<Item = &Lease> {
        let ended = self.ended.iter().chain(&self.committing);
        self.running.values().map(|claim| &claim.lease).chain(ended.map(|ended| &ended.lease))
    }

    /// Notes that these claims, in ascending order, were renewed by a call that began at this time.
    pub fn renewed(&mut self, claims: &[ClaimRef], at: Instant) {
        let ended = self.ended.iter_mut().chain(&mut self.committing);
        let leases = self.running.values_mut().map(|claim| &mut claim.lease);
        for lease in leases.chain(ended.map(|ended| &mut ended.lease)) {
            if claims.binary_search(&lease.held).is_ok() {
                lease.renewed_at = at;
            }
        }
    }
}

/// Returns a root span for each attempt: its parent is in the job's trace. It ends with the commit of
/// the result. Its level is "warn", so that log lines carry it at every log level.
fn span(claim: &Claim) -> Span {
    let Claim { job, epoch, attempts, .. } = claim;
    let span = tracing::warn_span!(
        parent: None,
        "job",
        job = %job.id,
        queue = %job.queue,
        attempt = attempts + 1,
        epoch,
        trace_id = Empty,
        parent_id = Empty,
        outcome = Empty,
        first_token_ms = Empty,
        completion_tokens = Empty,
    );
    if let Some(parent) = &job.traceparent {
        span.record("trace_id", parent.trace_id());
        span.record("parent_id", parent.parent_id());
        parent.adopt(&span);
    }
    span
}

/// Records in its span how an attempt ended.
fn record_end(span: &Span, disposition: &Disposition, first_token: Option<Duration>) {
    span.record("outcome", disposition.label());
    if let Some(time) = first_token {
        span.record("first_token_ms", u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    }
    match disposition {
        Disposition::Record(Outcome::Completed(completion)) => {
            span.record("completion_tokens", completion.usage.completion_tokens);
        }
        Disposition::Record(Outcome::Error(_)) => mark_failed(span, "the attempt failed"),
        _ => {}
    }
}
