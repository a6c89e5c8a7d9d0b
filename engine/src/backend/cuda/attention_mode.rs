//! The kinds of attention kernels, and the tasks that they divide a row into.

use super::shape::Shape;
use crate::backend::cpu::KvType;

/// Most queries of a warp's task.
pub const TASK_QUERIES: usize = 8;
/// Most queries of a task that is a tile of products.
const TILE_QUERIES: usize = 64;
/// Elements of the output that a block of a split task has.
const SLICE: usize = 32;
/// The kernel for short contexts is launched for this number of positions or a multiple of it.
pub const SHORT_STEP: usize = 256;

/// The attention kernels of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionMode {
    /// For few sequences: one row of each, split over blocks.
    Split,
    /// The same with short contexts: scores and values in one kernel. It needs no room for scores.
    Short,
    /// One row of each sequence, one warp per task.
    Warps4,
    /// Several rows of a sequence together.
    Warps8,
    /// Many rows of a sequence together, with int8 keys and values: one block per task. It needs no room for scores.
    Tiles,
}

impl AttentionMode {
    /// Returns the largest number of queries of a task.
    pub fn queries(self) -> usize {
        match self {
            Self::Split | Self::Short | Self::Warps4 => 4,
            Self::Warps8 => TASK_QUERIES,
            Self::Tiles => TILE_QUERIES,
        }
    }

    /// Returns whether a task has one row even where its queries leave room for more.
    pub fn is_by_row(self) -> bool {
        matches!(self, Self::Split | Self::Short)
    }
}

/// Returns the longest context of one kernel for scores and values: as many positions as its ring has.
pub fn short_positions(shape: &Shape) -> usize {
    if shape.kv == KvType::F32 { 256 } else { 512 }
}

/// Returns the number of slices of a task's output.
pub fn slices(shape: &Shape) -> usize {
    shape.padded_dim.div_ceil(SLICE)
}

/// Returns the number of attention tasks of one row.
pub fn tasks_of_row(shape: &Shape, mode: AttentionMode) -> usize {
    shape.kv_heads * (shape.heads / shape.kv_heads).div_ceil(mode.queries())
}
