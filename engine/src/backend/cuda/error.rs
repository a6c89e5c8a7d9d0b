//! Errors of starting a model on a device.

use super::device::DeviceError;
use crate::{config::Linear, files::ModelError};

/// A model did not start on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaLoadError {
    /// The machine has no CUDA driver.
    #[error("this machine has no CUDA driver (libcuda): use --device cpu")]
    NoDriver,
    /// The driver is older than the kernels.
    #[error("the CUDA driver supports CUDA {}, but at least {} is needed", version(*found), version(*needed))]
    DriverTooOld {
        /// Version found, 1000 · major + 10 · minor.
        found: i32,
        /// Oldest version that works.
        needed: i32,
    },
    /// No device has the ordinal.
    #[error("no device cuda:{ordinal}: this machine has {count}")]
    NoDevice {
        /// Requested ordinal.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device is too old.
    #[error(
        "{name} has compute capability {}.{}, at least 8.0 is needed",
        capability.0, capability.1
    )]
    TooOld {
        /// Name of the device.
        name: String,
        /// Compute capability of the device.
        capability: (u32, u32),
    },
    /// The kernels do not support the model.
    #[error("the device cannot run models with {0}")]
    Unsupported(&'static str),
    /// Two digits for a model that was trained with one.
    #[error(
        "the model was trained with int8 activations: int16 is for models with a scale for each group of inputs"
    )]
    ActivationsOfTraining,
    /// The device has too little memory.
    #[error(
        "the model needs {} MiB of device memory and {} MiB are free: {} MiB are missing",
        mib(*needed_bytes), free_bytes >> 20, mib(needed_bytes.saturating_sub(*free_bytes))
    )]
    OutOfMemory {
        /// Needed memory: weights, buffers, the requested KV blocks (at least one), and a margin.
        needed_bytes: u64,
        /// Free memory.
        free_bytes: u64,
    },
    /// The device's results differ from the host's.
    #[error("the device fails its self-test on {linear:?} with {rows} rows: use --device cpu")]
    SelfTest {
        /// The linear, of the first or the last layer.
        linear: Linear,
        /// Rows of the tested step.
        rows: usize,
    },
    /// The test of an experimental kernel has made the device unusable for this process.
    #[error(
        "a test of experimental kernels failed: {0}; --gpu-kernels standard starts without them"
    )]
    KernelFault(#[source] DeviceError),
    /// The model's file cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A call of the driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
