//! Opens a model, whatever its container.

use std::path::Path;

use super::{
    error::ModelError,
    gguf::file,
    hugging_face::folder::{self, EmbeddedFolder},
    mmap::Bytes,
    model::Model,
    parts::SkippedPart,
};

impl Model {
    /// Opens a Hugging Face folder (or a `.safetensors` file in one) or a `.gguf` file.
    ///
    /// # Errors
    /// Names the file, key or tensor that is missing, malformed or not supported.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let parts = if path.is_dir() {
            folder::open_folder(path)?
        } else {
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("gguf") => file::open(path)?,
                Some("safetensors") => {
                    folder::open_folder(path.parent().unwrap_or(Path::new(".")))?
                }
                _ => {
                    std::fs::metadata(path).map_err(|source| ModelError::io(path, source))?;
                    return Err(ModelError::NotAModel { path: path.to_owned() });
                }
            }
        };
        for SkippedPart { tensors, count, purpose } in &parts.skipped {
            tracing::info!(model = parts.name, tensors, count, purpose, "a part is not read");
        }
        Ok(Self::new(parts))
    }

    /// Opens a model that is embedded in the program.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_embedded(name: &str, files: EmbeddedFolder) -> Result<Self, ModelError> {
        Ok(Self::new(folder::open_embedded(name, files)?))
    }

    /// Opens a `.gguf` file in memory.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn open_gguf_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, ModelError> {
        Ok(Self::new(file::from_bytes(name, Bytes::Owned(bytes))?))
    }
}
