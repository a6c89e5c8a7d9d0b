//! Writes Hugging Face folders: the JSON files and one safetensors file, streamed.

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
pub(crate) fn write_folder(
    folder: &Path,
    config: &ModelConfig,
    storage: WeightStorage,
    texts: &FolderTexts<'_>,
    tensors: &[TensorPlan],
    mut data: impl FnMut(usize, &mut dyn Write) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    fs::create_dir_all(folder).map_err(|error| ModelError::io(folder, error))?;
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|error| ModelError::io(&path, error))
    };
    let partial = Partial::create(&folder.join("model.safetensors"))?;
    let mut out = BufWriter::with_capacity(1 << 20, partial.file());
    out.write_all(&header(tensors)).map_err(|error| partial.error(error))?;
    for index in 0..tensors.len() {
        data(index, &mut out)?;
    }
    out.flush().map_err(|error| partial.error(error))?;
    drop(out);

    let pretty = |value: &Value| format!("{value:#}\n").into_bytes();
    write("config.json", &pretty(&config_json(config, storage)))?;
    let eos = json!({ "bos_token_id": config.bos_token, "eos_token_id": config.eos_tokens });
    write("generation_config.json", &pretty(&eos))?;
    write("tokenizer.json", texts.tokenizer)?;
    let mut tokenizer_config = Map::new();
    tokenizer_config.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
    let special = texts.special_tokens.iter().map(|(name, text)| (name.as_str(), text.as_str()));
    let template = texts.chat_template.map(|text| ("chat_template", text));
    for (key, text) in special.chain(template) {
        tokenizer_config.insert(key.to_owned(), json!(text));
    }
    write("tokenizer_config.json", &pretty(&Value::Object(tokenizer_config)))?;
    partial.finish()
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
