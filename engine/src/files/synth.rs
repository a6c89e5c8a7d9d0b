//! Random ternary models in the shapes of real ones, for benchmarks and scale tests.
//!
//! They generate meaningless text at the cost of a real model: the same matrices, packing and
//! vocabulary. Weights depend on the seed, the tensor and the position alone; they are generated and
//! written in bounded memory, in parallel. The generator must stay [`SplitMix`]: with another one, the
//! same seed would give another model.

use std::{io::Write, path::Path};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::{
    error::ModelError,
    hf_config::WeightStorage,
    hf_tensors,
    hf_write::{self, FolderTexts, TensorPlan},
    roles::{norm_len, norms},
    safetensors::Dtype,
    synth_groups,
    tokenizer_json::{self, TokenizerJson},
};
use crate::{
    config::{Activation, Linear, ModelConfig, Multipliers, Norm, RopeScaling},
    tokenizer::byte_alphabet,
};

/// The special tokens of a synthetic model; their ids follow the 256 bytes.
pub(super) const SPECIAL: [&str; 4] =
    ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"];
pub(super) const BOS: u32 = 256;
pub(super) const EOS: u32 = 259;
/// Smallest vocabulary: 256 bytes and the special tokens.
pub const VOCAB_MIN: usize = 260;

pub(super) const CHAT_TEMPLATE: &str = "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

/// Name and sizes of a known model.
struct Preset {
    name: &'static str,
    family: Family,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocab: usize,
    context: usize,
    theta: f32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// BitNet b1.58 2B4T.
    BitNet,
    /// 1bitLLM: sub-norms with SiLU.
    OneBit,
    /// Llama, Falcon3: no sub-norms, a separate head.
    Llama,
    /// Ternary Bonsai (Qwen3): scales of groups, norms of query and key heads.
    Bonsai { tied: bool },
    /// BitCPM (MiniCPM4): scales of groups, constant factors, dense tables.
    BitCpm { tied: bool },
}

#[rustfmt::skip]
const PRESETS: [Preset; 15] = [
    Preset { name: "bitnet-2b", family: Family::BitNet, hidden: 2560, layers: 30, heads: 20, kv_heads: 5, head_dim: 128, intermediate: 6912, vocab: 128_256, context: 4096, theta: 500_000.0 },
    Preset { name: "bitnet-0.7b", family: Family::OneBit, hidden: 1536, layers: 24, heads: 16, kv_heads: 16, head_dim: 96, intermediate: 4096, vocab: 32_002, context: 2048, theta: 10_000.0 },
    Preset { name: "bitnet-3b", family: Family::OneBit, hidden: 3200, layers: 26, heads: 32, kv_heads: 32, head_dim: 100, intermediate: 8640, vocab: 32_002, context: 2048, theta: 10_000.0 },
    Preset { name: "llama-8b", family: Family::Llama, hidden: 4096, layers: 32, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 14_336, vocab: 128_256, context: 8192, theta: 500_000.0 },
    Preset { name: "falcon3-1b", family: Family::Llama, hidden: 2048, layers: 18, heads: 8, kv_heads: 4, head_dim: 256, intermediate: 8192, vocab: 131_072, context: 4096, theta: 1_000_042.0 },
    Preset { name: "falcon3-3b", family: Family::Llama, hidden: 3072, layers: 22, heads: 12, kv_heads: 4, head_dim: 256, intermediate: 9216, vocab: 131_072, context: 8192, theta: 1_000_042.0 },
    Preset { name: "falcon3-7b", family: Family::Llama, hidden: 3072, layers: 28, heads: 12, kv_heads: 4, head_dim: 256, intermediate: 23_040, vocab: 131_072, context: 8192, theta: 1_000_042.0 },
    Preset { name: "falcon3-10b", family: Family::Llama, hidden: 3072, layers: 40, heads: 12, kv_heads: 4, head_dim: 256, intermediate: 23_040, vocab: 131_072, context: 8192, theta: 1_000_042.0 },
    Preset { name: "bonsai-1.7b", family: Family::Bonsai { tied: true }, hidden: 2048, layers: 28, heads: 16, kv_heads: 8, head_dim: 128, intermediate: 6144, vocab: 151_936, context: 32_768, theta: 1_000_000.0 },
    Preset { name: "bonsai-4b", family: Family::Bonsai { tied: true }, hidden: 2560, layers: 36, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 9728, vocab: 151_936, context: 32_768, theta: 1_000_000.0 },
    Preset { name: "bonsai-8b", family: Family::Bonsai { tied: false }, hidden: 4096, layers: 36, heads: 32, kv_heads: 8, head_dim: 128, intermediate: 12_288, vocab: 151_936, context: 32_768, theta: 1_000_000.0 },
    Preset { name: "bitcpm-0.5b", family: Family::BitCpm { tied: true }, hidden: 1024, layers: 24, heads: 16, kv_heads: 2, head_dim: 64, intermediate: 4096, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-1b", family: Family::BitCpm { tied: false }, hidden: 2048, layers: 28, heads: 16, kv_heads: 2, head_dim: 128, intermediate: 6144, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-3b", family: Family::BitCpm { tied: false }, hidden: 2560, layers: 32, heads: 32, kv_heads: 2, head_dim: 128, intermediate: 10_240, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-8b", family: Family::BitCpm { tied: false }, hidden: 4096, layers: 32, heads: 32, kv_heads: 2, head_dim: 128, intermediate: 16_384, vocab: 73_448, context: 32_768, theta: 10_000.0 },
];

/// Returns the names of the models with a known shape.
pub fn shape_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// Returns the configuration of a known model; its fields can be changed for other shapes.
pub fn shape(name: &str) -> Option<ModelConfig> {
    let preset = PRESETS.iter().find(|preset| preset.name == name)?;
    let (architecture, sub_norms, tied_head) = match preset.family {
        Family::BitNet | Family::OneBit => ("bitnet", true, true),
        Family::Llama => ("llama", false, false),
        Family::Bonsai { tied } => ("qwen3", false, tied),
        Family::BitCpm { tied } => ("minicpm", false, tied),
    };
    let (is_bonsai, is_bitcpm) = (architecture == "qwen3", architecture == "minicpm");
    Some(ModelConfig {
        architecture: architecture.to_owned(),
        hidden_size: preset.hidden,
        layer_count: preset.layers,
        head_count: preset.heads,
        kv_head_count: preset.kv_heads,
        head_dim: preset.head_dim,
        intermediate_size: preset.intermediate,
        vocab_size: preset.vocab,
        context_length: preset.context,
        rms_norm_eps: if is_bonsai || is_bitcpm { 1e-6 } else { 1e-5 },
        rope_theta: preset.theta,
        rope_scaling: RopeScaling::None,
        activation: if preset.family == Family::BitNet {
            Activation::SquaredRelu
        } else {
            Activation::Silu
        },
        sub_norms,
        linear_norm_eps: None,
        qk_norm: is_bonsai,
        group_scales: is_bonsai || is_bitcpm,
        ternary_tables: is_bonsai,
        linear_biases: Vec::new(),
        multipliers: match preset.family {
            Family::BitCpm { .. } => Multipliers {
                embedding: 12.0,
                residual: 1.4 / (preset.layers as f32).sqrt(),
                logit_divisor: preset.hidden as f32 / 256.0,
            },
            _ => Multipliers::NONE,
        },
        tied_head,
        bos_token: Some(BOS),
        eos_tokens: vec![EOS],
    })
}

/// The random contents of a tensor.
#[derive(Clone, Copy)]
enum Fill {
    /// Packed trits, about a third of each value.
    Trits,
    /// bf16 with mean 0 and about this standard deviation.
    Bell(f32),
    /// bf16 around 1.
    NearOne,
    /// The same bf16 everywhere.
    Constant(f32),
}

/// Writes a random model as a folder, or as a GGUF file if it has scales of groups, with a byte-level tokenizer that replaces the token ids of
/// `config`.
///
/// # Errors
/// [`ModelError::BadKey`] if the vocabulary is smaller than [`VOCAB_MIN`], an output size is not
/// a multiple of 4 or, with scales of groups, an input size not one of 128; [`ModelError::NotAModel`] if a GGUF file
/// would not be called one; [`ModelError::Io`] if writing fails.
pub fn synth(config: &ModelConfig, out: &Path, seed: u64) -> Result<(), ModelError> {
    let bad = |key: &str, value: usize, expected| {
        Err(ModelError::BadKey { key: key.to_owned(), value: value.to_string(), expected })
    };
    if config.vocab_size < VOCAB_MIN {
        return bad("vocab_size", config.vocab_size, "260 or more: bytes and special tokens");
    }
    for linear in Linear::ALL {
        let (rows, _) = config.linear_shape(linear);
        if !rows.is_multiple_of(4) {
            return bad("output size of a linear", rows, "a multiple of 4");
        }
    }
    let config = ModelConfig { bos_token: Some(BOS), eos_tokens: vec![EOS], ..config.clone() };
    if config.group_scales {
        return synth_groups::write(&config, out, seed);
    }
    let (plan, fills): (Vec<_>, Vec<_>) = plan(&config).into_iter().unzip();
    let tokenizer = byte_tokenizer().to_string();
    let texts = FolderTexts {
        tokenizer: tokenizer.as_bytes(),
        bos_token: Some(SPECIAL[0]),
        eos_token: Some(SPECIAL[3]),
        chat_template: Some(CHAT_TEMPLATE),
    };
    let storage = WeightStorage::PackedMultiply;
    hf_write::write_folder(out, &config, storage, &texts, &plan, |index, writer| {
        let size = plan[index].size_bytes();
        fill(fills[index], size, mix(seed ^ mix(index as u64 + 1)), writer)
            .map_err(|error| ModelError::io(out, error))
    })
}

fn plan(config: &ModelConfig) -> Vec<(TensorPlan, Fill)> {
    let mut plan = Vec::new();
    let mut add = |name: String, dtype, shape: &[usize], fill| {
        let shape = shape.iter().map(|&dim| dim as u64).collect();
        plan.push((TensorPlan { name, dtype, shape }, fill));
    };
    let table = [config.vocab_size, config.hidden_size];
    let embedding = Fill::Bell(1.0);
    add("model.embed_tokens.weight".to_owned(), Dtype::Bf16, &table, embedding);
    if !config.tied_head {
        add("lm_head.weight".to_owned(), Dtype::Bf16, &table, Fill::Bell(0.02));
    }
    for norm in norms(config) {
        // With a plain final norm, a random tied model only repeats its last token.
        let fill = if norm == Norm::Final { Fill::Bell(0.1) } else { Fill::NearOne };
        add(hf_tensors::norm_name(norm), Dtype::Bf16, &[norm_len(config, norm)], fill);
    }
    for layer in 0..config.layer_count {
        for linear in Linear::ALL {
            let (rows, cols) = config.linear_shape(linear);
            let name = hf_tensors::linear_name(layer, linear);
            let scale = format!("{name}_scale");
            add(name, Dtype::U8, &[rows / 4, cols], Fill::Trits);
            // Trits have variance 2/3: this scale preserves the variance of the activations.
            let factor = (1.5 / cols as f32).sqrt();
            add(scale, Dtype::Bf16, &[1], Fill::Constant(factor));
        }
    }
    plan
}

/// Bytes generated and written at a time.
const WINDOW: usize = 16 << 20;
/// Bytes generated from one counter value.
const PIECE: usize = 64 << 10;

fn fill(fill: Fill, size: u64, seed: u64, writer: &mut dyn Write) -> std::io::Result<()> {
    let mut window = vec![0; WINDOW.min(size as usize)];
    let trits = four_trits();
    let mut written = 0u64;
    while written < size {
        let len = (size - written).min(WINDOW as u64) as usize;
        let first_piece = written / PIECE as u64;
        window[..len].par_chunks_mut(PIECE).enumerate().for_each(|(piece, bytes)| {
            let mut random = SplitMix(mix(seed ^ mix(first_piece + piece as u64)));
            match fill {
                Fill::Trits => random.bytes(bytes, |byte| trits[usize::from(byte)]),
                Fill::Bell(deviation) => random.bf16s(bytes, |bell| bell * deviation),
                Fill::NearOne => random.bf16s(bytes, |bell| 1.0 + 0.05 * bell),
                Fill::Constant(value) => random.bf16s(bytes, |_| value),
            }
        });
        writer.write_all(&window[..len])?;
        written += len as u64;
    }
    Ok(())
}

/// Maps a random byte to a packed byte of four trits: the 81 combinations share the 256 values as
/// evenly as possible.
pub(super) fn four_trits() -> [u8; 256] {
    std::array::from_fn(|byte| {
        let mut rest = byte * 81 / 256;
        (0..4).fold(0, |packed, plane| {
            let digit = (rest % 3) as u8;
            rest /= 3;
            packed | digit << (2 * plane)
        })
    })
}

/// The SplitMix64 generator (Steele, Lea, Flood 2014).
pub(super) struct SplitMix(pub u64);

/// SplitMix64's output function.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl SplitMix {
    pub fn next(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0).to_le_bytes()
    }

    pub fn bytes(&mut self, out: &mut [u8], map: impl Fn(u8) -> u8) {
        for chunk in out.chunks_mut(8) {
            chunk.iter_mut().zip(self.next()).for_each(|(out, byte)| *out = map(byte));
        }
    }

    /// bf16 values from sums of four bytes, scaled to mean 0 and deviation 1.
    fn bf16s(&mut self, out: &mut [u8], map: impl Fn(f32) -> f32) {
        for chunk in out.chunks_mut(4) {
            let bytes = self.next();
            for (value, four) in chunk.chunks_mut(2).zip(bytes.as_chunks::<4>().0) {
                let sum: u16 = four.iter().map(|&byte| u16::from(byte)).sum();
                let bell = (f32::from(sum) - 510.0) / 147.8;
                value.copy_from_slice(&half::bf16::from_f32(map(bell)).to_le_bytes());
            }
        }
    }
}

/// Returns a byte-level tokenizer without merges: one token per byte, and the special tokens.
pub(super) fn byte_tokenizer() -> Value {
    let mut vocab = Map::new();
    let mut alphabet: Vec<(char, u8)> = byte_alphabet().into_iter().collect();
    alphabet.sort_unstable_by_key(|&(_, byte)| byte);
    for (character, byte) in alphabet {
        vocab.insert(character.to_string(), json!(byte));
    }
    let added = |(id, token): (u32, &&str)| tokenizer_json::added_token(id, token, true);
    TokenizerJson {
        added: (BOS..).zip(&SPECIAL).map(added).collect(),
        normalizer: Value::Null,
        pre_tokenizer: tokenizer_json::llama3_pre_tokenizer(),
        post_processor: tokenizer_json::post_processor(Some((BOS, SPECIAL[0])), None),
        decoder: tokenizer_json::byte_level(false),
        ignore_merges: true,
        vocab,
        merges: Vec::new(),
    }
    .into_json()
}
