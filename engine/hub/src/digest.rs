//! [`Digest`]: the hash that a file must have, and its computation while the file arrives.
//!
//! Large files are stored by their sha256. Of small ones the hub states the id that git gives them: the sha1 of
//! `blob LENGTH\0` and the content. Both are the name of the blob in the cache.

use std::fmt;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// The hash of a file, in lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Digest {
    /// Of a file in large file storage.
    Sha256(String),
    /// Of a file in git.
    GitBlob(String),
}

impl Digest {
    /// Parses an entity tag: `"HASH"`, weak or not. `None` if it is not a hash.
    pub fn of_etag(etag: &str) -> Option<Self> {
        Self::parse(etag.trim().trim_start_matches("W/").trim_matches('"'))
    }

    /// Parses a hash by its length.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        let is_hex = text.bytes().all(|b| b.is_ascii_hexdigit());
        match text.len() {
            64 if is_hex => Some(Self::Sha256(text)),
            40 if is_hex => Some(Self::GitBlob(text)),
            _ => None,
        }
    }

    /// Returns the hexadecimal digits, which name the blob.
    pub fn hex(&self) -> &str {
        let (Self::Sha256(hex) | Self::GitBlob(hex)) = self;
        hex
    }

    /// Starts the computation for a file of this size.
    pub fn hasher(&self, size: u64) -> Hasher {
        match self {
            Self::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Self::GitBlob(_) => {
                Hasher::GitBlob(Sha1::new_with_prefix(format!("blob {size}\0").as_bytes()))
            }
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hex())
    }
}

/// The hash of the bytes so far.
pub(crate) enum Hasher {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hasher {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    /// Returns the hash.
    pub fn finish(self) -> Digest {
        match self {
            Self::Sha256(hasher) => Digest::Sha256(hex(&hasher.finalize())),
            Self::GitBlob(hasher) => Digest::GitBlob(hex(&hasher.finalize())),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What git and sha256sum print for "hello\n".
    const GIT: &str = "ce013625030ba8dba906f756967f9e9ca394464a";
    const SHA256: &str = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";

    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        for hash in [GIT, SHA256] {
            let digest = Digest::of_etag(&format!("\"{hash}\"")).expect("a hash");
            let mut hasher = digest.hasher(6);
            hasher.update(b"hel");
            hasher.update(b"lo\n");
            assert_eq!(hasher.finish(), digest);
        }
    }

    #[test]
    fn entity_tag_that_is_no_hash_is_refused() {
        assert_eq!(Digest::of_etag(&format!("W/\"{GIT}\"")), Some(Digest::GitBlob(GIT.to_owned())));
        for bad in ["", "\"\"", "\"abc\"", &format!("\"{GIT}-gzip\""), &"../".repeat(20)] {
            assert_eq!(Digest::of_etag(bad), None, "{bad}");
        }
    }
}
