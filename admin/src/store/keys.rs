//! API keys. The store keeps a hash of each.

use std::str::FromStr;

use async_trait::async_trait;
use tritmill_queue::{StoreError, Tenant, Timestamp, job::UnknownWord};
use uuid::Uuid;

/// Role of a key. Each role includes the ones before it, except [`Metrics`](Self::Metrics), which only
/// [`Operate`](Self::Operate) includes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyRole {
    /// Read the metrics of the service, which name all tenants, and nothing else.
    Metrics,
    /// Read the tenant's jobs, files and batches.
    Read,
    /// Also submit, cancel and delete.
    Submit,
    /// Also create and revoke the tenant's keys.
    Manage,
    /// Also operate the service, for all tenants.
    Operate,
}

impl KeyRole {
    /// All roles, the least first.
    pub const ALL: [Self; 5] =
        [Self::Metrics, Self::Read, Self::Submit, Self::Manage, Self::Operate];

    /// Returns the name in stores and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Manage => "manage",
            Self::Operate => "operate",
        }
    }
}

impl KeyRole {
    /// Returns whether a key with this role may do what `needed` may.
    pub fn includes(self, needed: Self) -> bool {
        let is_of_tenants = self != Self::Metrics && needed != Self::Metrics;
        self == needed || self == Self::Operate || (is_of_tenants && self > needed)
    }

    /// Returns whether a key with this role may create and revoke keys with another one.
    pub fn grants(self, other: Self) -> bool {
        self == Self::Operate || (self == Self::Manage && self.includes(other))
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
    /// Time from which it is not valid any more.
    pub expires_at: Option<Timestamp>,
    /// Time of its last use, which may be up to an hour later; `None` if it was never used.
    pub last_used_at: Option<Timestamp>,
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

    /// Returns the key with this hash, unless it is revoked or has expired.
    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;

    /// Returns all keys, the oldest first.
    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError>;

    /// Returns the keys of a tenant, the oldest first.
    async fn keys_of(&self, tenant: &Tenant) -> Result<Vec<ApiKey>, StoreError>;

    /// Records that a key is used now.
    async fn note_key_use(&self, id: Uuid) -> Result<(), StoreError>;

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

    #[test]
    fn roles_of_scrapers_and_of_tenants_are_apart() {
        let included = |role: KeyRole| KeyRole::ALL.map(|needed| role.includes(needed));
        assert_eq!(included(KeyRole::Metrics), [true, false, false, false, false]);
        assert_eq!(included(KeyRole::Read), [false, true, false, false, false]);
        assert_eq!(included(KeyRole::Submit), [false, true, true, false, false]);
        assert_eq!(included(KeyRole::Manage), [false, true, true, true, false]);
        assert_eq!(included(KeyRole::Operate), [true; 5]);
        let granted = |role: KeyRole| KeyRole::ALL.map(|other| role.grants(other));
        assert_eq!(granted(KeyRole::Submit), [false; 5]);
        assert_eq!(granted(KeyRole::Manage), [false, true, true, true, false]);
        assert_eq!(granted(KeyRole::Operate), [true; 5]);
    }
}
