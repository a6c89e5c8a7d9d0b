//! Writes the tensors of a model as a GGUF file for bitnet.cpp (`I2_S`) or llama.cpp (`TQ2_0`), or with a scale for each
//! group of inputs; [`gguf_metadata`] has the rest.
//!
//! Tensors that the engines which read an architecture do not look for are refused.

use std::{
    borrow::Cow,
    collections::HashSet,
    io::{BufWriter, Write},
    path::Path,
};

use half::f16;

use super::{
    gguf_metadata::{self, ModelDescription},
    target::{Report, Target, refuse},
};
use crate::{
    config::{Activation, LayerTensor, Linear, LongFactors, ModelConfig, Norm, RopeScaling},
    files::{
        encodings::{
            blocks::{TQ_BLOCK, TQ2_0_BYTES},
            dense::{DenseType, f32_bytes},
            encode,
            gguf_ternary::{I2_S_BLOCK, I2_S_TAIL},
        },
        error::{ModelError, Problem},
        gguf::{
            container::DEFAULT_ALIGNMENT,
            names,
            write::{self, TensorPlan, matrix_plan, type_id},
        },
        hugging_face,
        model::Model,
        partial::Partial,
        parts::DenseTensor,
        roles::{biases, layer_tensor_shape, layer_tensors, linears},
        value_heads::Order,
    },
    formats::{Scale, TernaryMatrix},
};

/// Returns the block type of linears with a scale for each group of inputs.
fn group_type(config: &ModelConfig, to: Target) -> Option<DenseType> {
    match to {
        Target::GgufTq2_0 => config.group_scales.then_some(DenseType::Tq2_0),
        _ => to.group_type(),
    }
}

/// Returns the architecture name, by which GGUF readers select their conventions.
fn architecture(model: &Model, to: Target) -> Result<&'static str, ModelError> {
    let config = model.config();
    if config.group_scales != group_type(config, to).is_some() {
        let problem = Problem::Other(match config.group_scales {
            true => "the format has one scale per tensor",
            false => "the model has one scale per tensor, the format one per group of inputs",
        });
        let first = config.linears(0)[0];
        return Err(refuse(model.ternary_name(0, first).to_owned(), to, problem));
    }
    let name = family(config, to)?;
    if name == "qwen35" && !config.rope_scaling.is_none() {
        let problem = Problem::Other("the architecture has no scaling of RoPE frequencies");
        return Err(refuse("rope_parameters".to_owned(), to, problem));
    }
    if permutes_heads(name) {
        return Ok(name);
    }
    if let Some((layer, linear)) = biases(config).next() {
        let problem = Problem::Other("the architecture has no biases of linears");
        let tensor = &model.parts().tensors.biases[&(layer, linear)];
        return Err(refuse(tensor.name.clone(), to, problem));
    }
    if matches!(config.rope_scaling, RopeScaling::Divisors { .. }) {
        let problem = Problem::Other("the architecture has no divisors of RoPE frequencies");
        return Err(refuse(names::ROPE_DIVISORS.to_owned(), to, problem));
    }
    Ok(name)
}

fn family(config: &ModelConfig, to: Target) -> Result<&'static str, ModelError> {
    if config.qk_norm && config.activation != Activation::Silu {
        let problem = Problem::Other("the architecture has no squared ReLU");
        let first = config.linears(0)[0];
        return Err(refuse(hugging_face::names::linear_name(0, first), to, problem));
    }
    if config.experts.is_some() {
        if config.tied_head {
            let problem = Problem::Other("the architecture has a head of its own");
            return Err(refuse("lm_head.weight".to_owned(), to, problem));
        }
        return Ok("maple");
    }
    if config.qk_norm {
        return Ok(if config.delta_net.is_some() { "qwen35" } else { "qwen3" });
    }
    if config.linear_norm_eps.is_some() {
        let problem = Problem::Other("the format has no norms in front of linears");
        return Err(refuse(
            hugging_face::names::norm_name(Norm::Linear(0, Linear::Q)),
            to,
            problem,
        ));
    }
    let is_longrope =
        matches!(config.rope_scaling, RopeScaling::Divisors { long_factors: Some(_), .. });
    let name = match (config.sub_norms, config.activation) {
        (true, Activation::SquaredRelu) => "bitnet-b1.58",
        (true, Activation::Silu) => "bitnet",
        (false, Activation::Silu) if is_longrope || !config.multipliers.is_none() => "minicpm",
        (false, Activation::Silu) => "llama",
        (false, Activation::SquaredRelu) => {
            let problem = Problem::Other("no architecture has squared ReLU without sub-norms");
            return Err(refuse(hugging_face::names::linear_name(0, Linear::Gate), to, problem));
        }
    };
    if config.sub_norms && !config.tied_head {
        let problem = Problem::Other("the architecture has no head of its own");
        return Err(refuse("lm_head.weight".to_owned(), to, problem));
    }
    Ok(name)
}

/// Returns whether rows of Q and K are in the order for adjacent-pair RoPE.
fn permutes_heads(architecture: &str) -> bool {
    matches!(architecture, "llama" | "minicpm")
}

/// Writes `model` as a GGUF file.
pub(super) fn write(model: &Model, to: Target, out: &Path) -> Result<Report, ModelError> {
    if out.extension().is_none_or(|extension| extension != "gguf") {
        // It could not be opened.
        return Err(ModelError::NotNamedGguf { path: out.to_owned() });
    }
    let architecture = architecture(model, to)?;
    let described = ModelDescription {
        name: model.name(),
        config: model.config(),
        tokenizer: model.tokenizer(),
        chat_template: model.chat_template(),
        eos_token: model.eos_token(),
    };
    let metadata = gguf_metadata::metadata(&described, architecture, to)?;
    let group_type = group_type(model.config(), to);
    let vectors = vectors(model, architecture)?;
    let plan = plan(model, &vectors, to)?;
    let partial = Partial::create(out)?;
    let io = |error| partial.error(error);
    let mut writer = BufWriter::with_capacity(1 << 20, partial.file());
    write::write_header(&mut writer, &metadata, &plan).map_err(io)?;
    let mut write = |bytes: &[u8]| {
        writer.write_all(bytes)?;
        write::write_padding(&mut writer, bytes.len() as u64)
    };
    let tables = &model.parts().tensors;
    write(&table(model, to, &tables.embedding)?).map_err(io)?;
    if let Some(head) = &tables.head {
        write(&table(model, to, head)?).map_err(io)?;
    }
    for Vector { values, .. } in &vectors {
        write(&f32_bytes(values)).map_err(io)?;
    }
    let mut inexact_scale_count = 0;
    for (layer, linear) in linears(model.config()) {
        let mut matrix = model.ternary(layer, linear)?;
        if permutes_heads(architecture) && is_permuted(linear) {
            matrix.reorder_rows(|row| adjacent(row, model.config().head_dim));
        }
        let name = model.ternary_name(layer, linear);
        to_file_order(model.config(), (name, linear), &mut matrix, to)?;
        let is_llama = permutes_heads(architecture);
        if is_llama && group_type == Some(DenseType::Tq2_0) && (layer, linear) == (0, Linear::Q) {
            check_group_scales(name, &matrix, to)?;
        }
        let (bytes, exact) = match group_type {
            Some(dtype) => (encode_groups(name, &matrix, to, dtype)?, true),
            None => encode(&matrix, to),
        };
        inexact_scale_count += usize::from(!exact);
        write(&bytes).map_err(io)?;
    }
    writer.flush().map_err(io)?;
    drop(writer);
    partial.finish()?;
    Ok(Report { tensor_count: plan.len(), inexact_scale_count })
}

/// Puts the value heads of a linear into the order of files. Only the output linear in a rotated basis has that of the forward pass.
fn to_file_order(
    config: &ModelConfig,
    (name, linear): (&str, Linear),
    matrix: &mut TernaryMatrix,
    to: Target,
) -> Result<(), ModelError> {
    let Some(delta) = &config.delta_net else { return Ok(()) };
    let is_in_order = linear == Linear::DeltaOutput && config.rotation.is_some();
    if is_in_order || Order::ToFile.apply(delta, linear, matrix) {
        return Ok(());
    }
    let (value, of) = (delta.head_dim as u64, matrix.groups.as_ref().map_or(1, |g| g.size) as u64);
    Err(refuse(
        name.to_owned(),
        to,
        Problem::NotAMultiple { what: "width of a value head", value, of },
    ))
}

/// A tensor that is written as F32.
struct Vector {
    name: String,
    /// Fastest first.
    dims: Vec<u64>,
    values: Vec<f32>,
}

impl Vector {
    fn new(name: String, values: Vec<f32>) -> Self {
        Self { name, dims: vec![values.len() as u64], values }
    }
}

/// Returns the other dense tensors of layers: those of recurrent layers, and routers.
fn of_layers(model: &Model) -> Result<Vec<Vector>, ModelError> {
    let config = model.config();
    let vector = |(layer, tensor)| {
        let (rows, cols) = layer_tensor_shape(config, tensor);
        let mut values = model.layer_tensor(layer, tensor)?;
        if tensor == LayerTensor::Convolution {
            // By tap in the forward pass, by channel in files.
            let of_channel = |channel| (0..cols).map(move |tap| tap * rows + channel);
            values = (0..rows).flat_map(of_channel).map(|at| values[at]).collect();
        }
        if let Some(delta) = &config.delta_net {
            values = Order::ToFile.apply_to(delta, (tensor, cols), values);
        }
        let name = names::layer_tensor_name(layer, tensor);
        let dims = if rows == 1 { vec![cols as u64] } else { vec![cols as u64, rows as u64] };
        Ok(Vector { name, dims, values })
    };
    layer_tensors(config).map(vector).collect()
}

/// Returns the norms, the divisors of the RoPE frequencies, the biases and the other dense tensors of layers. They are always F32,
/// because readers accept no other type.
fn vectors(model: &Model, architecture: &str) -> Result<Vec<Vector>, ModelError> {
    let config = model.config();
    let mut vectors = Vec::new();
    for norm in model.norms() {
        let name = match norm {
            Norm::FeedForward(layer) if config.delta_net.is_some() => {
                names::post_attention_norm_name(layer)
            }
            norm => names::norm_name(norm),
        };
        vectors.push(Vector::new(name, model.norm(norm)?));
    }
    if let RopeScaling::Divisors { divisors, long_factors } = &config.rope_scaling {
        let [short, long] = names::LONGROPE_DIVISORS;
        let name = if long_factors.is_some() { short } else { names::ROPE_DIVISORS };
        vectors.push(Vector::new(name.to_owned(), divisors.clone()));
        let of_long =
            |factors: &LongFactors| Vector::new(long.to_owned(), factors.divisors.clone());
        vectors.extend(long_factors.iter().map(of_long));
    }
    for (layer, linear) in biases(config) {
        let mut bias = model.bias(layer, linear)?.unwrap_or_default();
        if permutes_heads(architecture) && is_permuted(linear) {
            bias = (0..bias.len()).map(|row| bias[adjacent(row, config.head_dim)]).collect();
        }
        vectors.push(Vector::new(names::bias_name(layer, linear), bias));
    }
    vectors.extend(of_layers(model)?);
    Ok(vectors)
}

/// Returns the tensor directory, in the order in which [`write`] writes the data.
fn plan(model: &Model, vectors: &[Vector], to: Target) -> Result<Vec<TensorPlan>, ModelError> {
    let config = model.config();
    let tensors = &model.parts().tensors;
    let group_type = group_type(config, to);
    let table = |name: &str, tensor: &DenseTensor| match group_type {
        Some(dtype) if config.ternary_tables => {
            matrix_plan(name.to_owned(), tensor.rows, tensor.cols, dtype)
        }
        _ => dense_plan(name, tensor),
    };
    let mut plan = vec![table(names::EMBEDDING, &tensors.embedding)];
    plan.extend(tensors.head.as_ref().map(|head| table(names::HEAD, head)));
    for Vector { name, dims, values } in vectors {
        let (name, dims, size_bytes) = (name.clone(), dims.clone(), 4 * values.len() as u64);
        plan.push(TensorPlan { name, dims, type_id: 0, size_bytes });
    }
    let (block, type_id) = match to {
        Target::GgufTq2_0 => (TQ_BLOCK, 35),
        _ => (I2_S_BLOCK, 36),
    };
    for (layer, linear) in linears(config) {
        let (rows, cols) = config.linear_shape(linear);
        if let Some(dtype) = group_type {
            if dtype == DenseType::Q2_0 && fits_two_layouts(rows, cols) {
                let why = "it is so small that two layouts of the type fit its bytes";
                let tensor = model.ternary_name(layer, linear).to_owned();
                return Err(refuse(tensor, to, Problem::Other(why)));
            }
            let mut entry = matrix_plan(names::linear_name(layer, linear), rows, cols, dtype);
            if let (Some(experts), true) = (&config.experts, linear.is_of_experts()) {
                let count = experts.count;
                entry.dims = [cols, rows / count, count].map(|dim| dim as u64).to_vec();
            }
            plan.push(entry);
            continue;
        }
        if !cols.is_multiple_of(block) {
            let (value, of) = (cols as u64, block as u64);
            let problem = Problem::NotAMultiple { what: "row length", value, of };
            return Err(refuse(model.ternary_name(layer, linear).to_owned(), to, problem));
        }
        let size_bytes = match to {
            Target::GgufTq2_0 => rows * cols / TQ_BLOCK * TQ2_0_BYTES,
            _ => rows * cols / 4 + I2_S_TAIL,
        };
        plan.push(TensorPlan {
            name: names::linear_name(layer, linear),
            dims: vec![cols as u64, rows as u64],
            type_id,
            size_bytes: size_bytes as u64,
        });
    }
    Ok(plan)
}

/// Returns whether readers cannot tell a matrix of `Q2_0` from one of `PQ2_0` with the same type id: by the bytes up to the next tensor.
fn fits_two_layouts(rows: usize, cols: usize) -> bool {
    let [a, b] = [DenseType::Q2_0, DenseType::Pq2_0].map(|dtype| {
        Some((dtype.row_bytes(cols)? * rows).next_multiple_of(DEFAULT_ALIGNMENT as usize))
    });
    a.is_some() && a == b
}

/// Returns the stored bytes of the embedding or the head.
fn table<'a>(
    model: &'a Model,
    to: Target,
    tensor: &DenseTensor,
) -> Result<Cow<'a, [u8]>, ModelError> {
    let is_head = model.parts().tensors.head.as_ref().is_some_and(|head| head.name == tensor.name);
    let (dense, ternary) = match is_head {
        true => (model.head(), model.ternary_head()?),
        false => (model.embedding(), model.ternary_embedding()?),
    };
    match (group_type(model.config(), to), ternary) {
        (Some(dtype), Some(matrix)) => {
            encode_groups(&tensor.name, &matrix, to, dtype).map(Cow::Owned)
        }
        _ => Ok(Cow::Borrowed(dense.bytes)),
    }
}

/// Returns the stored bytes of a matrix with scales of groups.
fn encode_groups(
    name: &str,
    matrix: &TernaryMatrix,
    to: Target,
    dtype: DenseType,
) -> Result<Vec<u8>, ModelError> {
    let (of, _) = dtype.block();
    encode::encode_groups(matrix, dtype).ok_or_else(|| {
        let problem = match matrix.cols.is_multiple_of(of) {
            true => Problem::Other("the scales of its groups differ inside blocks of the format"),
            false => Problem::NotAMultiple {
                what: "row length",
                value: matrix.cols as u64,
                of: of as u64,
            },
        };
        refuse(name.to_owned(), to, problem)
    })
}

/// Checks that the scales of the first linear differ: by this, readers of `TQ2_0` know that a model has scales of groups.
fn check_group_scales(name: &str, matrix: &TernaryMatrix, to: Target) -> Result<(), ModelError> {
    let scales = matrix.groups.iter().flat_map(|groups| &groups.scales);
    let distinct: HashSet<u16> =
        scales.map(|scale| scale.to_bits()).filter(|&bits| bits != 0).collect();
    if distinct.len() < 2 {
        let problem =
            Problem::Other("its scales are all equal, which stands for one scale per tensor");
        return Err(refuse(name.to_owned(), to, problem));
    }
    Ok(())
}

/// Returns the stored bytes of a ternary tensor, and whether its scale is unchanged.
fn encode(matrix: &TernaryMatrix, to: Target) -> (Vec<u8>, bool) {
    let (scale, is_multiplier) = match matrix.scale {
        Scale::Multiply(scale) => (scale, true),
        Scale::Divide(scale) => (1.0 / scale, false),
    };
    if to == Target::GgufTq2_0 {
        // A scale below f16's range would become 0 and one above it infinite, so it is clamped.
        let least = f16::from_bits(1);
        let rounded = f16::from_f32(scale).max(least).min(f16::MAX);
        let exact = is_multiplier && rounded.to_f32() == scale;
        return (encode::encode_tq2_0(&matrix.trits, rounded), exact);
    }
    (encode::encode_i2_s(&matrix.trits, scale), is_multiplier)
}

fn is_permuted(linear: Linear) -> bool {
    matches!(linear, Linear::Q | Linear::K)
}

/// Returns the half-split row that is at `row` in llama.cpp's adjacent-pair order: row `j·head_dim/2 + i` of a head goes
/// to row `2i + j`.
fn adjacent(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    head * head_dim + (within % 2) * (head_dim / 2) + within / 2
}

fn dense_plan(name: &str, tensor: &DenseTensor) -> TensorPlan {
    TensorPlan {
        name: name.to_owned(),
        dims: vec![tensor.cols as u64, tensor.rows as u64],
        type_id: type_id(tensor.dtype),
        size_bytes: tensor.span.range.len() as u64,
    }
}
