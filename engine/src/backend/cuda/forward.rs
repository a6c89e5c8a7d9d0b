//! The launches of a forward pass, as `kernels/cuda/README.md` describes them.

use super::{
    args::{
        ActivateArgs, EmbedArgs, LINEAR_ADD, LINEAR_STORE, LinearArgs, NormLinearArgs,
        NormQuantizeArgs, ORDER_PLAIN, ORDER_WGMMA, Segment,
    },
    buffers::{Bucket, Buffers, Inputs},
    device::{Address, Args, Device, Launch},
    layout::k_blocks,
    linear::DeviceLinear,
    shape::{Shape, stride},
    tables::Embedding,
    tuning::Tuning,
    weights::{Layer, Weights},
};
use crate::{config::Linear, formats::Scale};

/// Width up to which a norm's block has 256 threads; up to twice as many elements it has 512, beyond that 1,024.
const NARROW: usize = 4096;

/// Everything that the launches of a pass depend on.
pub struct Pass<'a> {
    pub weights: &'a Weights,
    pub buffers: &'a Buffers,
    pub shape: &'a Shape,
    pub inputs: Inputs,
    pub bucket: Bucket,
    pub kv_base: Address,
    pub tuning: Tuning,
    /// Whether the device has the kernels with products of warpgroups.
    pub has_warpgroups: bool,
    /// Kernels for many rows; without a value the fastest are selected.
    pub many: Option<&'static Many>,
    /// The device, for its number of multiprocessors and the shared memory of kernels.
    pub device: &'a dyn Device,
}

/// A linear's input: rows of floats, and the norm before their quantization (0 without a norm).
#[derive(Clone, Copy)]
pub struct Input {
    pub x: Address,
    pub norm: Address,
    pub eps: f32,
}

/// Kernels for few rows.
struct FewRowsKernel {
    linear: &'static str,
    gate: &'static str,
    rows: usize,
    tiles: usize,
    warps_max: usize,
    linear_bytes: usize, // of shared memory per warp
    gate_bytes: usize,
}

#[rustfmt::skip]
const FEW: [FewRowsKernel; 4] = [
    FewRowsKernel { linear: "linear_n8", gate: "gate_n8", rows: 8, tiles: 1, warps_max: 16, linear_bytes: 6144, gate_bytes: 8192 },
    FewRowsKernel { linear: "linear_n16", gate: "gate_n16", rows: 16, tiles: 1, warps_max: 16, linear_bytes: 10_240, gate_bytes: 12_288 },
    FewRowsKernel { linear: "linear_n32", gate: "gate_n32", rows: 32, tiles: 2, warps_max: 8, linear_bytes: 4096, gate_bytes: 4096 },
    FewRowsKernel { linear: "linear_n64", gate: "gate_n64", rows: 64, tiles: 2, warps_max: 8, linear_bytes: 4096, gate_bytes: 4096 },
];

/// Kernels for many rows.
pub struct Many {
    pub linear: &'static str,
    gate: &'static str,
    rows: usize,
    tiles: usize, // of both matrices, if a gate
    threads: u32,
    shared_bytes: u32,
    order: u32, // of the bytes of a quantized row
}

pub const TILE64: Many = Many {
    linear: "linear_tile64",
    gate: "gate_tile64",
    rows: 64,
    tiles: 4,
    threads: 128,
    shared_bytes: 40_960,
    order: ORDER_PLAIN,
};
#[rustfmt::skip]
const TILE: Many = Many { linear: "linear_tile", gate: "gate_tile", rows: 128, tiles: 8, threads: 256, shared_bytes: 81_920, ..TILE64 };
/// Products of warpgroups.
#[rustfmt::skip]
pub const WGMMA: Many = Many { linear: "linear_wgmma", gate: "gate_wgmma", rows: 128, tiles: 16, threads: 256, shared_bytes: 148_480, order: ORDER_WGMMA };
#[rustfmt::skip]
pub const WGMMA64: Many = Many { linear: "linear_wgmma64", gate: "gate_wgmma64", rows: 64, shared_bytes: 99_328, ..WGMMA };

/// Converts a grid to the integers of a launch.
pub fn grid(x: usize, y: usize, z: usize) -> [u32; 3] {
    [x, y, z].map(|blocks| u32::try_from(blocks).expect("grids are bounded by buffers"))
}

/// Returns the warps of a block that share k blocks, `each` of them or fewer per warp. `bytes` of shared memory are for each warp, `fixed` for
/// the block.
fn warps_of(
    (k_blocks, each): (usize, usize),
    warps_max: usize,
    (bytes, fixed): (usize, usize),
    shared: usize,
) -> usize {
    k_blocks.div_ceil(each).min(warps_max).min(shared.saturating_sub(fixed) / bytes)
}

impl Pass<'_> {
    /// Returns the most dynamic shared memory that a kernel's block may have.
    pub fn shared_bytes(&self, kernel: &'static str) -> usize {
        self.device.shared_bytes(kernel) as usize
    }

    /// Returns the launches of the embedding and of all layers.
    pub fn body(&self) -> Vec<Launch> {
        let mut out = vec![self.embed()];
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention_block(index, layer, &mut out);
            self.feed_forward_block(layer, &mut out);
        }
        out
    }

    fn embed(&self) -> Launch {
        let (table, dtype) = match &self.weights.tables.embedding {
            Embedding::Dense { rows, dtype } => (*rows, *dtype),
            Embedding::Ternary(table) => return self.embed_ternary(table),
        };
        let args = EmbedArgs {
            step: self.inputs.step,
            tokens: self.inputs.tokens,
            carried: self.buffers.carried,
            table,
            residual: self.buffers.residual,
            width: self.shape.hidden as u32,
            dtype: dtype as u32,
            factor: self.shape.embedding_factor,
            unused: 0,
        };
        self.per_row("embed", Args::from_struct(&args))
    }

    /// Returns a launch with one block per row.
    pub fn per_row(&self, kernel: &'static str, args: Args) -> Launch {
        Launch { kernel, grid: grid(self.bucket.rows, 1, 1), threads: 256, shared_bytes: 0, args }
    }

    /// Returns the residual stream and a norm of it.
    pub(super) fn of_stream(&self, norm: Address) -> Input {
        Input { x: self.buffers.residual, norm, eps: self.shape.stream_eps }
    }

    fn attention_block(&self, index: usize, layer: &Layer, out: &mut Vec<Launch>) {
        let Buffers { residual, queries, keys, values, attended, .. } = *self.buffers;
        let qkv = [Linear::Q, Linear::K, Linear::V].map(|linear| layer.linear(linear));
        let input = self.of_stream(layer.attention_norm);
        let to = [(qkv[0], queries), (qkv[1], keys), (qkv[2], values)];
        self.separately(input, &to, out);
        if layer.head_norms[0] != 0 {
            out.push(self.norm_heads(layer));
        }
        self.attention(index, out);
        let input = Input { x: attended, norm: layer.attention_sub_norm, eps: self.shape.eps };
        self.linear(input, &[(layer.linear(Linear::O), residual)], LINEAR_ADD, out);
    }

    fn feed_forward_block(&self, layer: &Layer, out: &mut Vec<Launch>) {
        let Buffers { residual, gate, up, .. } = *self.buffers;
        let input = self.of_stream(layer.feed_forward_norm);
        let (of_gate, of_up) = (layer.linear(Linear::Gate), layer.linear(Linear::Up));
        if !self.shape.joins_gate() {
            self.separately(input, &[(of_gate, gate), (of_up, up)], out);
            let (width, activation) = (self.shape.intermediate as u32, self.shape.activation);
            let args = ActivateArgs { step: self.inputs.step, gate, up, width, activation };
            out.push(self.per_row("activate", Args::from_struct(&args)));
        } else {
            self.gate(input, [of_gate, of_up], out);
        }
        let input = Input { x: gate, norm: layer.feed_forward_sub_norm, eps: self.shape.eps };
        self.linear(input, &[(layer.linear(Linear::Down), residual)], LINEAR_ADD, out);
    }

    /// Appends linears that write to their own addresses: together, unless each has a norm of its own.
    fn separately(&self, input: Input, to: &[(&DeviceLinear, Address)], out: &mut Vec<Launch>) {
        let together = if self.shape.linear_eps.is_some() { 1 } else { to.len() };
        to.chunks(together).for_each(|to| self.linear(input, to, LINEAR_STORE, out));
    }

    /// Appends norms, quantization and products of linears that share an input; each writes to its own address.
    pub fn linear(
        &self,
        input: Input,
        to: &[(&DeviceLinear, Address)],
        mode: u32,
        out: &mut Vec<Launch>,
    ) {
        let (linear, _) = to[0];
        if linear.groups.is_some() {
            return self.group_linear(input, to, mode, out);
        }
        let mut segments = [segment(linear, 0); 3];
        for (segment_of, (linear, to)) in segments.iter_mut().zip(to) {
            *segment_of = segment(linear, *to);
        }
        let args = self.linear_args(linear.cols, segments, to.len(), mode);
        let tiles: usize = to.iter().map(|(linear, _)| linear.rows.div_ceil(16)).sum();
        if let Some(launch) = self.one("linear_one", 2048, tiles, input, linear, args) {
            return out.push(launch);
        }
        self.several(false, tiles, input, linear, args, out);
    }

    /// As [`Self::linear`], for the gate and up matrices; the gate's buffer receives their joined outputs.
    pub(super) fn gate(&self, input: Input, linears: [&DeviceLinear; 2], out: &mut Vec<Launch>) {
        let [gate, up] = linears;
        let to = self.buffers.gate;
        let segments = [segment(gate, to), segment(up, to), segment(gate, to)];
        let args = self.linear_args(gate.cols, segments, 2, LINEAR_STORE);
        let tiles = gate.rows.div_ceil(16);
        if let Some(launch) = self.one("gate_one", 4096, tiles, input, gate, args) {
            return out.push(launch);
        }
        self.several(true, tiles, input, gate, args, out);
    }

    fn linear_args(
        &self,
        cols: usize,
        segments: [Segment; 3],
        segment_count: usize,
        mode: u32,
    ) -> LinearArgs {
        LinearArgs {
            step: self.inputs.step,
            x: self.buffers.quantized,
            scales: self.buffers.scales,
            sums: self.buffers.sums,
            segments,
            segment_count: segment_count as u32,
            k_blocks: k_blocks(cols) as u32,
            mode,
            activation: self.shape.activation,
        }
    }

    /// Returns the kernel that does the norm, the quantization and the products of a single row, if the row fits
    /// its shared memory.
    fn one(
        &self,
        kernel: &'static str,
        warp_bytes: usize,
        tiles: usize,
        input: Input,
        linear: &DeviceLinear,
        args: LinearArgs,
    ) -> Option<Launch> {
        let fixed = 5 * stride(linear.cols);
        // Every warp has a part of the norm, too.
        let of_warp = (k_blocks(linear.cols), 2);
        let warps = warps_of(of_warp, 16, (warp_bytes, fixed), self.shared_bytes(kernel));
        if self.bucket.rows != 1 || warps == 0 {
            return None;
        }
        let args = NormLinearArgs {
            linear: args,
            x: input.x,
            weight: input.norm,
            weight2: linear.norm,
            width: linear.cols as u32,
            eps: input.eps,
            eps2: self.shape.linear_eps.unwrap_or_default(),
            unused: 0,
        };
        Some(Launch {
            kernel,
            grid: grid(tiles, 1, 1),
            threads: 32 * warps as u32,
            shared_bytes: (warps * warp_bytes + fixed) as u32,
            args: Args::from_struct(&args),
        })
    }

    /// Appends the norm, the quantization and the products of several rows, with the tiles of all segments or, of a gate, of
    /// one matrix.
    fn several(
        &self,
        gate: bool,
        tiles: usize,
        input: Input,
        linear: &DeviceLinear,
        args: LinearArgs,
        out: &mut Vec<Launch>,
    ) {
        let (order, products) = match self.few() {
            Some(few) => (ORDER_PLAIN, self.few_rows(few, gate, tiles, args)),
            None => {
                let tiles = if gate { 2 * tiles } else { tiles };
                let many = self.many.unwrap_or_else(|| self.fastest(tiles));
                (many.order, self.many_rows(many, gate, tiles, args))
            }
        };
        out.push(self.norm_quantize(input, linear, order));
        out.push(products);
    }

    fn norm_quantize(&self, input: Input, linear: &DeviceLinear, order: u32) -> Launch {
        let stride = stride(linear.cols);
        let args = NormQuantizeArgs {
            step: self.inputs.step,
            x: input.x,
            weight: input.norm,
            weight2: linear.norm,
            q: self.buffers.quantized,
            scales: self.buffers.scales,
            sums: self.buffers.sums,
            width: linear.cols as u32,
            stride: stride as u32,
            eps: input.eps,
            eps2: self.shape.linear_eps.unwrap_or_default(),
            order,
            unused: 0,
        };
        Launch {
            threads: if linear.cols <= NARROW {
                256
            } else {
                512 * linear.cols.div_ceil(2 * NARROW).min(2) as u32
            },
            shared_bytes: 4 * stride as u32,
            ..self.per_row("norm_quantize", Args::from_struct(&args))
        }
    }

    /// Returns the kernels for few rows, if the pass has few.
    fn few(&self) -> Option<&'static FewRowsKernel> {
        let rows = self.bucket.rows;
        FEW.iter().find(|few| rows <= few.rows && rows <= self.tuning.few_rows)
    }

    fn few_rows(&self, few: &FewRowsKernel, gate: bool, tiles: usize, args: LinearArgs) -> Launch {
        let bytes = if gate { few.gate_bytes } else { few.linear_bytes };
        let k_blocks = args.k_blocks as usize;
        let kernel = if gate { few.gate } else { few.linear };
        // The blocks of linears are few: more warps share their outputs. Those of gates fill the device.
        let of_warp = (k_blocks, if gate { 4 } else { 2 });
        let warps = warps_of(of_warp, few.warps_max, (bytes, 0), self.shared_bytes(kernel));
        let x = if gate { tiles } else { tiles.div_ceil(few.tiles) };
        Launch {
            kernel,
            grid: grid(x, self.bucket.rows.div_ceil(few.rows), 1),
            threads: 32 * warps as u32,
            shared_bytes: (warps * bytes) as u32,
            args: Args::from_struct(&args),
        }
    }

    /// Returns the fastest kernels for many rows. Larger blocks read less, but should be enough for all multiprocessors.
    fn fastest(&self, tiles: usize) -> &'static Many {
        let rows = self.bucket.rows;
        if self.has_warpgroups && rows >= self.tuning.wgmma_rows {
            let blocks = tiles.div_ceil(WGMMA.tiles) * rows.div_ceil(WGMMA.rows);
            let fill = blocks >= self.device.properties().multiprocessors as usize;
            return if fill { &WGMMA } else { &WGMMA64 };
        }
        if rows < self.tuning.large_tile_rows { &TILE64 } else { &TILE }
    }

    fn many_rows(&self, many: &Many, gate: bool, tiles: usize, args: LinearArgs) -> Launch {
        let rows = self.bucket.rows.div_ceil(many.rows);
        Launch {
            kernel: if gate { many.gate } else { many.linear },
            grid: grid(tiles.div_ceil(many.tiles), rows, 1),
            threads: many.threads,
            shared_bytes: many.shared_bytes,
            args: Args::from_struct(&args),
        }
    }
}

fn segment(linear: &DeviceLinear, out: Address) -> Segment {
    let (scale, divide) = match linear.scale {
        Scale::Multiply(scale) => (scale, 0),
        Scale::Divide(scale) => (scale, 1),
    };
    let rows = linear.rows as u32;
    let DeviceLinear { weights, bias, .. } = *linear;
    Segment { weights, bias, out, scale, divide, rows, stride: rows }
}
