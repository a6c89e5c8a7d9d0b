//! The forward pass of one step, in the order of the paper's figure.

use std::sync::Arc;

use super::{backend::CpuBackend, buffers::Buffers, disjoint::Disjoint, linears::Source};
use crate::{
    backend::{
        Backend, Chunk, CopyError, Logits, Recurrent, ScreenedRow, Screening, SlotSets, StepError,
        positions, slot_sets::SetsOf,
    },
    config::Linear,
    kernels::float::KvElement,
    kv::{BlockId, LayerGroups},
    sampling::{Remainder, Threshold, TokenLogit},
};

impl<E: KvElement + bytemuck::Pod> Backend for CpuBackend<E> {
    fn run_tasks(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(count, task);
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        self.run_layers(chunks)?;
        self.head(chunks, logits);
        Ok(())
    }

    fn step_hidden(
        &mut self,
        chunks: &[Chunk<'_>],
        hidden: &mut Vec<f32>,
    ) -> Result<(), StepError> {
        self.run_layers(chunks)?;
        self.last_hidden(chunks, hidden);
        Ok(())
    }

    fn as_screening(&mut self) -> Option<&mut dyn Screening> {
        Some(self)
    }

    fn as_recurrent(&mut self) -> Option<&mut dyn Recurrent> {
        if self.weights.config().delta_net.is_some() { Some(self) } else { None }
    }

    fn ready_blocks(&mut self, count: usize) {
        self.kv.ready_blocks(count);
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.kv.copy_block(from, to);
        Ok(())
    }

    fn with_copies(
        &mut self,
        blocks: &[BlockId],
        states: &[u32],
    ) -> Result<Box<dyn Backend>, CopyError> {
        let (kv, states) = (self.kv.with_copies(blocks), self.states.with_copies(states));
        Ok(Box::new(self.with_storage(kv, SetsOf::new(states))))
    }

    fn block_bytes(&self) -> usize {
        self.kv.block_bytes()
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.kv.read_block(block, content);
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        self.kv.write_block(block, content);
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.weights.config().vocab_size
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn layer_groups(&self) -> LayerGroups {
        self.kv_layers.groups
    }

    fn weight_bytes(&self) -> Option<usize> {
        Some(self.weights.step_bytes(self.isa))
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }
}

impl<E: KvElement + bytemuck::Pod> Screening for CpuBackend<E> {
    fn at_least(
        &mut self,
        row: ScreenedRow<'_>,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, StepError> {
        Ok(self.find_at_least(row, threshold, found))
    }

    fn logits_of(
        &mut self,
        row: ScreenedRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        self.logits_of_tokens(row, tokens, found);
        Ok(())
    }

    fn all(&mut self, row: ScreenedRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError> {
        self.all_logits_of(row.hidden, logits);
        Ok(())
    }
}

impl<E: KvElement + bytemuck::Pod> SlotSets for CpuBackend<E> {
    fn fork_set(&mut self, slots: &[u32]) -> u32 {
        let copies = self.states.with_copies(slots);
        self.states.add(copies)
    }

    fn use_set(&mut self, set: u32) {
        self.states.select(set);
    }

    fn drop_set(&mut self, set: u32) {
        self.states.remove(set);
    }
}

impl<E: KvElement + bytemuck::Pod> Recurrent for CpuBackend<E> {
    fn state_bytes(&self) -> usize {
        self.states.bytes()
    }

    fn as_slot_sets(&mut self) -> Option<&mut dyn SlotSets> {
        Some(self)
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result<(), StepError> {
        self.states.copy(from, to);
        Ok(())
    }

    fn read_state(&mut self, slot: u32, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.states.read(slot, content);
        Ok(())
    }

    fn write_state(&mut self, slot: u32, content: &[u8]) -> Result<(), StepError> {
        self.states.write(slot, content);
        Ok(())
    }
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Writes the residual stream behind the last layer.
    fn run_layers(&mut self, chunks: &[Chunk<'_>]) -> Result<(), StepError> {
        let config = self.weights.config();
        let blocks = (self.block_count, self.kv_layers.groups);
        positions::check(chunks, config, blocks, &mut self.buffers.written)?;
        if config.delta_net.is_some() {
            positions::check_slots(chunks, self.states.slots(), &mut self.buffers.written)?;
        }
        self.buffers.lay_out(chunks, config, self.pool.threads());
        self.embed();
        for layer in 0..self.weights.layers.len() {
            match self.weights.config().delta_layer(layer).copied() {
                None => self.attention_block(layer, chunks),
                Some(delta) => self.delta_block(layer, &delta, chunks),
            }
            match self.weights.config().experts.is_some() {
                true => self.experts_block(layer),
                false => self.feed_forward_block(layer),
            }
        }
        Ok(())
    }

    /// Writes the embedding rows to the residual stream, and the rotations of every position.
    fn embed(&mut self) {
        let config = self.weights.config();
        let (hidden, half) = (config.hidden_size, config.rotary_dim() / 2);
        let Buffers { rows, residual, rotations, .. } = &mut self.buffers;
        residual.resize(rows.len() * hidden, 0.0);
        rotations.resize(rows.len() * 2 * half, 0.0);
        let embedding = self.weights.model.embedding();
        let factor = config.embedding_factor();
        let (rope, kernels) = (&self.rope, self.kernels);
        let (residual, rotations) = (Disjoint::new(residual), Disjoint::new(rotations));
        let rows = &*rows;
        self.pool.run(rows.len(), &|r| {
            // SAFETY: each task writes its own row.
            let (out, rotation) = unsafe {
                let rotation = rotations.part(r * 2 * half..(r + 1) * 2 * half);
                (residual.part(r * hidden..(r + 1) * hidden), rotation)
            };
            embedding.row(rows[r].token as usize, out);
            if let Some(rotation) = &config.rotation {
                kernels.rotate_back(out, rotation);
            }
            if factor != 1.0 {
                out.iter_mut().for_each(|element| *element *= factor);
            }
            rope.rotation(rows[r].position, rotation);
        });
    }

    /// `residual += o(sub_norm(attention(q, k, v)))` with `q, k, v` of `norm(residual)`; some models have a norm of
    /// each head of `q` and `k`. In hybrid models each head of `q` has a gate, and what it attends to is multiplied by its sigmoid.
    fn attention_block(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let norm = (&l.attention_norm[..], config.stream_norm_eps());
        let qkv = [Linear::Q, Linear::K, Linear::V].map(|linear| l.linear(linear));
        let inputs = self.quantize(Source::Residual, Some(norm), &qkv);
        let is_gated = config.delta_net.is_some();
        let Buffers { queries, keys, values, hybrid, .. } = &mut self.buffers;
        let queries = if is_gated { &mut hybrid.gated_queries } else { queries };
        let mut outputs = [queries, keys, values].map(std::mem::take);
        self.project(qkv, inputs, &mut outputs);
        let Buffers { queries, keys, values, hybrid, .. } = &mut self.buffers;
        let queries = if is_gated { &mut hybrid.gated_queries } else { queries };
        [*queries, *keys, *values] = outputs;
        if is_gated {
            self.split_gates();
        }
        if let Some(norms) = &l.head_norms {
            self.norm_heads(norms);
        }
        self.attend(layer, chunks);
        if is_gated {
            self.gate_attended();
        }
        let o = l.linear(Linear::O);
        let sub_norm = l.attention_sub_norm.as_ref().map(|w| (&w[..], config.rms_norm_eps));
        self.quantize(Source::Attended, sub_norm, &[o]);
        self.project_into_residual(o);
    }

    /// `residual += down(sub_norm(activation(gate(x)) ⊙ up(x)))` with `x = norm(residual)`.
    fn feed_forward_block(&mut self, layer: usize) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let norm = (&l.feed_forward_norm[..], config.stream_norm_eps());
        let gate_up = [Linear::Gate, Linear::Up].map(|linear| l.linear(linear));
        let inputs = self.quantize(Source::Residual, Some(norm), &gate_up);
        self.project_gate_up(gate_up, inputs);
        let down = l.linear(Linear::Down);
        let sub_norm = l.feed_forward_sub_norm.as_ref().map(|w| (&w[..], config.rms_norm_eps));
        self.quantize(Source::Gate, sub_norm, &[down]);
        self.project_into_residual(down);
    }
}
