//! Changes of batches on request: cancel, pause, resume and retry.
//!
//! A change is a function of the stored batch, applied in one transaction. It says what the driver's next steps do; what
//! concerns jobs is done by them, so that a batch of any size changes at once.

use std::time::Duration;

use tritmill_queue::Timestamp;

use super::{
    batches::{Batch, BatchState, BatchTimes},
    call_keys::CallKey,
    step_state::{FilePosition, Rerun, RerunLines, StepState},
};

/// Most retries of a batch that wait for their turn.
const RERUNS_MAX: usize = 16;

/// A change of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BatchChange {
    /// Ends it: its jobs are cancelled, and its answers so far are kept.
    Cancel,
    /// Keeps its lines from starting.
    Pause {
        /// Whether running lines are interrupted as well, instead of going to their end.
        now: bool,
    },
    /// Lets no more lines be added to an open batch, which ends when its lines have.
    Seal,
    /// Goes on: a paused batch where it was paused, and a cancelled one with its cancelled lines, in a new time limit.
    Resume,
    /// Runs lines again. An ended batch is opened again.
    Retry {
        /// Which lines.
        lines: RerunLines,
        /// The idempotency key of the request.
        key: Option<RetryKey>,
    },
}

/// The idempotency key of a retry, and what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryKey {
    /// The key, which is unique among the calls and retries of a tenant.
    pub key: String,
    /// SHA-256 of the request: another one with the same key is refused.
    pub request_hash: [u8; 32],
}

impl RetryKey {
    /// Returns the key as those of calls, among which it is unique.
    pub fn as_call(&self) -> CallKey<'_> {
        CallKey { key: &self.key, request_hash: &self.request_hash }
    }
}

/// Result of [`change_batch`](super::Batches::change_batch).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// The batch is as it was asked for, by this call or an earlier one.
    Done(Box<Batch>),
    /// The state of the batch does not allow the change. Nothing was written.
    Refused(Box<Batch>),
    /// Too many retries of the batch wait. Nothing was written.
    ManyRetries,
    /// The tenant has too many unfinished batches. Nothing was written.
    Full,
    /// The key belongs to another request. Nothing was written.
    KeyConflict,
}

/// What became of a batch in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Applied {
    /// It changed.
    Changed,
    /// It was so already.
    Unchanged,
    /// Its state does not allow the change.
    Refused,
    /// Too many retries wait.
    ManyRetries,
}

impl BatchChange {
    /// Runs all lines without an answer again.
    pub fn retry_all() -> Self {
        Self::Retry { lines: RerunLines::Unanswered, key: None }
    }

    /// Returns its name in the audit log.
    pub fn action(&self) -> &'static str {
        match self {
            Self::Cancel => "batch.cancel",
            Self::Pause { .. } => "batch.pause",
            Self::Seal => "batch.seal",
            Self::Resume => "batch.resume",
            Self::Retry { .. } => "batch.retry",
        }
    }

    /// Returns what became of the batch, as messages say it.
    pub fn done(&self) -> &'static str {
        match self {
            Self::Cancel => "cancelled",
            Self::Pause { .. } => "paused",
            Self::Seal => "sealed",
            Self::Resume => "resumed",
            Self::Retry { .. } => "retried",
        }
    }

    /// Changes a batch, or leaves it as it is.
    pub(super) fn apply(&self, batch: &mut Batch, now: Timestamp) -> Applied {
        match self {
            Self::Cancel => cancel(batch, now),
            Self::Pause { now: running } => pause(batch, *running, now),
            Self::Seal => seal(batch, now),
            Self::Resume => resume(batch, now),
            Self::Retry { lines, .. } => retry(batch, lines.clone(), now),
        }
    }

    /// The idempotency key, if it has one.
    pub(super) fn key(&self) -> Option<&RetryKey> {
        match self {
            Self::Retry { key, .. } => key.as_ref(),
            Self::Cancel | Self::Pause { .. } | Self::Seal | Self::Resume => None,
        }
    }
}

fn cancel(batch: &mut Batch, now: Timestamp) -> Applied {
    match batch.state {
        BatchState::Validating | BatchState::InProgress | BatchState::Paused => {
            batch.seal(now);
            batch.enter(BatchState::Cancelling, now);
            Applied::Changed
        }
        BatchState::Cancelling | BatchState::Cancelled => Applied::Unchanged,
        _ => Applied::Refused,
    }
}

fn seal(batch: &mut Batch, now: Timestamp) -> Applied {
    match (batch.is_open, batch.at.sealed) {
        (true, _) => {
            batch.seal(now);
            Applied::Changed
        }
        (false, Some(_)) => Applied::Unchanged,
        (false, None) => Applied::Refused,
    }
}

fn pause(batch: &mut Batch, running: bool, now: Timestamp) -> Applied {
    match batch.state {
        BatchState::Validating | BatchState::InProgress => {
            batch.steps.holds_running = running;
            batch.steps.is_held = true;
            batch.enter(BatchState::Paused, now);
            Applied::Changed
        }
        BatchState::Paused if running && !batch.steps.holds_running => {
            batch.steps.holds_running = true;
            Applied::Changed
        }
        BatchState::Paused => Applied::Unchanged,
        _ => Applied::Refused,
    }
}

fn resume(batch: &mut Batch, now: Timestamp) -> Applied {
    match batch.state {
        BatchState::Paused => {
            // The clock stood still.
            let paused = batch.at.paused.take().map_or(Duration::ZERO, |since| now.since(since));
            batch.expires_at = batch.expires_at.after(paused);
            go_on(batch);
            Applied::Changed
        }
        BatchState::Cancelled => {
            reopen(batch, RerunLines::Cancelled, now);
            if batch.at.in_progress.is_none() {
                // Its lines were not checked: it begins anew.
                batch.steps = StepState::default();
            }
            Applied::Changed
        }
        _ => Applied::Refused,
    }
}

fn retry(batch: &mut Batch, lines: RerunLines, now: Timestamp) -> Applied {
    if batch.at.in_progress.is_none() {
        return Applied::Refused;
    }
    match batch.state {
        BatchState::InProgress | BatchState::Paused | BatchState::Validating => {
            if batch.steps.reruns.len() >= RERUNS_MAX {
                return Applied::ManyRetries;
            }
            batch.steps.reruns.push(Rerun { lines, at: now, reached: None });
            batch.steps.changed_at = Some(now);
            Applied::Changed
        }
        state if state.is_terminal() => {
            reopen(batch, lines, now);
            Applied::Changed
        }
        _ => Applied::Refused,
    }
}

/// Opens an ended batch again, to run lines again. Its lines are known to be valid.
fn reopen(batch: &mut Batch, lines: RerunLines, now: Timestamp) {
    batch.left_by = match batch.state {
        BatchState::Expired => Some(BatchState::Expired),
        BatchState::Cancelled | BatchState::Failed => Some(BatchState::Cancelled),
        _ => batch.left_by,
    };
    batch.reopened = batch.reopened.saturating_add(1);
    batch.archived_at = None;
    batch.expires_at = now.after(batch.window());
    (batch.overdue, batch.submitted) = (false, FilePosition::default());
    batch.steps.ahead = None;
    batch.errors.clear();
    let BatchTimes { in_progress, sealed, .. } = batch.at;
    batch.at = BatchTimes { in_progress, sealed, ..BatchTimes::default() };
    batch.steps.changed_at = Some(now);
    // What was not reached stays as it is, unless it is chosen.
    batch.steps.reruns = vec![Rerun { lines, at: now, reached: Some(u64::MAX) }];
    go_on(batch);
}

/// Lets a batch enter the state in progress when its tenant has room, or validates the rest of its lines.
fn go_on(batch: &mut Batch) {
    batch.steps.holds_running = false;
    batch.steps.is_valid |= batch.at.in_progress.is_some();
    batch.state = BatchState::Validating;
}
