//! BitNet embedding models in folders (microsoft/BitNet `docs/bitnet-embeddings-qwen3-gguf-conversion.md`): a Qwen3 with dense
//! weights that are quantized at load, a norm in front of each linear, and no head. Their configuration is that of a plain Qwen3, so
//! they are known by their tensors.

use serde_json::{Map, Value};

use super::{
    config::{HfConfig, WeightStorage},
    json_keys::Keys,
};
use crate::{
    config::Pooling,
    files::{error::ModelError, tokenizer::json},
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// What says how a text becomes a vector, as sentence-transformers writes it.
pub(super) const POOLING_FILE: &str = "1_Pooling/config.json";

/// What sentence-transformers runs.
pub(super) const MODULES_FILE: &str = "modules.json";
/// The end token of the published models. Their configuration may name that of conversations.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Returns the settings of an embedding model, if the tensors are those of one.
///
/// # Errors
/// If the file of the pooling is missing, or names another one than the last token's.
pub(super) fn settings<'a>(
    config: HfConfig,
    mut tensors: impl Iterator<Item = &'a String>,
    pooling_file: Option<&[u8]>,
) -> Result<HfConfig, ModelError> {
    let is_qwen3 = config.model.architecture == "qwen3";
    if !is_qwen3 || !tensors.any(|name| name.ends_with(".self_attn.q_proj.norm.weight")) {
        return Ok(config);
    }
    let HfConfig { mut model, .. } = config;
    model.pooling = Some(pooling(pooling_file)?);
    model.linear_norm_eps = Some(model.rms_norm_eps);
    (model.group_scales, model.ternary_tables, model.tied_head) = (false, false, true);
    Ok(HfConfig { model, storage: WeightStorage::Embedding })
}

fn pooling(file: Option<&[u8]>) -> Result<Pooling, ModelError> {
    let file = file.ok_or_else(|| ModelError::MissingFile {
        file: POOLING_FILE.to_owned(),
        why: "how a text becomes a vector",
    })?;
    let map: Map<String, Value> = serde_json::from_slice(file)
        .map_err(|source| ModelError::Json { file: POOLING_FILE.to_owned(), source })?;
    const LAST: &str = "pooling_mode_lasttoken";
    const NAME: &str = "pooling_mode";
    let keys = Keys { map: &map, prefix: "1_Pooling." };
    let others = map.keys().filter(|key| key.starts_with("pooling_mode_") && *key != LAST);
    for key in others {
        if keys.flag(key)? != Some(false) {
            return Err(keys.unsupported(key, "vectors of texts other than the last token's"));
        }
    }
    // Newer versions of sentence-transformers name the kind.
    let named = keys.text(NAME)?;
    if named.is_some_and(|name| name != "lasttoken") {
        return Err(keys.unsupported(NAME, "vectors of texts other than the last token's"));
    }
    match keys.flag(LAST)?.or(named.map(|_| true)) {
        Some(true) => Ok(Pooling::LastToken),
        _ => Err(keys.unsupported(LAST, "vectors of texts other than the last token's")),
    }
}

/// Returns the name of a tensor with the prefix that other folders have.
pub(super) fn tensor_name(name: String) -> String {
    let has_no_prefix = ["layers.", "embed_tokens.", "norm."].iter().any(|p| name.starts_with(p));
    if has_no_prefix { format!("model.{name}") } else { name }
}

/// Returns a `tokenizer.json` that puts the end token after a text, which the vector is of: `<|endoftext|>` if there is one.
///
/// # Errors
/// If the file is malformed, or no end token is known.
pub(super) fn with_end_token(
    file: &[u8],
    tokenizer: &Tokenizer,
    special: &TokenizerConfig,
) -> Result<Vec<u8>, ModelError> {
    let malformed = |source| ModelError::Json { file: "tokenizer.json".to_owned(), source };
    let mut root: Map<String, Value> = serde_json::from_slice(file).map_err(malformed)?;
    let named = [Some(END_OF_TEXT), special.special_token("eos_token")];
    let mut known =
        named.into_iter().flatten().filter_map(|name| Some((tokenizer.token_id(name)?, name)));
    let missing = || ModelError::MissingKey { key: "tokenizer_config.eos_token".to_owned() };
    let end = known.next().ok_or_else(missing)?;
    root.insert("post_processor".to_owned(), json::post_processor(None, Some(end)));
    serde_json::to_vec(&root).map_err(malformed)
}

/// Refuses modules that sentence-transformers runs and that are not computed.
///
/// # Errors
/// Names the first such module.
pub(super) fn refuse_modules(file: Option<&[u8]>) -> Result<(), ModelError> {
    let Some(file) = file else { return Ok(()) };
    let modules: Vec<Map<String, Value>> = serde_json::from_slice(file)
        .map_err(|source| ModelError::Json { file: MODULES_FILE.to_owned(), source })?;
    for map in &modules {
        let keys = Keys { map, prefix: "modules." };
        let kind = keys.required_text("type")?;
        let path = keys.text("path")?.unwrap_or_default();
        match kind.rsplit('.').next() {
            Some("Transformer" | "Normalize") => {}
            Some("Pooling") if path == "1_Pooling" => {}
            Some("Pooling") => {
                return Err(keys.unsupported("path", "a pooling in another folder than 1_Pooling"));
            }
            _ => return Err(keys.unsupported("type", "modules after the model's last layer")),
        }
    }
    Ok(())
}
