//! Hugging Face folders: `config.json`, `tokenizer.json` or `tokenizer.model`, and safetensors, sharded or not.
//!
//! Every tensor must have a role in the forward pass, and every role a tensor of the shape that follows
//! from the configuration. Anything else is an error that names the tensor.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fs,
    io::Read,
    path::Path,
};

use serde::Deserialize;

use super::{
    config::{self, HfConfig},
    embedding, safetensors, tensors,
    understood::{self, SKIPPED_PARTS},
};
use crate::{
    chat::ChatTemplate,
    config::ModelConfig,
    files::{
        error::{ModelError, Problem},
        mmap::{Bytes, check_content},
        parts::{Parts, SkippedPart, TensorInfo},
        tokenizer::{
            json::END_TOKENS,
            sentencepiece,
            sentencepiece_folder::{self, TokenizerFiles},
        },
    },
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// Largest `config.json`, `generation_config.json` or `tokenizer_config.json` accepted.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Largest `tokenizer.json` or shard index accepted.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Most shards accepted.
const SHARDS_MAX: usize = 4096;

/// The files of a Hugging Face folder that is embedded in the program.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddedFolder {
    /// `config.json`
    pub config: &'static [u8],
    /// `tokenizer.json`
    pub tokenizer: &'static [u8],
    /// `tokenizer_config.json`: special tokens and chat template.
    pub tokenizer_config: Option<&'static [u8]>,
    /// `generation_config.json`: additional tokens that end a generation.
    pub generation_config: Option<&'static [u8]>,
    /// `model.safetensors`
    pub weights: &'static [u8],
}

/// The files of a folder on disk or in the program.
struct Folder<'a> {
    config: Cow<'a, [u8]>,
    tokenizer: Cow<'a, [u8]>,
    tokenizer_config: Option<Cow<'a, [u8]>>,
    special_tokens_map: Option<Vec<u8>>,
    generation_config: Option<Cow<'a, [u8]>>,
    chat_template: Option<String>,
    /// [`embedding::POOLING_FILE`]
    pooling: Option<Vec<u8>>,
    /// [`embedding::MODULES_FILE`]
    modules: Option<Vec<u8>>,
    shards: Vec<(String, Bytes)>,
}

/// Opens a folder on disk.
pub(crate) fn open_folder(path: &Path) -> Result<Parts, ModelError> {
    let small = |name: &str| read_optional(path, name, CONFIG_BYTES_MAX);
    let Some(config) = small("config.json")? else {
        return Err(missing("config.json", "the shape of the model"));
    };
    understood::refuse_files(path)?;
    let tokenizer_config = small("tokenizer_config.json")?;
    let special_tokens_map = small("special_tokens_map.json")?;
    let tokenizer = match read_optional(path, "tokenizer.json", TOKENIZER_BYTES_MAX)? {
        Some(json) => json,
        None => tokenizer_model(path, tokenizer_config.as_deref(), special_tokens_map.as_deref())?,
    };
    let chat_template = small("chat_template.jinja")?.map(String::from_utf8).transpose();
    let chat_template = chat_template.map_err(|error| {
        let offset = error.utf8_error().valid_up_to() as u64;
        ModelError::malformed("chat_template.jinja", offset, Problem::NotUtf8)
    })?;
    let folder = Folder {
        config: config.into(),
        tokenizer: tokenizer.into(),
        tokenizer_config: tokenizer_config.map(Cow::from),
        special_tokens_map,
        generation_config: small("generation_config.json")?.map(Cow::from),
        chat_template,
        pooling: small(embedding::POOLING_FILE)?,
        modules: small(embedding::MODULES_FILE)?,
        shards: open_shards(path)?,
    };
    assemble(&folder_name(path), folder)
}

/// Opens a folder that is embedded in the program.
pub(crate) fn open_embedded(name: &str, files: EmbeddedFolder) -> Result<Parts, ModelError> {
    let folder = Folder {
        config: files.config.into(),
        tokenizer: files.tokenizer.into(),
        tokenizer_config: files.tokenizer_config.map(Cow::from),
        special_tokens_map: None,
        generation_config: files.generation_config.map(Cow::from),
        chat_template: None,
        pooling: None,
        modules: None,
        shards: vec![("model.safetensors".to_owned(), Bytes::Static(files.weights))],
    };
    assemble(name, folder)
}

/// Makes the `tokenizer.json` of a folder that only has SentencePiece's file.
fn tokenizer_model(
    path: &Path,
    config: Option<&[u8]>,
    special_tokens_map: Option<&[u8]>,
) -> Result<Vec<u8>, ModelError> {
    let Some(model) = read_optional(path, sentencepiece::FILE, TOKENIZER_BYTES_MAX)? else {
        let why = "it or tokenizer.model defines the vocabulary";
        return Err(missing("tokenizer.json", why));
    };
    let added_tokens = read_optional(path, "added_tokens.json", CONFIG_BYTES_MAX)?;
    let files =
        TokenizerFiles { config, special_tokens_map, added_tokens: added_tokens.as_deref() };
    sentencepiece_folder::to_json(&model, files)
}

fn missing(file: &str, why: &'static str) -> ModelError {
    ModelError::MissingFile { file: file.to_owned(), why }
}

fn folder_name(path: &Path) -> String {
    let absolute = fs::canonicalize(path);
    let path = absolute.as_deref().unwrap_or(path);
    path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Reads a whole file of bounded size; `None` if it does not exist.
fn read_optional(folder: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let path = folder.join(name);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ModelError::io(&path, error)),
    };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|error| ModelError::io(&path, error))?;
    if bytes.len() as u64 > limit {
        let problem = Problem::TooLarge { what: "file size", value: bytes.len() as u64, limit };
        return Err(ModelError::malformed(name, 0, problem));
    }
    check_content(&path, &bytes)?;
    Ok(Some(bytes))
}

/// Maps `model.safetensors`, or the shards that `model.safetensors.index.json` names.
fn open_shards(folder: &Path) -> Result<Vec<(String, Bytes)>, ModelError> {
    const SINGLE: &str = "model.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    if folder.join(SINGLE).exists() {
        return Ok(vec![(SINGLE.to_owned(), Bytes::map(&folder.join(SINGLE))?)]);
    }
    let Some(index) = read_optional(folder, INDEX, TOKENIZER_BYTES_MAX)? else {
        return Err(missing(SINGLE, "the weights"));
    };
    let names = shard_names(INDEX, &index)?;
    names
        .into_iter()
        .map(|name| {
            let bytes = Bytes::map(&folder.join(&name))?;
            Ok((name, bytes))
        })
        .collect()
}

/// Returns the distinct file names of a shard index, sorted.
///
/// # Errors
/// If the index is malformed, or a name is a path instead of a plain file name.
pub fn shard_names(file: &str, bytes: &[u8]) -> Result<Vec<String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let index: Index = serde_json::from_slice(bytes)
        .map_err(|source| ModelError::Json { file: file.to_owned(), source })?;
    let names: BTreeSet<String> = index.weight_map.into_values().collect();
    let plain = |name: &String| {
        !name.is_empty() && name != ".." && name != "." && !name.contains(['/', '\\', ':', '\0'])
    };
    if !names.iter().all(plain) {
        let problem = Problem::Other("a shard name is not a plain file name");
        return Err(ModelError::malformed(file, 0, problem));
    }
    if names.is_empty() || names.len() > SHARDS_MAX {
        let what = "shard count";
        let (value, limit) = (names.len() as u64, SHARDS_MAX as u64);
        return Err(ModelError::malformed(file, 0, Problem::TooLarge { what, value, limit }));
    }
    Ok(names.into_iter().collect())
}

fn assemble(name: &str, folder: Folder<'_>) -> Result<Parts, ModelError> {
    let parsed = config::parse(&folder.config)?;
    let is_hybrid = parsed.model.delta_net.is_some();
    let mut files = Vec::new();
    let mut entries = HashMap::new();
    let mut listing = Vec::new();
    let is_qwen3 = parsed.model.architecture == "qwen3";
    for (file, (shard, bytes)) in folder.shards.into_iter().enumerate() {
        for mut entry in safetensors::parse(&shard, &bytes)? {
            listing.push(TensorInfo {
                name: entry.name.clone(),
                type_name: entry.dtype.name().to_owned(),
                shape: entry.shape.clone(),
                size_bytes: entry.range.len() as u64,
            });
            let offset = entry.range.start as u64;
            // Models that read images, too, have the part for text under a name of its own.
            if is_hybrid && let Some(of_text) = entry.name.strip_prefix("model.language_model.") {
                entry.name = format!("model.{of_text}");
            } else if is_qwen3 {
                entry.name = embedding::tensor_name(entry.name);
            }
            if let Some((_, twice)) = entries.insert(entry.name.clone(), (file, entry)) {
                let problem = Problem::Duplicate(twice.name.clone());
                return Err(ModelError::bad_tensor(&twice.name, offset, problem));
            }
        }
        files.push(bytes);
    }
    let pooling = folder.pooling.as_deref();
    let HfConfig { mut model, storage } = embedding::settings(parsed, entries.keys(), pooling)?;
    let has_end_tokens = folder.generation_config.is_some();
    if let Some(bytes) = &folder.generation_config {
        model.eos_tokens.extend(config::parse_generation_eos(bytes, model.vocab_size)?);
    }
    let configs = (folder.tokenizer_config.as_deref(), folder.special_tokens_map.as_deref());
    let modules = folder.modules.as_deref();
    let (tokenizer, special) = read_tokenizer(&folder.tokenizer, configs, modules, &model)?;
    add_end_tokens(&mut model, (&tokenizer, &special), has_end_tokens);
    let chat_template = folder
        .chat_template
        .or(special.chat_template)
        .map(|source| ChatTemplate::new(source, special.special_tokens));

    if let Some(delta) = &mut model.delta_net {
        delta.dense_rates = tensors::has_dense_rates(&entries, &files);
    }
    let parts = SKIPPED_PARTS.iter().filter(|_| is_hybrid);
    let parts = parts.map(|(prefix, purpose)| ((*prefix).to_owned(), *purpose));
    let skipped = SkippedPart::among(parts, entries.keys().map(String::as_str));
    let tensors = tensors::find(entries, &files, &model, storage)?;
    Ok(Parts {
        name: name.to_owned(),
        container: "safetensors",
        config: model,
        files,
        tensors,
        listing,
        skipped,
        tokenizer,
        chat_template,
    })
}

/// Reads the tokenizer, and its configuration from two files.
fn read_tokenizer(
    json: &[u8],
    configs: (Option<&[u8]>, Option<&[u8]>),
    modules: Option<&[u8]>,
    model: &ModelConfig,
) -> Result<(Tokenizer, TokenizerConfig), ModelError> {
    let special = TokenizerConfig::parse(configs.0, configs.1)?;
    let mut tokenizer = Tokenizer::with_config(json, &special)?;
    if model.pooling.is_some() {
        embedding::refuse_modules(modules)?;
        if tokenizer.encode("", true)?.is_empty() {
            let json = embedding::with_end_token(json, &tokenizer, &special)?;
            tokenizer = Tokenizer::with_config(&json, &special)?;
        }
    }
    check_rows(&tokenizer, json, configs, (&special, model.vocab_size))?;
    Ok((tokenizer, special))
}

/// Adds the end tokens that the tokenizer's files name.
fn add_end_tokens(
    model: &mut ModelConfig,
    (tokenizer, special): (&Tokenizer, &TokenizerConfig),
    has_end_tokens: bool,
) {
    if matches!(&*model.architecture, "qwen3" | "qwen35" | "maple") && !has_end_tokens {
        // As GGUF files of the same model: their format has one key for these tokens.
        let named = END_TOKENS.iter().filter_map(|name| tokenizer.token_id(name));
        model.eos_tokens.extend(named.filter(|&id| tokenizer.is_special(id)));
    }
    // A conversation ends with the tokenizer's token, whatever the other files name.
    model.eos_tokens.extend(special.special_token("eos_token").and_then(|t| tokenizer.token_id(t)));
    model.eos_tokens.sort_unstable();
    model.eos_tokens.dedup();
}

/// Checks that the embedding has a row for every token. A special token that the vocabulary lacks gets the next free id, of which the
/// files say nothing: its error names what asks for it.
fn check_rows(
    tokenizer: &Tokenizer,
    json: &[u8],
    (config, map): (Option<&[u8]>, Option<&[u8]>),
    (special, vocab_size): (&TokenizerConfig, usize),
) -> Result<(), ModelError> {
    let Err(error) = tokenizer.check_vocab_size(vocab_size) else { return Ok(()) };
    let plain = Tokenizer::from_json(json).ok();
    let is_unknown = |text: &str| {
        let is_outside = tokenizer.token_id(text).is_some_and(|id| id as usize >= vocab_size);
        let has_id = special.added_tokens.values().any(|added| added.content == text);
        let is_in_file = plain.as_ref().is_none_or(|plain| plain.token_id(text).is_some());
        is_outside && !has_id && !is_in_file
    };
    let unknown = TokenizerConfig::unknown_token(config, map, &is_unknown);
    Err(unknown.unwrap_or(error).into())
}
