//! Secrets of API keys: made, read and hashed.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};
use tritmill_queue::{
    Tenant, Timestamp,
    store::{ApiKey, KeyRole, keys::KeyHash},
};
use uuid::Uuid;

/// What every secret begins with, so that people and scanners know one.
const PREFIX: &str = "tm-";
/// Hexadecimal digits after it: 256 bits.
const DIGITS: usize = 64;

/// What opens the door. It is shown once and never logged: it has no `Debug` and no `Display`.
pub struct Secret(String);

impl Secret {
    /// A fresh one.
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

    /// What a caller sent, if it may be one.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(PREFIX)?;
        let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (digits.len() == DIGITS && digits.bytes().all(is_hex)).then(|| Self(text.to_owned()))
    }

    /// What the store keeps of it.
    pub fn hash(&self) -> KeyHash {
        Sha256::digest(self.0.as_bytes()).into()
    }

    /// The text, to be shown to its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// A new key and its secret.
pub fn new_key(tenant: Tenant, role: KeyRole, name: &str) -> (ApiKey, Secret) {
    let created_at = Timestamp::default();
    let name = name.to_owned();
    let key = ApiKey { id: Uuid::now_v7(), tenant, role, name, created_at, revoked_at: None };
    (key, Secret::generate())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_from_its_own_text_and_no_other() {
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
