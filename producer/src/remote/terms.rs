//! Settings, updates and errors of a run over a batch file that a server answers.

use std::path::PathBuf;

use super::{answers::RemoteError, api::Escalation};
use crate::{batch_file::BatchFileError, progress::BatchProgress};

/// Files of a run, and parameters of its batches.
#[derive(Debug, Clone)]
pub struct RemoteSettings {
    /// Batch lines; `-` is standard input.
    pub input: PathBuf,
    /// Answers: a file, a pipe, or `-` for standard output.
    pub output: PathBuf,
    /// Folder of the state; by default it is beside the output, or beside the input if the output is a stream.
    pub state: Option<PathBuf>,
    /// Model of lines that do not name one.
    pub model: String,
    /// Time limit of each batch, as `24h`.
    pub window: String,
    /// `normal` or `low`.
    pub priority: String,
    /// Another model for lines that have not begun at some time after the creation of their batch.
    pub escalation: Option<Escalation>,
    /// Whether to discard an earlier run.
    pub restart: bool,
}

/// An update of a run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum RemoteUpdate {
    /// Lines and bytes of the input read so far.
    Reading(u64, u64),
    /// Bytes of a batch sent so far, and its size.
    Uploading(u64, u64),
    /// A message for the user.
    Notice(String),
    /// Finished lines.
    Progress(BatchProgress),
}

/// A run ended early. Its state is recorded for the next run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteRunError {
    /// Input or output cannot be used.
    #[error(transparent)]
    File(#[from] BatchFileError),
    /// A call to the server failed.
    #[error(transparent)]
    Server(#[from] RemoteError),
    /// The input differs from that of the earlier run.
    #[error(
        "{0} changed since the earlier run to this output: restore it, or start over with --restart"
    )]
    InputChanged(PathBuf),
    /// The server does not serve the model.
    #[error("the server serves no model '{model}': it serves {served}")]
    NotServed {
        /// The model that the lines name.
        model: String,
        /// The models that the server serves.
        served: String,
    },
    /// The server refused the file of a batch.
    #[error("the server refused {batch}: {problem}")]
    BatchRefused {
        /// Id of the batch.
        batch: String,
        /// The first error and the number of errors.
        problem: String,
    },
    /// The server does not know a batch or file of this run.
    #[error(
        "the server does not know {0}, or it belongs to another tenant: use the key it was created \
         with, or start over with --restart"
    )]
    Gone(String),
}
