//! Reads, writes and describes model files: Hugging Face folders and GGUF.
//!
//! A reader turns a file into a [`crate::config::ModelConfig`] and a tensor for each role (the query
//! projection of layer 3, say) with its packing and location. The rest of the engine sees a
//! [`Model`], which is the same for all containers. Files are not trusted: every count, length,
//! offset and shape is checked against the bytes of the file before use, and an unknown feature that
//! may change the computation is an error that names it.

mod convert;
mod encodings;
mod error;
mod fingerprint;
#[doc(hidden)]
pub mod gguf;
#[doc(hidden)]
pub mod hugging_face;
mod inspect;
mod limits;
mod mmap;
mod model;
mod needs;
mod open;
mod partial;
mod parts;
pub(crate) mod roles;
mod synth;
mod tokenizer;
mod value_heads;

pub(crate) use error::shorten;
#[doc(hidden)]
pub use hugging_face::folder::shard_names;
pub(crate) use hugging_face::python_json::without_literals;
pub(crate) use mmap::FileState;
pub use {
    convert::{Report, Target, convert},
    encodings::dense::{Dense, DenseType},
    error::{ModelError, Problem},
    fingerprint::Fingerprint,
    hugging_face::folder::EmbeddedFolder,
    inspect::{Inspection, inspect},
    model::Model,
    parts::{SkippedPart, TensorInfo},
    synth::{VOCAB_MIN, shape, shape_names, synth},
};
