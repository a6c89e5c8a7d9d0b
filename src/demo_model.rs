//! The model that is part of the program: `models/dates`, under the name `demo`.

use tritmill_engine::files::{EmbeddedFolder, Model, ModelError};

/// Its name, wherever a model is asked for.
pub const NAME: &str = "demo";

/// Lines that the model was not trained on, as JSON lines of `text` and `date`.
pub const HELD_OUT_LINES: &str = include_str!("../models/dates/eval.jsonl");

const FOLDER: EmbeddedFolder = EmbeddedFolder {
    config: include_bytes!("../models/dates/model/config.json"),
    tokenizer: include_bytes!("../models/dates/model/tokenizer.json"),
    tokenizer_config: Some(include_bytes!("../models/dates/model/tokenizer_config.json")),
    generation_config: Some(include_bytes!("../models/dates/model/generation_config.json")),
    weights: include_bytes!("../models/dates/model/model.safetensors"),
};

/// Opens it.
pub fn open() -> Result<Model, ModelError> {
    Model::open_embedded(NAME, FOLDER)
}
