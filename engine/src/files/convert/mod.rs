//! Converts models between containers without changing what they compute.
//!
//! Trits, norms, biases, factors, divisors of RoPE frequencies, embedding, tokenizer and chat template stay exactly the
//! same, and so do scales of groups. One scale per matrix stays, too, with two exceptions that the [`Report`] counts: GGUF
//! readers only multiply, so a scale to divide by (`bitlinear` folders) becomes its f32 reciprocal; and `TQ2_0` holds
//! scales as f16, so other scales are rounded. Both change results in the last digits and therefore the fingerprint. What
//! the target format cannot hold is an error that names it, before anything is written.

mod folder;
mod gguf;
pub(crate) mod gguf_metadata;
mod gguf_pieces;
pub(crate) mod target;

use std::path::Path;

use super::{error::ModelError, model::Model};
pub use target::{Report, Target};

/// Writes `model` to `out`: a file for the GGUF targets, else a folder.
///
/// # Errors
/// [`ModelError::Unconvertible`] names the tensor that the target cannot hold. Errors while reading
/// the model or writing the file are returned as they are.
pub fn convert(model: &Model, to: Target, out: &Path) -> Result<Report, ModelError> {
    model.check_tables()?;
    match to {
        Target::Folder => folder::write(model, out),
        Target::GgufI2S
        | Target::GgufTq2_0
        | Target::GgufQ2_0
        | Target::GgufPq2_0
        | Target::GgufPtq1_0 => gguf::write(model, to, out),
    }
}
