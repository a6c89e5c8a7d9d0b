//! Who may ask: API keys, of which the store keeps a hash.

use std::str::FromStr;

use async_trait::async_trait;
use uuid::Uuid;

use super::StoreError;
use crate::job::{Tenant, Timestamp, UnknownWord};

/// What a key allows, each one more than the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KeyRole {
    /// See what is the tenant's.
    Read,
    /// And ask for work.
    Submit,
    /// And run the service, for all tenants.
    Operate,
}

impl KeyRole {
    /// Every role, the least first.
    pub const ALL: [Self; 3] = [Self::Read, Self::Submit, Self::Operate];

    /// The word used in stores and on the wire.
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

/// A key, without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Names it in lists.
    pub id: Uuid,
    /// Whose requests it makes.
    pub tenant: Tenant,
    /// What it allows.
    pub role: KeyRole,
    /// What people call it.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// Since when it opens nothing.
    pub revoked_at: Option<Timestamp>,
}

/// SHA-256 of a key's secret. The secrets are random and 256 bits long: nothing slower is needed.
pub type KeyHash = [u8; 32];

/// Keys in a store.
#[async_trait]
pub trait Keys: Send + Sync {
    /// Keeps a key; its `created_at` is set here.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn add_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<(), StoreError>;

    /// Keeps a key if it is the first of all; whether it was. Of several processes that try, one is
    /// told so.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn add_first_key(&self, key: &ApiKey, hash: &KeyHash) -> Result<bool, StoreError>;

    /// The key with this hash, if it is not revoked.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn key(&self, hash: &KeyHash) -> Result<Option<ApiKey>, StoreError>;

    /// Every key, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn keys(&self) -> Result<Vec<ApiKey>, StoreError>;

    /// Revokes a key; false if there is none of this id that opens anything.
    ///
    /// # Errors
    /// [`StoreError`].
    async fn revoke_key(&self, id: Uuid) -> Result<bool, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_and_read_their_own_word() {
        assert!(KeyRole::ALL.is_sorted());
        for role in KeyRole::ALL {
            assert_eq!(role.as_str().parse::<KeyRole>().expect("its own word"), role);
        }
        assert!("admin".parse::<KeyRole>().is_err());
    }
}
