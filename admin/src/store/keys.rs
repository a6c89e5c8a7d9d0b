//! API keys. The store keeps a hash of each.

use std::str::FromStr;

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant, Timestamp, job::UnknownWord};
use uuid::Uuid;

/// Role of a key. Each role includes the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyRole {
    /// Read the tenant's jobs, files and batches.
    Read,
    /// Also submit, cancel and delete.
    Submit,
    /// Also operate the service, for all tenants.
    Operate,
}

impl KeyRole {
    /// All roles, the least first.
    pub const ALL: [Self; 3] = [Self::Read, Self::Submit, Self::Operate];

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Operate => "operate",
        }
    }
}

impl FromStr for KeyRole {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        let found = Self::ALL.into_iter().find(|role| role.as_str() == word);
        found.ok_or_else(|| UnknownWord { what: "role", word: word.to_owned() })
    }
}

/// A key without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Its identifier.
    pub id: Uuid,
    /// The tenant of its requests.
    pub tenant: Tenant,
    /// Its role.
    pub role: KeyRole,
    /// Its name, for people.
    pub name: String,
    /// Creation time.
    pub created_at: Timestamp,
    /// Time of its revocation.
    pub revoked_at: Option<Timestamp>,
}

/// SHA-256 of a key's secret. Secrets are random and have 256 bits, so no slower hash is needed.
pub type KeyHash = [u8; 32];

/// Keys in a store.
#[async_trait]
pub trait Keys: Send + Sync {
    /// Adds a key; `created_at` is set by the store.
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError>;

    /// Adds a key if there are no keys yet; returns whether it did. One of several concurrent calls
    /// succeeds.
    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError>;

    /// Returns the key with this hash, unless it is revoked.
    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;

    /// Returns all keys, the oldest first.
    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError>;

    /// Revokes a key; returns false if there is no valid key with this id.
    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_and_parse_their_names() {
        assert!(KeyRole::ALL.is_sorted());
        for role in KeyRole::ALL {
            assert_eq!(role.as_str().parse::<KeyRole>().expect("its own word"), role);
        }
        assert!("admin".parse::<KeyRole>().is_err());
    }
}
