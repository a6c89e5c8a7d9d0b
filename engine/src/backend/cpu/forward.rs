//! The forward pass of one step.

use std::{cell::RefCell, ops::Range, sync::Arc};

use super::{
    CpuOptions,
    disjoint::Disjoint,
    head::{HEAD_ROWS, Head},
    kv_store::{KvShape, KvStore},
    linears::{Source, TileTask},
    pool::Pool,
    screen::{Job, Screening},
    weights::Weights,
};
use crate::{
    backend::{Backend, Chunk, Logits, StepError, positions},
    config::{Linear, ModelConfig},
    kernels::{
        Activations, Isa,
        float::{FloatKernels, KvElement},
    },
    kv::BlockId,
};

/// Query rows per attention task.
pub(super) const ROWS_PER_TASK: usize = 4;

impl KvShape {
    /// The KV shape of a model.
    pub fn of(config: &ModelConfig) -> Self {
        Self {
            layer_count: config.layer_count,
            kv_head_count: config.kv_head_count,
            head_dim: config.head_dim,
        }
    }
}

/// One token of the step.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub chunk: usize,
    pub position: usize,
    token: u32,
}

/// Queries of a few rows of one chunk for one KV head.
#[derive(Clone)]
pub(super) struct AttentionTask {
    pub chunk: usize,
    pub kv_head: usize,
    pub rows: Range<usize>,
}

/// Int8 rows and their scales, the input of one or more linears.
#[derive(Default)]
pub(super) struct Quantized {
    pub x: Activations,
    pub scales: Vec<f32>, // (rows)
}

/// Buffers of a step, reused by the next one. Leading dimension: rows of the step.
#[derive(Default)]
pub(super) struct Buffers {
    pub rows: Vec<Row>,
    pub attention_tasks: Vec<AttentionTask>,
    /// Rows of chunks that no attention task has whole.
    pub rows_apart: Vec<usize>,
    pub residual: Vec<f32>,  // (rows, hidden)
    pub rotations: Vec<f32>, // (rows, 2, head_dim / 2): cosines, then sines
    pub queries: Vec<f32>,   // (rows, heads * head_dim)
    pub keys: Vec<f32>,      // (rows, kv_heads * head_dim)
    pub values: Vec<f32>,    // (rows, kv_heads * head_dim)
    pub attended: Vec<f32>,  // (rows, heads * head_dim)
    pub gate: Vec<f32>,      // (rows, intermediate)
    pub inputs: [Quantized; 3],
    pub tile_tasks: Vec<TileTask>,
    pub wanted: Vec<f32>,         // (rows with all logits, hidden)
    pub wanted_largest: Vec<f32>, // (rows with some of the largest, hidden)
}

/// Scratch of one thread.
#[derive(Default)]
pub(super) struct Scratch {
    pub sums: Vec<i32>,
    pub more_sums: Vec<i32>,
    pub floats: Vec<f32>,
    pub more_floats: Vec<f32>,
    pub bytes: Vec<i8>,
    pub scores: Vec<f32>,
    pub positions: Vec<usize>,
    pub candidates: Vec<(usize, f32, f32)>, // token, estimate, how far it may be off
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The first `len` elements of a buffer that only grows. They hold anything.
pub(super) fn room<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

pub(super) fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with_borrow_mut(f)
}

/// Weights, KV storage and threads of one CPU engine.
pub struct CpuBackend<E> {
    pub(super) weights: Arc<Weights>,
    pub(super) kernels: &'static FloatKernels,
    pub(super) isa: Isa,
    pub(super) pool: Pool,
    pub(super) kv: KvStore<E>,
    pub(super) block_count: usize,
    pub(super) numerics_class: String,
    /// RoPE frequencies `theta^(−2j / head_dim)`. // (head_dim / 2)
    pub(super) frequencies: Vec<f32>,
    pub(super) buffers: Buffers,
    screening: Screening,
}

impl<E: KvElement + bytemuck::Pod> CpuBackend<E> {
    /// Makes the KV pool and starts the threads.
    pub fn new(
        weights: Arc<Weights>,
        kernels: &'static FloatKernels,
        options: CpuOptions,
        numerics_class: String,
    ) -> Self {
        let config = weights.config();
        let kv = KvStore::new(KvShape::of(config), options.block_count);
        let frequencies = positions::rope_frequencies(config.rope_theta, config.head_dim);
        Self {
            weights,
            kernels,
            isa: options.isa,
            pool: Pool::new(options.threads),
            kv,
            block_count: options.block_count,
            numerics_class,
            frequencies,
            buffers: Buffers::default(),
            screening: Screening::default(),
        }
    }

    /// Checks the chunks and lays out the step's rows.
    fn plan(&mut self, chunks: &[Chunk<'_>]) -> Result<(), StepError> {
        let config = self.weights.config();
        positions::check(chunks, config, self.block_count)?;
        let group = config.kv_head_count;
        let Buffers { rows, attention_tasks, rows_apart, .. } = &mut self.buffers;
        rows.clear();
        attention_tasks.clear();
        rows_apart.clear();
        for (index, chunk) in chunks.iter().enumerate() {
            let first = rows.len();
            for (i, &token) in chunk.tokens.iter().enumerate() {
                rows.push(Row { chunk: index, position: chunk.position + i, token });
            }
            if chunk.tokens.len() > ROWS_PER_TASK {
                rows_apart.extend(first..rows.len());
            }
            // One head after another: its keys and values stay in the cache from task to task.
            attention_tasks.extend((0..group).flat_map(|kv_head| {
                let starts = (first..rows.len()).step_by(ROWS_PER_TASK);
                let end = rows.len();
                starts.map(move |start| AttentionTask {
                    chunk: index,
                    kv_head,
                    rows: start..(start + ROWS_PER_TASK).min(end),
                })
            }));
        }
        Ok(())
    }

    /// Embedding rows into the residual stream, and the rotations of every position.
    fn embed(&mut self) {
        let config = self.weights.config();
        let (hidden, half) = (config.hidden_size, config.head_dim / 2);
        let Buffers { rows, residual, rotations, .. } = &mut self.buffers;
        residual.resize(rows.len() * hidden, 0.0);
        rotations.resize(rows.len() * 2 * half, 0.0);
        let embedding = self.weights.model.embedding();
        let frequencies = &self.frequencies;
        let (residual, rotations) = (Disjoint::new(residual), Disjoint::new(rotations));
        let rows = &*rows;
        self.pool.run(rows.len(), &|r| {
            // SAFETY: each task writes its own row.
            let (out, rotation) = unsafe {
                let rotation = rotations.part(r * 2 * half..(r + 1) * 2 * half);
                (residual.part(r * hidden..(r + 1) * hidden), rotation)
            };
            embedding.row(rows[r].token as usize, out);
            positions::rotation(rows[r].position, frequencies, rotation);
        });
    }

    fn attention_block(&mut self, layer: usize, chunks: &[Chunk<'_>]) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let norm = (&l.attention_norm[..], config.rms_norm_eps);
        let qkv = [Linear::Q, Linear::K, Linear::V].map(|linear| l.linear(linear));
        let inputs = self.quantize(Source::Residual, &[norm], &qkv);
        self.project_qkv(&qkv, inputs);
        self.attend(layer, chunks);
        let o = l.linear(Linear::O);
        let sub_norm = l.attention_sub_norm.as_ref().map(|w| (&w[..], config.rms_norm_eps));
        self.quantize(Source::Attended, sub_norm.as_slice(), &[o]);
        self.project_into_residual(o);
    }

    fn feed_forward_block(&mut self, layer: usize) {
        let weights = Arc::clone(&self.weights);
        let (config, l) = (weights.config(), &weights.layers[layer]);
        let norm = (&l.feed_forward_norm[..], config.rms_norm_eps);
        let gate_up = [Linear::Gate, Linear::Up].map(|linear| l.linear(linear));
        let inputs = self.quantize(Source::Residual, &[norm], &gate_up);
        self.project_gate_up(gate_up, inputs);
        let down = l.linear(Linear::Down);
        let sub_norm = l.feed_forward_sub_norm.as_ref().map(|w| (&w[..], config.rms_norm_eps));
        self.quantize(Source::Gate, sub_norm.as_slice(), &[down]);
        self.project_into_residual(down);
    }

    /// Final norm and head for the rows the chunks ask for.
    fn head(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) {
        let weights = Arc::clone(&self.weights);
        let (config, head) = (weights.config(), &weights.head);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let Buffers { residual, wanted, wanted_largest, .. } = &mut self.buffers;
        let (mut with_all, mut counts) = (Vec::new(), Vec::new());
        let mut norms = Vec::new(); // row of the step, whether all its logits are wanted, place
        let mut first = 0;
        for chunk in chunks {
            let last = first + chunk.tokens.len();
            let (rows, count) = chunk.logits.rows(first..last);
            let count = count.filter(|count| head.screen().is_some_and(|s| s.pays_for(*count)));
            for r in rows {
                let all = count.is_none();
                let place = if all { norms.len() - counts.len() } else { counts.len() };
                norms.push((r, all, place));
                with_all.push(all);
                counts.extend(count);
            }
            first = last;
        }
        wanted.resize((norms.len() - counts.len()) * hidden, 0.0);
        wanted_largest.resize(counts.len() * hidden, 0.0);
        let (all_out, largest_out) = (Disjoint::new(wanted), Disjoint::new(wanted_largest));
        let kernels = self.kernels;
        self.pool.run(norms.len(), &|task| {
            let (r, all, place) = norms[task];
            let out = if all { all_out } else { largest_out };
            // SAFETY: each task has a place of its own.
            let out = unsafe { out.part(place * hidden..(place + 1) * hidden) };
            let x = &residual[r * hidden..(r + 1) * hidden];
            kernels.rms_norm(x, &weights.final_norm, config.rms_norm_eps, out);
        });
        logits.clear(vocab);
        logits.lay_out(with_all);
        if let Some(screen) = head.screen() {
            let (kernels, isa, xs) = (self.kernels, self.isa, &wanted_largest[..]);
            let job = Job { head, kernels, isa, xs, counts: &counts };
            screen.largest(&job, &mut self.pool, &mut self.screening);
            logits.set_largest(self.screening.found());
        }
        self.whole_head(head, vocab, logits.all_mut());
    }

    /// All logits of the wanted rows. // (rows, vocab)
    fn whole_head(&mut self, head: &Head, vocab: usize, logits: &mut [f32]) {
        let n = logits.len() / vocab;
        let out = Disjoint::new(logits);
        let (kernels, wanted) = (self.kernels, &self.buffers.wanted);
        let tasks = if n == 0 { 0 } else { vocab.div_ceil(HEAD_ROWS) };
        self.pool.run(tasks, &|task| {
            let first = task * HEAD_ROWS;
            let count = HEAD_ROWS.min(vocab - first);
            with_scratch(|scratch| {
                let Scratch { floats, more_floats, .. } = scratch;
                let floats = room(floats, n * count);
                head.logits(kernels, first, count, wanted, more_floats, floats);
                for (row, part) in floats.chunks_exact(count).enumerate() {
                    let start = row * vocab + first;
                    // SAFETY: each task writes its own columns.
                    unsafe { out.part(start..start + count) }.copy_from_slice(part);
                }
            });
        });
    }
}

impl<E: KvElement + bytemuck::Pod> Backend for CpuBackend<E> {
    fn vocab_size(&self) -> usize {
        self.weights.head.vocab_size()
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn weight_bytes(&self) -> Option<usize> {
        Some(self.weights.step_bytes(self.isa))
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        self.plan(chunks)?;
        self.embed();
        for layer in 0..self.weights.layers.len() {
            self.attention_block(layer, chunks);
            self.feed_forward_block(layer);
        }
        self.head(chunks, logits);
        Ok(())
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.kv.copy_block(from, to);
    }
}
