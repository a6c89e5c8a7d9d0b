//! The feed-forward blocks of a mixture of experts.
//!
//! ```text
//! p = softmax of the largest logits of the router(x)                      of each token, in f32
//! residual += Σ p_e · down_e(silu(min(gate_e(x), c)) ⊙ clamp(up_e(x), −c, c))    e ascending
//! ```
//!
//! A step's rows are put in the order of their experts, a place for each row and expert, so that the matrices of an expert are read
//! once for all rows that chose it. What a row gets does not depend on the others: a place is computed by itself, and a row adds its
//! experts in ascending order.

use std::{ops::Range, sync::Arc};

use super::{
    backend::CpuBackend,
    buffers::{Buffers, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    tiles::tiles_per_task,
    weights::TernaryLinear,
};
use crate::{
    config::{Experts, Linear},
    formats::TILE_ROWS,
    kernels::{
        self, GroupActivations, GroupShape, Isa,
        float::{FloatKernels, KvElement, Values},
    },
    math,
};

/// Experts whose logits a task computes.
const ROUTER_EXPERTS: usize = 16;

/// An expert of a row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Choice {
    pub expert: usize,
    /// Share of its output.
    pub weight: f32,
    /// Place of the row among those of all experts.
    pub place: usize,
}

/// The tiles of an expert that a task computes, for the places of its rows.
#[derive(Debug, Clone)]
struct ExpertTask {
    expert: usize,
    places: Range<usize>,
    /// Tiles of the expert's part of a matrix.
    tiles: Range<usize>,
}

/// Buffers of the experts of a step. A place is a row and one of its experts.
#[derive(Default)]
pub(super) struct ExpertBuffers {
    pub normed: Vec<f32>,     // (rows, hidden)
    pub logits: Vec<f32>,     // (rows, experts), of the router
    pub choices: Vec<Choice>, // (rows, used), by ascending expert
    /// First place of each expert, and the number of places.
    pub starts: Vec<usize>, // (experts + 1)
    next: Vec<usize>,         // scratch of the order of places
    pub inputs: GroupActivations, // (places, hidden), and then (places, intermediate)
    pub gate: Vec<f32>,       // (places, intermediate)
    pub outputs: Vec<f32>,    // (places, hidden)
    tasks: Vec<ExpertTask>,
}

/// Chooses the experts of a row: those with the largest logits, the lower of equal ones, with the softmax of their logits. `order` is
/// scratch.
fn choose(logits: &[f32], choices: &mut [Choice], order: &mut Vec<usize>) {
    order.clear();
    order.extend(0..logits.len());
    let larger = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if choices.len() < order.len() {
        order.select_nth_unstable_by(choices.len(), larger);
    }
    let chosen = &mut order[..choices.len()];
    chosen.sort_unstable();
    let largest = chosen.iter().fold(f32::NEG_INFINITY, |most, e| most.max(logits[*e]));
    let share = |expert: usize| math::exp(f64::from(logits[expert]) - f64::from(largest));
    let sum: f64 = chosen.iter().map(|expert| share(*expert)).sum();
    for (choice, &mut expert) in choices.iter_mut().zip(chosen) {
        *choice = Choice { expert, weight: (share(expert) / sum) as f32, place: 0 };
    }
}

/// Gives each choice a place, by expert and then by row. `starts` gets the first place of each expert; `next` is scratch.
fn place(choices: &mut [Choice], experts: usize, starts: &mut Vec<usize>, next: &mut Vec<usize>) {
    starts.clear();
    starts.resize(experts + 1, 0);
    for choice in &*choices {
        starts[choice.expert + 1] += 1;
    }
    for expert in 0..experts {
        starts[expert + 1] += starts[expert];
    }
    next.clone_from(starts);
    for choice in choices {
        choice.place = next[choice.expert];
        next[choice.expert] += 1;
    }
}

/// Cuts the tiles of all chosen experts into tasks, in order. `tile_bytes` are those of a tile of all matrices of a task.
fn cut(
    isa: Isa,
    starts: &[usize],
    (tiles, tile_bytes): (usize, usize),
    tasks: &mut Vec<ExpertTask>,
) {
    tasks.clear();
    for (expert, places) in starts.windows(2).map(|pair| pair[0]..pair[1]).enumerate() {
        if places.is_empty() {
            continue;
        }
        let step = tiles_per_task(isa, places.len(), tile_bytes);
        tasks.extend((0..tiles).step_by(step).map(|first| {
            let tiles = first..(first + step).min(tiles);
            ExpertTask { expert, places: places.clone(), tiles }
        }));
    }
}

/// Computes the outputs of a task for one of its matrices. // (places, tiles · TILE_ROWS)
fn multiply<'a>(
    isa: Isa,
    linear: &TernaryLinear,
    experts: usize,
    task: &ExpertTask,
    inputs: &GroupActivations,
    buffer: &'a mut Vec<f32>,
) -> &'a mut [f32] {
    let first = task.expert * (linear.matrix.tile_count() / experts);
    let tiles = first + task.tiles.start..first + task.tiles.end;
    let values = resized(buffer, task.places.len() * tiles.len() * TILE_ROWS);
    kernels::gemm_groups(isa, &linear.matrix, tiles, inputs.part(task.places.clone()), values);
    values
}

impl ExpertTask {
    /// Returns the columns of the expert's outputs.
    fn columns(&self) -> Range<usize> {
        self.tiles.start * TILE_ROWS..self.tiles.end * TILE_ROWS
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// `residual += Σ p_e · down_e(gate_e(x), up_e(x))` with `x = norm(residual)`.
    pub(super) fn experts_block(&mut self, layer: usize) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let (Some(experts), Some(router)) = (&config.experts, &l.router) else { return };
        self.route((&l.feed_forward_norm, config.stream_norm_eps()), router, experts);
        let [gate, up] = [Linear::ExpertGate, Linear::ExpertUp].map(|linear| l.linear(linear));
        self.quantize_choices(experts.used, gate);
        self.expert_gates([gate, up], experts, layer);
        let down = l.linear(Linear::ExpertDown);
        self.quantize_gates(down);
        self.expert_outputs(down, experts.count);
        self.add_choices(experts.used);
    }

    /// Chooses the experts of all rows.
    fn route(&mut self, (norm, eps): (&[f32], f32), router: &[f32], experts: &Experts) {
        let Buffers { rows, residual, experts: buffers, .. } = &mut self.buffers;
        let ExpertBuffers { normed, logits, choices, starts, next, .. } = buffers;
        let (n, hidden, count, used) = (rows.len(), norm.len(), experts.count, experts.used);
        normed.resize(n * hidden, 0.0);
        logits.resize(n * count, 0.0);
        choices.resize(n * used, Choice::default());
        let kernels = self.kernels;
        let out = Disjoint::new(normed);
        self.pool.run(n, &|r| {
            let range = r * hidden..(r + 1) * hidden;
            // SAFETY: each task writes its own row.
            kernels.rms_norm(&residual[range.clone()], norm, eps, unsafe { out.part(range) });
        });
        let out = Disjoint::new(logits);
        self.pool.run(count.div_ceil(ROUTER_EXPERTS), &|task| {
            let of_task = task * ROUTER_EXPERTS..((task + 1) * ROUTER_EXPERTS).min(count);
            let matrix = &router[of_task.start * hidden..of_task.end * hidden];
            with_scratch(|scratch| {
                let found = resized(&mut scratch.floats, n * of_task.len());
                kernels.head(matrix, hidden, normed, found);
                for (r, found) in found.chunks_exact(of_task.len()).enumerate() {
                    let columns = r * count + of_task.start..r * count + of_task.end;
                    // SAFETY: each task writes its own experts.
                    unsafe { out.part(columns) }.copy_from_slice(found);
                }
            });
        });
        let out = Disjoint::new(choices);
        self.pool.run(n, &|r| {
            // SAFETY: each task writes its own row.
            let choices = unsafe { out.part(r * used..(r + 1) * used) };
            let logits = &logits[r * count..(r + 1) * count];
            with_scratch(|scratch| choose(logits, choices, &mut scratch.positions));
        });
        place(choices, count, starts, next);
    }

    /// Quantizes the normed rows, each to the places of its experts.
    fn quantize_choices(&mut self, used: usize, linear: &TernaryLinear) {
        let shape = self.group_shape(linear);
        let ExpertBuffers { normed, choices, inputs, .. } = &mut self.buffers.experts;
        inputs.reset(shape, choices.len());
        let (writer, kernels) = (inputs.writer(), self.kernels);
        self.pool.run(choices.len() / used, &|r| {
            with_scratch(|scratch| {
                let (bytes, scales) = quantized(scratch, kernels, shape, normed, r);
                for choice in &choices[r * used..(r + 1) * used] {
                    // SAFETY: each choice has a place of its own.
                    unsafe { writer.set_row(choice.place, bytes, scales) };
                }
            });
        });
    }

    /// Quantizes the gated values of all places.
    fn quantize_gates(&mut self, linear: &TernaryLinear) {
        let shape = self.group_shape(linear);
        let ExpertBuffers { choices, gate, inputs, .. } = &mut self.buffers.experts;
        inputs.reset(shape, choices.len());
        let (writer, kernels) = (inputs.writer(), self.kernels);
        self.pool.run(choices.len(), &|place| {
            with_scratch(|scratch| {
                let (bytes, scales) = quantized(scratch, kernels, shape, gate, place);
                // SAFETY: each task writes its own place.
                unsafe { writer.set_row(place, bytes, scales) };
            });
        });
    }

    fn group_shape(&self, linear: &TernaryLinear) -> GroupShape {
        let (format, digits) = (self.weights.format, self.digits);
        let group = linear.matrix.group().expect("matrices of experts have scales of groups");
        GroupShape { format, digits, cols: linear.matrix.cols(), group }
    }

    /// `gate = silu(min(gate(x), c)) ⊙ clamp(up(x), −c, c)`, for all places.
    fn expert_gates(&mut self, [gate, up]: [&TernaryLinear; 2], experts: &Experts, layer: usize) {
        let (isa, kernels, count) = (self.isa, self.kernels, experts.count);
        let width = gate.matrix.rows() / count;
        let ExpertBuffers { starts, inputs, gate: out, tasks, choices, .. } =
            &mut self.buffers.experts;
        out.resize(choices.len() * width, 0.0);
        cut(isa, starts, (width / TILE_ROWS, 2 * gate.matrix.tile_bytes()), tasks);
        let (out, tasks, inputs) = (Disjoint::new(out), &tasks[..], &*inputs);
        let clamp = experts.clamp[layer];
        let activation = self.weights.config().activation;
        self.pool.run(tasks.len(), &|index| {
            let task = &tasks[index];
            with_scratch(|scratch| {
                let Scratch { values, more_values, .. } = scratch;
                let of_gate = multiply(isa, gate, count, task, inputs, values);
                let of_up = multiply(isa, up, count, task, inputs, more_values);
                of_gate.iter_mut().for_each(|x| *x = x.min(clamp));
                of_up.iter_mut().for_each(|x| *x = x.clamp(-clamp, clamp));
                let stride = task.tiles.len() * TILE_ROWS;
                let gate = Values { values: of_gate, stride };
                let up = Values { values: of_up, stride };
                let places = out.within(task.places.start * width..task.places.end * width);
                // SAFETY: each task writes its own columns of its own places.
                let out = unsafe { places.columns(width, task.columns()) };
                kernels.gate_values(activation, &gate, &up, out);
            });
        });
    }

    /// `outputs = down(gate)`, for all places.
    fn expert_outputs(&mut self, down: &TernaryLinear, count: usize) {
        let (isa, kernels) = (self.isa, self.kernels);
        let width = down.matrix.rows() / count;
        let ExpertBuffers { starts, inputs, outputs, tasks, choices, .. } =
            &mut self.buffers.experts;
        outputs.resize(choices.len() * width, 0.0);
        cut(isa, starts, (width / TILE_ROWS, down.matrix.tile_bytes()), tasks);
        let (out, tasks, inputs) = (Disjoint::new(outputs), &tasks[..], &*inputs);
        self.pool.run(tasks.len(), &|index| {
            let task = &tasks[index];
            with_scratch(|scratch| {
                let values = multiply(isa, down, count, task, inputs, &mut scratch.values);
                let values = Values { values, stride: task.tiles.len() * TILE_ROWS };
                let places = out.within(task.places.start * width..task.places.end * width);
                // SAFETY: each task writes its own columns of its own places.
                kernels.set_values(&values, unsafe { places.columns(width, task.columns()) });
            });
        });
    }

    /// Adds the outputs of each row's experts to the residual stream.
    fn add_choices(&mut self, used: usize) {
        let Buffers { rows, residual, experts, .. } = &mut self.buffers;
        let ExpertBuffers { choices, outputs, .. } = experts;
        let hidden = residual.len() / rows.len().max(1);
        let residual = Disjoint::new(residual);
        self.pool.run(rows.len(), &|r| {
            with_scratch(|scratch| {
                let sum = resized(&mut scratch.floats, hidden);
                sum.fill(0.0);
                for Choice { weight, place, .. } in &choices[r * used..(r + 1) * used] {
                    let output = &outputs[place * hidden..(place + 1) * hidden];
                    sum.iter_mut().zip(output).for_each(|(sum, x)| *sum += weight * x);
                }
                // SAFETY: each task writes its own row.
                let row = unsafe { residual.part(r * hidden..(r + 1) * hidden) };
                row.iter_mut().zip(&*sum).for_each(|(x, sum)| *x += sum);
            });
        });
    }
}

/// Quantizes a row of a buffer.
fn quantized<'a>(
    scratch: &'a mut Scratch,
    kernels: &FloatKernels,
    shape: GroupShape,
    rows: &[f32],
    row: usize,
) -> (&'a [i8], &'a [f32]) {
    let Scratch { bytes, scales, .. } = scratch;
    let bytes = resized(bytes, shape.digits.count() * shape.cols);
    let scales = resized(scales, shape.scales());
    kernels.quantize_groups(&rows[row * shape.cols..][..shape.cols], shape.digits, bytes, scales);
    (bytes, scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_are_chosen_and_the_lower_of_equal_ones() {
        let mut choices = [Choice::default(); 3];
        choose(&[0.5, 2.0, -1.0, 2.0, 0.5, 0.5], &mut choices, &mut Vec::new());
        assert_eq!(choices.map(|choice| choice.expert), [0, 1, 3]);
        let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        assert_eq!(choices[1].weight, choices[2].weight);
        let ratio = choices[1].weight / choices[0].weight;
        assert!((ratio - 1.5f32.exp()).abs() < 1e-5, "{ratio}");
        let mut all = [Choice::default(); 2];
        choose(&[f32::NEG_INFINITY, 1.0], &mut all, &mut Vec::new());
        assert_eq!(all.map(|choice| (choice.expert, choice.weight)), [(0, 0.0), (1, 1.0)]);
    }

    #[test]
    fn places_are_by_expert_and_then_by_row() {
        let of = |expert| Choice { expert, ..Choice::default() };
        let mut choices = [of(1), of(3), of(0), of(3), of(1), of(2)];
        let mut starts = Vec::new();
        place(&mut choices, 5, &mut starts, &mut Vec::new());
        assert_eq!(starts, [0, 1, 3, 4, 6, 6]);
        assert_eq!(choices.map(|choice| choice.place), [1, 4, 0, 5, 2, 3]);
    }

    #[test]
    fn tasks_cover_the_tiles_of_chosen_experts() {
        let mut tasks = Vec::new();
        cut(Isa::Avx2, &[0, 0, 2, 102], (9, 1 << 10), &mut tasks);
        for (expert, places) in [(1, 0..2), (2, 2..102)] {
            let of_expert = tasks.iter().filter(|task| task.expert == expert);
            let of_expert = of_expert.inspect(|task| assert_eq!(task.places, places));
            assert!(of_expert.flat_map(|task| task.tiles.clone()).eq(0..9));
        }
        assert!(tasks.iter().all(|task| task.expert != 0));
    }
}
