//! Writes Hugging Face folders: the JSON files and one safetensors file, streamed.
//!
//! Readers need `config.json`. It is taken away before the first file of an older model is replaced, and comes last: what a crash leaves is
//! the older model, or none.

use std::{
    fs,
    io::{self, BufWriter, Write},
    path::Path,
};

use serde_json::{Map, Value, json};

use super::{config::WeightStorage, rope, safetensors::Dtype};
use crate::{
    chat::SpecialTokens,
    config::ModelConfig,
    files::{error::ModelError, partial::Partial},
};

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const WEIGHTS: &str = "model.safetensors";
/// All files of a written folder.
const FILES: [&str; 5] = [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS];
/// What the engine keeps beside the weights: it knows for which file each part of it is.
const KEPT: &str = ".tritmill";

/// A tensor to write.
#[derive(Debug, Clone)]
pub(crate) struct TensorPlan {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
}

impl TensorPlan {
    pub fn size_bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size_bytes().unwrap_or(0)
    }
}

/// The text files of a folder.
pub(crate) struct FolderTexts<'a> {
    pub tokenizer: &'a [u8],
    pub special_tokens: SpecialTokens,
    pub chat_template: Option<&'a str>,
}

/// Writes a folder; `data` writes the bytes of tensor `i` of the plan. The weights get their name once
/// they are complete.
///
/// # Errors
/// [`ModelError::OtherFile`] if the folder has a file that this does not write, before anything is written.
pub(crate) fn write_folder(
    folder: &Path,
    config: &ModelConfig,
    storage: WeightStorage,
    texts: &FolderTexts<'_>,
    tensors: &[TensorPlan],
    mut data: impl FnMut(usize, &mut dyn Write) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    fs::create_dir_all(folder).map_err(at(folder))?;
    refuse_other_files(folder)?;
    let write = |name: &str, bytes: &[u8]| {
        let partial = Partial::create(&folder.join(name))?;
        partial.file().write_all(bytes).map_err(|error| partial.error(error))?;
        partial.finish()
    };
    let partial = Partial::create(&folder.join(WEIGHTS))?;
    let mut out = BufWriter::with_capacity(1 << 20, partial.file());
    out.write_all(&header(tensors)).map_err(|error| partial.error(error))?;
    for index in 0..tensors.len() {
        data(index, &mut out)?;
    }
    out.flush().map_err(|error| partial.error(error))?;
    drop(out);

    remove_config(folder)?;
    partial.finish()?;
    sync(folder);
    let pretty = |value: &Value| format!("{value:#}\n").into_bytes();
    let eos = json!({ "bos_token_id": config.bos_token, "eos_token_id": config.eos_tokens });
    write(GENERATION_CONFIG, &pretty(&eos))?;
    write(TOKENIZER, texts.tokenizer)?;
    let mut tokenizer_config = Map::new();
    tokenizer_config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    let special = texts.special_tokens.iter().map(|(name, text)| (name.as_str(), text.as_str()));
    let template = texts.chat_template.map(|text| ("chat_template", text));
    for (key, text) in special.chain(template) {
        tokenizer_config.insert(key.to_owned(), json!(text));
    }
    write(TOKENIZER_CONFIG, &pretty(&Value::Object(tokenizer_config)))?;
    sync(folder);
    write(CONFIG, &pretty(&config_json(config, storage)))?;
    sync(folder);
    Ok(())
}

/// Refuses a folder with files that are not written: readers prefer some of them, such as another chat template, and the folder would
/// be another model.
fn refuse_other_files(folder: &Path) -> Result<(), ModelError> {
    let mut others = Vec::new();
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        let name = entry.map_err(at(folder))?.file_name();
        // What a crash left of weights is replaced.
        let is_leftover = Path::new(&name).extension().is_some_and(|kind| kind == "partial");
        if !is_leftover && name != KEPT && !FILES.iter().any(|file| name == *file) {
            others.push(name.to_string_lossy().into_owned());
        }
    }
    match others.into_iter().min() {
        Some(file) => Err(ModelError::OtherFile { folder: folder.to_owned(), file }),
        None => Ok(()),
    }
}

/// Takes `config.json` of an older model away.
fn remove_config(folder: &Path) -> Result<(), ModelError> {
    let path = folder.join(CONFIG);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ModelError::io(&path, error)),
        _ => {
            sync(folder);
            Ok(())
        }
    }
}

/// Makes the names of a folder last in the order of their changes, as far as its file system can.
fn sync(folder: &Path) {
    let _ = fs::File::open(folder).and_then(|folder| folder.sync_all());
}

/// Returns the safetensors header, padded with spaces to align the data to 8 bytes.
fn header(tensors: &[TensorPlan]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + tensor.size_bytes();
        let entry = json!({
            "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [offset, end],
        });
        map.insert(tensor.name.clone(), entry);
        offset = end;
    }
    let mut json = Value::Object(map).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    header
}

fn config_json(config: &ModelConfig, storage: WeightStorage) -> Value {
    let (family, model_type) = if config.sub_norms {
        ("BitNetForCausalLM", "bitnet")
    } else {
        ("LlamaForCausalLM", "llama")
    };
    let (linear_class, mode) = match storage {
        WeightStorage::PackedMultiply => ("autobitlinear", "offline"),
        WeightStorage::PackedDivide => ("bitlinear", "offline"),
        WeightStorage::Online
        | WeightStorage::OneBitLlm
        | WeightStorage::Grouped
        | WeightStorage::Embedding => ("autobitlinear", "online"),
    };
    let mut quantization = json!({
        "quant_method": "bitnet", "linear_class": linear_class, "quantization_mode": mode,
    });
    if let Some(eps) = config.linear_norm_eps {
        quantization["use_rms_norm"] = json!(true);
        quantization["rms_norm_eps"] = json!(eps);
    }
    let mut json = json!({
        "architectures": [family],
        "model_type": model_type,
        "hidden_act": config.activation.name(),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layer_count,
        "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": false,
        "bos_token_id": config.bos_token,
        "eos_token_id": config.eos_tokens,
        "quantization_config": quantization,
        "torch_dtype": "bfloat16",
    });
    if let Some(scaling) = rope::to_json(&config.rope_scaling).filter(|json| !json.is_null()) {
        json["rope_scaling"] = scaling;
    }
    json
}

/// Adds a path to an [`io::Error`].
pub(crate) fn at(path: &Path) -> impl Fn(io::Error) -> ModelError {
    move |error| ModelError::io(path, error)
}
