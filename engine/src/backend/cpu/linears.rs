//! The ternary linears of a step: norm, quantization, integer products, scales.

use std::ops::Range;

use super::{
    backend::CpuBackend,
    buffers::{Buffers, Quantized, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    tiles::{StepRows, TileTask, tile_tasks},
    weights::TernaryLinear,
};
use crate::{
    formats::TILE_ROWS,
    kernels::{
        self, GroupShape, Isa,
        float::{Columns, FloatKernels, KvElement, Sums, Values},
    },
};

/// Weights and epsilon of a norm.
type Norm<'a> = (&'a [f32], f32);

/// Buffer that a quantization reads.
#[derive(Clone, Copy)]
pub(super) enum Source {
    Residual,
    Attended,
    Gate,
}

/// Products of all rows with some tiles of a linear.
enum Products<'a> {
    /// Integers, which need the scales of rows and matrix.
    Sums(Sums<'a>),
    /// Values of a matrix with scales of groups.
    Values(Values<'a>),
}

impl Products<'_> {
    /// `out = values`
    fn set(&self, kernels: &FloatKernels, out: Columns<'_>) {
        match self {
            Self::Sums(sums) => kernels.rescale(sums, out),
            Self::Values(values) => kernels.set_values(values, out),
        }
    }

    /// `out += values`
    fn add(&self, kernels: &FloatKernels, out: Columns<'_>) {
        match self {
            Self::Sums(sums) => kernels.add_rescaled(sums, out),
            Self::Values(values) => kernels.add_values(values, out),
        }
    }
}

/// Buffers of a task's products.
struct ProductBuffers<'a> {
    sums: &'a mut Vec<i32>,
    values: &'a mut Vec<f32>,
}

/// Computes the products of a task with the tiles of a linear, and adds its bias; returns them with the range of the
/// linear's outputs that they belong to.
fn multiply<'a>(
    (isa, kernels): (Isa, &FloatKernels),
    linear: &TernaryLinear,
    task: &TileTask,
    input: &'a Quantized,
    buffers: ProductBuffers<'a>,
) -> (Products<'a>, Range<usize>) {
    let TileTask { tiles, rows, .. } = task.clone();
    let matrix = &linear.matrix;
    let stride = tiles.len() * TILE_ROWS;
    let start = tiles.start * TILE_ROWS;
    let columns = start..(start + stride).min(matrix.rows());
    let bias = linear.bias.as_ref().map(|bias| &bias[columns.clone()]);
    if matrix.group().is_some() {
        let values = resized(buffers.values, rows.len() * stride);
        kernels::gemm_groups(isa, matrix, tiles, input.groups.part(rows), values);
        add_bias(bias, stride, values);
        return (Products::Values(Values { values, stride }), columns);
    }
    let sums = resized(buffers.sums, rows.len() * stride);
    kernels::gemm(isa, matrix, tiles, input.x.part(rows.clone()), sums);
    let sums = Sums { sums, stride, scales: &input.scales[rows.clone()], scale: linear.scale };
    if bias.is_none() {
        return (Products::Sums(sums), columns);
    }
    let values = resized(buffers.values, rows.len() * stride);
    // SAFETY: these columns are all of the buffer, which belongs to this task.
    kernels.rescale(&sums, unsafe { Disjoint::new(values).columns(stride, 0..stride) });
    add_bias(bias, stride, values);
    (Products::Values(Values { values, stride }), columns)
}

/// `values += bias`, for each row of `stride` values.
fn add_bias(bias: Option<&[f32]>, stride: usize, values: &mut [f32]) {
    for row in values.chunks_exact_mut(stride) {
        for (value, bias) in row.iter_mut().zip(bias.unwrap_or_default()) {
            *value += bias;
        }
    }
}

/// Returns the part of a buffer with rows of `width` that a task writes.
fn rows_of<'a>(buffer: Disjoint<'a, f32>, task: &TileTask, width: usize) -> Disjoint<'a, f32> {
    buffer.within(task.rows.start * width..task.rows.end * width)
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Applies the norm to a buffer and quantizes it as the input of `linears`. Linears with their own
    /// norm, or with groups of different sizes, get separate inputs; the others share one. Returns the index of each linear's input in
    /// `inputs`.
    pub(super) fn quantize(
        &mut self,
        source: Source,
        norm: Option<Norm<'_>>,
        linears: &[&TernaryLinear],
    ) -> [usize; 4] {
        let group = linears[0].matrix.group();
        let shared =
            linears.iter().all(|linear| linear.norm.is_none() && linear.matrix.group() == group);
        let count = if shared { 1 } else { linears.len() };
        let eps = self.weights.config().linear_norm_eps.unwrap_or_default();
        for (index, linear) in linears.iter().take(count).enumerate() {
            let own = linear.norm.as_ref().map(|weight| (&weight[..], eps));
            let matrix = (linear.matrix.cols(), linear.matrix.group());
            self.quantize_rows(source, [norm, own], matrix, index);
        }
        if shared { [0; 4] } else { [0, 1, 2, 3] }
    }

    fn quantize_rows(
        &mut self,
        source: Source,
        norms: [Option<Norm<'_>>; 2],
        (width, group): (usize, Option<usize>),
        index: usize,
    ) {
        let (format, digits) = (self.weights.format, self.digits);
        let rotation = self.weights.config().rotation.as_ref();
        let Buffers { rows, residual, attended, gate, inputs, .. } = &mut self.buffers;
        let source = match source {
            Source::Residual => &*residual,
            Source::Attended => &*attended,
            Source::Gate => &*gate,
        };
        let Quantized { x, scales, groups } = &mut inputs[index];
        let shape = group.map(|group| GroupShape { format, digits, cols: width, group });
        match shape {
            Some(shape) => groups.reset(shape, rows.len()),
            None => {
                x.reset(format, width, rows.len());
                scales.resize(rows.len(), 0.0);
            }
        }
        let (writer, scales) = (x.writer(), Disjoint::new(scales));
        let group_writer = groups.writer();
        let kernels = self.kernels;
        self.pool.run(rows.len(), &|r| {
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, bytes, scales: group_scales, .. } = scratch;
                let row = &source[r * width..(r + 1) * width];
                let (mut normed, mut other) = (resized(floats, width), resized(more_floats, width));
                let mut is_normed = false;
                for (weight, eps) in norms.iter().flatten() {
                    let x = if is_normed { &*normed } else { row };
                    kernels.rms_norm(x, weight, *eps, other);
                    std::mem::swap(&mut normed, &mut other);
                    is_normed = true;
                }
                if let Some(rotation) = rotation {
                    if !is_normed {
                        normed.copy_from_slice(row);
                        is_normed = true;
                    }
                    kernels.rotate(normed, rotation);
                }
                let input = if is_normed { &*normed } else { row };
                if let Some(shape) = shape {
                    let bytes = resized(bytes, digits.count() * width);
                    let group_scales = resized(group_scales, shape.scales());
                    kernels.quantize_groups(input, digits, bytes, group_scales);
                    // SAFETY: each task writes its own row.
                    return unsafe { group_writer.set_row(r, bytes, group_scales) };
                }
                let bytes = resized(bytes, width);
                let scale = kernels.quantize(input, bytes);
                // SAFETY: each task writes its own row.
                unsafe {
                    scales.part(r..r + 1)[0] = scale;
                    writer.set_row(r, bytes);
                }
            });
        });
    }

    /// `outputs[i] = linears[i](x)` with `x` from `inputs`. The outputs are none of the buffers.
    pub(super) fn project<const N: usize>(
        &mut self,
        linears: [&TernaryLinear; N],
        inputs: [usize; 4],
        outputs: &mut [Vec<f32>; N],
    ) {
        let Buffers { rows, inputs: quantized, tile_tasks: tasks, .. } = &mut self.buffers;
        let n = rows.len();
        for (out, linear) in outputs.iter_mut().zip(linears) {
            out.resize(n * linear.matrix.rows(), 0.0);
        }
        let outputs = outputs.each_mut().map(|out| Disjoint::new(out));
        let (isa, kernels) = (self.isa, self.kernels);
        let matrices = linears.map(|linear| &linear.matrix);
        let rows = StepRows::of(matrices[0], n, self.digits);
        tile_tasks(isa, &matrices, rows, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        self.pool.run(tasks.len(), &|task| {
            let task = &tasks[task];
            let i = task.matrix;
            let (linear, input) = (linears[i], &quantized[inputs[i]]);
            with_scratch(|scratch| {
                let Scratch { sums, values, .. } = scratch;
                let buffers = ProductBuffers { sums, values };
                let (products, columns) = multiply((isa, kernels), linear, task, input, buffers);
                let width = linear.matrix.rows();
                // SAFETY: each task writes its own columns of its rows.
                let out = unsafe { rows_of(outputs[i], task, width).columns(width, columns) };
                products.set(kernels, out);
            });
        });
    }

    /// Applies the norms of query and key heads.
    pub(super) fn norm_heads(&mut self, [query, key]: &[Vec<f32>; 2]) {
        let (dim, eps) = (query.len(), self.weights.config().rms_norm_eps);
        let Buffers { rows, queries, keys, .. } = &mut self.buffers;
        let widths = [queries.len() / rows.len(), keys.len() / rows.len()];
        let (queries, keys) = (Disjoint::new(queries), Disjoint::new(keys));
        let kernels = self.kernels;
        self.pool.run(rows.len(), &|r| {
            with_scratch(|scratch| {
                let normed = resized(&mut scratch.floats, dim);
                let buffers = [(queries, widths[0], query), (keys, widths[1], key)];
                for (buffer, width, weight) in buffers {
                    // SAFETY: each task has its own row.
                    let heads = unsafe { buffer.part(r * width..(r + 1) * width) };
                    for head in heads.chunks_exact_mut(dim) {
                        kernels.rms_norm(head, weight, eps, normed);
                        head.copy_from_slice(normed);
                    }
                }
            });
        });
    }

    /// `gate = activation(gate(x)) ⊙ up(x)` with `x` from `inputs`.
    pub(super) fn project_gate_up(&mut self, [gate, up]: [&TernaryLinear; 2], inputs: [usize; 4]) {
        let Buffers { rows, gate: out, inputs: quantized, tile_tasks: tasks, .. } =
            &mut self.buffers;
        let (n, width) = (rows.len(), gate.matrix.rows());
        out.resize(n * width, 0.0);
        let out = Disjoint::new(out);
        let (isa, kernels) = (self.isa, self.kernels);
        let rows = StepRows::of(&gate.matrix, n, self.digits);
        tile_tasks(isa, &[&gate.matrix], rows, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        let (gate_in, up_in) = (&quantized[inputs[0]], &quantized[inputs[1]]);
        let activation = self.weights.config().activation;
        self.pool.run(tasks.len(), &|task| {
            let task = &tasks[task];
            with_scratch(|scratch| {
                let Scratch { sums, more_sums, values, more_values, .. } = scratch;
                let buffers = ProductBuffers { sums, values };
                let more = ProductBuffers { sums: more_sums, values: more_values };
                let (of_gate, columns) = multiply((isa, kernels), gate, task, gate_in, buffers);
                let (of_up, _) = multiply((isa, kernels), up, task, up_in, more);
                // SAFETY: each task writes its own columns of its rows.
                let out = unsafe { rows_of(out, task, width).columns(width, columns) };
                match (&of_gate, &of_up) {
                    (Products::Sums(gate), Products::Sums(up)) => {
                        kernels.gate(activation, gate, up, out);
                    }
                    (Products::Values(gate), Products::Values(up)) => {
                        kernels.gate_values(activation, gate, up, out);
                    }
                    _ => unreachable!(
                        "gate and up have both scales of groups and biases, or neither"
                    ),
                }
            });
        });
    }

    /// `residual += linear(inputs[0])`
    pub(super) fn project_into_residual(&mut self, linear: &TernaryLinear) {
        let Buffers { rows, residual, inputs, tile_tasks: tasks, .. } = &mut self.buffers;
        let (n, width) = (rows.len(), linear.matrix.rows());
        let residual = Disjoint::new(residual);
        let (isa, kernels) = (self.isa, self.kernels);
        let rows = StepRows::of(&linear.matrix, n, self.digits);
        tile_tasks(isa, &[&linear.matrix], rows, self.pool.threads(), tasks);
        let tasks = &tasks[..];
        let input = &inputs[0];
        self.pool.run(tasks.len(), &|task| {
            with_scratch(|scratch| {
                let task = &tasks[task];
                let Scratch { sums, values, .. } = scratch;
                let buffers = ProductBuffers { sums, values };
                let (products, columns) = multiply((isa, kernels), linear, task, input, buffers);
                let residual = rows_of(residual, task, width);
                // SAFETY: each task writes its own columns of its rows.
                products.add(kernels, unsafe { residual.columns(width, columns) });
            });
        });
    }
}
