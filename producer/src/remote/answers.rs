//! What a server answers about batches, and the errors of its calls.

use std::{io, path::Path, time::Duration};

use serde::Deserialize;

use crate::http::HttpError;

/// Lines that were added to an open batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct LinesAdded {
    /// Lines that are new.
    pub added: u64,
    /// Lines that the batch had already.
    pub known: u64,
    /// Lines of the batch with them.
    pub total: u64,
}

/// A call to a server failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// There was no answer.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The server answered with an error.
    #[error("the server refused ({status} {code}): {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Error code for programs.
        code: String,
        /// Error message for people.
        message: String,
        /// Time to wait before the next call, if the server named one.
        retry_after: Option<Duration>,
    },
    /// The answer is not one of this API: the URL belongs to another service.
    #[error("{url} does not answer as a Tritmill server does: {problem}")]
    Unexpected {
        /// The URL that was called.
        url: String,
        /// What is wrong with the answer.
        problem: String,
    },
    /// A local file cannot be read or written.
    #[error("cannot use {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The API key has characters that an HTTP header cannot carry.
    #[error("the key has characters that are not allowed in an HTTP header")]
    Key,
}

impl RemoteError {
    pub(super) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.display().to_string(), source }
    }

    /// Returns whether the same call may succeed later. Damaged data stays damaged.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http(error) => !matches!(error, HttpError::Url(_) | HttpError::Tls { .. }),
            Self::Refused { status, code, .. } => {
                matches!(status, 408 | 429) || (*status >= 500 && code != "damaged_data")
            }
            _ => false,
        }
    }

    /// Returns whether the server does not know the file or batch.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// A batch as a server shows it.
#[derive(Debug, Clone, Deserialize)]
pub struct RemoteBatch {
    /// Its id.
    pub id: String,
    /// Its state, as `in_progress`.
    pub status: String,
    /// Id of the file of answers, once the batch is finished.
    pub output_file_id: Option<String>,
    /// Id of the file of errors, once the batch is finished.
    pub error_file_id: Option<String>,
    /// Counts of its lines.
    #[serde(default)]
    pub request_counts: RequestCounts,
    /// Why the server refused its file.
    pub errors: Option<BatchErrors>,
}

/// Finished lines of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct RequestCounts {
    /// Lines with an answer.
    pub completed: u64,
    /// Lines with an error.
    pub failed: u64,
}

/// What a batch would need.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct BatchEstimate {
    /// Its lines.
    pub lines: u64,
    /// Lines that were read; the counts are scaled from them to the size of the file.
    pub sampled_lines: u64,
    /// Of these, lines that are no valid request.
    pub invalid_lines: u64,
    /// Tokens of the prompts.
    pub input_tokens: u64,
    /// The most tokens that the answers may have.
    pub max_output_tokens: u64,
    /// The most that the answers may cost, by currency; empty without prices.
    pub max_cost: Vec<Cost>,
    /// Seconds until it would be finished; `None` if no rate is known.
    pub seconds: Option<u64>,
}

/// An amount of money.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Cost {
    /// The currency.
    pub currency: String,
    /// The amount in its unit.
    pub amount: f64,
}

/// Errors of a batch file that a server refused.
#[derive(Debug, Clone, Deserialize)]
pub struct BatchErrors {
    /// The errors.
    pub data: Vec<LineError>,
}

/// An error of one line.
#[derive(Debug, Clone, Deserialize)]
pub struct LineError {
    /// Error code for programs.
    pub code: String,
    /// Error message for people.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_data_is_permanent_and_other_server_errors_are_transient() {
        let refused = |status, code: &str| {
            let (code, message) = (code.to_owned(), String::new());
            RemoteError::Refused { status, code, message, retry_after: None }.is_transient()
        };
        assert!(
            refused(429, "queue_full")
                && refused(408, "timeout")
                && refused(503, "unavailable")
                && refused(500, "x")
        );
        assert!(!refused(500, "damaged_data") && !refused(404, "not_found"));
    }
}
