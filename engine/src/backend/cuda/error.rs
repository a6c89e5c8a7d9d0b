//! Why a model does not start on a device.

use super::{device::DeviceError, weights::WeightsError};
use crate::{config::Linear, files::ModelError};

/// Why a model does not start on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaLoadError {
    /// There is no CUDA driver.
    #[error("this machine has no CUDA driver (libcuda): use --device cpu")]
    NoDriver,
    /// The driver is older than the kernels.
    #[error("the CUDA driver is of version {}, at least {} is needed", version(*found), version(*needed))]
    DriverTooOld {
        /// Its version, 1000 · major + 10 · minor.
        found: i32,
        /// The least that will do.
        needed: i32,
    },
    /// No device of that number.
    #[error("there is no device cuda:{ordinal}: this machine has {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// Devices that there are.
        count: usize,
    },
    /// The device is too old.
    #[error(
        "{name} has compute capability {}.{}, at least 8.0 is needed",
        capability.0, capability.1
    )]
    TooOld {
        /// The device.
        name: String,
        /// What it has.
        capability: (u32, u32),
    },
    /// The model is of a kind that the kernels cannot run.
    #[error("the device cannot run models with {0}")]
    Unsupported(&'static str),
    /// The device has too little memory.
    #[error(
        "the model needs {} MiB of device memory and {} MiB are free: {} MiB are missing",
        mib(*needed_bytes), free_bytes >> 20, mib(needed_bytes.saturating_sub(*free_bytes))
    )]
    OutOfMemory {
        /// Weights, buffers, the KV blocks asked for (at least one), and a margin.
        needed_bytes: u64,
        /// What nobody holds.
        free_bytes: u64,
    },
    /// The device computes something else than the host.
    #[error("the device fails its self-test on {linear:?} with {rows} rows: use --device cpu")]
    SelfTest {
        /// A linear of the first or the last layer.
        linear: Linear,
        /// Rows of the step.
        rows: usize,
    },
    /// The model's file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A call of the driver.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

impl From<WeightsError> for CudaLoadError {
    fn from(error: WeightsError) -> Self {
        match error {
            WeightsError::Model(error) => Self::Model(error),
            WeightsError::Device(error) => Self::Device(error),
        }
    }
}
