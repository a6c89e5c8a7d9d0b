//! GGUF files: the container, and a model in it.

pub(crate) mod architecture;
pub(crate) mod config;
pub(crate) mod container;
pub(crate) mod file;
mod keys;
mod maple;
pub(crate) mod names;
mod pieces;
mod rope;
pub(crate) mod rotation;
mod tensors;
pub(crate) mod tokenizer;
mod understood;
pub(crate) mod vocabulary;
pub(crate) mod write;

pub use container::{Array, Gguf, TensorEntry, Value, parse};
