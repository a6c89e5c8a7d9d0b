//! What a download reports.

use std::time::Duration;

use crate::{
    error::{PullError, Unreachable},
    variants::PassedOver,
};

/// What happens during a download.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The hub is away: the model is used as it is in the cache.
    FromCache {
        /// Why the hub was not asked.
        cause: &'a PullError,
    },
    /// Of several GGUF files one was chosen.
    Chosen {
        /// Path in the repository.
        file: &'a str,
        /// The others, with the reasons.
        passed_over: &'a [PassedOver],
    },
    /// Another process downloads the file.
    Waiting {
        /// Path in the repository.
        file: &'a str,
    },
    /// A download starts, or goes on.
    Starting {
        /// Path in the repository.
        file: &'a str,
        /// Size in bytes.
        size: u64,
        /// Bytes of an earlier download.
        received: u64,
    },
    /// Bytes arrived.
    Received {
        /// Path in the repository.
        file: &'a str,
        /// Bytes so far; fewer than before if the download had to start again.
        received: u64,
    },
    /// The connection was lost.
    Retrying {
        /// Path in the repository.
        file: &'a str,
        /// Why.
        cause: &'a Unreachable,
        /// Time until the next request.
        delay: Duration,
    },
    /// The file is complete and has the right hash.
    Finished {
        /// Path in the repository.
        file: &'a str,
    },
}

/// Receives events.
pub(crate) type Progress<'p> = dyn FnMut(Event<'_>) + Send + 'p;
