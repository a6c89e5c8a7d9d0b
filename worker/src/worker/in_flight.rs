//! What a worker holds: claims in the engine, and ended claims that are not committed yet.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tracing::{Span, field::Empty};
use tritmill_queue::{Claim, ClaimRef, Delivery, FinishedAttempt, Outcome, Prompt};

use super::renewer::Lease;

/// A claim that is in the engine or about to be submitted to it.
#[derive(Debug)]
pub(super) struct RunningClaim {
    lease: Lease,
    /// Index of the device that runs it.
    pub device: usize,
    pub prompt: Prompt,
    /// Choices it asked for: the slots it takes.
    choices: usize,
    pub first_token_at: Option<Instant>,
    /// Span of its log lines: job, queue, attempt and trace.
    pub span: Span,
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
    /// Time from the claim to its first token, if it has one.
    pub first_token: Option<Duration>,
    ended_at: Instant,
}

impl EndedClaim {
    /// Returns the time from the claim to its end.
    pub(super) fn elapsed(&self) -> Duration {
        self.ended_at.duration_since(self.lease.claimed_at)
    }

    /// Returns whether the claim is handed back rather than recorded.
    pub(super) fn is_hand_back(&self) -> bool {
        matches!(self.disposition, Disposition::HandBack)
    }
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

/// Claims by their stage.
#[derive(Debug)]
pub(super) struct InFlight {
    running: HashMap<ClaimRef, RunningClaim>,
    /// Ended claims that are not committed.
    ended: Vec<EndedClaim>,
    /// Leases of claims in the current commit; they are renewed until it succeeds.
    committing: Vec<Lease>,
    /// Time at which the oldest claim in `ended` ended.
    oldest_end: Option<Instant>,
    /// Loads by device.
    loads: Vec<Load>,
}

impl InFlight {
    /// Creates an empty state for this many devices.
    pub(super) fn new(devices: usize) -> Self {
        Self {
            running: HashMap::new(),
            ended: Vec::new(),
            committing: Vec::new(),
            oldest_end: None,
            loads: vec![Load::default(); devices],
        }
    }

    /// Adds a claim that is about to run on a device.
    pub(super) fn start(
        &mut self,
        claim: &Claim,
        delivery: Delivery,
        claimed_at: Instant,
        device: usize,
    ) {
        let choices = claim.job.sampling.n as usize;
        self.loads[device].claims += 1;
        self.loads[device].choices += choices;
        let span = span(claim);
        span.in_scope(|| tracing::debug!("claimed"));
        let running = RunningClaim {
            lease: Lease { held: claim.claim_ref(), delivery, claimed_at },
            device,
            prompt: claim.job.prompt.clone(),
            choices,
            first_token_at: None,
            submitted: false,
            stopping: false,
            hand_back: false,
            span,
        };
        self.running.insert(claim.claim_ref(), running);
    }

    /// Returns a running claim.
    pub(super) fn get(&self, held: ClaimRef) -> Option<&RunningClaim> {
        self.running.get(&held)
    }

    /// Returns a running claim.
    pub(super) fn get_mut(&mut self, held: ClaimRef) -> Option<&mut RunningClaim> {
        self.running.get_mut(&held)
    }

    /// Moves a claim from running to ended.
    pub(super) fn end(&mut self, held: ClaimRef, outcome: Option<Outcome>) {
        let Some(claim) = self.running.remove(&held) else { return };
        let RunningClaim { lease, device, choices, first_token_at, span, .. } = claim;
        self.loads[device].claims -= 1;
        self.loads[device].choices -= choices;
        let disposition = match outcome {
            Some(outcome) => Disposition::Record(outcome),
            None if claim.hand_back => Disposition::HandBack,
            None => Disposition::Forget,
        };
        span.in_scope(|| tracing::debug!(how = disposition.label(), "ended"));
        let first_token = first_token_at.map(|at| at.duration_since(lease.claimed_at));
        let ended_at = Instant::now();
        self.ended.push(EndedClaim { lease, disposition, span, first_token, ended_at });
        self.oldest_end.get_or_insert(ended_at);
    }

    /// Takes all ended claims for one commit, which must end with [`Self::committed`] or
    /// [`Self::restore`]; until then their leases are kept.
    pub(super) fn take_ended(&mut self) -> Vec<EndedClaim> {
        self.oldest_end = None;
        let ended = std::mem::take(&mut self.ended);
        self.committing = ended.iter().map(|ended| ended.lease.clone()).collect();
        ended
    }

    /// Drops the leases of the commit after it has succeeded.
    pub(super) fn committed(&mut self) {
        self.committing.clear();
    }

    /// Puts back the claims of a failed commit, before the claims that have ended since.
    pub(super) fn restore(&mut self, mut ended: Vec<EndedClaim>) {
        self.committing.clear();
        ended.append(&mut self.ended);
        self.oldest_end = (!ended.is_empty()).then(Instant::now);
        self.ended = ended;
    }

    /// Returns the time at which the ended claims must be committed.
    pub(super) fn flush_at(&self, wait: Duration) -> Option<Instant> {
        self.oldest_end.map(|oldest| oldest + wait)
    }

    /// Returns the number of ended claims that are in no commit yet.
    pub(super) fn ended_count(&self) -> usize {
        self.ended.len()
    }

    /// Returns the running claims of a device.
    pub(super) fn running_on(&self, device: usize) -> Vec<ClaimRef> {
        let on_device = self.running.iter().filter(|(_, claim)| claim.device == device);
        on_device.map(|(held, _)| *held).collect()
    }

    /// Returns the number of results that are not committed yet.
    pub(super) fn uncommitted_count(&self) -> usize {
        self.ended.len() + self.committing.len()
    }

    /// Returns the number of claims in the engine, or about to be.
    pub(super) fn running_count(&self) -> usize {
        self.running.len()
    }

    /// Returns whether nothing is in flight.
    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.uncommitted_count() == 0
    }

    /// Returns the load of a device.
    pub(super) fn load(&self, device: usize) -> Load {
        self.loads[device]
    }

    /// Returns every lease to renew.
    pub(super) fn leases(&self) -> Vec<Lease> {
        let running = self.running.values().map(|claim| &claim.lease);
        let ended = self.ended.iter().map(|ended| &ended.lease);
        running.chain(ended).chain(&self.committing).cloned().collect()
    }
}

/// Returns a root span for each attempt: its parent is in the job's trace. Its level is "warn", so
/// that log lines carry it at every log level.
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
    );
    if let Some(parent) = &job.traceparent {
        span.record("trace_id", parent.trace_id());
        span.record("parent_id", parent.parent_id());
    }
    span
}

/// Returns the results to record.
pub(super) fn finished(ended: &[EndedClaim]) -> Vec<FinishedAttempt> {
    let record = |ended: &EndedClaim| match &ended.disposition {
        Disposition::Record(outcome) => Some(FinishedAttempt {
            claim: ended.lease.held,
            outcome: outcome.clone(),
            first_token: ended.first_token,
        }),
        Disposition::Forget | Disposition::HandBack => None,
    };
    ended.iter().filter_map(record).collect()
}

/// Returns the claims to hand back.
pub(super) fn handed_back(ended: &[EndedClaim]) -> Vec<ClaimRef> {
    ended.iter().filter(|ended| ended.is_hand_back()).map(|ended| ended.lease.held).collect()
}
