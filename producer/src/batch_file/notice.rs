//! Notices and errors of a run over a batch file.

use std::{io, path::PathBuf};

use tritmill_queue::StoreError;

/// A message for the user about what a run found or changed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// The output file has no database: it was renamed, and all lines run again.
    StoreMissing {
        /// The old output file.
        kept_as: PathBuf,
    },
    /// The output file was missing and is written again from the database.
    OutputMissing,
    /// The output file ended in an incomplete line, which was cut off.
    OutputTorn {
        /// Number of bytes cut off.
        bytes: u64,
    },
    /// The output file differed from the database and was written again.
    OutputRewritten,
    /// Answers to lines that were removed from the input or changed were deleted.
    Pruned {
        /// Number of lines.
        lines: u64,
    },
    /// All earlier answers were deleted, as requested.
    Restarted,
    /// Failed lines run again, as requested.
    Retried {
        /// Number of lines.
        lines: u64,
    },
}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::StoreMissing { kept_as } => write!(
                f,
                "the database of earlier answers is gone: every line runs again, the old output is \
                 kept as {}",
                kept_as.display()
            ),
            Self::OutputMissing => {
                f.write_str("the output file is gone: writing it again from the database")
            }
            Self::OutputTorn { bytes } => {
                write!(f, "the output file ended in an incomplete line: {bytes} bytes cut off")
            }
            Self::OutputRewritten => {
                f.write_str("the output file differs from the database: written again")
            }
            Self::Pruned { lines } => {
                write!(f, "{lines} lines of the last run were removed or changed in the input")
            }
            Self::Restarted => f.write_str("earlier answers deleted"),
            Self::Retried { lines } => write!(f, "{lines} failed lines run again"),
        }
    }
}

impl BatchFileError {
    /// Returns whether the reader of the output closed it, which is no failure: the answers are kept.
    pub fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
    }
}

/// A batch file cannot be answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchFileError {
    /// The input cannot be read.
    #[error("cannot read {path}: {source}")]
    Input {
        /// The input.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The output, its database or its lock cannot be written.
    #[error("cannot write {path}: {source}")]
    Output {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The input is not lines of text.
    #[error("{path} is {format}, not lines of text: {remedy} | tritmill batch run - -o OUT")]
    Format {
        /// The input.
        path: PathBuf,
        /// The format.
        format: &'static str,
        /// A command that makes lines of it.
        remedy: &'static str,
    },
    /// The output cannot hold answers.
    #[error("{path} is {what}, not a file: give a file, a pipe, or - for standard output")]
    NotAFile {
        /// The output.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// Input and output are the same file.
    #[error("{0} is both input and output")]
    SameFile(PathBuf),
    /// Another run holds the lock of the output.
    #[error("{0} is being written by another run; wait for it or choose another output")]
    Locked(PathBuf),
    /// The answers so far are of another model.
    #[error(
        "{path} has answers of model '{was}', not of '{now}'; run with --restart to delete them, or \
         choose another output"
    )]
    OtherModel {
        /// The output.
        path: PathBuf,
        /// The model of the answers so far.
        was: String,
        /// The model of this run.
        now: String,
    },
    /// The answers so far were made with other settings.
    #[error(
        "{path} has answers made with {was}; this run has {now}: run with --restart to delete them, or choose another output"
    )]
    OtherLimits {
        /// The output.
        path: PathBuf,
        /// The settings of the answers so far.
        was: String,
        /// The settings of this run.
        now: String,
    },
    /// The database beside the output failed.
    #[error("database {path}: {source}")]
    Store {
        /// The database file.
        path: PathBuf,
        /// The cause.
        source: StoreError,
    },
}
