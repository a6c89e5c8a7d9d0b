//! The trace context of a job (W3C Trace Context).

#[cfg(feature = "opentelemetry")]
mod span;

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize};
#[cfg(feature = "opentelemetry")]
pub use span::mark_failed;

/// Characters of a value of version 00: version, trace, parent, flags.
const LENGTH: usize = 2 + 1 + 32 + 1 + 16 + 1 + 2;

/// A valid `traceparent`: the trace and the span of the submitter.
///
/// ```
/// use tritmill_queue::TraceParent;
///
/// let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// let parent: TraceParent = text.parse()?;
/// assert_eq!(parent.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
/// assert_eq!(parent.parent_id(), "00f067aa0ba902b7");
/// assert_eq!(parent.flags(), 1);
/// assert_eq!(parent.to_string(), text);
/// # Ok::<(), tritmill_queue::TraceParentError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct TraceParent(String);

/// A text is not a valid `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TraceParentError {
    /// Not `VERSION-TRACE-PARENT-FLAGS`, of 2, 32, 16 and 2 digits.
    #[error(
        "traceparent must be VERSION-TRACE-PARENT-FLAGS, of 2, 32, 16 and 2 lowercase hex digits"
    )]
    Shape,
    /// The version is `ff`, which is invalid.
    #[error("traceparent version ff is not allowed")]
    Version,
    /// The trace id or the parent id is all zeros.
    #[error("traceparent must not have a trace or a parent of zeros")]
    Zeros,
}

impl TraceParent {
    /// Returns the trace id, in 32 hex digits.
    pub fn trace_id(&self) -> &str {
        &self.0[3..35]
    }

    /// Returns the id of the submitter's span, in 16 hex digits.
    pub fn parent_id(&self) -> &str {
        &self.0[36..52]
    }

    /// Returns the flags. The lowest bit says whether the submitter records the trace.
    pub fn flags(&self) -> u8 {
        // Both digits were checked.
        u8::from_str_radix(&self.0[53..], 16).unwrap_or_default()
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TraceParent {
    type Err = TraceParentError;

    /// For a later version, keeps only the fields of version 00, as the standard requires.
    fn from_str(text: &str) -> Result<Self, TraceParentError> {
        let (known, rest) = text.split_at_checked(LENGTH).ok_or(TraceParentError::Shape)?;
        let fits = known.bytes().enumerate().all(|(at, byte)| match at {
            2 | 35 | 52 => byte == b'-',
            _ => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        });
        let more = !known.starts_with("00") && rest.starts_with('-');
        if !fits || !(rest.is_empty() || more) {
            return Err(TraceParentError::Shape);
        }
        if known.starts_with("ff") {
            return Err(TraceParentError::Version);
        }
        let parent = Self(known.to_owned());
        let zeros = |id: &str| id.bytes().all(|byte| byte == b'0');
        if zeros(parent.trace_id()) || zeros(parent.parent_id()) {
            return Err(TraceParentError::Zeros);
        }
        Ok(parent)
    }
}

/// Deserializes a job's `traceparent`. An invalid one is dropped: a job is not refused for its trace.
pub(crate) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Option<TraceParent>, D::Error> {
    let text = Option::<String>::deserialize(from)?;
    Ok(text.and_then(|text| text.parse().ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_traceparents_parse() {
        let check = |text: &str, expected: Result<&str, TraceParentError>| {
            let parent = text.parse::<TraceParent>().map(|parent| parent.to_string());
            assert_eq!(parent, expected.map(str::to_owned), "{text}");
        };
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        check(good, Ok(good));
        let later = format!("cc{}", &good[2..]);
        check(&later, Ok(&later));
        check(&format!("{later}-what-comes"), Ok(&later));
        let shape = Err(TraceParentError::Shape);
        check("", shape);
        check("nonsense", shape);
        check(&good[..54], shape);
        check(&format!("{good}-more"), shape);
        check(&format!("{later}x"), shape);
        check(&good.replace('-', "_"), shape);
        check(&good.to_uppercase(), shape);
        check(&good.replace("4bf9", "ä2f"), shape);
        check(&format!("ff{}", &good[2..]), Err(TraceParentError::Version));
        let zeros = Err(TraceParentError::Zeros);
        check(&good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)), zeros);
        check(&good.replace("00f067aa0ba902b7", &"0".repeat(16)), zeros);
    }
}
