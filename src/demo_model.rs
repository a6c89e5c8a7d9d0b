//! The built-in model `demo`, from `demo_model/`.

use tritmill_engine::files::{EmbeddedFolder, Model, ModelError};

/// Name of the built-in model.
pub const NAME: &str = "demo";

/// Lines that are not in the training data, as JSON lines of `text` and `date`.
pub const HELD_OUT_LINES: &str = include_str!("demo_model/eval.jsonl");

const FOLDER: EmbeddedFolder = EmbeddedFolder {
    config: include_bytes!("demo_model/model/config.json"),
    tokenizer: include_bytes!("demo_model/model/tokenizer.json"),
    tokenizer_config: Some(include_bytes!("demo_model/model/tokenizer_config.json")),
    generation_config: Some(include_bytes!("demo_model/model/generation_config.json")),
    weights: include_bytes!("demo_model/model/model.safetensors"),
};

/// Opens the built-in model.
pub fn open() -> Result<Model, ModelError> {
    Model::open_embedded(NAME, FOLDER)
}
