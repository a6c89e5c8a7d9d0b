//! What operators did: a line for each act, written before the act itself.

use async_trait::async_trait;
use serde_json::Value;
use uuid::Uuid;

use super::{Page, StoreError};
use crate::job::Timestamp;

/// Lines that are kept; older ones are deleted with new ones' coming.
pub const AUDIT_MAX: u32 = 100_000;

/// An act.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Names it; ids are in the order of time.
    pub id: Uuid,
    /// When; set by the store.
    pub at: Timestamp,
    /// Whose key; none at the command line.
    pub key: Option<Uuid>,
    /// What people call that key.
    pub key_name: String,
    /// What: `queue.pause`.
    pub action: String,
    /// On what: the name of a queue, a worker, a tenant.
    pub target: String,
    /// How: a JSON object.
    pub detail: Value,
}

impl AuditEntry {
    /// An act without a key.
    pub fn from_command_line(action: &str, target: &str, detail: Value) -> Self {
        Self {
            id: Uuid::now_v7(),
            at: Timestamp::default(),
            key: None,
            key_name: "command line".to_owned(),
            action: action.to_owned(),
            target: target.to_owned(),
            detail,
        }
    }
}

/// The log of acts.
#[async_trait]
pub trait Audit: Send + Sync {
    /// Writes a line.
    ///
    /// # Errors
    /// [`StoreError`]; then the act is not to be done.
    async fn record_audit(&self, line: &AuditEntry) -> Result<(), StoreError>;

    /// Lines, the latest first (`page.ascending` has no effect).
    ///
    /// # Errors
    /// [`StoreError`].
    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError>;
}
