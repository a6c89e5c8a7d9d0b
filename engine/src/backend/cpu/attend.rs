//! Positions, KV writes and attention of a step.

use super::{
    disjoint::Disjoint,
    forward::{Buffers, CpuBackend, Scratch, with_scratch},
};
use crate::{
    backend::Chunk,
    kernels::float::{KvElement, LANES},
};

/// Half-split RoPE of one head: element `j` pairs with `j + head_dim / 2`.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// RoPE on queries and keys; keys and values into their blocks.
    pub(super) fn rotate_and_store(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let config = self.weights.config();
        let (dim, half) = (config.head_dim, config.head_dim / 2);
        let (q_width, kv_width) = (config.head_count * dim, config.kv_head_count * dim);
        let Buffers { rows, queries, keys, values, rotations, .. } = &mut self.buffers;
        let (queries, keys) = (Disjoint::new(queries), Disjoint::new(keys));
        let (rows, values, rotations) = (&*rows, &*values, &*rotations);
        let (store, kernels) = (self.kv.layer_mut(layer), self.kernels);
        self.pool.run(rows.len(), &|r| {
            // SAFETY: each task writes its own row.
            let (queries, keys) = unsafe {
                (
                    queries.part(r * q_width..(r + 1) * q_width),
                    keys.part(r * kv_width..(r + 1) * kv_width),
                )
            };
            let (cos, sin) = rotations[r * 2 * half..(r + 1) * 2 * half].split_at(half);
            for head in queries.chunks_exact_mut(dim).chain(keys.chunks_exact_mut(dim)) {
                rotate(head, cos, sin);
            }
            let row = rows[r];
            let values = &values[r * kv_width..(r + 1) * kv_width];
            // SAFETY: positions of a step are distinct: one row each.
            unsafe {
                let blocks = chunks[row.chunk].blocks;
                store.write(kernels, blocks, row.position, keys, values);
            }
        });
    }

    pub(super) fn attend(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let config = self.weights.config();
        let (dim, group) = (config.head_dim, config.head_count / config.kv_head_count);
        let padded = dim.next_multiple_of(LANES);
        let width = config.head_count * dim;
        let Buffers { rows, queries, attended, attention_tasks, .. } = &mut self.buffers;
        attended.resize(rows.len() * width, 0.0);
        let attended = Disjoint::new(attended);
        let (rows, queries) = (&*rows, &*queries);
        let (kv, kernels) = (&self.kv, self.kernels);
        self.pool.run(attention_tasks.len(), &|index| {
            let task = &attention_tasks[index];
            let tile = kv.tile(layer, task.kv_head, chunks[task.chunk].blocks);
            let columns = task.kv_head * group * dim..(task.kv_head + 1) * group * dim;
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, scores, positions, .. } = scratch;
                if task.rows.len() == 1 && padded == dim {
                    // Queries and outputs of one row lie as the kernel has them.
                    let row = task.rows.start;
                    let start = row * width + columns.start;
                    positions.clear();
                    positions.resize(group, rows[row].position);
                    // SAFETY: each task writes its own rows and heads.
                    let out = unsafe { attended.part(start..start + group * dim) };
                    let queries = &queries[start..start + group * dim];
                    return kernels.attention(&tile, queries, positions, scores, out);
                }
                floats.clear();
                positions.clear();
                for r in task.rows.clone() {
                    floats.extend_from_slice(&queries[r * width..][columns.clone()]);
                    positions.extend(std::iter::repeat_n(rows[r].position, group));
                }
                more_floats.resize(positions.len() * padded, 0.0);
                kernels.attention(&tile, floats, positions, scores, more_floats);
                for (i, r) in task.rows.clone().enumerate() {
                    let start = r * width + columns.start;
                    // SAFETY: each task writes its own rows and heads.
                    let out = unsafe { attended.part(start..start + group * dim) };
                    for (h, head) in out.chunks_exact_mut(dim).enumerate() {
                        head.copy_from_slice(&more_floats[(i * group + h) * padded..][..dim]);
                    }
                }
            });
        });
    }
}
