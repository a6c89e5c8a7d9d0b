//! What a server says of a batch, and why it did not do as asked.

use std::{io, path::Path, time::Duration};

use serde::Deserialize;

use crate::http::HttpError;

/// Why a server did not do as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// There was no answer.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// It refused.
    #[error("the server refused ({status} {code}): {message}")]
    Refused {
        /// HTTP's status.
        status: u16,
        /// A word for programs.
        code: String,
        /// A sentence for people.
        message: String,
        /// When to try again, if it said so.
        retry_after: Option<Duration>,
    },
    /// What answers is no such server.
    #[error("{url} does not answer as a Tritmill server does: {problem}")]
    Stranger {
        /// What was called.
        url: String,
        /// What it said.
        problem: String,
    },
    /// A file of this side cannot be used.
    #[error("cannot use {path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A key that no header can carry.
    #[error("the key has characters that no key has")]
    Key,
}

impl RemoteError {
    pub(super) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.display().to_string(), source }
    }

    /// Whether the same call may do better later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http(error) => !matches!(error, HttpError::Address(_) | HttpError::Tls { .. }),
            Self::Refused { status, .. } => *status == 429 || *status >= 500,
            _ => false,
        }
    }

    /// Whether it is about something that is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// A batch as a server shows it.
#[derive(Debug, Clone, Deserialize)]
pub struct RemoteBatch {
    /// Its name.
    pub id: String,
    /// Where it is.
    pub status: String,
    /// Answers, once it is over.
    pub output_file_id: Option<String>,
    /// Errors, once it is over.
    pub error_file_id: Option<String>,
    /// How many lines.
    #[serde(default)]
    pub request_counts: Counted,
    /// Why it is no batch.
    pub errors: Option<Errors>,
}

/// Lines of a batch.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct Counted {
    /// Answered.
    pub completed: u64,
    /// With an error.
    pub failed: u64,
}

/// What is wrong with a batch.
#[derive(Debug, Clone, Deserialize)]
pub struct Errors {
    /// One by one.
    pub data: Vec<LineError>,
}

/// What is wrong with a line.
#[derive(Debug, Clone, Deserialize)]
pub struct LineError {
    /// A word for programs.
    pub code: String,
    /// A sentence for people.
    pub message: String,
}
