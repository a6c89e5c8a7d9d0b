//! `config.json` and `generation_config.json` of a Hugging Face folder.
//!
//! Keys that may change the computation and are not read are errors ([`understood`]), and so are unknown keys in the RoPE and
//! quantization blocks. Defaults are those of transformers' `BitNetConfig`, `LlamaConfig` and `Qwen3Config`, and of OpenBMB's
//! `MiniCPMConfig`.

use serde_json::{Map, Value};

use super::python_json::without_literals;
use super::{
    family::{Family, MULTIPLIER_KEYS},
    hybrid,
    json_keys::Keys,
    maple, rope, understood,
};
use crate::{
    config::{Activation, Linear, ModelConfig, Multipliers},
    files::{
        error::ModelError,
        limits::{LAYERS_MAX, VOCAB_MAX, WIDTH_MAX},
    },
};

/// Storage of the ternary linears of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightStorage {
    /// Packed trits; the result is multiplied by `weight_scale`.
    PackedMultiply,
    /// Packed trits; the result is divided by `weight_scale`.
    PackedDivide,
    /// Dense master weights, quantized at load.
    Online,
    /// The same, with the names that 1bitLLM has for the norms inside the blocks.
    OneBitLlm,
    /// Dense weights that are exactly ternary, with a scale per group of inputs.
    Grouped,
    /// Dense master weights, quantized at load, with the names that embedding models have for the norms of linears.
    Embedding,
}

/// The contents of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct HfConfig {
    /// Shape and conventions of the model.
    pub model: ModelConfig,
    /// Storage of the linears.
    pub storage: WeightStorage,
}

/// Parses `config.json`.
///
/// # Errors
/// Names the key that is missing, out of range or not supported.
pub fn parse(bytes: &[u8]) -> Result<HfConfig, ModelError> {
    let root: Map<String, Value> = serde_json::from_slice(&without_literals(bytes))
        .map_err(|source| ModelError::Json { file: "config.json".to_owned(), source })?;
    let keys = Keys { map: &root, prefix: "" };
    let family = Family::read(&keys)?;
    // Models that read images, too, have the settings of text apart.
    let text = keys.get("text_config").and_then(Value::as_object);
    let keys = match text.filter(|_| family == Family::Qwen35) {
        Some(map) => Keys { map, prefix: "text_config." },
        None => keys,
    };
    let root = keys.map;
    let (is_bitnet, is_hybrid) = (family == Family::Bitnet, family == Family::Qwen35);
    let is_maple = family == Family::Maple;
    let is_qwen3 = family == Family::Qwen3 || is_hybrid;
    understood::refuse_keys(&keys, family)?;
    let is_dense = family == Family::Llama && keys.get("quantization_config").is_none();
    let (storage, linear_norm_eps) = match one_bit_llm(&keys, is_bitnet)? {
        true => (WeightStorage::OneBitLlm, None),
        false if is_dense || family == Family::MiniCpm || is_qwen3 || is_maple => {
            refuse_quantization(&keys)?
        }
        false => quantization(&keys)?,
    };
    let sub_norms = is_bitnet || storage == WeightStorage::OneBitLlm;

    let hidden_size = keys.required_size("hidden_size", WIDTH_MAX)?;
    let head_count = keys.required_size("num_attention_heads", WIDTH_MAX)?;
    let kv_head_count = match keys.size("num_key_value_heads", WIDTH_MAX)? {
        Some(count) => count,
        // The defaults of `BitNetConfig` (5) and `Qwen3Config` (32) fit no model without the key.
        None if family != Family::Llama && !root.contains_key("num_key_value_heads") => {
            return Err(ModelError::MissingKey { key: "num_key_value_heads".to_owned() });
        }
        None => head_count,
    };
    if !head_count.is_multiple_of(kv_head_count) {
        return Err(keys.bad("num_key_value_heads", "a divisor of num_attention_heads"));
    }
    let head_dim = head_dim(&keys, is_qwen3, (hidden_size, head_count))?;
    let default_eps = if is_bitnet { 1e-5 } else { 1e-6 };
    let vocab_size = keys.required_size("vocab_size", VOCAB_MAX)?;
    let context_length = keys.size("max_position_embeddings", u64::from(u32::MAX))?.unwrap_or(2048);
    let rotary_dim = match is_hybrid || is_maple {
        true => Some(hybrid::rotary_dim(&keys, head_dim)?).filter(|turned| *turned != head_dim),
        false => None,
    };
    let shape = rope::Shape { context_length, frequencies: rotary_dim.unwrap_or(head_dim) / 2 };
    let rope = match family {
        Family::Qwen3 => rope::parse(&keys, shape, Some("yarn")),
        Family::Qwen35 => rope::parse(&keys, shape, Some(rope::HYBRID)),
        Family::MiniCpm => rope::parse(&keys, shape, Some("longrope")),
        Family::Bitnet | Family::Llama | Family::Maple => rope::parse(&keys, shape, None),
    }?;
    let layer_count = keys.required_size("num_hidden_layers", LAYERS_MAX)?;
    let delta_net = is_hybrid.then(|| hybrid::delta_net(&keys, layer_count)).transpose()?;
    let model = ModelConfig {
        architecture: family.name().to_owned(),
        hidden_size,
        layer_count,
        head_count,
        kv_head_count,
        head_dim,
        intermediate_size: match is_maple {
            true => keys.required_size("moe_intermediate_size", WIDTH_MAX)?,
            false => keys.required_size("intermediate_size", WIDTH_MAX)?,
        },
        vocab_size,
        context_length,
        rms_norm_eps: keys.epsilon("rms_norm_eps")?.unwrap_or(default_eps),
        rope_theta: rope.theta.unwrap_or(if is_bitnet { 500_000.0 } else { 10_000.0 }),
        rope_scaling: rope.scaling,
        activation: activation(&keys, is_bitnet)?,
        sub_norms,
        linear_norm_eps,
        qk_norm: is_qwen3 || is_maple,
        group_scales: storage == WeightStorage::Grouped,
        linear_biases: linear_biases(&keys)?,
        ternary_tables: is_qwen3,
        multipliers: match family {
            Family::MiniCpm => multipliers(&keys, hidden_size, layer_count)?,
            _ => Multipliers::NONE,
        },
        rotary_dim,
        delta_net,
        rotation: None,
        windows: is_maple.then(|| maple::windows(&keys, layer_count)).transpose()?,
        experts: is_maple.then(|| maple::experts(&keys, (hidden_size, layer_count))).transpose()?,
        pooling: None,
        tied_head: keys.flag("tie_word_embeddings")?.unwrap_or(family == Family::MiniCpm),
        bos_token: keys.token_ids("bos_token_id", vocab_size)?.first().copied(),
        eos_tokens: keys.token_ids("eos_token_id", vocab_size)?,
    };
    Ok(HfConfig { model, storage })
}

/// Reads which linears have a bias.
fn linear_biases(keys: &Keys<'_>) -> Result<Vec<Linear>, ModelError> {
    let attention = keys.flag("attention_bias")?.unwrap_or(false);
    let feed_forward = keys.flag("mlp_bias")?.unwrap_or(false);
    let has_bias = |linear: &Linear| match linear {
        Linear::Q | Linear::K | Linear::V | Linear::O => attention,
        Linear::Gate | Linear::Up | Linear::Down => feed_forward,
        Linear::DeltaInput
        | Linear::DeltaGate
        | Linear::DecayRate
        | Linear::LearningRate
        | Linear::DeltaOutput
        | Linear::ExpertGate
        | Linear::ExpertUp
        | Linear::ExpertDown => false,
    };
    Ok(Linear::OF_ATTENTION.into_iter().filter(has_bias).collect())
}

/// Reads the constant factors of MiniCPM.
fn multipliers(
    keys: &Keys<'_>,
    hidden_size: usize,
    layer_count: usize,
) -> Result<Multipliers, ModelError> {
    let required = |key: &str| keys.positive(key)?.ok_or_else(|| keys.missing(key));
    let [embedding, depth] = MULTIPLIER_KEYS;
    let multipliers = Multipliers {
        embedding: required(embedding)?,
        residual: (f64::from(required(depth)?) / (layer_count as f64).sqrt()) as f32,
        logit_divisor: hidden_size as f32 / required("dim_model_base")?,
    };
    match multipliers.are_sound() {
        true => Ok(multipliers),
        false => Err(keys.bad(depth, "with scale_emb and dim_model_base, factors within bounds")),
    }
}

/// Reads the number of elements of a head; without the key it depends on the family.
fn head_dim(
    keys: &Keys<'_>,
    is_qwen3: bool,
    (hidden_size, head_count): (usize, usize),
) -> Result<usize, ModelError> {
    let head_dim = match keys.size("head_dim", WIDTH_MAX)? {
        Some(head_dim) => head_dim,
        None if is_qwen3 && !keys.map.contains_key("head_dim") => 128,
        None if hidden_size.is_multiple_of(head_count) => hidden_size / head_count,
        None => return Err(keys.bad("num_attention_heads", "a divisor of hidden_size")),
    };
    if !head_dim.is_multiple_of(2) {
        return Err(keys.bad("head_dim", "an even number"));
    }
    if (head_count * head_dim) as u64 > WIDTH_MAX {
        return Err(keys.bad("num_attention_heads", "heads times head_dim within 2^20"));
    }
    Ok(head_dim)
}

/// Reads the tokens that end a generation from `generation_config.json`.
///
/// # Errors
/// As [`parse`].
pub fn parse_generation_eos(bytes: &[u8], vocab_size: usize) -> Result<Vec<u32>, ModelError> {
    let root: Map<String, Value> = serde_json::from_slice(&without_literals(bytes))
        .map_err(|source| ModelError::Json { file: "generation_config.json".to_owned(), source })?;
    Keys { map: &root, prefix: "generation_config." }.token_ids("eos_token_id", vocab_size)
}

fn activation(keys: &Keys<'_>, is_bitnet: bool) -> Result<Activation, ModelError> {
    match keys.text("hidden_act")? {
        Some("relu2") => Ok(Activation::SquaredRelu),
        Some("silu") => Ok(Activation::Silu),
        Some(_) => Err(keys.unsupported("hidden_act", "only relu2 and silu are known")),
        None if is_bitnet => Ok(Activation::SquaredRelu),
        None => Ok(Activation::Silu),
    }
}

/// Refuses other storages than dense weights, which may be ternary.
fn refuse_quantization(keys: &Keys<'_>) -> Result<(WeightStorage, Option<f32>), ModelError> {
    for key in ["quantization_config", "quantization"] {
        if keys.get(key).is_some() {
            let why = "only dense weights that are ternary in groups are known";
            return Err(keys.unsupported(key, why));
        }
    }
    Ok((WeightStorage::Grouped, None))
}

/// Returns whether the model is one of 1bitLLM: a Llama with sub-norms. Its keys `weight_bits` and `input_bits` stand
/// for ternary weights by their mean magnitude and int8 activations by their largest (its `utils_quant.py`).
fn one_bit_llm(keys: &Keys<'_>, is_bitnet: bool) -> Result<bool, ModelError> {
    for (key, supported) in [("weight_bits", 1), ("input_bits", 8)] {
        if keys.get(key).is_some_and(|bits| is_bitnet || bits.as_u64() != Some(supported)) {
            return Err(keys.unsupported(key, "another quantization scheme"));
        }
    }
    let both = keys.get("weight_bits").is_some() && keys.get("input_bits").is_some();
    if both && keys.get("quantization_config").is_some() {
        return Err(keys.unsupported("weight_bits", "two quantization schemes"));
    }
    if !both
        && let Some(key) = ["weight_bits", "input_bits"].into_iter().find(|k| keys.get(k).is_some())
    {
        return Err(keys.unsupported(key, "weight_bits without input_bits, or the reverse"));
    }
    Ok(both)
}

/// Reads `quantization_config`: storage, and the epsilon of per-linear norms.
fn quantization(keys: &Keys<'_>) -> Result<(WeightStorage, Option<f32>), ModelError> {
    let Some(value) = keys.get("quantization_config") else {
        return Err(ModelError::MissingKey {
            key: "quantization_config (the model is not ternary)".to_owned(),
        });
    };
    let Some(map) = value.as_object() else {
        return Err(keys.bad("quantization_config", "an object"));
    };
    let keys = Keys { map, prefix: "quantization_config." };
    for key in map.keys() {
        const KNOWN: [&str; 6] = [
            "quant_method",
            "linear_class",
            "quantization_mode",
            "use_rms_norm",
            "rms_norm_eps",
            "modules_to_not_convert",
        ];
        if !KNOWN.contains(&key.as_str()) && keys.get(key).is_some() {
            return Err(keys.unsupported(key, "unknown key"));
        }
    }
    if keys.required_text("quant_method")? != "bitnet" {
        return Err(keys.unsupported("quant_method", "only bitnet is known"));
    }
    let online = match keys.text("quantization_mode")?.unwrap_or("offline") {
        "online" => true,
        "offline" => false,
        _ => return Err(keys.unsupported("quantization_mode", "only online and offline are known")),
    };
    let storage = match keys.text("linear_class")?.unwrap_or("bitlinear") {
        "autobitlinear" if online => WeightStorage::Online,
        "autobitlinear" => WeightStorage::PackedMultiply,
        "bitlinear" if !online => WeightStorage::PackedDivide,
        "bitlinear" => {
            return Err(keys.unsupported("quantization_mode", "bitlinear is always offline"));
        }
        _ => {
            return Err(
                keys.unsupported("linear_class", "only autobitlinear and bitlinear are known")
            );
        }
    };
    check_unconverted_modules(&keys)?;
    let eps = keys.epsilon("rms_norm_eps")?.unwrap_or(1e-6);
    let with_norm = keys.flag("use_rms_norm")?.unwrap_or(false);
    Ok((storage, with_norm.then_some(eps)))
}

/// Rejects dense linears inside the layers: only head, embedding and norms may be unconverted.
fn check_unconverted_modules(keys: &Keys<'_>) -> Result<(), ModelError> {
    const KEY: &str = "modules_to_not_convert";
    let Some(value) = keys.get(KEY) else { return Ok(()) };
    let Some(list) = value.as_array() else { return Err(keys.bad(KEY, "null or a list")) };
    let never_ternary = |module: &Value| {
        module.as_str().is_some_and(|name| {
            matches!(name, "lm_head" | "embed_tokens" | "model.embed_tokens" | "model.norm")
        })
    };
    if !list.iter().all(never_ternary) {
        return Err(keys.unsupported(KEY, "dense linears inside the layers"));
    }
    Ok(())
}
