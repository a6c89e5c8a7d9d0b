//! Hugging Face folders: `config.json`, `tokenizer.json` and safetensors, sharded or not.
//!
//! Every tensor of the files must have a role in the forward pass, and every role its tensor, in
//! the shape the configuration gives: a file is understood whole or refused by name.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    fs,
    io::Read,
    path::Path,
};

use serde::Deserialize;

use super::{
    dense::DenseType,
    error::{ModelError, Problem},
    hf_config::{self, HfConfig, WeightStorage},
    mmap::Bytes,
    model::{
        DenseTensor, EmbeddedFolder, Parts, Span, TensorInfo, Tensors, TernaryTensor, norm_len,
        norms,
    },
    safetensors::{self, Dtype, TensorEntry},
    ternary::Packing,
};
use crate::{
    chat::ChatTemplate,
    config::{Linear, ModelConfig, Norm},
    formats::Scale,
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// Largest `config.json`, `generation_config.json` or `tokenizer_config.json` accepted.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Largest `tokenizer.json` or shard index accepted.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Most shards accepted.
const SHARDS_MAX: usize = 4096;

/// The files of a folder, wherever they come from.
struct Folder<'a> {
    config: Cow<'a, [u8]>,
    tokenizer: Cow<'a, [u8]>,
    tokenizer_config: Option<Cow<'a, [u8]>>,
    generation_config: Option<Cow<'a, [u8]>>,
    chat_template: Option<String>,
    shards: Vec<(String, Bytes)>,
}

/// Opens a folder on disk.
pub(crate) fn open_folder(path: &Path) -> Result<Parts, ModelError> {
    let small = |name: &str| read_optional(path, name, CONFIG_BYTES_MAX);
    let Some(config) = small("config.json")? else {
        return Err(missing("config.json", "the shape of the model"));
    };
    let Some(tokenizer) = read_optional(path, "tokenizer.json", TOKENIZER_BYTES_MAX)? else {
        let why = if path.join("tokenizer.model").exists() {
            "SentencePiece vocabularies (tokenizer.model) are not supported"
        } else {
            "text becomes tokens by it"
        };
        return Err(missing("tokenizer.json", why));
    };
    let chat_template = match small("chat_template.jinja")? {
        None => None,
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to() as u64;
            ModelError::malformed("chat_template.jinja", offset, Problem::NotUtf8)
        })?),
    };
    let folder = Folder {
        config: config.into(),
        tokenizer: tokenizer.into(),
        tokenizer_config: small("tokenizer_config.json")?.map(Cow::from),
        generation_config: small("generation_config.json")?.map(Cow::from),
        chat_template,
        shards: open_shards(path)?,
    };
    assemble(&folder_name(path), folder)
}

/// Opens a folder that is part of the program.
pub(crate) fn open_embedded(name: &str, files: EmbeddedFolder) -> Result<Parts, ModelError> {
    let folder = Folder {
        config: files.config.into(),
        tokenizer: files.tokenizer.into(),
        tokenizer_config: files.tokenizer_config.map(Cow::from),
        generation_config: files.generation_config.map(Cow::from),
        chat_template: None,
        shards: vec![("model.safetensors".to_owned(), Bytes::Static(files.weights))],
    };
    assemble(name, folder)
}

fn missing(file: &str, why: &'static str) -> ModelError {
    ModelError::MissingFile { file: file.to_owned(), why }
}

fn folder_name(path: &Path) -> String {
    let absolute = fs::canonicalize(path);
    let path = absolute.as_deref().unwrap_or(path);
    path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Reads a whole file of bounded size; `None` if there is no such file.
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

/// The distinct file names of a shard index, sorted. A name may not leave the folder.
///
/// # Errors
/// [`ModelError::Json`] or [`ModelError::Malformed`].
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
    let HfConfig { mut model, storage } = hf_config::parse(&folder.config)?;
    if let Some(bytes) = &folder.generation_config {
        model.eos_tokens.extend(hf_config::parse_generation_eos(bytes, model.vocab_size)?);
    }
    model.eos_tokens.sort_unstable();
    model.eos_tokens.dedup();

    let special = match &folder.tokenizer_config {
        Some(bytes) => TokenizerConfig::parse(bytes)?,
        None => TokenizerConfig::default(),
    };
    let tokenizer = Tokenizer::from_json(&folder.tokenizer)?;
    tokenizer.check_vocab_size(model.vocab_size)?;
    let chat_template = folder
        .chat_template
        .or(special.chat_template)
        .map(|source| ChatTemplate::parse(source, special.bos_token, special.eos_token))
        .transpose()?;

    let mut files = Vec::new();
    let mut entries = HashMap::new();
    let mut listing = Vec::new();
    for (file, (shard, bytes)) in folder.shards.into_iter().enumerate() {
        for entry in safetensors::parse(&shard, &bytes)? {
            listing.push(TensorInfo {
                name: entry.name.clone(),
                type_name: entry.dtype.name().to_owned(),
                shape: entry.shape.clone(),
                size_bytes: entry.range.len() as u64,
            });
            let offset = entry.range.start as u64;
            if let Some((_, twice)) = entries.insert(entry.name.clone(), (file, entry)) {
                let problem = Problem::Duplicate(twice.name.clone());
                return Err(ModelError::bad_tensor(&twice.name, offset, problem));
            }
        }
        files.push(bytes);
    }
    let mut finder = Finder { entries, files: &files };
    let tensors = finder.tensors(&model, storage)?;
    finder.refuse_leftovers(&model)?;
    Ok(Parts {
        name: name.to_owned(),
        container: "safetensors",
        config: model,
        files,
        tensors,
        listing,
        tokenizer,
        chat_template,
    })
}

/// Takes tensors out of the files' listing, one role at a time.
struct Finder<'a> {
    entries: HashMap<String, (usize, TensorEntry)>,
    files: &'a [Bytes],
}

impl Finder<'_> {
    fn tensors(
        &mut self,
        config: &ModelConfig,
        storage: WeightStorage,
    ) -> Result<Tensors, ModelError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = self.dense("model.embed_tokens.weight".to_owned(), &[vocab, hidden])?;
        let head = if config.tied_head {
            None
        } else {
            Some(self.dense("lm_head.weight".to_owned(), &[vocab, hidden])?)
        };
        // Not reserved ahead: a false layer count must fail at its first missing tensor.
        let mut linears = Vec::new();
        for layer in 0..config.layer_count {
            let mut of_layer = Vec::with_capacity(Linear::ALL.len());
            for linear in Linear::ALL {
                let (rows, cols) = config.linear_shape(linear);
                of_layer.push(self.linear(linear_name(layer, linear), rows, cols, storage)?);
            }
            linears.push(of_layer);
        }
        let mut by_role = HashMap::new();
        for norm in norms(config) {
            by_role.insert(norm, self.dense(norm_name(norm), &[norm_len(config, norm)])?);
        }
        Ok(Tensors { linears, norms: by_role, embedding, head })
    }

    fn take(&mut self, name: &str) -> Result<(usize, TensorEntry), ModelError> {
        self.entries
            .remove(name)
            .ok_or_else(|| ModelError::MissingTensor { tensor: name.to_owned() })
    }

    fn dense(&mut self, name: String, shape: &[usize]) -> Result<DenseTensor, ModelError> {
        let (file, entry) = self.take(&name)?;
        let dtype = dense_type(&entry, "F32, F16 or BF16")?;
        check_shape(&entry, shape)?;
        let span = Span { file, range: entry.range };
        let (rows, cols) = match *shape {
            [rows, cols] => (rows, cols),
            _ => (1, shape[0]),
        };
        Ok(DenseTensor { name, span, rows, cols, dtype })
    }

    fn linear(
        &mut self,
        name: String,
        rows: usize,
        cols: usize,
        storage: WeightStorage,
    ) -> Result<TernaryTensor, ModelError> {
        let (file, entry) = self.take(&name)?;
        let packing = if storage == WeightStorage::Online {
            check_shape(&entry, &[rows, cols])?;
            Packing::Online(dense_type(&entry, "F32, F16 or BF16")?)
        } else {
            if entry.dtype != Dtype::U8 {
                return Err(wrong_type(&entry, "U8 (packed ternary)"));
            }
            if !rows.is_multiple_of(4) {
                let problem =
                    Problem::NotAMultiple { what: "row count", value: rows as u64, of: 4 };
                return Err(ModelError::bad_tensor(&name, entry.range.start as u64, problem));
            }
            check_shape(&entry, &[rows / 4, cols])?;
            let scale = self.scale(format!("{name}_scale"))?;
            Packing::Planar(match storage {
                WeightStorage::PackedDivide => Scale::Divide(scale),
                _ => Scale::Multiply(scale),
            })
        };
        let span = Span { file, range: entry.range };
        Ok(TernaryTensor { name, span, rows, cols, packing, permuted_heads: None })
    }

    /// A `weight_scale` tensor: one element, whatever the number of dimensions.
    fn scale(&mut self, name: String) -> Result<f32, ModelError> {
        let (file, entry) = self.take(&name)?;
        let dtype = dense_type(&entry, "F32, F16 or BF16")?;
        if entry.shape.iter().any(|&dim| dim != 1) {
            return Err(shape_error(&entry, &[1]));
        }
        let mut scale = [0f32];
        super::dense::widen(dtype, &self.files[file][entry.range.clone()], &mut scale);
        if !(scale[0].is_finite() && scale[0] > 0.0) {
            let problem = Problem::BadScale(scale[0]);
            return Err(ModelError::bad_tensor(&name, entry.range.start as u64, problem));
        }
        Ok(scale[0])
    }

    /// Anything nobody asked for may change the mathematics.
    fn refuse_leftovers(self, config: &ModelConfig) -> Result<(), ModelError> {
        let ignored = |name: &str| {
            // A tied model never uses its head; frequencies follow from theta.
            (config.tied_head && name == "lm_head.weight") || name.ends_with("rotary_emb.inv_freq")
        };
        let mut left: Vec<String> =
            self.entries.into_keys().filter(|name| !ignored(name)).collect();
        left.sort_unstable();
        match left.into_iter().next() {
            Some(tensor) => Err(ModelError::UnexpectedTensor { tensor }),
            None => Ok(()),
        }
    }
}

fn dense_type(entry: &TensorEntry, expected: &'static str) -> Result<DenseType, ModelError> {
    match entry.dtype {
        Dtype::F32 => Ok(DenseType::F32),
        Dtype::F16 => Ok(DenseType::F16),
        Dtype::Bf16 => Ok(DenseType::Bf16),
        _ => Err(wrong_type(entry, expected)),
    }
}

fn wrong_type(entry: &TensorEntry, expected: &'static str) -> ModelError {
    let found = super::error::shorten(entry.dtype.name());
    ModelError::TensorType { tensor: entry.name.clone(), found, expected }
}

fn check_shape(entry: &TensorEntry, shape: &[usize]) -> Result<(), ModelError> {
    if entry.shape.iter().copied().eq(shape.iter().map(|&dim| dim as u64)) {
        return Ok(());
    }
    Err(shape_error(entry, shape))
}

fn shape_error(entry: &TensorEntry, shape: &[usize]) -> ModelError {
    let found = entry.shape.iter().copied().take(8).collect();
    let expected = shape.iter().map(|&dim| dim as u64).collect();
    ModelError::TensorShape { tensor: entry.name.clone(), found, expected }
}

/// Module path of a linear inside its layer.
fn linear_module(linear: Linear) -> &'static str {
    match linear {
        Linear::Q => "self_attn.q_proj",
        Linear::K => "self_attn.k_proj",
        Linear::V => "self_attn.v_proj",
        Linear::O => "self_attn.o_proj",
        Linear::Gate => "mlp.gate_proj",
        Linear::Up => "mlp.up_proj",
        Linear::Down => "mlp.down_proj",
    }
}

/// The folder's name of a linear's weights.
pub(crate) fn linear_name(layer: usize, linear: Linear) -> String {
    format!("model.layers.{layer}.{}.weight", linear_module(linear))
}

/// The folder's name of a norm's weights.
pub(crate) fn norm_name(norm: Norm) -> String {
    match norm {
        Norm::Attention(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        Norm::AttentionSub(layer) => format!("model.layers.{layer}.self_attn.attn_sub_norm.weight"),
        Norm::FeedForward(layer) => {
            format!("model.layers.{layer}.post_attention_layernorm.weight")
        }
        Norm::FeedForwardSub(layer) => format!("model.layers.{layer}.mlp.ffn_sub_norm.weight"),
        Norm::Linear(layer, linear) => {
            format!("model.layers.{layer}.{}.rms_norm.weight", linear_module(linear))
        }
        Norm::Final => "model.norm.weight".to_owned(),
    }
}
