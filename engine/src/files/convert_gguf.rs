//! Writes a model as a GGUF file for bitnet.cpp (`I2_S`) or llama.cpp (`TQ2_0`), or with a scale for each group of
//! inputs.
//!
//! Besides the keys that those engines read, the file has [`gguf_model::EOS_TOKENS_KEY`], the complete
//! list of end tokens: the format's own key holds only one.

use std::{
    borrow::Cow,
    io::{BufWriter, Write},
    path::Path,
};

use half::f16;

use super::{
    convert::{Report, Target, eos_token, f32_bytes, linears, refuse},
    dense::DenseType,
    error::{ModelError, Problem},
    gguf_config, gguf_model,
    gguf_ternary::{I2_S_BLOCK, I2_S_TAIL, TQ_BLOCK, TQ2_0_BYTES},
    gguf_tokenizer::{TYPE_CONTROL, TYPE_NORMAL, TYPE_UNUSED, TYPE_USER_DEFINED},
    gguf_write::{self, Meta, TensorPlan},
    hf_tensors,
    model::{DenseTensor, Model},
    partial::Partial,
    roles::norm_len,
    ternary_write,
};
use crate::{
    chat::ChatTemplate,
    config::{Activation, Linear, ModelConfig, Multipliers, Norm, RopeScaling, Yarn},
    formats::{Scale, TernaryMatrix},
    tokenizer::{TokenKind, Tokenizer},
};

/// Returns the architecture name, by which GGUF readers select their conventions.
fn architecture(model: &Model, to: Target) -> Result<&'static str, ModelError> {
    let config = model.config();
    if config.group_scales != to.group_type().is_some() {
        let problem = Problem::Other(match config.group_scales {
            true => "the format has one scale per tensor",
            false => "the model has one scale per tensor, the format one per group of inputs",
        });
        return Err(refuse(model.ternary_name(0, Linear::Q).to_owned(), to, problem));
    }
    if config.qk_norm {
        return Ok("qwen3");
    }
    if !config.multipliers.is_none() {
        return Ok("minicpm");
    }
    if config.linear_norm_eps.is_some() {
        let problem = Problem::Other("the format has no norms in front of linears");
        return Err(refuse(hf_tensors::norm_name(Norm::Linear(0, Linear::Q)), to, problem));
    }
    let name = match (config.sub_norms, config.activation) {
        (true, Activation::SquaredRelu) => "bitnet-b1.58",
        (true, Activation::Silu) => "bitnet",
        (false, Activation::Silu) => "llama",
        (false, Activation::SquaredRelu) => {
            let problem = Problem::Other("no architecture has squared ReLU without sub-norms");
            return Err(refuse(hf_tensors::linear_name(0, Linear::Gate), to, problem));
        }
    };
    if config.sub_norms && !config.tied_head {
        let problem = Problem::Other("the architecture has no head of its own");
        return Err(refuse("lm_head.weight".to_owned(), to, problem));
    }
    Ok(name)
}

/// Writes `model` as a GGUF file.
pub(super) fn write(model: &Model, to: Target, out: &Path) -> Result<Report, ModelError> {
    let architecture = architecture(model, to)?;
    let described = Described {
        name: model.name(),
        config: model.config(),
        tokenizer: model.tokenizer(),
        chat_template: model.chat_template(),
        eos_token: eos_token(model),
    };
    let metadata = metadata(&described, architecture, to)?;
    let plan = plan(model, to)?;
    let partial = Partial::create(out)?;
    let io = |error| partial.error(error);
    let mut writer = BufWriter::with_capacity(1 << 20, partial.file());
    gguf_write::write_header(&mut writer, &metadata, &plan).map_err(io)?;
    let mut write = |bytes: &[u8]| {
        writer.write_all(bytes)?;
        gguf_write::write_padding(&mut writer, bytes.len() as u64)
    };
    let tables = &model.parts().tensors;
    write(&table(model, to, &tables.embedding)?).map_err(io)?;
    if let Some(head) = &tables.head {
        write(&table(model, to, head)?).map_err(io)?;
    }
    for norm in model.norms() {
        write(&f32_bytes(&model.norm(norm)?)).map_err(io)?;
    }
    let mut inexact_scale_count = 0;
    for (layer, linear) in linears(model.config()) {
        let mut matrix = model.ternary(layer, linear)?;
        if matches!(architecture, "llama" | "minicpm") {
            permute(&mut matrix, linear, model.config());
        }
        let name = model.ternary_name(layer, linear);
        let (bytes, exact) = match to.group_type() {
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

/// Returns the tensor directory, in the order in which [`write`] writes the data. Norms are always
/// F32, because readers accept no other type.
fn plan(model: &Model, to: Target) -> Result<Vec<TensorPlan>, ModelError> {
    let config = model.config();
    let tensors = &model.parts().tensors;
    let group_type = to.group_type();
    let table = |name: &str, tensor: &DenseTensor| match group_type {
        Some(dtype) if config.ternary_tables => {
            group_plan(name.to_owned(), tensor.rows, tensor.cols, dtype)
        }
        _ => dense_plan(name, tensor),
    };
    let mut plan = vec![table(gguf_model::EMBEDDING, &tensors.embedding)];
    plan.extend(tensors.head.as_ref().map(|head| table(gguf_model::HEAD, head)));
    for norm in model.norms() {
        let len = norm_len(config, norm) as u64;
        let name = gguf_model::norm_name(norm).unwrap_or_default();
        plan.push(TensorPlan { name, dims: vec![len], type_id: 0, size_bytes: len * 4 });
    }
    let (block, type_id) = match to {
        Target::GgufTq2_0 => (TQ_BLOCK, 35),
        _ => (I2_S_BLOCK, 36),
    };
    for (layer, linear) in linears(config) {
        let (rows, cols) = config.linear_shape(linear);
        if let Some(dtype) = group_type {
            plan.push(group_plan(gguf_model::linear_name(layer, linear), rows, cols, dtype));
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
            name: gguf_model::linear_name(layer, linear),
            dims: vec![cols as u64, rows as u64],
            type_id,
            size_bytes: size_bytes as u64,
        });
    }
    Ok(plan)
}

/// Returns the entry of a tensor with scales of groups.
pub(super) fn group_plan(name: String, rows: usize, cols: usize, dtype: DenseType) -> TensorPlan {
    // Rows that are not whole blocks are refused when they are encoded, before the file has its name.
    let size_bytes = (dtype.row_bytes(cols).unwrap_or(0) * rows) as u64;
    let dims = vec![cols as u64, rows as u64];
    TensorPlan { name, dims, type_id: type_id(dtype), size_bytes }
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
    match (to.group_type(), ternary) {
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
    ternary_write::encode_groups(matrix, dtype).ok_or_else(|| {
        let problem = Problem::Other("its groups have 64 inputs, those of the format 128");
        refuse(name.to_owned(), to, problem)
    })
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
        return (ternary_write::encode_tq2_0(&matrix.trits, rounded), exact);
    }
    (ternary_write::encode_i2_s(&matrix.trits, scale), is_multiplier)
}

/// Puts Q and K rows into llama.cpp's adjacent-pair order: row `j·head_dim/2 + i` of a head goes to
/// row `2i + j`.
fn permute(matrix: &mut TernaryMatrix, linear: Linear, config: &ModelConfig) {
    if !matches!(linear, Linear::Q | Linear::K) {
        return;
    }
    let head_dim = config.head_dim;
    matrix.reorder_rows(|row| {
        let (head, within) = (row / head_dim, row % head_dim);
        head * head_dim + (within % 2) * (head_dim / 2) + within / 2
    });
}

/// Returns the type id of a tensor.
fn type_id(dtype: DenseType) -> u32 {
    match dtype {
        DenseType::F32 => 0,
        DenseType::F16 => 1,
        DenseType::Bf16 => 30,
        DenseType::Q8_0 => 8,
        DenseType::Q6K => 14,
        DenseType::Q4K => 12,
        DenseType::Q2_0 => 42,
        DenseType::Pq2_0 => 142,
        DenseType::Ptq1_0 => 143,
        DenseType::Tq1_0 => 34,
        DenseType::Tq2_0 => 35,
    }
}

fn dense_plan(name: &str, tensor: &DenseTensor) -> TensorPlan {
    TensorPlan {
        name: name.to_owned(),
        dims: vec![tensor.cols as u64, tensor.rows as u64],
        type_id: type_id(tensor.dtype),
        size_bytes: tensor.span.range.len() as u64,
    }
}

/// What metadata are written of a model.
pub(super) struct Described<'a> {
    pub name: &'a str,
    pub config: &'a ModelConfig,
    pub tokenizer: &'a Tokenizer,
    pub chat_template: Option<&'a ChatTemplate>,
    pub eos_token: Option<u32>,
}

/// Returns the metadata of the model, in the order bitnet.cpp writes them.
pub(super) fn metadata(
    model: &Described<'_>,
    architecture: &str,
    to: Target,
) -> Result<Vec<(String, Meta)>, ModelError> {
    let config = model.config;
    let number = |value: usize| Meta::U32(u32::try_from(value).unwrap_or(u32::MAX));
    let mut metadata = vec![
        ("general.architecture".to_owned(), Meta::Text(architecture.to_owned())),
        ("general.name".to_owned(), Meta::Text(model.name.to_owned())),
        ("general.quantization_version".to_owned(), Meta::U32(2)),
    ];
    let file_type = match to {
        Target::GgufTq2_0 => Some(37),
        Target::GgufI2S => Some(40),
        _ => None,
    };
    metadata.extend(file_type.map(|kind| ("general.file_type".to_owned(), Meta::U32(kind))));
    for (key, value) in [
        ("vocab_size", number(config.vocab_size)),
        ("context_length", number(config.context_length)),
        ("embedding_length", number(config.hidden_size)),
        ("block_count", number(config.layer_count)),
        ("feed_forward_length", number(config.intermediate_size)),
        ("rope.dimension_count", number(config.head_dim)),
        ("rope.freq_base", Meta::F32(config.rope_theta)),
        ("attention.head_count", number(config.head_count)),
        ("attention.head_count_kv", number(config.kv_head_count)),
        ("attention.key_length", number(config.head_dim)),
        ("attention.value_length", number(config.head_dim)),
        ("attention.layer_norm_rms_epsilon", Meta::F32(config.rms_norm_eps)),
    ] {
        metadata.push((format!("{architecture}.{key}"), value));
    }
    if !config.multipliers.is_none() {
        let Multipliers { embedding, residual, logit_divisor } = config.multipliers;
        let values = [embedding, residual, logit_divisor];
        for (key, value) in gguf_config::MULTIPLIER_KEYS.into_iter().zip(values) {
            metadata.push((format!("{architecture}.{key}"), Meta::F32(value)));
        }
    }
    let mut push = |key: &str, value| {
        metadata.push((format!("{architecture}.rope.scaling.{key}"), value));
    };
    match config.rope_scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            push("type", Meta::Text("linear".to_owned()));
            push("factor", Meta::F32(factor));
        }
        RopeScaling::Yarn(Yarn { factor, original_context }) => {
            push("type", Meta::Text("yarn".to_owned()));
            push("factor", Meta::F32(factor));
            push("original_context_length", number(original_context));
        }
        RopeScaling::Llama3 { .. } | RopeScaling::Divisors { .. } => {
            let problem = Problem::Other("its RoPE frequencies are scaled one by one");
            return Err(refuse(gguf_model::ROPE_DIVISORS.to_owned(), to, problem));
        }
    }
    metadata.extend(tokenizer_metadata(model, to)?);
    Ok(metadata)
}

fn tokenizer_metadata(
    model: &Described<'_>,
    to: Target,
) -> Result<Vec<(String, Meta)>, ModelError> {
    let Described { config, tokenizer, .. } = *model;
    let vocabulary = tokenizer.vocabulary()?;
    let Some(pre) = vocabulary.pre else {
        let problem = Problem::Other(if tokenizer.has_pieces() {
            "SentencePiece vocabularies are read from GGUF files, but not written"
        } else {
            "its pre-tokenizer has no name in the format"
        });
        return Err(refuse("tokenizer.json".to_owned(), to, problem));
    };
    let framed = tokenizer.encode("", true)?;
    let eos = model.eos_token;
    let add_bos = config.bos_token.is_some() && framed.first() == config.bos_token.as_ref();
    let add_eos = framed.len() > usize::from(add_bos);
    if framed.len() > 2 || (add_eos && framed.last() != eos.as_ref()) {
        let problem = Problem::Other("it puts more around a prompt than one BOS and EOS token");
        return Err(refuse("tokenizer.json".to_owned(), to, problem));
    }
    let mut texts = Vec::with_capacity(config.vocab_size);
    let mut kinds = Vec::with_capacity(config.vocab_size);
    for id in 0..config.vocab_size {
        let (text, kind) = match vocabulary.tokens.get(id).cloned().flatten() {
            None => (format!("[PAD{id}]"), TYPE_UNUSED),
            Some((text, TokenKind::Normal)) => (text, TYPE_NORMAL),
            Some((text, TokenKind::Added)) => (text, TYPE_USER_DEFINED),
            Some((text, TokenKind::Special)) => (text, TYPE_CONTROL),
        };
        texts.push(text);
        kinds.push(kind as i32);
    }
    let mut metadata = vec![
        ("tokenizer.ggml.model", Meta::Text("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Meta::Text(pre.to_owned())),
        ("tokenizer.ggml.tokens", Meta::Texts(texts)),
        ("tokenizer.ggml.token_type", Meta::I32s(kinds)),
        ("tokenizer.ggml.merges", Meta::Texts(vocabulary.merges)),
        ("tokenizer.ggml.add_bos_token", Meta::Bool(add_bos)),
        ("tokenizer.ggml.add_eos_token", Meta::Bool(add_eos)),
        (gguf_model::EOS_TOKENS_KEY, Meta::U32s(config.eos_tokens.clone())),
    ];
    metadata.extend(config.bos_token.map(|id| ("tokenizer.ggml.bos_token_id", Meta::U32(id))));
    metadata.extend(eos.map(|id| ("tokenizer.ggml.eos_token_id", Meta::U32(id))));
    if let Some(template) = model.chat_template {
        metadata.push(("tokenizer.chat_template", Meta::Text(template.source().to_owned())));
    }
    Ok(metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}
