//! The memory that a model takes on the processor, from shapes alone: before anything is loaded.
//!
//! Weights and KV storage are exact. The buffers of steps are those of the largest step, and grow to that size
//! only when such a step comes.

use super::{
    HeadMode, KvType, buffers::Row, experts::Choice, head, head::Head, kv_store::KvShape,
    together::sequences_max,
};
use crate::{
    config::{Experts, ModelConfig},
    files::{
        Model,
        roles::{layer_tensor_shape, layer_tensors, linears},
    },
    formats::{Format, PackedMatrix},
    kernels::{Activations, Digits, GroupShape},
};

/// Columns of a task's integer sums: four tiles, or the rows of the head that a task computes.
const TASK_COLUMNS: usize = head::HEAD_ROWS;

/// The size of the largest step.
#[derive(Debug, Clone, Copy)]
pub struct StepSize {
    /// Tokens, prefill chunks and decodes together.
    pub rows: usize,
    /// Sequences that logits are computed for.
    pub sequences: usize,
    /// Threads of the step.
    pub threads: usize,
    /// Digits of activations.
    pub activations: Digits,
}

/// Returns the bytes of the packed matrices, of the dense tensors of layers, and of the head with its copies.
pub fn weight_bytes(model: &Model, format: Format, head: HeadMode) -> usize {
    let config = model.config();
    let layers = shapes(config)
        .map(|(rows, cols)| PackedMatrix::size_for(format, rows, cols, group_of(config, cols)));
    let head_group = group_of(config, model.head().cols);
    let dense = layer_tensors(config).map(|(_, tensor)| {
        let (rows, cols) = layer_tensor_shape(config, tensor);
        size_of::<f32>() * rows * cols
    });
    layers.sum::<usize>() + dense.sum::<usize>() + Head::size_for(model, format, head, head_group)
}

/// Returns the bytes of the packed matrices of a model's experts; 0 without any.
pub fn expert_bytes(config: &ModelConfig, format: Format) -> usize {
    let of_experts = linears(config).filter(|(_, linear)| linear.is_of_experts());
    let shapes = of_experts.map(|(_, linear)| config.linear_shape(linear));
    shapes
        .map(|(rows, cols)| PackedMatrix::size_for(format, rows, cols, group_of(config, cols)))
        .sum()
}

/// Returns the size of the groups with scales. Of groups of 64, it assumes that they pair up: where they do not, their
/// scales take 6 % more.
fn group_of(config: &ModelConfig, cols: usize) -> Option<usize> {
    config.group_scales.then(|| if cols.is_multiple_of(128) { 128 } else { 64 })
}

/// Returns the bytes of the KV storage.
pub fn kv_bytes(model: &Model, kv: KvType, block_count: usize) -> usize {
    KvShape::from_config(model.config()).store_bytes(kv, block_count)
}

/// Returns the bytes of the largest step's buffers, logits included, and of each thread's scratch.
pub fn step_bytes(config: &ModelConfig, format: Format, size: StepSize) -> usize {
    let StepSize { rows, sequences, threads, activations: digits } = size;
    let (hidden, heads) = (config.hidden_size, config.head_count * config.head_dim);
    let kv = config.kv_head_count * config.head_dim;
    let values = config.delta_net.map_or(0, |delta| delta.values());
    let widest = hidden.max(heads).max(config.intermediate_size).max(values);
    // What Q gives, its gates, and the parts of recurrent layers; what these read has the place of what is attended to.
    let hybrid = config.delta_net.map_or(0, |delta| {
        let read = values.saturating_sub(heads);
        3 * heads + 2 * delta.channels() + values + 2 * delta.value_heads + read
    });
    let input = |cols: usize, digits| match group_of(config, cols) {
        Some(group) => GroupShape { format, digits, cols, group }.row_bytes(),
        None => Activations::row_bytes(format, cols) + size_of::<f32>(),
    };
    let inputs = if config.linear_norm_eps.is_some() { 3 } else { 1 };
    // A place for each row and expert of it.
    let experts = config.experts.as_ref().map_or(0, |experts| {
        let Experts { count, used, .. } = *experts;
        let place = 4 * (hidden + config.intermediate_size) + input(widest, digits);
        4 * (hidden + count) + used * (place + size_of::<Choice>())
    });
    let row = size_of::<Row>()
        + experts
        + 4 * (hidden + config.head_dim + 2 * heads + 2 * kv + config.intermediate_size + hybrid)
        + inputs * input(widest, digits);
    let head_input = if config.ternary_tables { input(hidden, Digits::Two) } else { 0 };
    let logits = sequences * (4 * (config.vocab_size + 2 * hidden) + head_input);
    let group = config.head_count / config.kv_head_count;
    let products = if config.linear_biases.is_empty() { 2 } else { 4 };
    let scratch = 4
        * (products * rows * TASK_COLUMNS // sums, and values with a bias
        + (widest + head::HEAD_ROWS * hidden) * 2 // floats
        + sequences_max(config) * group * (2 * config.context_length + 3 * config.head_dim)); // attention
    rows * row + logits + threads * scratch
}

/// Returns the bytes that loading takes besides the weights: one decoded matrix, twice while its rows are
/// reordered, or a decoded ternary embedding.
pub fn load_bytes(config: &ModelConfig) -> usize {
    let table = if config.ternary_tables { config.vocab_size * config.hidden_size } else { 0 };
    table.max(2 * shapes(config).map(|(rows, cols)| rows * cols).max().unwrap_or(0))
}

/// Returns the shapes of the matrices of all layers.
fn shapes(config: &ModelConfig) -> impl Iterator<Item = (usize, usize)> + '_ {
    linears(config).map(|(_, linear)| config.linear_shape(linear))
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use half::f16;

    use super::*;
    use crate::{
        backend::{
            Backend as _, Chunk, Logits, LogitsFor,
            cpu::{CpuOptions, backend::CpuBackend, weights::Weights},
        },
        kernels::float::{FloatKernels, KvElement},
        kv::blocks_for,
    };

    const MODELS: [&str; 9] = [
        "bitnet-tiny",
        "bitnet-online-tiny",
        "llama-norm-tiny",
        "llama-tiny",
        "qwen3-group-tiny",
        "qwen3-yarn-tiny",
        "qwen35-tiny",
        "qwen35-rotated-tiny/qwen35-rotated-tiny-pq2_0.gguf",
        "maple-tiny/maple-tiny-tq2_0.gguf",
    ];
    const FORMATS: [Format; 3] = [Format::I2S, Format::Tl1, Format::Tl2];
    const BLOCKS: usize = 12;
    /// Tokens of the test step.
    const ROWS: usize = 48;

    fn open(name: &str) -> Arc<Model> {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        Arc::new(Model::open(&golden).expect("a golden model"))
    }

    #[test]
    fn weights_take_what_was_computed() {
        for name in MODELS {
            let model = open(name);
            for format in FORMATS {
                for head in [HeadMode::Exact, HeadMode::Full, HeadMode::Q8] {
                    let weights = Weights::load(Arc::clone(&model), format, head);
                    let held = weights.expect("a good model").size_bytes();
                    assert_eq!(
                        weight_bytes(&model, format, head),
                        held,
                        "{name} {format} {head:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn experts_take_what_was_computed() {
        for name in MODELS {
            let model = open(name);
            for format in FORMATS {
                let weights = Weights::load(Arc::clone(&model), format, HeadMode::Full);
                let weights = weights.expect("a good model");
                let linears = weights.layers.iter().flat_map(|layer| layer.all());
                let of_experts = linears.filter(|(linear, _)| linear.is_of_experts());
                let held: usize = of_experts.map(|(_, l)| l.matrix.size_bytes()).sum();
                assert_eq!(expert_bytes(model.config(), format), held, "{name} {format}");
                assert_eq!(held > 0, model.config().experts.is_some(), "{name}");
            }
        }
    }

    fn check_step<E: KvElement + bytemuck::Pod>(name: &str, format: Format, kv: KvType) {
        let (model, head) = (open(name), HeadMode::Exact);
        let weights = Weights::load(Arc::clone(&model), format, head).expect("a good model");
        let options = CpuOptions { format, threads: 2, kv, head, ..CpuOptions::new(BLOCKS) };
        let kernels = FloatKernels::for_isa(options.isa).expect("detected");
        let mut backend = CpuBackend::<E>::new(weights.into(), kernels, options, String::new());
        assert_eq!(kv_bytes(&model, kv, BLOCKS), backend.kv.size_bytes(), "{name} {kv:?}");

        let tokens: Vec<u32> = (0..ROWS as u32).collect();
        let (blocks, windows) = backend.layer_groups().tables(0, blocks_for(ROWS));
        let chunk = Chunk {
            tokens: &tokens,
            position: 0,
            blocks: &blocks,
            windows: &windows,
            logits: LogitsFor::Last,
            state: 0.into(),
        };
        let mut logits = Logits::default();
        backend.step(&[chunk], &mut logits).expect("a good chunk");
        let config = model.config();
        let size = StepSize { rows: ROWS, sequences: 1, threads: 0, activations: Digits::Two };
        let computed = step_bytes(config, format, size) - 4 * config.vocab_size;
        let held = backend.buffers.size_bytes();
        assert!(held <= computed && computed <= 2 * held, "{name} {format}: {held}, {computed}");
    }

    #[test]
    fn kv_storage_and_buffers_take_what_was_computed() {
        for name in MODELS {
            for format in FORMATS {
                check_step::<f16>(name, format, KvType::F16);
            }
            check_step::<f32>(name, Format::I2S, KvType::F32);
            check_step::<i8>(name, Format::I2S, KvType::Q8);
        }
    }
}
