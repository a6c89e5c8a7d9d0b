//! Shapes of known models.

use super::vocabulary::{BOS, EOS};
use crate::config::{
    Activation, DeltaNet, Experts, ModelConfig, Multipliers, Pooling, RopeScaling, Rotation,
    Windows,
};

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
    /// Ternary Bonsai 2 (Qwen3.5): the same with Gated DeltaNet layers, in a rotated basis.
    Hybrid { value_heads: usize },
    /// BitCPM (MiniCPM4): scales of groups, constant factors, dense tables.
    BitCpm { tied: bool },
    /// BitNet embedding models (Qwen3): norms in front of linears, no head.
    Embedding,
    /// Maple: experts, windows of attention, dense tables.
    Maple { experts: usize, used: usize },
}

#[rustfmt::skip]
const PRESETS: [Preset; 19] = [
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
    Preset { name: "bonsai2-9b", family: Family::Hybrid { value_heads: 32 }, hidden: 4096, layers: 32, heads: 16, kv_heads: 4, head_dim: 256, intermediate: 12_288, vocab: 248_320, context: 32_768, theta: 10_000_000.0 },
    Preset { name: "bonsai2-27b", family: Family::Hybrid { value_heads: 48 }, hidden: 5120, layers: 64, heads: 24, kv_heads: 4, head_dim: 256, intermediate: 17_408, vocab: 248_320, context: 32_768, theta: 10_000_000.0 },
    Preset { name: "bitcpm-0.5b", family: Family::BitCpm { tied: true }, hidden: 1024, layers: 24, heads: 16, kv_heads: 2, head_dim: 64, intermediate: 4096, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-1b", family: Family::BitCpm { tied: false }, hidden: 2048, layers: 28, heads: 16, kv_heads: 2, head_dim: 128, intermediate: 6144, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-3b", family: Family::BitCpm { tied: false }, hidden: 2560, layers: 32, heads: 32, kv_heads: 2, head_dim: 128, intermediate: 10_240, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitcpm-8b", family: Family::BitCpm { tied: false }, hidden: 4096, layers: 32, heads: 32, kv_heads: 2, head_dim: 128, intermediate: 16_384, vocab: 73_448, context: 32_768, theta: 10_000.0 },
    Preset { name: "bitnet-embedding-0.6b", family: Family::Embedding, hidden: 1024, layers: 28, heads: 16, kv_heads: 8, head_dim: 128, intermediate: 3072, vocab: 151_936, context: 32_768, theta: 1_000_000.0 },
    Preset { name: "maple-20b-a1b", family: Family::Maple { experts: 256, used: 8 }, hidden: 2048, layers: 24, heads: 16, kv_heads: 4, head_dim: 128, intermediate: 512, vocab: 151_936, context: 32_768, theta: 10_000.0 },
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
        Family::Hybrid { .. } => ("qwen35", false, false),
        Family::BitCpm { tied } => ("minicpm", false, tied),
        Family::Embedding => ("qwen3", false, true),
        Family::Maple { .. } => ("maple", false, false),
    };
    let embeds = preset.family == Family::Embedding;
    let is_qwen3 = matches!(architecture, "qwen3" | "qwen35");
    let is_bonsai = is_qwen3 && !embeds;
    let is_bitcpm = architecture == "minicpm";
    let experts = match preset.family {
        Family::Maple { experts, used } => {
            Some(Experts { count: experts, used, clamp: vec![7.0; preset.layers] })
        }
        _ => None,
    };
    let is_maple = experts.is_some();
    let delta_net = match preset.family {
        Family::Hybrid { value_heads } => Some(DeltaNet {
            attention_interval: 4,
            key_heads: 16,
            value_heads,
            head_dim: 128,
            dense_rates: true,
        }),
        _ => None,
    };
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
        rms_norm_eps: if is_qwen3 || is_bitcpm || is_maple { 1e-6 } else { 1e-5 },
        rope_theta: preset.theta,
        rope_scaling: RopeScaling::None,
        activation: if preset.family == Family::BitNet {
            Activation::SquaredRelu
        } else {
            Activation::Silu
        },
        sub_norms,
        linear_norm_eps: embeds.then_some(1e-6),
        qk_norm: is_qwen3 || is_maple,
        group_scales: is_bonsai || is_bitcpm || is_maple,
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
        rotary_dim: match preset.family {
            Family::Hybrid { .. } => Some(preset.head_dim / 4),
            Family::Maple { .. } => Some(preset.head_dim / 2),
            _ => None,
        },
        rotation: delta_net.map(|_| Rotation { block: 1024, signs: Vec::new() }),
        delta_net,
        windows: is_maple.then(|| Windows {
            size: 512,
            layers: (1..=preset.layers).map(|layer| !layer.is_multiple_of(4)).collect(),
        }),
        experts,
        pooling: embeds.then_some(Pooling::LastToken),
        tied_head,
        bos_token: Some(BOS),
        eos_tokens: vec![EOS],
    })
}
