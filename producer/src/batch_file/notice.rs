//! What a run of a batch file tells the person, and why there is none.

use std::{io, path::PathBuf};

use tritmill_queue::StoreError;

/// Something the person should be told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// There is an output file, but its store is gone: it was put aside and all lines run again.
    StoreMissing {
        /// Where the old output is now.
        kept_as: PathBuf,
    },
    /// The output file is gone and is written again from the store.
    OutputMissing,
    /// The output file ended in a torn line, which was cut off.
    OutputTorn {
        /// Bytes cut off.
        bytes: u64,
    },
    /// The output file said something else than the store and was written again.
    OutputRewritten,
    /// Lines of earlier runs that are no longer in the input, or were changed; their answers were
    /// dropped.
    Pruned {
        /// How many.
        lines: u64,
    },
    /// Every earlier answer was dropped, as asked.
    Restarted,
    /// Lines that had failed run again, as asked.
    Retried {
        /// How many.
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
                write!(f, "the output file ended in a torn line: {bytes} bytes cut off")
            }
            Self::OutputRewritten => {
                f.write_str("the output file differs from the database: written again")
            }
            Self::Pruned { lines } => {
                write!(f, "{lines} lines of the last run were removed or changed in the input")
            }
            Self::Restarted => f.write_str("earlier answers dropped"),
            Self::Retried { lines } => write!(f, "{lines} failed lines run again"),
        }
    }
}

/// Why a batch file cannot be answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BatchFileError {
    /// The input cannot be read.
    #[error("cannot read {path}: {source}")]
    Input {
        /// The input.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The output, its store or its lock cannot be written.
    #[error("cannot write {path}: {source}")]
    Output {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Input and output are the same file.
    #[error("{0} is both input and output")]
    SameFile(PathBuf),
    /// Another run owns the output.
    #[error("{0} is being written by another run; wait for it or choose another output")]
    Locked(PathBuf),
    /// The answers so far are another model's.
    #[error(
        "{path} has answers of model '{was}', not of '{now}'; run with --restart to drop them, or \
         choose another output"
    )]
    OtherModel {
        /// The output.
        path: PathBuf,
        /// Who answered so far.
        was: String,
        /// Who would answer now.
        now: String,
    },
    /// The store beside the output failed.
    #[error("database {path}: {source}")]
    Store {
        /// The store's file.
        path: PathBuf,
        /// Why.
        source: StoreError,
    },
}
