//! The launches of attention: rotation, stores of keys and values, scores, weighted values.

use super::{
    args::{AttentionArgs, KvPool, RotateScoresArgs, RotateStoreArgs},
    attention_mode::{AttentionMode, slices, tasks_of_row},
    buffers::Buffers,
    device::{Args, Device, Launch},
    forward::{Pass, grid},
    shape::Shape,
};
use crate::backend::cpu::KvType;

/// Warps of a block.
const ATTENTION_WARPS: usize = 4;
/// Blocks of tiles that a multiprocessor runs at once.
const TILE_BLOCKS: usize = 2;
/// Largest `padded_dim` of the kernel for tiles of narrow heads.
const TILE_NARROW: usize = 128;

/// The kernel of attention in tiles for heads of this `padded_dim`, and the dynamic shared memory of a block.
fn tile_kernel(padded_dim: usize) -> (&'static str, usize) {
    let kernel = if padded_dim > TILE_NARROW { "attend_tile256_q8" } else { "attend_tile128_q8" };
    (kernel, 3 * 128 * (padded_dim + 8))
}

/// Returns whether attention can be computed in tiles.
pub fn has_tile_kernels(shape: &Shape, device: &dyn Device) -> bool {
    let (kernel, bytes) = tile_kernel(shape.padded_dim);
    shape.kv == KvType::Q8 && bytes <= device.shared_bytes(kernel) as usize
}

impl Pass<'_> {
    fn pool(&self, layer: usize) -> KvPool {
        let shape = self.shape;
        KvPool {
            base: self.kv_base,
            block_bytes: shape.kv_block_bytes() as u64,
            layer_offset: (layer * shape.kv_layer_bytes()) as u64,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            padded_dim: shape.padded_dim as u32,
            heads: shape.heads as u32,
        }
    }

    /// Appends RoPE, the stores of keys and values, and attention.
    pub fn attention(&self, layer: usize, out: &mut Vec<Launch>) {
        let (buffers, inputs) = (self.buffers, &self.inputs);
        let attention = AttentionArgs {
            step: inputs.step,
            tasks: inputs.tasks,
            blocks: inputs.blocks,
            queries: buffers.queries,
            attended: buffers.attended,
            scores: buffers.scores,
            maxima: buffers.maxima,
            pool: self.pool(layer),
            scores_stride: self.bucket.reach as u32,
            scale: 1.0 / (self.shape.head_dim as f32).sqrt(),
        };
        match self.bucket.attention {
            AttentionMode::Split => return self.split_attention(attention, out),
            AttentionMode::Short => return out.push(self.short_attention(attention)),
            _ => {}
        }
        let args = RotateStoreArgs {
            step: inputs.step,
            positions: inputs.positions,
            tables: inputs.tables,
            blocks: inputs.blocks,
            queries: buffers.queries,
            keys: buffers.keys,
            values: buffers.values,
            rotations: self.weights.rotations,
            pool: attention.pool,
        };
        let kernel = self.of_kv(["rotate_store_f16", "rotate_store_f32", "rotate_store_q8"]);
        out.push(self.per_row(kernel, Args::from_struct(&args)));
        if self.bucket.attention == AttentionMode::Tiles {
            return out.push(self.tile_attention(&attention));
        }
        let queries = self.bucket.attention.queries();
        let kernel = match self.bucket.attention {
            AttentionMode::Warps8 => self.of_kv(["attend8_f16", "attend8_f32", "attend8_q8"]),
            _ => self.of_kv(["attend4_f16", "attend4_f32", "attend4_q8"]),
        };
        let tasks = self.bucket.rows * self.shape.heads;
        let warps = self.buffers.warps(&self.bucket).min(tasks.next_multiple_of(ATTENTION_WARPS));
        out.push(Launch {
            kernel,
            grid: grid(warps / ATTENTION_WARPS, 1, 1),
            threads: 32 * ATTENTION_WARPS as u32,
            shared_bytes: (ATTENTION_WARPS * queries * (self.shape.padded_dim + 128) * 4) as u32,
            args: Args::from_struct(&attention),
        });
    }

    fn tile_attention(&self, attention: &AttentionArgs) -> Launch {
        let (kernel, shared_bytes) = tile_kernel(self.shape.padded_dim);
        let tasks = self.bucket.rows * tasks_of_row(self.shape, AttentionMode::Tiles);
        let multiprocessors = self.device.properties().multiprocessors as usize;
        Launch {
            kernel,
            grid: grid(tasks.min(TILE_BLOCKS * multiprocessors), 1, 1),
            threads: 32 * ATTENTION_WARPS as u32,
            shared_bytes: shared_bytes as u32,
            args: Args::from_struct(attention),
        }
    }

    fn short_attention(&self, attention: AttentionArgs) -> Launch {
        let Buffers { keys, values, .. } = *self.buffers;
        let kernel = self.of_kv(["attend_short_f16", "attend_short_f32", "attend_short_q8"]);
        let args = RotateScoresArgs { attention, keys, values, rotations: self.weights.rotations };
        // Each warp has a copy of the queries and computes scores of 32 positions at once. Then there is a warp for each query.
        let warp_bytes = 16 * self.shape.padded_dim;
        let warps = (self.bucket.reach / 32).min(self.shared_bytes(kernel) / warp_bytes).max(4);
        Launch {
            kernel,
            grid: grid(self.split_tasks(), slices(self.shape), 1),
            threads: 32 * warps as u32,
            shared_bytes: (warps * warp_bytes) as u32,
            args: Args::from_struct(&args),
        }
    }

    /// Returns the number of tasks of one row each.
    fn split_tasks(&self) -> usize {
        tasks_of_row(self.shape, AttentionMode::Split) * self.bucket.rows
    }

    fn split_attention(&self, attention: AttentionArgs, out: &mut Vec<Launch>) {
        let Buffers { keys, values, .. } = *self.buffers;
        let tasks = self.split_tasks();
        let alone = self.bucket.rows == 1;
        // One sequence leaves most of the device idle; the smallest blocks occupy the most
        // multiprocessors.
        let warps = if alone { 1 } else { ATTENTION_WARPS };
        let multiprocessors = self.device.properties().multiprocessors as usize;
        let windows = self.bucket.reach.div_ceil(32 * warps);
        let splits = (16 * multiprocessors / (tasks * warps)).clamp(1, windows);
        let args = RotateScoresArgs { attention, keys, values, rotations: self.weights.rotations };
        out.push(Launch {
            kernel: self.of_kv(["rotate_scores_f16", "rotate_scores_f32", "rotate_scores_q8"]),
            grid: grid(tasks, splits, 1),
            threads: 32 * warps as u32,
            shared_bytes: (warps * 16 * self.shape.padded_dim) as u32,
            args: Args::from_struct(&args),
        });
        let warps = if alone { 2 } else { 4 };
        out.push(Launch {
            kernel: self.of_kv(["attend_values_f16", "attend_values_f32", "attend_values_q8"]),
            grid: grid(tasks, slices(self.shape), 4 / warps),
            threads: 32 * warps as u32,
            shared_bytes: 0,
            args: Args::from_struct(&attention),
        });
    }

    fn of_kv(&self, [f16, f32, q8]: [&'static str; 3]) -> &'static str {
        match self.shape.kv {
            KvType::F16 => f16,
            KvType::F32 => f32,
            KvType::Q8 => q8,
        }
    }
}
