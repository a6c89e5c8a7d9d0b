//! Kernels that only a device can show to be worth their code: products of warpgroups, attention in tiles, short contexts in one
//! kernel, and kernels that overlap. [`GpuKernels`] is their switch. None runs unless it is on; then each start tests them first.
//!
//! Their sources are in `kernels/cuda/experimental`. A kernel with a gain on a device moves to the others.

pub mod choices;
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
