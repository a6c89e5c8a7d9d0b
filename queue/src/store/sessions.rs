//! Who is logged in: sessions of browsers, each of an API key, of whose secret the store keeps a hash.

use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::{
    StoreError,
    keys::{ApiKey, KeyHash},
};

/// Sessions that a key has at most: one more ends the one that would have ended first.
pub const SESSIONS_PER_KEY_MAX: u32 = 32;

/// Sessions in a store.
#[async_trait]
pub trait Sessions: Send + Sync {
    /// Keeps a session of a key for so long. Those whose time is up are forgotten.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn add_session(
        &self,
        hash: &KeyHash,
        key: Uuid,
        lifetime: Duration,
    ) -> Result<(), StoreError>;

    /// The key of the session with this hash, if the session lasts and the key is not revoked.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn session(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;

    /// Ends a session, if there is one.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn end_session(&self, hash: &KeyHash) -> Result<(), StoreError>;
}
