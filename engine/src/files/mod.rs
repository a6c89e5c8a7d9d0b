//! Model files: Hugging Face folders and GGUF, read, written and described.
//!
//! A reader turns a file into roles (which tensor is the query projection of layer 3, how it is
//! packed, where its bytes are) and a [`crate::config::ModelConfig`]; [`Model`] is all that the
//! rest of the engine sees, whatever the container. Files are not trusted: every count, length,
//! offset and shape is checked against the bytes that are really there before it is used, and
//! whatever would change the mathematics without being understood is refused by its name.

mod dense;
mod error;
mod fingerprint;
pub mod gguf;
mod gguf_config;
mod gguf_model;
mod gguf_ternary;
mod gguf_tokenizer;
mod hf;
pub mod hf_config;
mod mmap;
mod model;
mod quants;
pub mod safetensors;
mod ternary;

pub(crate) use error::shorten;
pub use {
    dense::{Dense, DenseType},
    error::{ModelError, Problem},
    fingerprint::Fingerprint,
    hf::shard_names,
    model::{EmbeddedFolder, Model, TensorInfo},
};
