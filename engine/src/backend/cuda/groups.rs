//! The launches of models with scales of groups: embedding, norms of heads, linears and the head, all with ternary
//! matrices.

use std::mem::offset_of;

use super::{
    args::{
        EmbedTernaryArgs, GroupLinearArgs, GroupQuantizeArgs, GroupSegment, InputBlock,
        LINEAR_STORE, NormHeadsArgs, Step,
    },
    device::{Address, Args, Launch},
    forward::{Input, Pass, grid},
    layout::{TILE_ROWS, k_blocks},
    linear::DeviceLinear,
    shape::stride,
    weights::Layer,
};

/// A kernel for few rows: columns (rows times digits) of a block, and the most k blocks that it has sums of at a time.
struct FewRowsKernel {
    kernel: &'static str,
    columns: usize,
    round: usize,
}

const FEW: [FewRowsKernel; 3] = [
    FewRowsKernel { kernel: "group_n8", columns: 8, round: 32 },
    FewRowsKernel { kernel: "group_n16", columns: 16, round: 32 },
    FewRowsKernel { kernel: "group_n32", columns: 32, round: 16 },
];
const FEW_THREADS: u32 = 256;
/// Bytes of the weight scales of a k block.
const SCALES_BYTES: usize = 2 * TILE_ROWS * 4;
/// Integers from one column of sums to the next.
const SUMS_STRIDE: usize = TILE_ROWS + 4;

/// Kernels for many rows, by digits: `Tile` of `group_tile.cu`.
const TILES: [&str; 2] = ["group_tile_int8", "group_tile_int16"];
/// Tiles and columns of a block, threads, stages.
const TILE: (usize, usize, u32, usize) = (4, 64, 128, 4);

/// Some rows of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Address of their number, a field of [`Step`].
    count: Address,
    /// Most rows that the pass has.
    bucket: usize,
    /// Their indices in the pass, or 0 for all of them.
    wanted: Address,
}

/// A quantized input.
#[derive(Debug, Clone, Copy)]
struct Quantized {
    rows: Rows,
    width: usize,
    digits: usize,
}

impl FewRowsKernel {
    /// Returns the shared memory of a block.
    fn shared_bytes(&self, k_blocks: usize, groups_of_block: usize) -> usize {
        let sums = groups_of_block * SUMS_STRIDE * 4;
        k_blocks.min(self.round) * (SCALES_BYTES + self.columns * (size_of::<InputBlock>() + sums))
    }
}

impl Pass<'_> {
    pub(super) fn embed_ternary(&self, table: &DeviceLinear) -> Launch {
        let segment = segment(table, 0, 0);
        let args = EmbedTernaryArgs {
            step: self.inputs.step,
            tokens: self.inputs.tokens,
            carried: self.buffers.carried,
            weights: segment.weights,
            scales: segment.scales,
            residual: self.buffers.residual,
            width: table.cols as u32,
            groups: segment.groups,
            factor: self.shape.embedding_factor,
            unused: 0,
        };
        self.per_row("embed_ternary", Args::from_struct(&args))
    }

    /// Returns the norms of query and key heads.
    pub(super) fn norm_heads(&self, layer: &Layer) -> Launch {
        let (shape, [query_weight, key_weight]) = (self.shape, layer.head_norms);
        let args = NormHeadsArgs {
            step: self.inputs.step,
            queries: self.buffers.queries,
            keys: self.buffers.keys,
            query_weight,
            key_weight,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            eps: shape.eps,
        };
        self.per_row("norm_heads", Args::from_struct(&args))
    }

    /// As [`Pass::linear`], of matrices with scales of groups.
    pub(super) fn group_linear(
        &self,
        input: Input,
        to: &[(&DeviceLinear, Address)],
        mode: u32,
        out: &mut Vec<Launch>,
    ) {
        let count = self.inputs.step + offset_of!(Step, rows) as u64;
        let rows = Rows { count, bucket: self.bucket.rows, wanted: 0 };
        let (width, digits) = (to[0].0.cols, self.shape.digits);
        let quantized = Quantized { rows, width, digits };
        out.push(self.group_quantize(&quantized, input, to[0].0.norm));
        let mut segments = [segment(to[0].0, 0, 0); 3];
        for (of_linear, (linear, to)) in segments.iter_mut().zip(to) {
            *of_linear = segment(linear, *to, linear.rows);
        }
        out.push(self.group_products(&quantized, segments, to.len(), mode));
    }

    /// Returns the rows that need all logits.
    pub(super) fn whole_rows(&self) -> Rows {
        let count = self.inputs.step + offset_of!(Step, whole) as u64;
        Rows { count, bucket: self.bucket.whole, wanted: self.inputs.whole }
    }

    /// Returns the rows that need the first tokens of a question.
    pub(super) fn screened_rows(&self) -> Rows {
        let count = self.inputs.step + offset_of!(Step, screened) as u64;
        Rows { count, bucket: self.bucket.screened, wanted: self.inputs.screened }
    }

    /// Appends all logits of some rows; `to` has `stride` floats for each.
    pub(super) fn ternary_head(
        &self,
        head: &DeviceLinear,
        rows: Rows,
        (to, stride): (Address, usize),
        out: &mut Vec<Launch>,
    ) {
        let input = self.of_stream(self.weights.final_norm);
        let quantized = Quantized { rows, width: head.cols, digits: 2 };
        out.push(self.group_quantize(&quantized, input, 0));
        let segments = [segment(head, to, stride); 3];
        out.push(self.group_products(&quantized, segments, 1, LINEAR_STORE));
    }

    fn group_quantize(&self, quantized: &Quantized, input: Input, norm: Address) -> Launch {
        let Quantized { rows, width, digits } = *quantized;
        let args = GroupQuantizeArgs {
            count: rows.count,
            wanted: rows.wanted,
            x: input.x,
            weight: input.norm,
            weight2: norm,
            q: self.buffers.quantized,
            blocks: self.buffers.blocks,
            width: width as u32,
            stride: stride(width) as u32,
            eps: input.eps,
            eps2: self.shape.linear_eps.unwrap_or_default(),
            digits: digits as u32,
            unused: 0,
        };
        Launch {
            kernel: "group_quantize",
            grid: grid(rows.bucket, 1, 1),
            threads: 256,
            shared_bytes: 4 * stride(width) as u32,
            args: Args::from_struct(&args),
        }
    }

    fn group_products(
        &self,
        quantized: &Quantized,
        segments: [GroupSegment; 3],
        segment_count: usize,
        mode: u32,
    ) -> Launch {
        let Quantized { rows, width, digits } = *quantized;
        let used = &segments[..segment_count];
        let tiles: usize = used.iter().map(|s| (s.rows as usize).div_ceil(TILE_ROWS)).sum();
        let args = Args::from_struct(&GroupLinearArgs {
            count: rows.count,
            x: self.buffers.quantized,
            blocks: self.buffers.blocks,
            segments,
            segment_count: segment_count as u32,
            k_blocks: k_blocks(width) as u32,
            digits: digits as u32,
            mode,
        });
        let columns = rows.bucket * digits;
        let groups_of_block = if used.iter().all(|s| s.halves == 2) { 1 } else { 2 };
        let bytes_of = |few: &FewRowsKernel| few.shared_bytes(k_blocks(width), groups_of_block);
        let few =
            FEW.iter().find(|few| columns <= few.columns && rows.bucket <= self.tuning.few_rows);
        if let Some(few) = few.filter(|few| bytes_of(few) <= self.shared_bytes(few.kernel)) {
            let grid = grid(tiles, columns.div_ceil(few.columns), 1);
            let (threads, shared_bytes) = (FEW_THREADS, bytes_of(few) as u32);
            return Launch { kernel: few.kernel, grid, threads, shared_bytes, args };
        }
        let (of_block, tile_columns, threads, stages) = TILE;
        // Weights and columns of a k block, scales of its rows, and of two groups of each tile.
        let stage_bytes =
            of_block * 512 + tile_columns * 128 + tile_columns / digits * 16 + of_block * 64;
        Launch {
            kernel: TILES[digits - 1],
            grid: grid(tiles.div_ceil(of_block), columns.div_ceil(tile_columns), 1),
            threads,
            shared_bytes: (stages * stage_bytes) as u32,
            args,
        }
    }
}

/// Returns a matrix with its outputs' address and stride in floats.
fn segment(linear: &DeviceLinear, out: Address, stride: usize) -> GroupSegment {
    let groups = linear.groups.expect("a model's matrices all have scales of groups, or none");
    GroupSegment {
        weights: linear.weights,
        scales: groups.scales,
        bias: linear.bias,
        out,
        rows: linear.rows as u32,
        stride: stride as u32,
        groups: (linear.cols / groups.size) as u32,
        halves: (groups.size / 64) as u32,
    }
}
