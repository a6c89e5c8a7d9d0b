//! Why a worker ends.

use std::{sync::Arc, time::Duration};

use tritmill_engine::backend::StepError;
use tritmill_queue::{DispatchError, StoreError};

/// The reason why a worker ended before its work was done. Leases of the claims it still holds
/// expire.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The store failed for longer than the worker waits.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The dispatcher failed.
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
    /// An engine's thread died.
    #[error("the engine on {0} stopped: its thread panicked")]
    EngineStopped(String),
    /// A step does not end. Claims were handed back; the process should exit, since the thread may
    /// never end.
    #[error("the engine on {device} hangs: one step has run for more than {} s", .limit.as_secs_f32())]
    EngineHangs {
        /// The device that runs the step.
        device: String,
        /// How long a step may run.
        limit: Duration,
    },
    /// A device cannot be used any more in this process. All claims were handed back; the process
    /// should exit.
    #[error("{device}: {error}")]
    DeviceLost {
        /// The lost device.
        device: String,
        /// Its last error.
        #[source]
        error: Arc<StepError>,
    },
    /// An engine's thread could not be started.
    #[error("cannot start an engine's thread: {0}")]
    Thread(#[source] std::io::Error),
}

impl WorkerError {
    /// Returns whether a server refuses this program until an operator has changed something: another try fails, too.
    pub(super) fn needs_operator(&self) -> bool {
        matches!(
            self,
            Self::Store(StoreError::Refused(_)) | Self::Dispatch(DispatchError::Refused(_))
        )
    }
}
