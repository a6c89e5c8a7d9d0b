//! Opens a `.gguf` file: its configuration, tokenizer and tensors.

use std::path::Path;

use super::{
    architecture::Architecture,
    config, container,
    names::{EMBEDDING, HEAD},
    rope, rotation,
    tensors::Finder,
    tokenizer,
};
use crate::files::{error::ModelError, mmap::Bytes, parts::Parts};

/// Opens a file on disk.
pub(crate) fn open(path: &Path) -> Result<Parts, ModelError> {
    let name = path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy());
    from_bytes(&name, Bytes::map(path)?)
}

/// Opens a mapped file or one in memory.
pub(crate) fn from_bytes(name: &str, bytes: Bytes) -> Result<Parts, ModelError> {
    let file = format!("{name}.gguf");
    let gguf = container::parse(&file, &bytes)?;
    let named @ (architecture, _) = Architecture::read(&gguf)?;
    let dims = |name: &str| gguf.tensors.iter().find(|t| t.name == name).map(|t| &t.dims);
    let vocab_size = match dims(EMBEDDING).map(Vec::as_slice) {
        Some(&[_, rows]) => rows,
        Some(_) | None => {
            return Err(ModelError::MissingTensor { tensor: EMBEDDING.to_owned() });
        }
    };
    let mut config = config::parse(&file, &gguf, named, vocab_size, dims(HEAD).is_some())?;
    let tokens = tokenizer::read(&file, &gguf, &config)?;
    tokens.tokenizer.check_vocab_size(config.vocab_size)?;
    config.eos_tokens = tokens.eos_tokens;
    if config.pooling.is_some() && config.eos_tokens.is_empty() {
        return Err(ModelError::MissingKey { key: "tokenizer.ggml.eos_token_id".to_owned() });
    }

    let drafts = config::draft_blocks(&gguf, named)?;
    let mut finder = Finder::new(&gguf, &bytes, architecture);
    if architecture == Architecture::Llama {
        config.group_scales = finder.has_group_scales();
    }
    if let Some(delta) = &mut config.delta_net {
        delta.dense_rates = finder.has_dense_rates();
    }
    if architecture == Architecture::Qwen35 {
        config.rotation = rotation::read(&file, &gguf, (&config, &drafts))?;
    }
    config.linear_biases = finder.linear_biases();
    rope::read_divisors(&gguf, &mut finder, &mut config, architecture)?;
    let tensors = finder.tensors(&config, architecture)?;
    let skipped = finder.skip_blocks(drafts);
    let listing = finder.finish(&gguf, architecture)?;
    Ok(Parts {
        name: name.to_owned(),
        container: "gguf",
        config,
        tensors,
        listing,
        skipped,
        tokenizer: tokens.tokenizer,
        chat_template: tokens.chat_template,
        files: vec![bytes],
    })
}
