//! How tensors are stored in model files: dense, quantized in blocks, or ternary with one scale or a scale for each group.

pub(crate) mod blocks;
pub(crate) mod dense;
pub(crate) mod encode;
pub(crate) mod gguf_ternary;
mod grouped;
mod quants;
pub(crate) mod stored;
mod ternary;
