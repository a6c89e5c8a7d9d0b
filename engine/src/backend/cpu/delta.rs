//! Recurrent layers (Gated DeltaNet) and the gates of attention, of hybrid models.
//!
//! ```text
//! u = input(x);  y = silu(convolution of u and the three inputs before it);  q, k, v = y, q and k of length 1
//! S = e^g S;  e = β (v − Sᵀ k);  S = S + k eᵀ;  o = Sᵀ q        for each value head, token by token
//! residual += output(norm(o) ⊙ silu(gate(x)))
//! ```
//!
//! with `g = decay · softplus(decay_rate(x) + bias)` and `β = sigmoid(learning_rate(x))`. A task has a head of a chunk, and its
//! tokens in their order, so that neither chunks nor threads change a bit.

use super::{
    backend::CpuBackend,
    buffers::{Buffers, HybridBuffers, resized, with_scratch},
    disjoint::Disjoint,
    linears::Source,
    weights::DeltaWeights,
};
use crate::{
    backend::{Chunk, StateSlots},
    config::{DeltaNet, Linear, ModelConfig},
    kernels::float::{DeltaToken, FloatKernels, KvElement},
    math,
};
use std::{mem, ops::Range, sync::Arc};

/// Inputs of the convolution before the current one.
const BEFORE: usize = DeltaNet::TAPS - 1;

/// The states of sequences: of each, for each recurrent layer, the newest inputs of the convolution `(BEFORE, channels)`, oldest
/// first, and the matrices of the value heads `(value_heads, head_dim, head_dim)`.
pub(super) struct States {
    memory: Vec<f32>, // (slots, recurrent layers, state)
    slots: usize,
    of_slot: usize,
}

impl States {
    /// Takes memory for so many states, of running sequences and others; none for models without recurrent layers. The system gives it when it is written to.
    pub fn new(config: &ModelConfig, slots: usize) -> Self {
        let of_slot = config.state_len();
        Self { memory: vec![0.0; slots * of_slot], slots, of_slot }
    }

    /// Returns the number of states that there is room for.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of bytes of a state.
    pub fn bytes(&self) -> usize {
        size_of::<f32>() * self.of_slot
    }

    /// Returns as many slots, of which these have the same states.
    pub fn with_copies(&self, slots: &[u32]) -> Self {
        let mut copy = Self { memory: vec![0.0; self.memory.len()], ..*self };
        for slot in slots {
            let range = self.range(*slot);
            copy.memory[range.clone()].copy_from_slice(&self.memory[range]);
        }
        copy
    }

    /// Copies the state in a slot to another one.
    pub fn copy(&mut self, from: u32, to: u32) {
        let (from, to) = (self.range(from), self.range(to));
        self.memory.copy_within(from, to.start);
    }

    /// Appends the state in a slot to `content`, as little-endian f32.
    pub fn read(&self, slot: u32, content: &mut Vec<u8>) {
        content.extend_from_slice(bytemuck::cast_slice(&self.memory[self.range(slot)]));
    }

    /// Writes what [`read`](Self::read) returned.
    pub fn write(&mut self, slot: u32, content: &[u8]) {
        let range = self.range(slot);
        bytemuck::cast_slice_mut(&mut self.memory[range]).copy_from_slice(content);
    }

    fn range(&self, slot: u32) -> Range<usize> {
        let start = slot as usize * self.of_slot;
        start..start + self.of_slot
    }
}

/// The buffers of a recurrent layer, and the states of the layer.
struct Layer<'a> {
    delta: DeltaNet,
    weights: &'a DeltaWeights,
    kernels: &'a FloatKernels,
    chunks: &'a [Chunk<'a>],
    /// First row of each chunk.
    starts: &'a [usize],
    states: Disjoint<'a, f32>,
    /// Elements of a slot, and the place of the layer in it.
    of_slot: usize,
    place: usize,
}

impl Layer<'_> {
    fn rows(&self, chunk: usize) -> Range<usize> {
        let start = self.starts[chunk];
        start..start + self.chunks[chunk].tokens.len()
    }

    /// Returns a part of the state in a slot.
    ///
    /// # Safety
    /// No other part that overlaps is in use.
    #[expect(clippy::mut_from_ref, reason = "as `Disjoint::part`; see Safety")]
    unsafe fn of_slot(&self, slot: u32, range: Range<usize>) -> &mut [f32] {
        let start = slot as usize * self.of_slot + self.place;
        // SAFETY: guaranteed by the caller.
        unsafe { self.states.part(start + range.start..start + range.end) }
    }

    /// Returns a part of the state of a chunk's sequence as the chunk begins.
    ///
    /// # Safety
    /// No other part that overlaps is in use.
    #[expect(clippy::mut_from_ref, reason = "as `Disjoint::part`; see Safety")]
    unsafe fn state(&self, chunk: usize, range: Range<usize>) -> &mut [f32] {
        let Chunk { state: StateSlots { own, from, .. }, position, .. } = self.chunks[chunk];
        // SAFETY: guaranteed by the caller; no chunk writes what another reads or writes.
        let state = unsafe { self.of_slot(own, range.clone()) };
        match from {
            _ if position == 0 => state.fill(0.0),
            Some(from) => {
                let start = from as usize * self.of_slot + self.place;
                // SAFETY: other chunks may read the slot, too, but only this one may write it, and does so after this.
                state.copy_from_slice(unsafe {
                    self.states.read(start + range.start..start + range.end)
                });
            }
            None => {}
        }
        state
    }

    /// Convolves the channels of a head for all rows of a chunk, and keeps their newest inputs. Heads are those of queries, then those
    /// of keys, then those of values.
    ///
    /// # Safety
    /// No other task has the head of the chunk.
    unsafe fn convolve(
        &self,
        (chunk, head): (usize, usize),
        inputs: &[f32],
        out: Disjoint<'_, f32>,
    ) {
        let DeltaNet { key_heads, head_dim: d, .. } = self.delta;
        let channels = self.delta.channels();
        let at = head * d..(head + 1) * d;
        let taps = |tap| &self.weights.convolution[tap * channels..][at.clone()];
        let weights = std::array::from_fn(taps);
        let rows = self.rows(chunk);
        // SAFETY: each task has its own channels, of the state and of the rows.
        let mut before: [&mut [f32]; BEFORE] = unsafe {
            std::array::from_fn(|i| {
                self.state(chunk, i * channels + at.start..i * channels + at.end)
            })
        };
        let input = |row: usize| &inputs[row * channels..][at.clone()];
        for (index, row) in rows.clone().enumerate() {
            let of_tap = |tap: usize| match (index + tap).checked_sub(BEFORE) {
                Some(i) => input(rows.start + i),
                None => &before[index + tap][..],
            };
            let inputs = std::array::from_fn(of_tap);
            // SAFETY: as above.
            let out = unsafe { out.part(row * channels + at.start..row * channels + at.end) };
            self.kernels.convolve(weights, inputs, out);
            if head < key_heads {
                self.kernels.to_length(out, 1.0 / (d as f32).sqrt());
            } else if head < 2 * key_heads {
                self.kernels.to_length(out, 1.0);
            }
        }
        for &(after, slot) in self.chunks[chunk].state.saves {
            for i in 0..BEFORE {
                let range = i * channels + at.start..i * channels + at.end;
                // SAFETY: as above.
                let kept = unsafe { self.of_slot(slot, range) };
                kept.copy_from_slice(match (after + i).checked_sub(BEFORE) {
                    Some(index) => input(rows.start + index),
                    None => &*before[after + i],
                });
            }
        }
        for i in 0..BEFORE {
            match (rows.len() + i).checked_sub(BEFORE) {
                Some(index) => before[i].copy_from_slice(input(rows.start + index)),
                None => {
                    let (to, from) = before.split_at_mut(i + 1);
                    to[i].copy_from_slice(from[rows.len() - 1]);
                }
            }
        }
    }

    /// Runs a value head over all rows of a chunk.
    ///
    /// # Safety
    /// No other task has the head of the chunk.
    unsafe fn run_head(
        &self,
        (chunk, head): (usize, usize),
        (convolved, gates, rates): (&[f32], &[f32], &[Vec<f32>; 2]),
        (norm_eps, normed): (f32, &mut [f32]),
        out: Disjoint<'_, f32>,
    ) {
        let DeltaNet { key_heads, value_heads, head_dim: d, .. } = self.delta;
        let (channels, values) = (self.delta.channels(), self.delta.values());
        let key_head = head / self.delta.group();
        let first = BEFORE * channels + head * d * d;
        // SAFETY: each task has its own head.
        let state = unsafe { self.state(chunk, first..first + d * d) };
        let mut saves = self.chunks[chunk].state.saves.iter().peekable();
        for (index, row) in self.rows(chunk).enumerate() {
            let part = |head: usize| &convolved[row * channels + head * d..][..d];
            let [decay, learning] = [0, 1].map(|i| f64::from(rates[i][row * value_heads + head]));
            let bias = f64::from(self.weights.decay_bias[head]);
            let rate = f64::from(self.weights.decay[head]) * softplus(decay + bias);
            let token = DeltaToken {
                query: part(key_head),
                key: part(key_heads + key_head),
                value: part(2 * key_heads + head),
                decay: math::exp(rate) as f32,
                beta: (1.0 / (1.0 + math::exp(-learning))) as f32,
            };
            let at = row * values + head * d;
            // SAFETY: as above.
            let out = unsafe { out.part(at..at + d) };
            self.kernels.delta_rule(state, &token, out);
            self.kernels.rms_norm(out, &self.weights.norm, norm_eps, normed);
            out.copy_from_slice(normed);
            self.kernels.apply_silu(out, &gates[at..at + d]);
            if let Some((_, slot)) = saves.next_if(|(after, _)| *after == index + 1) {
                // SAFETY: as above.
                unsafe { self.of_slot(*slot, first..first + d * d) }.copy_from_slice(state);
            }
        }
    }
}

/// `ln(1 + e^x)`
fn softplus(x: f64) -> f64 {
    if x > 30.0 { x } else { math::ln(1.0 + math::exp(x)) }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// `residual += output(norm(delta rule(input(x), rates(x))) ⊙ silu(gate(x)))` with `x = norm(residual)`.
    pub(super) fn delta_block(&mut self, layer: usize, delta: &DeltaNet, chunks: &[Chunk<'_>]) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let norm = (&l.attention_norm[..], config.stream_norm_eps());
        let (input, gate) = (l.linear(Linear::DeltaInput), l.linear(Linear::DeltaGate));
        let hybrid = &mut self.buffers.hybrid;
        let [decay, learning] = &mut hybrid.rates;
        let outputs = [&mut hybrid.inputs, &mut hybrid.gates, decay, learning].map(mem::take);
        let [inputs, gates, decay, learning] = match &l.delta {
            Some(DeltaWeights { dense_rates: Some(rates), .. }) => {
                let [inputs, gates, mut decay, mut learning] = outputs;
                let of_inputs = self.quantize(Source::Residual, Some(norm), &[input, gate]);
                let mut outputs = [inputs, gates];
                self.project([input, gate], of_inputs, &mut outputs);
                self.dense_rates(norm, rates, [&mut decay, &mut learning]);
                let [inputs, gates] = outputs;
                [inputs, gates, decay, learning]
            }
            _ => {
                let rates = [Linear::DecayRate, Linear::LearningRate].map(|of| l.linear(of));
                let linears = [input, gate, rates[0], rates[1]];
                let of_inputs = self.quantize(Source::Residual, Some(norm), &linears);
                let mut outputs = outputs;
                self.project(linears, of_inputs, &mut outputs);
                outputs
            }
        };
        let hybrid = &mut self.buffers.hybrid;
        (hybrid.inputs, hybrid.gates) = (inputs, gates);
        hybrid.rates = [decay, learning];
        let Some(of_layer) = &l.delta else { return };
        let place = (layer - config.attention_layers_before(layer)) * delta.state_len();
        self.run_delta(*delta, (of_layer, config.rms_norm_eps), place, chunks);
        let output = l.linear(Linear::DeltaOutput);
        self.quantize(Source::Attended, None, &[output]);
        self.project_into_residual(output);
    }

    /// Convolves, and runs the value heads; writes what they read to `attended`.
    fn run_delta(
        &mut self,
        delta: DeltaNet,
        (weights, norm_eps): (&DeltaWeights, f32),
        place: usize,
        chunks: &[Chunk<'_>],
    ) {
        let Buffers { rows, starts, attended, hybrid, .. } = &mut self.buffers;
        let HybridBuffers { inputs, convolved, gates, rates, .. } = hybrid;
        convolved.resize(rows.len() * delta.channels(), 0.0);
        attended.resize(rows.len() * delta.values(), 0.0);
        let States { memory, of_slot, .. } = &mut *self.states;
        let layer = Layer {
            delta,
            weights,
            kernels: self.kernels,
            chunks,
            starts,
            states: Disjoint::new(memory),
            of_slot: *of_slot,
            place,
        };
        let heads = 2 * delta.key_heads + delta.value_heads;
        let out = Disjoint::new(convolved);
        self.pool.run(chunks.len() * heads, &|task| {
            // SAFETY: each task has another head of a chunk, and chunks write different rows and slots.
            unsafe { layer.convolve((task / heads, task % heads), inputs, out) };
        });
        let out = Disjoint::new(attended);
        let heads = delta.value_heads;
        let read = (&convolved[..], &gates[..], &*rates);
        self.pool.run(chunks.len() * heads, &|task| {
            with_scratch(|scratch| {
                let normed = resized(&mut scratch.floats, delta.head_dim);
                // SAFETY: as above.
                unsafe {
                    layer.run_head((task / heads, task % heads), read, (norm_eps, normed), out);
                }
            });
        });
    }

    /// `outputs[i] = rates[i] norm(residual)`, in f32.
    fn dense_rates(
        &mut self,
        (norm, eps): (&[f32], f32),
        rates: &[Vec<f32>; 2],
        outputs: [&mut Vec<f32>; 2],
    ) {
        let Buffers { rows, residual, .. } = &self.buffers;
        let hidden = norm.len();
        let width = rates[0].len() / hidden;
        let outputs = outputs.map(|out| {
            out.resize(rows.len() * width, 0.0);
            Disjoint::new(out)
        });
        let kernels = self.kernels;
        self.pool.run(rows.len(), &|r| {
            with_scratch(|scratch| {
                let normed = resized(&mut scratch.floats, hidden);
                kernels.rms_norm(&residual[r * hidden..(r + 1) * hidden], norm, eps, normed);
                for (rates, out) in rates.iter().zip(outputs) {
                    // SAFETY: each task writes its own row.
                    let out = unsafe { out.part(r * width..(r + 1) * width) };
                    kernels.head(rates, hidden, normed, out);
                }
            });
        });
    }

    /// Divides what Q gives into queries and gates: each head has its query, and then as many gate elements.
    pub(super) fn split_gates(&mut self) {
        let dim = self.weights.config().head_dim;
        let Buffers { rows, queries, hybrid, .. } = &mut self.buffers;
        let HybridBuffers { gated_queries, attention_gates, .. } = hybrid;
        let half = gated_queries.len() / 2;
        queries.resize(half, 0.0);
        attention_gates.resize(half, 0.0);
        let width = half / rows.len().max(1);
        let (queries, gates) = (Disjoint::new(queries), Disjoint::new(attention_gates));
        let both = &gated_queries[..];
        self.pool.run(rows.len(), &|r| {
            // SAFETY: each task writes its own row.
            let (queries, gates) = unsafe {
                let range = r * width..(r + 1) * width;
                (queries.part(range.clone()), gates.part(range))
            };
            let heads = both[2 * r * width..2 * (r + 1) * width].chunks_exact(2 * dim);
            let outputs = queries.chunks_exact_mut(dim).zip(gates.chunks_exact_mut(dim));
            for (head, (query, gate)) in heads.zip(outputs) {
                query.copy_from_slice(&head[..dim]);
                gate.copy_from_slice(&head[dim..]);
            }
        });
    }

    /// `attended = attended ⊙ sigmoid(gates)`
    pub(super) fn gate_attended(&mut self) {
        let Buffers { rows, attended, hybrid, .. } = &mut self.buffers;
        let width = attended.len() / rows.len().max(1);
        let (attended, gates) = (Disjoint::new(attended), &hybrid.attention_gates[..]);
        let kernels = self.kernels;
        self.pool.run(rows.len(), &|r| {
            let range = r * width..(r + 1) * width;
            // SAFETY: each task writes its own row.
            kernels.apply_sigmoid(unsafe { attended.part(range.clone()) }, &gates[range]);
        });
    }
}
