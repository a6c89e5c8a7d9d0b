//! Kernels that no device has shown to be worth their code yet: products of warpgroups and attention in tiles. [`GpuKernels`] is their
//! switch. None runs unless it is on; then each start [tests](super::choices) them first.
//!
//! Their sources are in `kernels/cuda/experimental`. A kernel with a gain on a device moves to the others.

pub mod warpgroups;

use crate::names::names;

/// Which kernels a GPU runs. All give the same answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GpuKernels {
    /// The simplest ones.
    #[default]
    Standard,
    /// Experimental ones, too, after a test at each start.
    Experimental,
}

names!(GpuKernels, "GPU kernels", Standard = "standard", Experimental = "experimental");
