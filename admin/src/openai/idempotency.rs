//! The header `Idempotency-Key`: a repeated request with the same key returns what the first one created.

use axum::http::HeaderMap;
use sha2::{Digest as _, Sha256};

use crate::ApiError;

/// Name of the header.
const HEADER: &str = "Idempotency-Key";
/// Most characters of a key.
const KEY_CHARS_MAX: usize = 255;

/// Returns the idempotency key of a request.
///
/// # Errors
/// If it is too long, empty or not ASCII.
pub(crate) fn key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(HEADER) else { return Ok(None) };
    let is_valid = |text: &&str| (1..=KEY_CHARS_MAX).contains(&text.len());
    match value.to_str().ok().filter(is_valid) {
        Some(text) => Ok(Some(text.to_owned())),
        None => {
            let message = format!("{HEADER} must be 1 to {KEY_CHARS_MAX} ASCII characters");
            Err(ApiError::invalid_value(HEADER, message))
        }
    }
}

/// Returns a hash of the parts of a request, each with its length.
pub(crate) fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// The error for a key that an earlier, different request has.
pub(crate) fn conflict(what: &str) -> ApiError {
    let message =
        format!("the idempotency key was used for a different {what}: choose another key");
    ApiError::conflict("idempotency_conflict", &message).at(HEADER)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn key_is_short_ascii() {
        let of = |text: &str| {
            let value = HeaderValue::from_str(text).expect("a header");
            key(&HeaderMap::from_iter([(HEADER.parse().expect("a name"), value)]))
        };
        assert_eq!(key(&HeaderMap::new()), Ok(None));
        assert_eq!(of("nightly/7"), Ok(Some("nightly/7".to_owned())));
        for wrong in ["", "ü", &"x".repeat(KEY_CHARS_MAX + 1)] {
            assert_eq!(of(wrong).expect_err("it is invalid").param(), Some(HEADER), "{wrong}");
        }
    }

    #[test]
    fn parts_of_a_request_do_not_run_together() {
        assert_ne!(hash([b"ab".as_slice(), b"c"]), hash([b"a".as_slice(), b"bc"]));
        assert_eq!(hash([b"a".as_slice()]), hash([b"a".as_slice()]));
    }
}
