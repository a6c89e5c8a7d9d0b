//! The numerics class of a backend: everything that a token depends on besides the request, as one string.

use super::cpu::{HeadMode, KvType};
use crate::{
    config::ModelConfig,
    files::{Model, ModelError},
    kernels::Digits,
    sampling,
};

/// Options that change tokens.
#[derive(Debug, Clone, Copy)]
pub struct Choices {
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// Digits of activations; `None` for those of the model.
    pub activations: Option<Digits>,
}

/// The order of the sums of a matrix with scales of groups (`kernels::group_gemm`), and the digits of its activations
/// (`kernels::group_activations`); the number rises when answers change.
const GROUPS_VERSION: u32 = 1;

/// Returns the digits of a model's activations: one for models that were trained with int8 activations.
pub fn digits(config: &ModelConfig, chosen: Option<Digits>) -> Digits {
    if config.group_scales { chosen.unwrap_or(Digits::Two) } else { Digits::One }
}

/// Returns the numerics class of a model on a kind of backend: `cpu` or `cuda`. The first call for a model
/// reads all of it. A ternary head always sees two digits, so that the head mode changes nothing.
///
/// # Errors
/// As [`Model::fingerprint`].
pub fn numerics_class(
    model: &Model,
    choices: Choices,
    backend: &str,
) -> Result<String, ModelError> {
    let fingerprint = model.fingerprint()?;
    let Choices { kv, head, activations } = choices;
    let config = model.config();
    let precision = match head {
        _ if config.ternary_tables => "ternary",
        HeadMode::Q8 => "q8",
        HeadMode::Exact | HeadMode::Full => model.head().dtype.name(),
    };
    let (kv, draw) = (kv.class_name(), sampling::VERSION);
    if config.group_scales {
        let digits = digits(config, activations);
        let activations = format!("activations-{digits}-{GROUPS_VERSION}");
        return Ok(format!(
            "{fingerprint}/kv-{kv}/head-{precision}/{activations}/{draw}/{backend}"
        ));
    }
    Ok(format!("{fingerprint}/kv-{kv}/head-{precision}/{draw}/{backend}"))
}
