//! Constants that change the speed and never the results.

use super::GpuKernels;

/// More rows than any step has.
pub const NEVER: usize = 1 << 20;

/// Which kernels run for a step. Every value gives the same results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Longest contexts of decodes for which one kernel computes scores and values, up to 512 (256 with f32).
    pub short_positions: usize,
    /// Most blocks per multiprocessor with which it does.
    pub short_blocks: usize,
    /// Most attention tasks per multiprocessor with which the attention of other decodes is split over blocks.
    pub split_tasks: usize,
    /// Fewest screened rows for which the screen uses one digit instead of two.
    pub one_digit_rows: usize,
    /// Most rows for which linears use the kernels for few rows, which exist up to 64.
    pub few_rows: usize,
    /// Fewest rows for which linears use the larger tiles.
    pub large_tile_rows: usize,
    /// Fewest rows for which linears use products of warpgroups, where the device has them.
    pub wgmma_rows: usize,
    /// Most rows of passes in which a kernel may start while the one before it runs.
    pub overlap_rows: usize,
    /// Fewest rows of a sequence for which a step's attention over int8 keys and values takes tiles.
    pub attention_tile_rows: usize,
    /// Share of a multiprocessor's cache that is shared memory, in percent; 0: the driver chooses it for each kernel. Kernels with
    /// different shares may not be able to overlap.
    pub shared_percent: usize,
}

impl Default for Tuning {
    /// The kernels of [`GpuKernels::Standard`].
    fn default() -> Self {
        Self { wgmma_rows: NEVER, attention_tile_rows: NEVER, ..Self::EXPERIMENTAL }
    }
}

impl Tuning {
    /// Returns the constants for some kernels.
    pub fn of(kernels: GpuKernels) -> Self {
        match kernels {
            GpuKernels::Standard => Self::default(),
            GpuKernels::Experimental => Self::EXPERIMENTAL,
        }
    }

    /// The kernels of [`GpuKernels::Experimental`].
    pub const EXPERIMENTAL: Self = Self {
        short_positions: 512,
        short_blocks: 1,
        split_tasks: 8,
        one_digit_rows: NEVER,
        few_rows: 64,
        large_tile_rows: 2048,
        wgmma_rows: 512,
        overlap_rows: 64,
        attention_tile_rows: 16,
        shared_percent: 0,
    };
}
