//! [`PullError`]: the reasons why a model is not in the cache, each with what to do about it.

use std::{fmt, io, path::Path, path::PathBuf};

use crate::{RemoteFile, SettingsError};

/// Most files that an error lists.
const LISTED_MAX: usize = 12;

/// The reason why a model could not be pulled. The messages take one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The environment is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The hub gives the files only to those who accepted the licence.
    #[error(
        "{repository} is gated: accept its licence at {page}, then set HF_TOKEN to a token of that account"
    )]
    Gated {
        /// `ORG/NAME`
        repository: String,
        /// Page of the repository.
        page: String,
    },
    /// The hub does not accept the token.
    #[error("the hub refuses the token (HF_TOKEN or the token file) for {repository}: {reason}")]
    TokenRefused {
        /// `ORG/NAME`
        repository: String,
        /// What the hub says.
        reason: String,
    },
    /// The repository does not exist, or the user may not know that it does.
    #[error(
        "the hub has no repository {repository}, or it is private and HF_TOKEN has no access to it"
    )]
    NoRepository {
        /// `ORG/NAME`
        repository: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error("{repository} has no revision {revision}")]
    NoRevision {
        /// `ORG/NAME`
        repository: String,
        /// Branch, tag or commit.
        revision: String,
    },
    /// The repository has no such file.
    #[error("{repository} has no file {file} at revision {revision}")]
    NoFile {
        /// `ORG/NAME`
        repository: String,
        /// Path in the repository.
        file: String,
        /// Branch, tag or commit.
        revision: String,
    },
    /// Only a GGUF file is a whole model.
    #[error(
        "{file} is not a .gguf file: without --file, all files of a safetensors model are pulled"
    )]
    NotAModel {
        /// Path in the repository.
        file: String,
    },
    /// The repository has neither weights that can be read nor one GGUF file.
    #[error(
        "{repository} has no model: neither config.json with model.safetensors nor a .gguf file"
    )]
    NoModel {
        /// `ORG/NAME`
        repository: String,
    },
    /// A file of the repository says that its weights cannot be used as they are.
    #[error("{repository} cannot be used because of its {file}: {why}")]
    Unsupported {
        /// `ORG/NAME`
        repository: String,
        /// Path in the repository.
        file: String,
        /// The unsupported feature.
        why: &'static str,
    },
    /// There are several GGUF files, and the names do not tell which one is ternary.
    #[error("{repository} has several models, choose one with --file: {files}")]
    Several {
        /// `ORG/NAME`
        repository: String,
        /// The candidates.
        files: FileList,
    },
    /// Offline, and the cache does not have the model.
    #[error("{reference} is not completely in the cache {cache}, and HF_HUB_OFFLINE is set")]
    NotCached {
        /// The model.
        reference: String,
        /// Folder of the cache.
        cache: PathBuf,
    },
    /// The file that arrived is not the one that the hub describes. It is deleted.
    #[error("{file} arrived damaged: its hash is {found}, the hub says {expected}")]
    WrongHash {
        /// Path in the repository.
        file: String,
        /// Hash that the hub states.
        expected: String,
        /// Hash of what arrived.
        found: String,
    },
    /// More bytes arrived than the file has. They are deleted.
    #[error("{file} arrived damaged: it is longer than the {size} bytes that the hub states")]
    TooLong {
        /// Path in the repository.
        file: String,
        /// Size that the hub states.
        size: u64,
    },
    /// The connection was lost too often. What arrived stays.
    #[error(
        "{file} was interrupted at {received} of {size} bytes, {attempts} times in a row: {cause}; the same command \
         continues there"
    )]
    Interrupted {
        /// Path in the repository.
        file: String,
        /// Bytes in the partial file.
        received: u64,
        /// Size of the file.
        size: u64,
        /// Requests in a row that brought nothing.
        attempts: u32,
        /// Of the last one.
        cause: Unreachable,
    },
    /// The hub did not answer.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The hub answered with something else than expected.
    #[error("unexpected answer of {url}: {problem}")]
    Answer {
        /// Address without its query, which may have a signature.
        url: String,
        /// What is wrong.
        problem: String,
    },
    /// There is no room for a file. What arrived stays.
    #[error("no room for {file} in {folder}: it needs {needed} more bytes")]
    DiskFull {
        /// Path in the repository.
        file: String,
        /// Folder of the cache.
        folder: PathBuf,
        /// Bytes that are missing of the file.
        needed: u64,
    },
    /// The cache cannot be used.
    #[error("cannot use {path}: {source}")]
    Cache {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl PullError {
    /// Returns a function that adds the path to an I/O error.
    pub(crate) fn cache(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Cache { path, source }
    }

    /// Returns whether another attempt, or the cache, may help: the hub is away.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Interrupted { .. })
    }
}

/// A server without an answer, or with one that says to come later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unreachable {
    /// No connection, or it broke.
    #[error("cannot reach {host}: {cause}")]
    Connection {
        /// Host and port.
        host: String,
        /// The root cause.
        cause: String,
    },
    /// A server with too much to do, or with an error of its own.
    #[error("{host} answers {status}")]
    Busy {
        /// Host and port.
        host: String,
        /// HTTP status.
        status: u16,
        /// Seconds after which the server wants to be asked again.
        retry_after: Option<u64>,
    },
    /// The server closed the connection within the file.
    #[error("{host} closed the connection")]
    Closed {
        /// Host and port.
        host: String,
    },
}

/// Files with their sizes, for messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileList(pub Vec<RemoteFile>);

impl fmt::Display for FileList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, file) in self.0.iter().take(LISTED_MAX).enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{}", file.name)?;
            if let Some(size) = file.size {
                write!(f, " ({:.2} GB)", size as f64 / 1e9)?;
            }
        }
        match self.0.len().saturating_sub(LISTED_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
