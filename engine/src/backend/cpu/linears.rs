//! The ternary linears of a step: norm, int8 quantization, integer products, scales.

use std::ops::Range;

use super::{
    disjoint::Disjoint,
    forward::{Buffers, CpuBackend, Quantized, Scratch, with_scratch},
    weights::TernaryLinear,
};
use crate::{
    formats::{PackedMatrix, TILE_ROWS},
    kernels::{self, Activations, Isa, float::KvElement},
};

/// Bytes of weights per task: small enough that threads finish together, large enough that handing
/// one out costs nothing beside it.
const TASK_BYTES: usize = 40 << 10;
/// Tiles of a task at most: as many as the kernels for many rows take together.
const TASK_TILES: usize = 4;
/// Rows up to which weights are what takes time.
const FEW_ROWS: usize = 7;
/// Rows up to which vectors take two tiles together; then, or with AMX, four.
const PAIR_ROWS: usize = 64;

/// Which buffer a quantization reads.
#[derive(Clone, Copy)]
pub(super) enum Source {
    Residual,
    Attended,
    Gate,
}

/// Output columns a multiplication filled, and the distance between rows of its sums.
struct Columns {
    range: Range<usize>,
    stride: usize,
}

/// Integer products of all rows with some tiles of a matrix, into `sums` `(rows, stride)`.
fn multiply(
    isa: Isa,
    matrix: &PackedMatrix,
    tiles: Range<usize>,
    x: &Activations,
    rows: usize,
    sums: &mut Vec<i32>,
) -> Columns {
    let stride = tiles.len() * TILE_ROWS;
    let start = tiles.start * TILE_ROWS;
    sums.resize(rows * stride, 0);
    kernels::gemm(isa, matrix, tiles, x, sums);
    Columns { range: start..(start + stride).min(matrix.rows()), stride }
}

fn tile_tasks(isa: Isa, matrix: &PackedMatrix, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let count = matrix.tile_count();
    let of_task = match rows {
        ..=FEW_ROWS => (TASK_BYTES / matrix.tile_bytes()).clamp(1, TASK_TILES),
        ..=PAIR_ROWS if isa != Isa::Amx => 2,
        _ => TASK_TILES,
    };
    (0..count).step_by(of_task).map(move |at| at..(at + of_task).min(count))
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Norms and quantizes a buffer as the input of `linears`. Linears with norms of their own get
    /// an input each, the others share one: the returned indices say which is whose.
    pub(super) fn quantize(
        &mut self,
        source: Source,
        norms: &[(&[f32], f32)],
        linears: &[&TernaryLinear],
    ) -> [usize; 3] {
        let shared = linears.iter().all(|linear| linear.norm.is_none());
        let count = if shared { 1 } else { linears.len() };
        let eps = self.weights.config().linear_norm_eps.unwrap_or_default();
        for (index, linear) in linears.iter().take(count).enumerate() {
            let mut all = norms.to_vec();
            all.extend(linear.norm.as_ref().map(|w| (&w[..], eps)));
            self.quantize_rows(source, &all, linear.matrix.cols(), index);
        }
        if shared { [0; 3] } else { [0, 1, 2] }
    }

    fn quantize_rows(
        &mut self,
        source: Source,
        norms: &[(&[f32], f32)],
        width: usize,
        index: usize,
    ) {
        let Buffers { rows, residual, attended, gate, inputs, .. } = &mut self.buffers;
        let source = match source {
            Source::Residual => &*residual,
            Source::Attended => &*attended,
            Source::Gate => &*gate,
        };
        let Quantized { x, scales } = &mut inputs[index];
        x.reset(self.weights.format, width, rows.len());
        scales.resize(rows.len(), 0.0);
        let (writer, scales) = (x.writer(), Disjoint::new(scales));
        let kernels = self.kernels;
        self.pool.run(rows.len(), &|r| {
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, bytes, .. } = scratch;
                let row = &source[r * width..(r + 1) * width];
                floats.resize(width, 0.0);
                more_floats.resize(width, 0.0);
                for (index, (weight, eps)) in norms.iter().enumerate() {
                    let x = if index == 0 { row } else { &floats[..] };
                    kernels.rms_norm(x, weight, *eps, more_floats);
                    std::mem::swap(floats, more_floats);
                }
                bytes.resize(width, 0);
                let normed = if norms.is_empty() { row } else { &floats[..] };
                let scale = kernels.quantize(normed, bytes);
                // SAFETY: each task writes its own row.
                unsafe {
                    scales.part(r..r + 1)[0] = scale;
                    writer.set_row(r, bytes);
                }
            });
        });
    }

    pub(super) fn project_qkv(&mut self, linears: &[&TernaryLinear; 3], inputs: [usize; 3]) {
        let Buffers { rows, queries, keys, values, inputs: quantized, .. } = &mut self.buffers;
        let n = rows.len();
        let mut outputs = [queries, keys, values];
        for (out, linear) in outputs.iter_mut().zip(linears) {
            out.resize(n * linear.matrix.rows(), 0.0);
        }
        let outputs = outputs.map(|out| Disjoint::new(out));
        let (isa, kernels) = (self.isa, self.kernels);
        let tasks: Vec<(usize, Range<usize>)> = (0..3)
            .flat_map(|i| tile_tasks(isa, &linears[i].matrix, n).map(move |t| (i, t)))
            .collect();
        self.pool.run(tasks.len(), &|task| {
            let (i, tiles) = tasks[task].clone();
            let (linear, input) = (linears[i], &quantized[inputs[i]]);
            with_scratch(|scratch| {
                let cols = multiply(isa, &linear.matrix, tiles, &input.x, n, &mut scratch.sums);
                for r in 0..n {
                    let sums = &scratch.sums[r * cols.stride..][..cols.range.len()];
                    let start = r * linear.matrix.rows();
                    // SAFETY: each task writes its own columns.
                    let out = unsafe {
                        outputs[i].part(start + cols.range.start..start + cols.range.end)
                    };
                    kernels.rescale(sums, input.scales[r], linear.scale, out);
                }
            });
        });
    }

    pub(super) fn project_gate_up(&mut self, [gate, up]: [&TernaryLinear; 2], inputs: [usize; 3]) {
        let Buffers { rows, gate: out, inputs: quantized, .. } = &mut self.buffers;
        let (n, width) = (rows.len(), gate.matrix.rows());
        out.resize(n * width, 0.0);
        let out = Disjoint::new(out);
        let (isa, kernels) = (self.isa, self.kernels);
        let tasks: Vec<Range<usize>> = tile_tasks(isa, &gate.matrix, n).collect();
        let (gate_in, up_in) = (&quantized[inputs[0]], &quantized[inputs[1]]);
        let activation = self.weights.config().activation;
        self.pool.run(tasks.len(), &|task| {
            let tiles = tasks[task].clone();
            with_scratch(|scratch| {
                let Scratch { sums, more_sums, floats, .. } = scratch;
                let cols = multiply(isa, &gate.matrix, tiles.clone(), &gate_in.x, n, sums);
                multiply(isa, &up.matrix, tiles, &up_in.x, n, more_sums);
                floats.resize(cols.range.len(), 0.0);
                for r in 0..n {
                    // SAFETY: each task writes its own columns.
                    let out = unsafe {
                        out.part(r * width + cols.range.start..r * width + cols.range.end)
                    };
                    let part = r * cols.stride..r * cols.stride + cols.range.len();
                    kernels.rescale(&sums[part.clone()], gate_in.scales[r], gate.scale, out);
                    kernels.rescale(&more_sums[part], up_in.scales[r], up.scale, floats);
                    kernels.gate(activation, out, floats);
                }
            });
        });
    }

    /// `residual += linear(inputs[0])`
    pub(super) fn project_into_residual(&mut self, linear: &TernaryLinear) {
        let Buffers { rows, residual, inputs, .. } = &mut self.buffers;
        let (n, width) = (rows.len(), linear.matrix.rows());
        let residual = Disjoint::new(residual);
        let (isa, kernels) = (self.isa, self.kernels);
        let tasks: Vec<Range<usize>> = tile_tasks(isa, &linear.matrix, n).collect();
        let input = &inputs[0];
        self.pool.run(tasks.len(), &|task| {
            with_scratch(|scratch| {
                let Scratch { sums, floats, .. } = scratch;
                let tiles = tasks[task].clone();
                let cols = multiply(isa, &linear.matrix, tiles, &input.x, n, sums);
                floats.resize(cols.range.len(), 0.0);
                for r in 0..n {
                    let sums = &sums[r * cols.stride..][..cols.range.len()];
                    kernels.rescale(sums, input.scales[r], linear.scale, floats);
                    // SAFETY: each task writes its own columns.
                    let out = unsafe {
                        residual.part(r * width + cols.range.start..r * width + cols.range.end)
                    };
                    kernels.add(out, floats);
                }
            });
        });
    }
}
