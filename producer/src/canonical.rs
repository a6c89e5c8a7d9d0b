//! One spelling for equal JSON, and the hashes that keys, seeds and ids are made of.
//!
//! Canonical means: object keys sorted by their bytes, no spaces, numbers and strings as
//! `serde_json` writes them. Two requests that differ in key order or spacing are the same request.

use serde_json::Value;

/// What a hash is for; each has a domain of its own, so that no two can be confused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Finds a line again.
    Key,
    /// Finds a refused line again.
    RefusedKey,
    /// Seed of a job that brought none.
    Seed,
    /// Tells a repeated submission from another one under the same idempotency key.
    Submission,
    /// `request_id` of a response.
    RequestId,
    /// `system_fingerprint` of a response.
    Fingerprint,
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
        }
    }
}

/// Hash of the parts, each preceded by its length.
pub fn hash(purpose: Purpose, parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key(purpose.context());
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Lower-case hex of the first sixteen bytes.
pub fn short_hex(hash: &[u8]) -> String {
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// The canonical spelling of a value. Depth is bounded by the parser's own limit.
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

fn write(value: &Value, text: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| *key);
            separated('{', '}', entries, text, |(key, value), text| {
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push(':');
                write(value, text);
            });
        }
        Value::Array(items) => separated('[', ']', items, text, write),
        scalar => text.push_str(&scalar.to_string()),
    }
}

fn separated<T>(
    open: char,
    close: char,
    items: impl IntoIterator<Item = T>,
    text: &mut String,
    each: impl Fn(T, &mut String),
) {
    text.push(open);
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        each(item, text);
    }
    text.push(close);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &str) {
        let value: Value = serde_json::from_str(text).expect("JSON");
        assert_eq!(canonical(&value), expected);
    }

    #[test]
    fn keys_are_sorted_and_spaces_dropped_at_every_depth() {
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
