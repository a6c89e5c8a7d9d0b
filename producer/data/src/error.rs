//! [`DataError`]: why a source or a sink cannot be used.

use std::{io, path::PathBuf};

use tritmill_client::http::{BadCertificates, HttpError};

/// A source or a sink cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The address begins with a scheme that is not known.
    #[error(
        "unknown scheme '{scheme}' of {address}: known are s3://, gs://, az://, https://, http://, and paths"
    )]
    Scheme {
        /// The address.
        address: String,
        /// Its scheme.
        scheme: String,
    },
    /// The address has no bucket, or its path has an empty or relative part.
    #[error("bad address {address}: {problem}")]
    Address {
        /// The address.
        address: String,
        /// What is wrong.
        problem: String,
    },
    /// The operator of the server allows no such address.
    #[error("{address} is not below an address that the operator allows (--allow-url)")]
    NotAllowed {
        /// The address.
        address: String,
    },
    /// The object store refuses the credentials, or they lack a right.
    #[error(
        "no right to use {address}: the object store refuses the credentials of {variables}: {cause}"
    )]
    Denied {
        /// The address.
        address: String,
        /// The environment variables with credentials.
        variables: &'static str,
        /// What the store says.
        cause: String,
    },
    /// There is nothing at the address.
    #[error("nothing is at {address}")]
    NotFound {
        /// The address.
        address: String,
    },
    /// The object store has no such bucket.
    #[error("cannot use {address}: {cause}")]
    NoBucket {
        /// The address.
        address: String,
        /// What the store says.
        cause: String,
    },
    /// The object store failed.
    #[error("cannot use {address}: {cause}")]
    Objects {
        /// The address.
        address: String,
        /// The root cause.
        cause: String,
    },
    /// The web server did not answer.
    #[error("cannot use {address}: {source}")]
    Http {
        /// The address.
        address: String,
        /// The cause.
        source: HttpError,
    },
    /// The web server answered with another status than success.
    #[error("cannot use {address}: the server answers with status {status}")]
    Status {
        /// The address.
        address: String,
        /// The status.
        status: u16,
    },
    /// The web server sends its client to another address, which is not followed.
    #[error(
        "cannot use {address}: the server answers with a redirect (status {status}), which is not followed"
    )]
    Redirect {
        /// The address.
        address: String,
        /// The status.
        status: u16,
    },
    /// The rows of a file cannot become requests of this endpoint.
    #[error(
        "{name} has rows, which need the endpoint /v1/chat/completions, /v1/completions or /v1/embeddings"
    )]
    NoEndpoint {
        /// Name of the file.
        name: String,
    },
    /// What reads the lines wants no more.
    #[error("the lines are not wanted any more")]
    Unwanted,
    /// The system's certificates cannot be used.
    #[error(transparent)]
    Certificates(#[from] BadCertificates),
    /// A source cannot be read, or ends in the middle.
    #[error("cannot read {name}: {source}")]
    Read {
        /// Name of the file.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// A Parquet file is damaged or has something that is not supported.
    #[error("cannot read {name}: not usable as Parquet: {cause}")]
    Parquet {
        /// Name of the file.
        name: String,
        /// The cause.
        cause: String,
    },
    /// A file has more bytes than may be copied to this machine.
    #[error("{name} has more than {bytes_max} bytes")]
    TooLarge {
        /// Name of the file.
        name: String,
        /// The limit.
        bytes_max: u64,
    },
    /// A file has no such column.
    #[error("{name} has no column {column}: it has {found}")]
    NoColumn {
        /// Name of the file.
        name: String,
        /// The wanted column, or a choice of columns.
        column: String,
        /// The columns that it has.
        found: String,
    },
    /// A split of a single file was asked for.
    #[error("{address} is one file: only a folder has splits")]
    SplitOfFile {
        /// The address.
        address: String,
    },
    /// A folder has no file of a known form.
    #[error("{address} has no Parquet, CSV or JSON lines files{of_split}")]
    EmptyFolder {
        /// The address.
        address: String,
        /// ` of the split '…'`, if one was asked for.
        of_split: String,
    },
    /// The source has fewer rows than at an earlier run, because it ended in the middle.
    #[error(
        "{cause}: it ended after {lines} rows, an earlier run read {earlier}; nothing was changed"
    )]
    Shorter {
        /// Why it ended.
        cause: Box<DataError>,
        /// Rows read now.
        lines: u64,
        /// Rows read by the earlier run.
        earlier: u64,
    },
    /// The folder of the run belongs to another source or sink.
    #[error(
        "{path} keeps the state of {was}: choose another folder with --state, or delete it with --restart"
    )]
    OtherRun {
        /// The folder.
        path: PathBuf,
        /// Source and sink of the other run.
        was: String,
    },
    /// Another process runs with the same folder.
    #[error("another run uses {0}")]
    Locked(PathBuf),
    /// Files of the run cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// What an earlier run left cannot be read.
    #[error("cannot read {path}: {source}; --restart begins anew")]
    State {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The answers cannot be written in this form.
    #[error("cannot write {address}: {problem}")]
    Sink {
        /// The address.
        address: String,
        /// What is wrong.
        problem: String,
    },
}

impl DataError {
    /// Returns whether a later try may succeed: the network or a server failed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Http { source, .. } => matches!(
                source,
                HttpError::Resolve { .. }
                    | HttpError::Connect { .. }
                    | HttpError::Broken(_)
                    | HttpError::Timeout(_)
            ),
            Self::Status { status, .. } => matches!(status, 408 | 425 | 429 | 500..),
            Self::Objects { .. } => true,
            Self::Read { source, .. } | Self::Write { source, .. } => is_broken(source),
            _ => false,
        }
    }

    /// Returns whether a source ended before its content did, as a part of a file does.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::UnexpectedEof)
    }

    /// Returns whether the reader of standard output closed it.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// The kind of an error while something is read that a later try may read.
pub(crate) const BROKEN: io::ErrorKind = io::ErrorKind::ConnectionAborted;

/// Whether a connection broke, and not what came over it, or a disk is full for now.
fn is_broken(error: &io::Error) -> bool {
    matches!(error.kind(), BROKEN | io::ErrorKind::StorageFull)
}

impl From<DataError> for io::Error {
    fn from(error: DataError) -> Self {
        let kind = if error.is_transient() { BROKEN } else { io::ErrorKind::Other };
        Self::new(kind, error)
    }
}
