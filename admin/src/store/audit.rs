//! The audit log: one entry for each operator action, written before the action.

use async_trait::async_trait;
use serde_json::Value;
use tritmill_queue::{StoreError, Timestamp, store::Page};
use uuid::Uuid;

/// Maximum number of entries that are kept; each new entry deletes the oldest beyond that.
pub const AUDIT_MAX: u32 = 100_000;

/// An entry of the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEntry {
    /// Its identifier; ids are in the order of time.
    pub id: Uuid,
    /// Time of the action; set by the store.
    pub at: Timestamp,
    /// The operator's key; `None` for the command line.
    pub key: Option<Uuid>,
    /// Name of the key.
    pub key_name: String,
    /// Address that the operator's request came from; `None` for the command line.
    pub address: Option<String>,
    /// The action, e.g. `queue.pause`.
    pub action: String,
    /// Target of the action: the name of a queue, a worker or a tenant.
    pub target: String,
    /// Parameters of the action: a JSON object.
    pub detail: Value,
}

impl AuditEntry {
    /// Creates an entry for an action from the command line.
    pub fn from_command_line(action: &str, target: &str, detail: Value) -> Self {
        Self {
            id: Uuid::now_v7(),
            at: Timestamp::default(),
            key: None,
            key_name: "command line".to_owned(),
            address: None,
            action: action.to_owned(),
            target: target.to_owned(),
            detail,
        }
    }
}

/// The audit log.
#[async_trait]
pub trait Audit: Send + Sync {
    /// Appends an entry. If this fails, the action must not be carried out.
    async fn record_audit(&self, entry: &AuditEntry) -> Result<(), StoreError>;

    /// Returns entries, the newest first (`page.ascending` has no effect).
    async fn audit_log(&self, page: Page<Uuid>) -> Result<Vec<AuditEntry>, StoreError>;
}
