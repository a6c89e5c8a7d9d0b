//! [`Architecture`]: the families of GGUF models, and for each what is understood of its files. A new family starts here.

use super::{container::Gguf, keys::Keys, names::HEAD};
use crate::files::{error::ModelError, needs};

/// A family of GGUF models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// BitNet b1.58 2B4T: `bitnet-b1.58` or `bitnet-25`.
    BitnetB158,
    /// 1bitLLM: `bitnet`.
    Bitnet,
    /// Llama 3 8B 1.58, Falcon3: `llama`.
    Llama,
    /// BitCPM: `minicpm`.
    MiniCpm,
    /// Ternary Bonsai: `qwen3`.
    Qwen3,
    /// Ternary Bonsai 27B: `qwen35`, with Gated DeltaNet layers.
    Qwen35,
    /// Maple: `maple`, a mixture of experts with windows of attention.
    Maple,
}

/// Constant factors of `minicpm`: of embedding rows, of what blocks add, and the divisor of the logits.
pub(crate) const MULTIPLIER_KEYS: [&str; 3] = ["embedding_scale", "residual_scale", "logit_scale"];

/// Key of `qwen35` with the number of blocks that draft tokens. They come after the layers, and count as blocks.
pub(crate) const DRAFT_BLOCKS_KEY: &str = "nextn_predict_layers";

/// Keys of `qwen35`. For text all positions are equal, so that the sections of RoPE change nothing.
const HYBRID_KEYS: [&str; 8] = [
    DRAFT_BLOCKS_KEY,
    "full_attention_interval",
    "rope.dimension_sections",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
];

/// Keys of `maple`.
const MAPLE_KEYS: [&str; 7] = [
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "swiglu_clamp_exp",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
];

impl Architecture {
    /// Reads `general.architecture`. Returns it with its name in the file, which is the prefix of its keys.
    ///
    /// # Errors
    /// The key is missing, or names a family that this build cannot compute.
    pub fn read<'a>(gguf: &'a Gguf<'a>) -> Result<(Self, &'a str), ModelError> {
        const KEY: &str = "general.architecture";
        let keys = Keys { gguf, prefix: "" };
        let name = keys.required_text(KEY)?;
        let architecture = match name {
            "bitnet-b1.58" | "bitnet-25" => Self::BitnetB158,
            "bitnet" => Self::Bitnet,
            "llama" => Self::Llama,
            "minicpm" => Self::MiniCpm,
            "qwen3" => Self::Qwen3,
            "qwen35" => Self::Qwen35,
            "maple" => Self::Maple,
            _ => return Err(keys.unsupported(KEY, needs::of_architecture(name))),
        };
        Ok((architecture, name))
    }

    /// Returns whether the family is read by bitnet.cpp, with its type ids.
    pub fn is_bitnet(self) -> bool {
        matches!(self, Self::BitnetB158 | Self::Bitnet)
    }

    /// Returns whether rows of Q and K are in the order for adjacent-pair RoPE.
    pub fn permutes_heads(self) -> bool {
        matches!(self, Self::Llama | Self::MiniCpm)
    }

    /// Returns the keys that this family has beside those of all, without the prefix.
    pub fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::MiniCpm => &MULTIPLIER_KEYS,
            Self::Qwen35 => &HYBRID_KEYS,
            Self::Maple => &MAPLE_KEYS,
            _ => &[],
        }
    }

    /// Returns the prefixes of namespaces that only files of this family may have, such as `prism.`; reading them is the
    /// family's duty.
    pub fn own_namespaces(self) -> &'static [&'static str] {
        match self {
            Self::Qwen35 => &[super::rotation::NAMESPACE],
            _ => &[],
        }
    }

    /// Returns whether a tensor without a role may stay in the file, because it changes no result.
    ///
    /// That is the head of BitNet files: bitnet.cpp multiplies by the embedding, even if there is another matrix.
    /// `rope_freqs.weight` is never among them: its divisors change the frequencies of RoPE (see [`super::rope`]).
    pub fn ignores(self, tensor: &str) -> bool {
        self.is_bitnet() && tensor == HEAD
    }
}
