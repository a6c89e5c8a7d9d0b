//! Browser sessions. Each belongs to an API key. The store keeps a hash of the session's secret.

use std::time::Duration;

use async_trait::async_trait;
use tritmill_queue::StoreError;
use uuid::Uuid;

use super::keys::{ApiKey, KeyHash};

/// Maximum number of sessions of a key: one more ends the session that would expire first.
pub const SESSIONS_PER_KEY_MAX: u32 = 32;

/// Sessions in a store.
#[async_trait]
pub trait Sessions: Send + Sync {
    /// Adds the key of a visitor who logged in at a provider, or gives the key with this id its present name, tenant and
    /// role. Returns it; `None` if it is revoked.
    async fn admit_login(&self, key: &ApiKey, hash: &KeyHash)
    -> Result<Option<ApiKey>, StoreError>;

    /// Adds a session of a key with a lifetime; deletes expired sessions.
    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError>;

    /// Returns the key of the session with this hash, unless the session or the key has expired
    /// or the key is revoked.
    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;

    /// Ends a session if it exists.
    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError>;
}
