//! RoPE, KV writes and attention of a step.

use super::{
    backend::CpuBackend,
    buffers::{AttentionTask, Buffers, ROWS_PER_TASK, Row, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    kv_store::KvLayer,
};
use crate::{
    backend::Chunk,
    config::ModelConfig,
    kernels::float::{FloatKernels, KvElement, LANES, POSITIONS_PART},
    kv::BLOCK_TOKENS,
};

/// Applies half-split RoPE to the first `2 * cos.len()` elements of a head: element `j` pairs with `j + cos.len()`.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

/// Queries, keys and values of a step, and the KV storage of the layer.
struct AttentionInput<'a, E> {
    config: &'a ModelConfig,
    kernels: &'a FloatKernels,
    chunks: &'a [Chunk<'a>],
    rows: &'a [Row],
    rotations: &'a [f32],
    /// Pairs of elements that RoPE turns in this layer.
    turned: usize,
    queries: Disjoint<'a, f32>,
    keys: Disjoint<'a, f32>,
    values: &'a [f32],
    layer: KvLayer<'a, E>,
}

impl<E: KvElement> AttentionInput<'_, E> {
    /// Returns the number of query heads per KV head.
    fn group(&self) -> usize {
        self.config.head_count / self.config.kv_head_count
    }

    /// Returns the range of a row's elements for a KV head, in the queries and in the outputs.
    /// // (group, head_dim)
    fn queries_at(&self, row: usize, kv_head: usize) -> std::ops::Range<usize> {
        let width = self.group() * self.config.head_dim;
        let start = (row * self.config.kv_head_count + kv_head) * width;
        start..start + width
    }

    /// Applies RoPE to a row's queries and keys of a KV head, and stores its keys and values.
    ///
    /// # Safety
    /// No other thread uses this row's queries and keys of the head, or its position in the block.
    unsafe fn rotate_and_store(&self, row: usize, kv_head: usize) {
        let (dim, half) = (self.config.head_dim, self.turned);
        let at = (row * self.config.kv_head_count + kv_head) * dim;
        // SAFETY: guaranteed by the caller.
        let (queries, keys) = unsafe {
            let queries = self.queries.part(self.queries_at(row, kv_head));
            (queries, self.keys.part(at..at + dim))
        };
        let (cos, sin) = self.rotations[row * 2 * half..(row + 1) * 2 * half].split_at(half);
        for head in queries.chunks_exact_mut(dim) {
            rotate(head, cos, sin);
        }
        rotate(keys, cos, sin);
        let Row { chunk, position, .. } = self.rows[row];
        let place = (self.chunks[chunk].blocks, position);
        let values = &self.values[at..at + dim];
        // SAFETY: guaranteed by the caller.
        unsafe { self.layer.write(self.kernels, place, kv_head, [keys, values]) };
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Applies RoPE to queries and keys, stores keys and values in their blocks, and attends.
    ///
    /// If one attention task has all rows of a chunk, it stores their keys and values just before it
    /// reads them. Rows of longer chunks are stored in a separate region before any attention task.
    pub(super) fn attend(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let config = self.weights.config();
        let window = config.window(layer).unwrap_or(usize::MAX);
        let place = config.attention_layers_before(layer);
        let (dim, kernels) = (config.head_dim, self.kernels);
        let padded = dim.next_multiple_of(LANES);
        let Buffers {
            rows,
            queries,
            keys,
            values,
            rotations,
            attended,
            attention_tasks,
            prestored_rows,
            ..
        } = &mut self.buffers;
        attended.resize(rows.len() * config.head_count * dim, 0.0);
        let (attended, rows) = (Disjoint::new(attended), &rows[..]);
        let (attention_tasks, prestored_rows) = (&attention_tasks[..], &prestored_rows[..]);
        let input = AttentionInput {
            config,
            kernels,
            chunks,
            rows,
            rotations,
            turned: config.rotary_dim_of(layer) / 2,
            queries: Disjoint::new(queries),
            keys: Disjoint::new(keys),
            values,
            layer: self.kv.layer(place),
        };
        let group = input.group();
        self.pool.run(prestored_rows.len(), &|task| {
            for kv_head in 0..config.kv_head_count {
                // SAFETY: positions of a step are distinct, and each task has a different row.
                unsafe { input.rotate_and_store(prestored_rows[task], kv_head) };
            }
        });
        self.pool.run(attention_tasks.len(), &|index| {
            let AttentionTask { chunk, kv_head, rows: of_task } = attention_tasks[index].clone();
            if chunks[chunk].tokens.len() <= ROWS_PER_TASK {
                for row in of_task.clone() {
                    // SAFETY: no other task has these rows and this head, and no other chunk reads what
                    // this one writes.
                    unsafe { input.rotate_and_store(row, kv_head) };
                }
            }
            // What no row of the task attends to is left out, in parts that the kernels add up as one.
            let first = (rows[of_task.start].position + 1).saturating_sub(window);
            let hidden = first - first % POSITIONS_PART;
            let blocks = &chunks[chunk].blocks[hidden / BLOCK_TOKENS..];
            // SAFETY: the chunk's keys and values of this head have been written, here or before.
            let tile = unsafe { input.layer.tile(kv_head, (blocks, window)) };
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, scores, positions, .. } = scratch;
                positions.clear();
                for row in of_task.clone() {
                    positions.extend(std::iter::repeat_n(rows[row].position - hidden, group));
                }
                // SAFETY: each task reads and writes its own rows and heads.
                let (queries_of, out_of) = unsafe {
                    (
                        |row| &*input.queries.part(input.queries_at(row, kv_head)),
                        |row| attended.part(input.queries_at(row, kv_head)),
                    )
                };
                if of_task.len() == 1 && padded == dim {
                    // Queries and outputs of one row already have the kernel's layout.
                    let row = of_task.start;
                    let (queries, out) = (queries_of(row), out_of(row));
                    return kernels.attention(&tile, queries, positions, scores, out);
                }
                floats.clear();
                for row in of_task.clone() {
                    floats.extend_from_slice(queries_of(row));
                }
                let outputs = resized(more_floats, positions.len() * padded);
                kernels.attention(&tile, floats, positions, scores, outputs);
                for (i, row) in of_task.clone().enumerate() {
                    for (h, head) in out_of(row).chunks_exact_mut(dim).enumerate() {
                        head.copy_from_slice(&outputs[(i * group + h) * padded..][..dim]);
                    }
                }
            });
        });
    }
}
