//! Canonical JSON, and the hashes for keys, seeds and ids.
//!
//! In canonical JSON, object keys are sorted by their bytes, there are no spaces, and numbers and
//! strings are as `serde_json` writes them. Two requests that differ in key order or spacing only are
//! the same request.

use serde_json::Value;

/// What a hash is for. Each purpose has its own domain, so hashes of two purposes never collide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Key of a line: equal in every run over the same line.
    Key,
    /// Key of a refused line.
    RefusedKey,
    /// Seed of a job without one.
    Seed,
    /// Distinguishes a repeated submission from another request with the same idempotency key.
    Submission,
    /// `request_id` of a response.
    RequestId,
    /// `system_fingerprint` of a response.
    Fingerprint,
    /// Ids of the calls of tools in a response.
    CallId,
}

impl Purpose {
    const fn context(self) -> &'static str {
        match self {
            Self::Key => "tritmill batch line key",
            Self::RefusedKey => "tritmill refused batch line key",
            Self::Seed => "tritmill batch line seed",
            Self::Submission => "tritmill submission",
            Self::RequestId => "tritmill batch line request id",
            Self::Fingerprint => "tritmill system fingerprint",
            Self::CallId => "tritmill tool call id",
        }
    }
}

/// Returns the hash of the parts, each preceded by its length.
pub fn hash(purpose: Purpose, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(purpose.context());
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Returns the seed of a job that does not set one, from what identifies the job.
pub fn derived_seed(parts: &[&[u8]]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = hash(Purpose::Seed, parts);
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Returns lower-case hex of the first sixteen bytes.
pub fn short_hex(hash: &[u8]) -> String {
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the canonical JSON of a value. The JSON parser limits its depth.
pub fn canonical(value: &Value) -> String {
    let mut sorted = value.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let value: Value = serde_json::from_str(text).expect("valid JSON");
        assert_eq!(canonical(&value), expected);
    }

    #[test]
    fn keys_are_sorted_and_spaces_removed_at_every_depth() {
        check(
            r#" {"b": [1, {"z":null, "a":true}], "a": "x\"" } "#,
            r#"{"a":"x\"","b":[1,{"a":true,"z":null}]}"#,
        );
        check("[ ]", "[]");
        check("{ }", "{}");
        check("[1.50, -0.0, 18446744073709551615]", "[1.5,-0.0,18446744073709551615]");
    }

    #[test]
    fn hashes_of_different_parts_and_purposes_differ() {
        let split = hash(Purpose::Key, &[b"ab", b"c"]);
        assert_ne!(split, hash(Purpose::Key, &[b"a", b"bc"]));
        assert_ne!(split, hash(Purpose::Seed, &[b"ab", b"c"]));
        assert_eq!(short_hex(&split).len(), 32);
    }
}
