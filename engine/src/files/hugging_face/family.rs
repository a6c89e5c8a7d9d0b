//! [`Family`]: the families of models in folders, and for each what is understood of its files. A new family starts here.

use super::json_keys::Keys;
use crate::files::{error::ModelError, needs};

/// A family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Bitnet,
    Llama,
    MiniCpm,
    Qwen3,
}

/// Keys of MiniCPM's factors that other families have with another meaning.
pub(super) const MULTIPLIER_KEYS: [&str; 2] = ["scale_emb", "scale_depth"];

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
        }
    }

    /// Returns the keys that are read for this family only.
    pub fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::MiniCpm => &MULTIPLIER_KEYS,
            _ => &[],
        }
    }
}
