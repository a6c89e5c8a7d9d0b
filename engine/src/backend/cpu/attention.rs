//! RoPE, KV writes and attention of a step.

use std::ops::Range;

use super::{
    backend::CpuBackend,
    buffers::{AttentionTask, Buffers, ROWS_PER_TASK, Row, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    kv_layers::KvPlace,
    kv_store::KvLayer,
    together::{SEQUENCES_MAX, SharedTask},
};
use crate::{
    backend::Chunk,
    config::ModelConfig,
    kernels::float::{FloatKernels, KvElement, LANES, POSITIONS_PART, Together},
    kv::{BLOCK_TOKENS, BlockId},
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
    attended: Disjoint<'a, f32>,
    /// Newest positions that a row attends to, with its own; all with [`usize::MAX`].
    window: usize,
    /// The group of the layer.
    group: usize,
    layer: KvLayer<'a, E>,
}

impl<E: KvElement> AttentionInput<'_, E> {
    /// Returns the blocks of a chunk that have the layer's keys and values.
    fn blocks(&self, chunk: usize) -> &[BlockId] {
        let Chunk { blocks, windows, .. } = self.chunks[chunk];
        if self.group == 0 { blocks } else { &windows[self.group - 1] }
    }

    /// Returns the number of query heads per KV head.
    fn queries_per_head(&self) -> usize {
        self.config.head_count / self.config.kv_head_count
    }

    /// Returns the range of a row's elements for a KV head, in the queries and in the outputs.
    /// // (queries per head, head_dim)
    fn queries_at(&self, row: usize, kv_head: usize) -> Range<usize> {
        let width = self.queries_per_head() * self.config.head_dim;
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
        let place = (self.blocks(chunk), position);
        let values = &self.values[at..at + dim];
        // SAFETY: guaranteed by the caller.
        unsafe { self.layer.write(self.kernels, place, kv_head, [keys, values]) };
    }
}

impl<E: KvElement> AttentionInput<'_, E> {
    /// Attends with some rows of a chunk for a KV head. If these are all rows of the chunk, their keys and values are stored first.
    ///
    /// # Safety
    /// No other thread uses these rows' queries, keys and outputs of the head, and the keys and values of longer chunks are stored.
    unsafe fn attend(&self, chunk: usize, kv_head: usize, of_task: Range<usize>) {
        let (rows, dim, per_head) = (self.rows, self.config.head_dim, self.queries_per_head());
        let padded = dim.next_multiple_of(LANES);
        if self.chunks[chunk].tokens.len() <= ROWS_PER_TASK {
            for row in of_task.clone() {
                // SAFETY: guaranteed by the caller; no other chunk reads what this one writes.
                unsafe { self.rotate_and_store(row, kv_head) };
            }
        }
        // What no row of the task attends to is left out, in parts that the kernels add up as one.
        let first = (rows[of_task.start].position + 1).saturating_sub(self.window);
        let hidden = first - first % POSITIONS_PART;
        let blocks = &self.blocks(chunk)[hidden / BLOCK_TOKENS..];
        // SAFETY: the chunk's keys and values of this head have been written, here or before.
        let tile = unsafe { self.layer.tile(kv_head, (blocks, self.window)) };
        with_scratch(|scratch| {
            let Scratch { floats, more_floats, scores, positions, .. } = scratch;
            positions.clear();
            for row in of_task.clone() {
                positions.extend(std::iter::repeat_n(rows[row].position - hidden, per_head));
            }
            if of_task.len() == 1 && padded == dim {
                // Queries and outputs of one row already have the kernel's layout.
                let place = self.queries_at(of_task.start, kv_head);
                // SAFETY: guaranteed by the caller.
                let (queries, out) =
                    unsafe { (&*self.queries.part(place.clone()), self.attended.part(place)) };
                return self.kernels.attention(&tile, queries, positions, scores, out);
            }
            // SAFETY: guaranteed by the caller.
            unsafe { self.gather(floats, of_task.clone(), kv_head) };
            let outputs = resized(more_floats, positions.len() * padded);
            self.kernels.attention(&tile, floats, positions, scores, outputs);
            // SAFETY: guaranteed by the caller.
            unsafe { self.scatter(outputs, of_task.clone(), kv_head) };
        });
    }

    /// Stores the keys and values of several decodes for a KV head, and attends with them.
    ///
    /// # Safety
    /// As for [`attend`](Self::attend).
    unsafe fn attend_together(&self, task: &SharedTask, chunks: &[usize], starts: &[usize]) {
        let SharedTask { kv_head, segments, .. } = *task;
        if self.window < usize::MAX {
            for &chunk in chunks {
                let row = starts[chunk];
                // SAFETY: guaranteed by the caller.
                unsafe { self.attend(chunk, kv_head, row..row + 1) };
            }
            return;
        }
        let rows = || chunks.iter().map(|chunk| starts[*chunk]);
        for row in rows() {
            // SAFETY: guaranteed by the caller; no other chunk reads what this one writes.
            unsafe { self.rotate_and_store(row, kv_head) };
        }
        let mut tables: [&[BlockId]; SEQUENCES_MAX] = [&[]; SEQUENCES_MAX];
        for (table, chunk) in tables.iter_mut().zip(chunks) {
            *table = self.chunks[*chunk].blocks;
        }
        let together = Together { tables: &tables[..chunks.len()], segments };
        // SAFETY: the keys and values of this head have been written, here or before.
        let tile = unsafe { self.layer.tile(kv_head, (tables[0], self.window)) };
        let (dim, per_head) = (self.config.head_dim, self.queries_per_head());
        with_scratch(|scratch| {
            let Scratch { floats, more_floats, scores, positions, .. } = scratch;
            positions.clear();
            for row in rows() {
                positions.extend(std::iter::repeat_n(self.rows[row].position, per_head));
            }
            // SAFETY: guaranteed by the caller.
            unsafe { self.gather(floats, rows(), kv_head) };
            let outputs = resized(more_floats, positions.len() * dim.next_multiple_of(LANES));
            let kernels = self.kernels;
            kernels.attention_together(&tile, &together, floats, positions, scores, outputs);
            // SAFETY: guaranteed by the caller.
            unsafe { self.scatter(outputs, rows(), kv_head) };
        });
    }

    /// Writes the queries of rows for a KV head to `queries`. // (row, queries per head, head_dim)
    ///
    /// # Safety
    /// No other thread writes them.
    unsafe fn gather(
        &self,
        queries: &mut Vec<f32>,
        rows: impl Iterator<Item = usize>,
        kv_head: usize,
    ) {
        queries.clear();
        for row in rows {
            // SAFETY: guaranteed by the caller.
            queries.extend_from_slice(unsafe { self.queries.part(self.queries_at(row, kv_head)) });
        }
    }

    /// Writes the outputs of rows for a KV head, `(row, queries per head, padded head_dim)`, to their places.
    ///
    /// # Safety
    /// No other thread uses these.
    unsafe fn scatter(&self, outputs: &[f32], rows: impl Iterator<Item = usize>, kv_head: usize) {
        let (dim, per_head) = (self.config.head_dim, self.queries_per_head());
        let padded = dim.next_multiple_of(LANES);
        for (row, outputs) in rows.zip(outputs.chunks_exact(per_head * padded)) {
            // SAFETY: guaranteed by the caller.
            let out = unsafe { self.attended.part(self.queries_at(row, kv_head)) };
            for (head, output) in out.chunks_exact_mut(dim).zip(outputs.chunks_exact(padded)) {
                head.copy_from_slice(&output[..dim]);
            }
        }
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Applies RoPE to queries and keys, stores keys and values in their blocks, and attends.
    ///
    /// If one attention task has all rows of a chunk, it stores their keys and values just before it
    /// reads them. Rows of longer chunks are stored in a separate region before any attention task.
    pub(super) fn attend(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let config = self.weights.config();
        let KvPlace { group, layer: place } = self.kv_layers.place(layer);
        let Buffers {
            rows,
            starts,
            queries,
            keys,
            values,
            rotations,
            attended,
            attention_tasks,
            shared,
            prestored_rows,
            ..
        } = &mut self.buffers;
        attended.resize(rows.len() * config.head_count * config.head_dim, 0.0);
        let (starts, attention_tasks, prestored_rows) =
            (&starts[..], &attention_tasks[..], &prestored_rows[..]);
        let shared = &*shared;
        let input = AttentionInput {
            config,
            kernels: self.kernels,
            chunks,
            rows,
            rotations,
            turned: config.rotary_dim_of(layer) / 2,
            queries: Disjoint::new(queries),
            keys: Disjoint::new(keys),
            values,
            attended: Disjoint::new(attended),
            window: config.window(layer).unwrap_or(usize::MAX),
            group,
            layer: self.kv.layer(place),
        };
        self.pool.run(prestored_rows.len(), &|task| {
            for kv_head in 0..config.kv_head_count {
                // SAFETY: positions of a step are distinct, and each task has a different row.
                unsafe { input.rotate_and_store(prestored_rows[task], kv_head) };
            }
        });
        let of_shared = shared.tasks.len();
        self.pool.run(
            of_shared + attention_tasks.len(),
            &|index| match index.checked_sub(of_shared) {
                None => {
                    let task = &shared.tasks[index];
                    let chunks = &shared.members[task.members.clone()];
                    // SAFETY: each task has its own rows and head, here and below.
                    unsafe { input.attend_together(task, chunks, starts) };
                }
                Some(index) => {
                    let AttentionTask { chunk, kv_head, ref rows } = attention_tasks[index];
                    // SAFETY: as above; rows of longer chunks are stored.
                    unsafe { input.attend(chunk, kv_head, rows.clone()) };
                }
            },
        );
    }
}
