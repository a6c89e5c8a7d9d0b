//! Reads, writes and describes model files: Hugging Face folders and GGUF.
//!
//! A reader turns a file into a [`crate::config::ModelConfig`] and a tensor for each role (the query
//! projection of layer 3, say) with its packing and location. The rest of the engine sees a
//! [`Model`], which is the same for all containers. Files are not trusted: every count, length,
//! offset and shape is checked against the bytes of the file before use, and an unknown feature that
//! may change the computation is an error that names it.

mod convert;
mod convert_folder;
mod convert_gguf;
mod dense;
mod error;
mod fingerprint;
#[doc(hidden)]
pub mod gguf;
mod gguf_config;
mod gguf_metadata;
mod gguf_model;
mod gguf_names;
mod gguf_pieces;
mod gguf_pieces_write;
mod gguf_rope;
mod gguf_ternary;
mod gguf_tokenizer;
mod gguf_write;
mod grouped;
mod hf;
#[doc(hidden)]
pub mod hf_config;
mod hf_rope;
mod hf_tensors;
mod hf_write;
mod inspect;
mod json_keys;
mod mmap;
mod model;
mod partial;
mod pieces;
mod protobuf;
mod quants;
mod roles;
#[doc(hidden)]
pub mod safetensors;
mod sentencepiece;
mod sentencepiece_folder;
mod synth;
mod synth_groups;
mod ternary;
mod ternary_write;
mod tokenizer_json;

pub(crate) use error::shorten;
#[doc(hidden)]
pub use hf::shard_names;
pub(crate) use mmap::FileState;
pub use {
    convert::{Report, Target, convert},
    dense::{Dense, DenseType},
    error::{ModelError, Problem},
    fingerprint::Fingerprint,
    inspect::{Inspection, inspect},
    model::{EmbeddedFolder, Model, TensorInfo},
    synth::{VOCAB_MIN, shape, shape_names, synth},
};
