//! [`Escalation`]: another model for the lines of a batch that wait at a set time.

use serde::{Deserialize, Serialize};
use tritmill_queue::{QueueName, Timestamp};

use super::{batches::Batch, windows::parse_window};

/// Another model for the lines of a batch that have not begun at some time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Escalation {
    /// The model, as the creator of the batch named it.
    pub model: String,
    /// The queue of the model.
    pub queue: QueueName,
    /// Time after the creation of the batch as its creator wrote it, such as `20h`. The time in which the batch is paused does
    /// not count.
    pub after: String,
}

impl Batch {
    /// Returns the time from which its waiting lines go to another model.
    pub fn escalates_at(&self) -> Option<Timestamp> {
        let after = parse_window(&self.escalation.as_ref()?.after)?;
        Some(self.expires_at.before(self.window().saturating_sub(after)))
    }

    /// Returns the other model if waiting lines go to it now.
    pub fn escalated(&self) -> Option<&Escalation> {
        self.escalation.as_ref().filter(|_| self.steps.is_escalated)
    }
}
