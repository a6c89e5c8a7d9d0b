//! Hugging Face folders: their JSON files, and safetensors.

#[doc(hidden)]
pub mod config;
mod embedding;
mod family;
pub(crate) mod folder;
mod hybrid;
mod json_keys;
mod maple;
pub(crate) mod names;
pub(crate) mod python_json;
pub(crate) mod rope;
#[doc(hidden)]
pub mod safetensors;
mod tensors;
mod understood;
pub(crate) mod write;
