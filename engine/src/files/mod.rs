//! Model files: Hugging Face folders and GGUF, read, written and described.
//!
//! A reader turns a file into roles (which tensor is the query projection of layer 3, how it is
//! packed, where its bytes are) and a [`crate::config::ModelConfig`]; [`Model`] is all that the
//! rest of the engine sees, whatever the container. Files are not trusted: every count, length,
//! offset and shape is checked against the bytes that are really there before it is used, and
//! whatever would change the mathematics without being understood is refused by its name.

mod convert;
mod convert_folder;
mod convert_gguf;
mod dense;
mod error;
mod fingerprint;
pub mod gguf;
mod gguf_config;
mod gguf_model;
mod gguf_ternary;
mod gguf_tokenizer;
mod gguf_write;
mod hf;
pub mod hf_config;
mod hf_tensors;
mod hf_write;
mod inspect;
mod mmap;
mod model;
mod partial;
mod quants;
pub mod safetensors;
mod synth;
mod ternary;
mod ternary_write;
mod tokenizer_json;

pub(crate) use error::shorten;
pub use {
    convert::{Report, Target, convert},
    dense::{Dense, DenseType},
    error::{ModelError, Problem},
    fingerprint::Fingerprint,
    hf::shard_names,
    inspect::{Inspection, inspect},
    model::{EmbeddedFolder, Model, TensorInfo},
    synth::{VOCAB_MIN, shape, shape_names, synth},
};
