//! Events: what happened to a batch or a budget, for those who are told by [`notices`](super::notices).

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tritmill_queue::{Tenant, Timestamp, job::UnknownWord};
use uuid::Uuid;

use super::{
    batches::{Batch, BatchId, BatchState},
    budgets::Budget,
    step_state::StepState,
};

/// Most notices of pauses and resumes of a tenant that wait. More are not written: each change on request adds one.
pub const WAITING_MAX: u32 = 1000;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum NoticeKind {
    /// Every line of a batch has its answer or error.
    BatchCompleted,
    /// The file of a batch was rejected.
    BatchFailed,
    /// The deadline of a batch passed before every line was answered.
    BatchExpired,
    /// A batch was cancelled, and its output is written.
    BatchCancelled,
    /// A batch was paused.
    BatchPaused,
    /// A paused or cancelled batch goes on.
    BatchResumed,
    /// The soft bound of a budget is reached.
    BudgetSoftReached,
    /// The hard bound of a budget is reached: new work is refused.
    BudgetSpent,
}

impl NoticeKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::BatchCompleted,
        Self::BatchFailed,
        Self::BatchExpired,
        Self::BatchCancelled,
        Self::BatchPaused,
        Self::BatchResumed,
        Self::BudgetSoftReached,
        Self::BudgetSpent,
    ];

    /// Whether it is about a batch.
    pub const fn is_of_batch(self) -> bool {
        !matches!(self, Self::BudgetSoftReached | Self::BudgetSpent)
    }

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BatchCompleted => "batch.completed",
            Self::BatchFailed => "batch.failed",
            Self::BatchExpired => "batch.expired",
            Self::BatchCancelled => "batch.cancelled",
            Self::BatchPaused => "batch.paused",
            Self::BatchResumed => "batch.resumed",
            Self::BudgetSoftReached => "budget.soft_reached",
            Self::BudgetSpent => "budget.spent",
        }
    }
}

impl From<NoticeKind> for String {
    fn from(kind: NoticeKind) -> Self {
        kind.as_str().to_owned()
    }
}

impl TryFrom<String> for NoticeKind {
    type Error = UnknownWord;

    fn try_from(word: String) -> Result<Self, UnknownWord> {
        word.parse()
    }
}

impl FromStr for NoticeKind {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = Self::ALL.into_iter().find(|kind| kind.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "event", word: word.to_owned() })
    }
}

/// What an event is about, as it was then.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Subject {
    /// A batch.
    Batch {
        /// Without what its next steps need, its webhook and its mail addresses.
        batch: Box<Batch>,
        /// Lines that were added to it.
        added: u64,
    },
    /// A budget.
    Budget(Box<SpentBudget>),
}

impl Subject {
    /// Returns what is kept of a batch.
    fn of_batch(batch: &Batch) -> Self {
        let added = batch.added;
        let batch = Batch {
            webhook: None,
            escalation: None,
            mail_to: Vec::new(),
            idempotency_key: None,
            steps: StepState::default(),
            ..batch.clone()
        };
        Self::Batch { batch: Box::new(batch), added }
    }
}

/// A budget with what was spent of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpentBudget {
    /// The budget.
    pub budget: Budget,
    /// In its currency, in 10⁻⁹ of its unit.
    pub spent: i64,
    /// First day of the period, and the first day after it.
    pub period: (i64, i64),
}

/// An event before it has receivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Its identifier.
    pub id: String,
    /// Its tenant.
    pub tenant: Tenant,
    /// What happened.
    pub kind: NoticeKind,
    /// When.
    pub at: Timestamp,
    /// What it is about.
    pub subject: Subject,
}

impl Event {
    /// Returns the end of a batch that is in a terminal state. A batch that ends once more has another event.
    pub(super) fn of_end(batch: &Batch) -> Option<Self> {
        let (kind, at) = match batch.state {
            BatchState::Completed => (NoticeKind::BatchCompleted, batch.at.completed),
            BatchState::Failed => (NoticeKind::BatchFailed, batch.at.failed),
            BatchState::Expired => (NoticeKind::BatchExpired, batch.at.expired),
            BatchState::Cancelled => (NoticeKind::BatchCancelled, batch.at.cancelled),
            _ => return None,
        };
        let mut id = format!("evt_{}", Uuid::from(batch.id).as_simple());
        if batch.reopened > 0 {
            id.push_str(&format!("_{}", batch.reopened));
        }
        Some(Self::of_batch(id, batch, kind, at.unwrap_or(batch.created_at)))
    }

    /// Returns the event of a change on request, which may have made a batch paused or let it go on.
    pub(super) fn of_change(before: &Batch, after: &Batch, now: Timestamp) -> Option<Self> {
        let kind = match (before.state, after.state) {
            (BatchState::Paused, BatchState::Paused) => return None,
            (_, BatchState::Paused) => NoticeKind::BatchPaused,
            (BatchState::Paused, BatchState::Validating) => NoticeKind::BatchResumed,
            (BatchState::Cancelled, BatchState::Validating) => NoticeKind::BatchResumed,
            _ => return None,
        };
        Some(Self::of_batch(format!("evt_{}", Uuid::now_v7().as_simple()), after, kind, now))
    }

    fn of_batch(id: String, batch: &Batch, kind: NoticeKind, at: Timestamp) -> Self {
        let (tenant, subject) = (batch.tenant.clone(), Subject::of_batch(batch));
        Self { id, tenant, kind, at, subject }
    }

    /// Returns the batch that it is about.
    pub fn batch(&self) -> Option<BatchId> {
        match &self.subject {
            Subject::Batch { batch, .. } => Some(batch.id),
            Subject::Budget(_) => None,
        }
    }

    /// Most notices that its tenant may have waiting when it is written.
    pub(super) fn waiting_max(&self) -> Option<u32> {
        let is_on_request =
            [NoticeKind::BatchPaused, NoticeKind::BatchResumed].contains(&self.kind);
        is_on_request.then_some(WAITING_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_one_name() {
        for kind in NoticeKind::ALL {
            assert_eq!(kind.as_str().parse::<NoticeKind>().expect("its own name"), kind);
        }
        assert!("batch.opened".parse::<NoticeKind>().is_err());
    }
}
