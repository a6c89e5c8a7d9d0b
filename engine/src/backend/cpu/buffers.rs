//! Buffers of a step, the layout of its rows, and the scratch of each thread.

use std::{cell::RefCell, ops::Range};

use super::{
    experts::ExpertBuffers,
    tiles::TileTask,
    together::{SharedPrefixes, sequences_max},
};
use crate::{
    backend::{Chunk, Largest},
    config::ModelConfig,
    kernels::{Activations, GroupActivations},
};

/// Query rows per attention task.
pub(super) const ROWS_PER_TASK: usize = 4;

/// One token of the step.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub chunk: usize,
    pub position: usize,
    pub token: u32,
}

/// Queries of a few rows of one chunk for one KV head.
#[derive(Clone)]
pub(super) struct AttentionTask {
    pub chunk: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
}

/// A row that logits are requested for.
#[derive(Clone, Copy)]
pub(super) struct HeadRow {
    pub row: usize,
    pub needs: HeadNeeds,
    /// Its place among the rows that need the same.
    pub place: usize,
}

/// The logits that a row needs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadNeeds {
    All,
    /// Some of the largest.
    Largest,
    /// Those of given tokens.
    Tokens,
}

/// Quantized rows, the input of one or more linears.
#[derive(Default)]
pub(super) struct Quantized {
    /// Int8, for matrices with one scale.
    pub x: Activations,
    pub scales: Vec<f32>, // (rows)
    /// For matrices with scales of groups.
    pub groups: GroupActivations,
}

/// Buffers of a step of a hybrid model. Leading dimension: rows of the step.
#[derive(Default)]
pub(super) struct HybridBuffers {
    pub gated_queries: Vec<f32>, // (rows, heads, 2, head_dim): query, then gate
    pub attention_gates: Vec<f32>, // (rows, heads * head_dim)
    pub inputs: Vec<f32>,        // (rows, channels), before the convolution
    pub convolved: Vec<f32>,     // (rows, channels)
    pub gates: Vec<f32>,         // (rows, values)
    pub rates: [Vec<f32>; 2],    // each (rows, value_heads): of decay, and of learning
}

/// Buffers of a step, reused by the next one. Leading dimension: rows of the step.
#[derive(Default)]
pub(super) struct Buffers {
    pub rows: Vec<Row>,
    /// First row of each chunk.
    pub starts: Vec<usize>,
    pub attention_tasks: Vec<AttentionTask>,
    /// The attention of decodes that begin with the same blocks.
    pub shared: SharedPrefixes,
    /// Rows of chunks with more than [`ROWS_PER_TASK`] rows: their keys and values are stored before any
    /// attention task runs.
    pub prestored_rows: Vec<usize>,
    pub residual: Vec<f32>,  // (rows, hidden)
    pub rotations: Vec<f32>, // (rows, 2, head_dim / 2): cosines, then sines
    pub queries: Vec<f32>,   // (rows, heads * head_dim)
    pub keys: Vec<f32>,      // (rows, kv_heads * head_dim)
    pub values: Vec<f32>,    // (rows, kv_heads * head_dim)
    pub attended: Vec<f32>,  // (rows, heads * head_dim)
    pub gate: Vec<f32>,      // (rows, intermediate)
    pub inputs: [Quantized; 4],
    /// Of hybrid models: what Q gives, the gates of attention, and the parts of recurrent layers.
    pub hybrid: HybridBuffers,
    pub experts: ExpertBuffers,
    pub tile_tasks: Vec<TileTask>,
    /// Scratch of the check of a step.
    pub written: Vec<u64>,
    pub head_rows: Vec<HeadRow>,
    /// The tokens to find for each row with some of the largest.
    pub questions: Vec<Largest>,
    pub head_rows_all: Vec<f32>,  // (rows with all logits, hidden)
    pub head_rows_some: Vec<f32>, // (rows with some of the largest, then those with given tokens; hidden)
    /// The rows with all logits, as the input of a ternary head.
    pub head_input: GroupActivations,
}

impl Buffers {
    /// Lays out a step's rows and cuts its attention into tasks, for so many threads.
    pub fn lay_out(&mut self, chunks: &[Chunk<'_>], config: &ModelConfig, threads: usize) {
        let kv_head_count = config.kv_head_count;
        let Self { rows, starts, attention_tasks, shared, prestored_rows, .. } = self;
        shared.find(chunks, kv_head_count, threads, sequences_max(config));
        rows.clear();
        starts.clear();
        attention_tasks.clear();
        prestored_rows.clear();
        for (index, chunk) in chunks.iter().enumerate() {
            let first = rows.len();
            starts.push(first);
            for (i, &token) in chunk.tokens.iter().enumerate() {
                rows.push(Row { chunk: index, position: chunk.position + i, token });
            }
            if chunk.tokens.len() > ROWS_PER_TASK {
                prestored_rows.extend(first..rows.len());
            }
            if shared.members.contains(&index) {
                continue;
            }
            // Ordered by head, so that a head's keys and values stay in the cache from task to task.
            attention_tasks.extend((0..kv_head_count).flat_map(|kv_head| {
                let starts = (first..rows.len()).step_by(ROWS_PER_TASK);
                let end = rows.len();
                starts.map(move |start| AttentionTask {
                    chunk: index,
                    kv_head,
                    rows: start..(start + ROWS_PER_TASK).min(end),
                })
            }));
        }
    }
}

#[cfg(test)]
impl Buffers {
    /// Returns the memory in bytes of the buffers with one row per token.
    pub fn size_bytes(&self) -> usize {
        let floats = [
            &self.residual,
            &self.rotations,
            &self.queries,
            &self.keys,
            &self.values,
            &self.attended,
            &self.gate,
            &self.head_rows_all,
            &self.head_rows_some,
        ];
        let HybridBuffers { gated_queries, attention_gates, inputs, convolved, gates, rates } =
            &self.hybrid;
        let hybrid = [gated_queries, attention_gates, inputs, convolved, gates];
        let ExpertBuffers { normed, logits, gate, outputs, inputs: of_experts, .. } = &self.experts;
        let experts = [normed, logits, gate, outputs];
        let floats = floats.into_iter().chain(hybrid).chain(rates).chain(experts);
        let floats: usize = floats.map(|buffer| buffer.len() * 4).sum();
        let rows = self.rows.len() * size_of::<Row>();
        let input = |input: &Quantized| {
            let row = Activations::row_bytes(input.x.format(), input.x.cols());
            input.x.rows() * row + input.scales.len() * 4 + input.groups.size_bytes()
        };
        let inputs: usize = self.inputs.iter().map(input).sum();
        floats + rows + inputs + self.head_input.size_bytes() + of_experts.size_bytes()
    }
}

/// Scratch of one thread.
#[derive(Default)]
pub(super) struct Scratch {
    pub sums: Vec<i32>,
    pub more_sums: Vec<i32>,
    /// Outputs of matrices with scales of groups, in the place of `sums`.
    pub values: Vec<f32>,
    pub more_values: Vec<f32>,
    pub floats: Vec<f32>,
    pub more_floats: Vec<f32>,
    pub bytes: Vec<i8>,
    /// Scales of a row's groups.
    pub scales: Vec<f32>,
    pub scores: Vec<f32>,
    pub positions: Vec<usize>,
    pub candidates: Vec<(usize, f32, f32)>, // token, estimate, error bound of the estimate
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Calls `f` with the scratch of this thread.
pub(super) fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}

/// Returns the first `len` elements of a buffer that only grows. Their values are unspecified.
pub(super) fn resized<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
