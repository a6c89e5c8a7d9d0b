//! What a worker holds: claims in the engine, and results that wait for their commit.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;
use tracing::{Span, field::Empty};
use tritmill_queue::{Claim, ClaimRef, Delivery, FinishedAttempt, Outcome, Prompt};

use super::renewer::Lease;

#[derive(Debug)]
struct RunningClaim {
    /// The device that runs it, by its place.
    device: usize,
    delivery: Delivery,
    prompt: Prompt,
    /// Choices it asked for: slots it takes.
    choices: usize,
    claimed_at: Instant,
    /// From the claim to its first token, once it has one.
    first_token: Option<Duration>,
    /// Where log lines about it belong: its id, queue, attempt and trace.
    span: Span,
    /// The engine has its request.
    submitted: bool,
    /// It is stopped for no fault of its own: the claim is to be given back, if it still is one.
    hand_back: bool,
}

/// A claim that ended, and what to record of it.
#[derive(Debug)]
pub(super) struct EndedClaim {
    pub held: ClaimRef,
    pub delivery: Delivery,
    pub end: Disposition,
    /// As of its flight.
    pub span: Span,
    /// From the claim to its first token, if it got so far.
    pub first_token: Option<Duration>,
    claimed_at: Instant,
    ended_at: Instant,
}

impl EndedClaim {
    /// From the claim to the end.
    pub(super) fn took(&self) -> Duration {
        self.ended_at.duration_since(self.claimed_at)
    }

    /// Whether the claim is given back rather than recorded.
    pub(super) fn is_hand_back(&self) -> bool {
        matches!(self.end, Disposition::HandBack)
    }

    fn holding(&self) -> Lease {
        let Self { held, delivery, claimed_at, .. } = self;
        Lease { held: *held, delivery: delivery.clone(), claimed_at: *claimed_at }
    }
}

/// What to do about an ended claim.
#[derive(Debug)]
pub(super) enum Disposition {
    /// Record this.
    Record(Outcome),
    /// Nothing: whoever ended it has recorded that.
    Forget,
    /// Give the claim back.
    HandBack,
}

impl Disposition {
    /// What happened, without what was said: prompts and answers stay out of logs.
    fn word(&self) -> &'static str {
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

/// Claims by what happens to them.
#[derive(Debug)]
pub(super) struct InFlight {
    running: HashMap<ClaimRef, RunningClaim>,
    /// Ended, not committed.
    done: Vec<EndedClaim>,
    /// On their way to the store; their leases must live on.
    committing: Vec<Lease>,
    /// When the oldest of `done` ended.
    waiting_since: Option<Instant>,
    /// By device.
    loads: Vec<Load>,
}

impl InFlight {
    /// None yet, on so many devices.
    pub(super) fn new(devices: usize) -> Self {
        Self {
            running: HashMap::new(),
            done: Vec::new(),
            committing: Vec::new(),
            waiting_since: None,
            loads: vec![Load::default(); devices],
        }
    }

    /// Notes a claim that is about to run on a device.
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
        let prompt = claim.job.prompt.clone();
        let span = span(claim);
        span.in_scope(|| tracing::debug!("claimed"));
        let flight = RunningClaim {
            device,
            delivery,
            prompt,
            choices,
            claimed_at,
            first_token: None,
            submitted: false,
            hand_back: false,
            span,
        };
        self.running.insert(claim.claim_ref(), flight);
    }

    /// Where log lines about a running claim belong.
    pub(super) fn span(&self, held: ClaimRef) -> Span {
        self.running.get(&held).map_or_else(Span::none, |flight| flight.span.clone())
    }

    /// The prompt of a running claim.
    pub(super) fn prompt(&self, held: ClaimRef) -> Option<&Prompt> {
        self.running.get(&held).map(|flight| &flight.prompt)
    }

    /// The device that a running claim was given to.
    pub(super) fn device(&self, held: ClaimRef) -> Option<usize> {
        self.running.get(&held).map(|flight| flight.device)
    }

    /// Notes that the engine gets a claim's request.
    pub(super) fn submitted(&mut self, held: ClaimRef) {
        if let Some(flight) = self.running.get_mut(&held) {
            flight.submitted = true;
        }
    }

    /// Notes when a running claim got its first token.
    pub(super) fn began(&mut self, held: ClaimRef, at: Instant) {
        if let Some(flight) = self.running.get_mut(&held) {
            flight.first_token = Some(at.duration_since(flight.claimed_at));
        }
    }

    /// Whether the engine has a claim's request.
    pub(super) fn is_submitted(&self, held: ClaimRef) -> bool {
        self.running.get(&held).is_some_and(|flight| flight.submitted)
    }

    /// Notes that a running claim is to be given back when its work has stopped; false if it does not
    /// run.
    pub(super) fn mark_for_hand_back(&mut self, held: ClaimRef) -> bool {
        self.running.get_mut(&held).map(|flight| flight.hand_back = true).is_some()
    }

    /// Moves a claim from running to done.
    pub(super) fn end(&mut self, held: ClaimRef, outcome: Option<Outcome>) {
        let Some(flight) = self.running.remove(&held) else { return };
        self.loads[flight.device].claims -= 1;
        self.loads[flight.device].choices -= flight.choices;
        let end = match outcome {
            Some(outcome) => Disposition::Record(outcome),
            None if flight.hand_back => Disposition::HandBack,
            None => Disposition::Forget,
        };
        let RunningClaim { delivery, span, claimed_at, first_token, .. } = flight;
        span.in_scope(|| tracing::debug!(how = end.word(), "ended"));
        let ended_at = Instant::now();
        self.done.push(EndedClaim { held, delivery, end, span, first_token, claimed_at, ended_at });
        self.waiting_since.get_or_insert_with(Instant::now);
    }

    /// Everything that is done, for one commit; it is held until that is [`Self::committed`] or
    /// [`Self::put_back`].
    pub(super) fn take_done(&mut self) -> Vec<EndedClaim> {
        self.waiting_since = None;
        let done = std::mem::take(&mut self.done);
        self.committing = done.iter().map(EndedClaim::holding).collect();
        done
    }

    /// The commit is over: what it was about is held no more.
    pub(super) fn committed(&mut self) {
        self.committing.clear();
    }

    /// What could not be committed; it comes before what has ended since.
    pub(super) fn put_back(&mut self, mut done: Vec<EndedClaim>) {
        self.committing.clear();
        done.append(&mut self.done);
        self.waiting_since = (!done.is_empty()).then(Instant::now);
        self.done = done;
    }

    /// When what is done must be committed.
    pub(super) fn flush_at(&self, wait: Duration) -> Option<Instant> {
        self.waiting_since.map(|since| since + wait)
    }

    /// Results that wait for a commit to begin.
    pub(super) fn done_count(&self) -> usize {
        self.done.len()
    }

    /// Every running claim of a device.
    pub(super) fn running_on(&self, device: usize) -> Vec<ClaimRef> {
        let of_device = self.running.iter().filter(|(_, flight)| flight.device == device);
        of_device.map(|(held, _)| *held).collect()
    }

    /// Results that no commit has recorded yet.
    pub(super) fn waiting_count(&self) -> usize {
        self.done.len() + self.committing.len()
    }

    /// Claims in the engine, or about to be.
    pub(super) fn running_count(&self) -> usize {
        self.running.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.done.is_empty() && self.committing.is_empty()
    }

    /// What a device holds.
    pub(super) fn load(&self, device: usize) -> Load {
        self.loads[device]
    }

    /// Every claim whose lease must live on.
    pub(super) fn leases(&self) -> Vec<Lease> {
        let running = self.running.iter().map(|(held, flight)| Lease {
            held: *held,
            delivery: flight.delivery.clone(),
            claimed_at: flight.claimed_at,
        });
        let done = self.done.iter().map(EndedClaim::holding);
        running.chain(done).chain(self.committing.iter().cloned()).collect()
    }
}

/// A span of its own for each attempt: nobody's child here, since its parent is in the trace. At the
/// level of warnings, so that they name it whatever else is logged.
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

/// What to record, of those that have something.
pub(super) fn finished(done: &[EndedClaim]) -> Vec<FinishedAttempt> {
    let record = |done: &EndedClaim| match &done.end {
        Disposition::Record(outcome) => Some(FinishedAttempt {
            claim: done.held,
            outcome: outcome.clone(),
            first_token: done.first_token,
        }),
        Disposition::Forget | Disposition::HandBack => None,
    };
    done.iter().filter_map(record).collect()
}

/// Claims to give back.
pub(super) fn handed_back(done: &[EndedClaim]) -> Vec<ClaimRef> {
    let given = done.iter().filter(|done| done.is_hand_back());
    given.map(|done| done.held).collect()
}
