//! [`Family`]: the families of models in folders, and for each what is understood of its files. A new family starts here.

use super::{json_keys::Keys, maple};
use crate::files::{error::ModelError, needs};

/// A family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Bitnet,
    Llama,
    MiniCpm,
    Qwen3,
    Qwen35,
    Maple,
}

/// Keys of MiniCPM's factors that other families have with another meaning.
pub(super) const MULTIPLIER_KEYS: [&str; 2] = ["scale_emb", "scale_depth"];

/// Keys of Qwen3.5's recurrent layers and gated attention. Its draft head is not read: `mtp` tensors are skipped.
const HYBRID_KEYS: [&str; 12] = [
    "attn_output_gate",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "partial_rotary_factor",
    "layer_types",
];

impl Family {
    /// Reads `model_type`.
    ///
    /// # Errors
    /// The key is missing, or names a family that this build cannot compute.
    pub fn read(keys: &Keys<'_>) -> Result<Self, ModelError> {
        const KEY: &str = "model_type";
        Ok(match keys.required_text(KEY)? {
            "bitnet" => Self::Bitnet,
            "llama" => Self::Llama,
            "minicpm" => Self::MiniCpm,
            "qwen3" => Self::Qwen3,
            "qwen3_5_text" | "qwen3_5" => Self::Qwen35,
            "maple" => Self::Maple,
            other => return Err(keys.unsupported(KEY, needs::of_architecture(other))),
        })
    }

    /// Returns the name of the model type, which is that of the architecture, too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bitnet => "bitnet",
            Self::Llama => "llama",
            Self::MiniCpm => "minicpm",
            Self::Qwen3 => "qwen3",
            Self::Qwen35 => "qwen35",
            Self::Maple => "maple",
        }
    }

    /// Returns the keys that are read for this family only.
    pub fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::MiniCpm => &MULTIPLIER_KEYS,
            Self::Qwen35 => &HYBRID_KEYS,
            Self::Maple => &maple::KEYS,
            _ => &[],
        }
    }
}
