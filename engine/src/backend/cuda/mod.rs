//! The CUDA backend: the same forward pass as the CPU's, by the kernels of `kernels/cuda`.
//!
//! A step waits for the device once: the host uploads tokens, positions, block tables and attention tasks
//! together, launches (or replays, if a step of that size was recorded) and downloads the logits. Meanwhile the device
//! already computes the decodes that will probably follow (`ahead`). A step without logits waits for the one before it only. Buffers are
//! allocated once, for passes of bounded size; larger steps are several passes. The results of a row depend
//! neither on the pass nor on the kernels chosen for its size.
//!
//! [`device::Device`] is the device as the backend uses it; `driver` implements it with the CUDA driver. On machines
//! without a GPU, tests load a driver that runs the same kernels on the processor (`emulated`).

mod ahead;
mod args;
mod attention;
mod attention_mode;
mod backend;
mod buffers;
mod choices;
mod cost;
mod device;
mod draws;
mod driver;
#[cfg(test)]
mod emulated;
mod error;
mod experimental;
mod features;
mod forward;
mod found;
mod groups;
mod head;
mod layout;
mod linear;
mod load;
mod memory;
mod modules;
mod pass;
mod peaks;
mod plan;
mod recordings;
pub mod roofline;
mod self_test;
mod shape;
mod step;
pub mod sweep;
mod tables;
#[cfg(test)]
mod tests;
mod tuning;
mod weights;

pub use cost::Cost;
pub use device::{DeviceError, Properties};
pub use driver::{Devices, count, devices, usable};
pub use error::CudaLoadError;
pub use experimental::GpuKernels;
pub use features::{Feature, FeatureReport, FeatureSet};
pub use load::{CudaOptions, kv_block_bytes, load};
pub use memory::KvBlocks;
pub use peaks::Peaks;
