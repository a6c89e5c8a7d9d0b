//! The numerics class of a backend: everything that a token depends on besides the request, as one string.

use super::cpu::{HeadMode, KvType};
use crate::{
    files::{Model, ModelError},
    sampler,
};

/// Returns the numerics class of a model on a kind of backend: `cpu` or `cuda`. The first call for a model
/// reads all of it.
///
/// # Errors
/// As [`Model::fingerprint`].
pub fn of(model: &Model, kv: KvType, head: HeadMode, backend: &str) -> Result<String, ModelError> {
    let fingerprint = model.fingerprint()?;
    let precision = if head == HeadMode::Q8 { "q8" } else { model.head().dtype.name() };
    let (kv, draw) = (kv.class_name(), sampler::VERSION);
    Ok(format!("{fingerprint}/kv-{kv}/head-{precision}/{draw}/{backend}"))
}
