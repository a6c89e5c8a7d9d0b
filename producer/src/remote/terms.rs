//! What a run is asked for, what it says meanwhile, and why it may end early.

use std::path::PathBuf;

use super::answers::RemoteError;
use crate::{batch_file::BatchFileError, progress::BatchProgress};

/// Which files, and how the server is to answer them.
#[derive(Debug, Clone)]
pub struct RemoteSettings {
    /// Batch lines; `-` is standard input.
    pub input: PathBuf,
    /// Answers; what is remembered lies beside it.
    pub output: PathBuf,
    /// The model of lines that name none.
    pub model: String,
    /// How long each batch may take, as `24h`.
    pub window: String,
    /// `normal` or `low`.
    pub priority: String,
    /// Forget an earlier run.
    pub restart: bool,
}

/// What a run says while it runs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum RemoteUpdate {
    /// Lines and bytes of the input read so far.
    Reading(u64, u64),
    /// Bytes of a batch sent so far, and all that it has.
    Uploading(u64, u64),
    /// Something to tell.
    Notice(String),
    /// Lines that are over.
    Progress(BatchProgress),
}

/// Why a run ended early. What was done is remembered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteRunError {
    /// Input or output cannot be used.
    #[error(transparent)]
    File(#[from] BatchFileError),
    /// The server did not do as asked.
    #[error(transparent)]
    Server(#[from] RemoteError),
    /// The input is another one than the run began with.
    #[error(
        "{0} is not what the earlier run to this output began with: give it back as it was, or start \
         over with --restart"
    )]
    InputChanged(PathBuf),
    /// The server has no such model.
    #[error("the server serves no model '{model}': it serves {served}")]
    NotServed {
        /// What is asked for.
        model: String,
        /// What there is.
        served: String,
    },
    /// The server will not have a batch.
    #[error("the server refused {batch}: {problem}")]
    NoBatch {
        /// Its name.
        batch: String,
        /// The first error, and how many there are.
        problem: String,
    },
    /// The server does not know what it made.
    #[error(
        "the server does not know {0} any more, or it is another's: use the key it was made with, or \
         start over with --restart"
    )]
    Gone(String),
}
