//! Secrets of API keys and sessions.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};
use tritmill_queue::{Tenant, Timestamp};
use uuid::Uuid;

use crate::store::{ApiKey, KeyRole, keys::KeyHash};

/// Prefix of every secret, so that people and scanners recognize it.
const PREFIX: &str = "tm-";
/// Hexadecimal digits after the prefix: 256 bits.
const DIGITS: usize = 64;

/// The secret of an API key or a session. It is shown once and never logged, so it has neither `Debug` nor
/// `Display`.
pub struct Secret(String);

impl Secret {
    /// Generates a random secret.
    pub fn generate() -> Self {
        let mut random = [0_u8; DIGITS / 2];
        getrandom::fill(&mut random).expect("the system has a source of randomness");
        let mut text = PREFIX.to_owned();
        for byte in random {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
        }
        Self(text)
    }

    /// Parses text that a caller sent; `None` if it is malformed.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(PREFIX)?;
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (digits.len() == DIGITS && digits.bytes().all(is_hex)).then(|| Self(text.to_owned()))
    }

    /// The hash that the store keeps.
    pub fn hash(&self) -> KeyHash {
        Sha256::digest(self.0.as_bytes()).into()
    }

    /// The text, to show to its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// Creates an API key without an expiry, and its secret. The store sets the time of creation.
pub fn new_key(tenant: Tenant, role: KeyRole, name: &str) -> (ApiKey, Secret) {
    let created_at = Timestamp::default();
    let name = name.to_owned();
    let key = ApiKey {
        id: Uuid::now_v7(),
        tenant,
        role,
        name,
        created_at,
        revoked_at: None,
        expires_at: None,
        last_used_at: None,
    };
    (key, Secret::generate())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_well_formed_text_is_parsed_as_a_secret() {
        let secret = Secret::generate();
        let again = Secret::parse(secret.reveal()).expect("its own text");
        assert_eq!(secret.hash(), again.hash());
        assert_ne!(secret.hash(), Secret::generate().hash());
        let upper = secret.reveal().to_uppercase();
        for wrong in ["", "tm-", &secret.reveal()[..66], &upper, "tm-'; DROP TABLE api_keys"] {
            assert!(Secret::parse(wrong).is_none(), "{wrong}");
        }
    }
}
