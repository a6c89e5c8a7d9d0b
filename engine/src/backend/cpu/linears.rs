//! The ternary linears of a step: norm, int8 quantization, integer products, scales.

use std::ops::Range;

use super::{
    buffers::{Buffers, Quantized, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    load::CpuBackend,
    weights::TernaryLinear,
};
use crate::{
    formats::{PackedMatrix, TILE_ROWS},
    kernels::{
        self, Isa,
        float::{KvElement, Sums},
    },
};

/// Bytes of weights per task: small enough that threads finish at nearly the same time, large enough
/// that the cost of distributing tasks is negligible.
const TASK_BYTES: usize = 40 << 10;
/// Most tiles per task: the number that the kernels for many rows take together.
const TASK_TILES: usize = 4;
/// Most rows for which reading the weights dominates.
const FEW_ROWS: usize = 7;
/// Most rows for which vector kernels take two tiles together; with more rows, or AMX, they take four.
const PAIR_ROWS: usize = 64;

/// Weights and epsilon of a norm.
type Norm<'a> = (&'a [f32], f32);

/// Buffer that a quantization reads.
#[derive(Clone, Copy)]
pub(super) enum Source {
    Residual,
    Attended,
    Gate,
}

/// Computes the integer products of all rows with some tiles of a linear; returns them with the range of
/// the linear's outputs that they belong to.
fn multiply<'a>(
    isa: Isa,
    linear: &TernaryLinear,
    tiles: Range<usize>,
    input: &'a Quantized,
    sums: &'a mut Vec<i32>,
) -> (Sums<'a>, Range<usize>) {
    let matrix = &linear.matrix;
    let stride = tiles.len() * TILE_ROWS;
    let start = tiles.start * TILE_ROWS;
    let sums = resized(sums, input.scales.len() * stride);
    kernels::gemm(isa, matrix, tiles, &input.x, sums);
    let sums = Sums { sums, stride, scales: &input.scales, scale: linear.scale };
    (sums, start..(start + stride).min(matrix.rows()))
}

/// Index of a matrix, and a range of its tiles.
pub(super) type TileTask = (usize, Range<usize>);

/// Cuts the tiles of matrices into tasks, in order. Each thread's share ends with smaller tasks, so that
/// threads finish at nearly the same time.
fn tile_tasks(
    isa: Isa,
    matrices: &[&PackedMatrix],
    rows: usize,
    threads: usize,
    tasks: &mut Vec<TileTask>,
) {
    let tiles_per_task = |matrix: &PackedMatrix| match rows {
        ..=FEW_ROWS => (TASK_BYTES / matrix.tile_bytes()).clamp(1, TASK_TILES),
        ..=PAIR_ROWS if isa != Isa::Amx => 2,
        _ => TASK_TILES,
    };
    let total: usize = matrices.iter().map(|matrix| matrix.tile_count()).sum();
    let (mut matrix, mut tile) = (0, 0);
    tasks.clear();
    for thread in 0..threads {
        let mut left = (thread + 1) * total / threads - thread * total / threads;
        while left > 0 {
            let in_matrix = matrices[matrix].tile_count() - tile;
            let count = tiles_per_task(matrices[matrix]).min(left.div_ceil(2)).min(in_matrix);
            tasks.push((matrix, tile..tile + count));
            (tile, left) = (tile + count, left - count);
            if tile == matrices[matrix].tile_count() {
                (matrix, tile) = (matrix + 1, 0);
            }
        }
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Applies the norm to a buffer and quantizes it as the input of `linears`. Linears with their own
    /// norm get separate inputs; the others share one. Returns the index of each linear's input in
    /// `inputs`.
    pub(super) fn quantize(
        &mut self,
        source: Source,
        norm: Option<Norm<'_>>,
        linears: &[&TernaryLinear],
    ) -> [usize; 3] {
        let shared = linears.iter().all(|linear| linear.norm.is_none());
        let count = if shared { 1 } else { linears.len() };
        let eps = self.weights.config().linear_norm_eps.unwrap_or_default();
        for (index, linear) in linears.iter().take(count).enumerate() {
            let own = linear.norm.as_ref().map(|weight| (&weight[..], eps));
            self.quantize_rows(source, [norm, own], linear.matrix.cols(), index);
        }
        if shared { [0; 3] } else { [0, 1, 2] }
    }

    fn quantize_rows(
        &mut self,
        source: Source,
        norms: [Option<Norm<'_>>; 2],
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
                let (mut normed, mut other) = (resized(floats, width), resized(more_floats, width));
                let mut is_normed = false;
                for (weight, eps) in norms.iter().flatten() {
                    let x = if is_normed { &*normed } else { row };
                    kernels.rms_norm(x, weight, *eps, other);
                    std::mem::swap(&mut normed, &mut other);
                    is_normed = true;
                }
                let bytes = resized(bytes, width);
                let scale = kernels.quantize(if is_normed { normed } else { row }, bytes);
                // SAFETY: each task writes its own row.
                unsafe {
                    scales.part(r..r + 1)[0] = scale;
                    writer.set_row(r, bytes);
                }
            });
        });
    }

    /// `queries, keys, values = q(x), k(x), v(x)` with `x` from `inputs`.
    pub(super) fn project_qkv(&mut self, linears: &[&TernaryLinear; 3], inputs: [usize; 3]) {
        let Buffers { rows, queries, keys, values, inputs: quantized, tile_tasks: tasks, .. } =
            &mut self.buffers;
        let n = rows.len();
        let mut outputs = [queries, keys, values];
        for (out, linear) in outputs.iter_mut().zip(linears) {
            out.resize(n * linear.matrix.rows(), 0.0);
        }
        let outputs = outputs.map(|out| Disjoint::new(out));
        let (isa, kernels) = (self.isa, self.kernels);
        let matrices = linears.map(|linear| &linear.matrix);
        tile_tasks(isa, &matrices, n, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        self.pool.run(tasks.len(), &|task| {
            let (i, tiles) = tasks[task].clone();
            let (linear, input) = (linears[i], &quantized[inputs[i]]);
            with_scratch(|scratch| {
                let (sums, columns) = multiply(isa, linear, tiles, input, &mut scratch.sums);
                // SAFETY: each task writes its own columns.
                let out = unsafe { outputs[i].columns(linear.matrix.rows(), columns) };
                kernels.rescale(&sums, out);
            });
        });
    }

    /// `gate = activation(gate(x)) ⊙ up(x)` with `x` from `inputs`.
    pub(super) fn project_gate_up(&mut self, [gate, up]: [&TernaryLinear; 2], inputs: [usize; 3]) {
        let Buffers { rows, gate: out, inputs: quantized, tile_tasks: tasks, .. } =
            &mut self.buffers;
        let (n, width) = (rows.len(), gate.matrix.rows());
        out.resize(n * width, 0.0);
        let out = Disjoint::new(out);
        let (isa, kernels) = (self.isa, self.kernels);
        tile_tasks(isa, &[&gate.matrix], n, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        let (gate_in, up_in) = (&quantized[inputs[0]], &quantized[inputs[1]]);
        let activation = self.weights.config().activation;
        self.pool.run(tasks.len(), &|task| {
            let (_, tiles) = tasks[task].clone();
            with_scratch(|scratch| {
                let Scratch { sums, more_sums, .. } = scratch;
                let (gate_sums, columns) = multiply(isa, gate, tiles.clone(), gate_in, sums);
                let (up_sums, _) = multiply(isa, up, tiles, up_in, more_sums);
                // SAFETY: each task writes its own columns.
                let out = unsafe { out.columns(width, columns) };
                kernels.gate(activation, &gate_sums, &up_sums, out);
            });
        });
    }

    /// `residual += linear(inputs[0])`
    pub(super) fn project_into_residual(&mut self, linear: &TernaryLinear) {
        let Buffers { rows, residual, inputs, tile_tasks: tasks, .. } = &mut self.buffers;
        let (n, width) = (rows.len(), linear.matrix.rows());
        let residual = Disjoint::new(residual);
        let (isa, kernels) = (self.isa, self.kernels);
        tile_tasks(isa, &[&linear.matrix], n, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        let input = &inputs[0];
        self.pool.run(tasks.len(), &|task| {
            with_scratch(|scratch| {
                let (_, tiles) = tasks[task].clone();
                let (sums, columns) = multiply(isa, linear, tiles, input, &mut scratch.sums);
                // SAFETY: each task writes its own columns.
                kernels.add_rescaled(&sums, unsafe { residual.columns(width, columns) });
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::Format;

    #[test]
    fn tasks_cover_every_tile_once_and_shrink_within_each_share() {
        let matrix = |rows: usize| {
            PackedMatrix::pack(Format::I2S, rows, 64, &vec![0; rows * 64])
                .expect("the shape can be packed")
        };
        let (large, small) = (matrix(70 * TILE_ROWS), matrix(3 * TILE_ROWS + 1));
        let mut tasks = Vec::new();
        for (rows, largest) in [(32, 2), (512, TASK_TILES)] {
            for threads in [1, 2, 3, 64, 200] {
                tile_tasks(Isa::Avx512, &[&large, &small, &small], rows, threads, &mut tasks);
                let tiles = tasks.iter().flat_map(|(matrix, tiles)| {
                    assert!((1..=largest).contains(&tiles.len()));
                    tiles.clone().map(move |tile| (*matrix, tile))
                });
                let all = [(0, 70), (1, 4), (2, 4)];
                let all = all.into_iter().flat_map(|(m, count)| (0..count).map(move |t| (m, t)));
                assert!(tiles.eq(all), "{threads} threads, {rows} rows");
            }
            tile_tasks(Isa::Avx512, &[&large], rows, 2, &mut tasks);
            let sizes: Vec<usize> = tasks.iter().map(|(_, tiles)| tiles.len()).collect();
            let (first, second) = sizes.split_at(sizes.len() / 2);
            assert_eq!(first, second, "each of two threads has a half");
            assert!(first.is_sorted_by(|a, b| a >= b) && first.ends_with(&[1]), "{first:?}");
        }
    }
}
