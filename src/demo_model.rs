//! The model that is part of the program: `src/demo_model`, under the name `demo`.

use tritmill_engine::files::{EmbeddedFolder, Model, ModelError};

/// Its name, wherever a model is asked for.
pub const NAME: &str = "demo";

/// Lines that the model was not trained on, as JSON lines of `text` and `date`.
pub const HELD_OUT_LINES: &str = include_str!("demo_model/eval.jsonl");

const FOLDER: EmbeddedFolder = EmbeddedFolder {
    config: include_bytes!("demo_model/model/config.json"),
    tokenizer: include_bytes!("demo_model/model/tokenizer.json"),
    tokenizer_config: Some(include_bytes!("demo_model/model/tokenizer_config.json")),
    generation_config: Some(include_bytes!("demo_model/model/generation_config.json")),
    weights: include_bytes!("demo_model/model/model.safetensors"),
};

/// Opens it.
pub fn open() -> Result<Model, ModelError> {
    Model::open_embedded(NAME, FOLDER)
}
