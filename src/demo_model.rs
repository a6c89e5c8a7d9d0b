//! The built-in model `demo`, from `models/demo`.

use tritmill_engine::files::{EmbeddedFolder, Model, ModelError};

/// Name of the built-in model.
pub const NAME: &str = "demo";

/// Lines that are not in the training data, as JSON lines of `text` and `date`.
pub const HELD_OUT_LINES: &str = include_str!("../models/demo/eval.jsonl");

const FOLDER: EmbeddedFolder = EmbeddedFolder {
    config: include_bytes!("../models/demo/model/config.json"),
    tokenizer: include_bytes!("../models/demo/model/tokenizer.json"),
    tokenizer_config: Some(include_bytes!("../models/demo/model/tokenizer_config.json")),
    generation_config: Some(include_bytes!("../models/demo/model/generation_config.json")),
    weights: include_bytes!("../models/demo/model/model.safetensors"),
};

/// Opens the built-in model.
pub fn open() -> Result<Model, ModelError> {
    Model::open_embedded(NAME, FOLDER)
}
