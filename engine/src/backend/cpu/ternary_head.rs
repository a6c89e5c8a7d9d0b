//! The head of models with a ternary one: a linear with scales of groups. Its input always has two digits.

use super::{
    buffers::{Buffers, Scratch, resized, with_scratch},
    disjoint::Disjoint,
    linears::tile_tasks,
    load::CpuBackend,
};
use crate::{
    formats::{PackedMatrix, TILE_ROWS},
    kernels::{
        self, Digits, GroupShape,
        float::{KvElement, Values},
    },
};

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Computes all logits of `head_rows_all`. // (rows, vocab)
    pub(super) fn ternary_head(&mut self, head: &PackedMatrix, logits: &mut [f32]) {
        let (vocab, hidden) = (head.rows(), head.cols());
        let rows = logits.len() / vocab;
        let Some(group) = head.group().filter(|_| rows > 0) else { return };
        let (isa, kernels, digits) = (self.isa, self.kernels, Digits::Two);
        let Buffers { head_rows_all, head_input, tile_tasks: tasks, .. } = &mut self.buffers;
        let shape = GroupShape { format: head.format(), digits, cols: hidden, group };
        head_input.reset(shape, rows);
        let writer = head_input.writer();
        self.pool.run(rows, &|r| {
            with_scratch(|scratch| {
                let Scratch { bytes, scales, .. } = scratch;
                let bytes = resized(bytes, digits.count() * hidden);
                let scales = resized(scales, shape.scales());
                let row = &head_rows_all[r * hidden..(r + 1) * hidden];
                kernels.quantize_groups(row, digits, bytes, scales);
                // SAFETY: each task writes its own row.
                unsafe { writer.set_row(r, bytes, scales) };
            });
        });
        tile_tasks(isa, &[head], rows, self.pool.threads(), tasks);
        let (tasks, input, out) = (&tasks[..], &*head_input, Disjoint::new(logits));
        self.pool.run(tasks.len(), &|task| {
            let (_, tiles) = tasks[task].clone();
            let (start, stride) = (tiles.start * TILE_ROWS, tiles.len() * TILE_ROWS);
            with_scratch(|scratch| {
                let values = resized(&mut scratch.values, rows * stride);
                kernels::gemm_groups(isa, head, tiles, input, values);
                // SAFETY: each task writes its own columns.
                let columns = unsafe { out.columns(vocab, start..(start + stride).min(vocab)) };
                kernels.set_values(&Values { values, stride }, columns);
            });
        });
    }
}
