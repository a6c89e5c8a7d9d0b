//! The ternary tensor types of GGUF files: `I2_S` (bitnet.cpp), `TQ1_0` and `TQ2_0` (llama.cpp).
//!
//! - `I2_S`, x86 layout: all weights as one row-major stream, blocks of 128 weights in 32 bytes;
//!   weight `j` of a block is in byte `j mod 32` at bit `6 − 2·(j div 32)`; code = trit + 1. One
//!   f32 scale follows the codes, then 28 bytes of garbage that the encoder does not write.
//! - `TQ1_0` and `TQ2_0`: see [`super::blocks`].
//!
//! `I2_S` has a variant with the same type id: 64 weights in 16 bytes, written by ARM builds of
//! bitnet.cpp since November 2025. **Nothing in a file distinguishes the two**; the reader assumes
//! the x86 layout, which the published models use.
//!
//! Each `TQ` block has a scale. A ternary model has one scale per tensor, so all blocks must agree;
//! blocks of zeros may have the scale 0.

use rayon::prelude::*;

use super::{
    blocks::{Block, TQ_BLOCK},
    stored::Stored,
};
use crate::files::error::{ModelError, Problem};

/// Weights of an `I2_S` block.
pub const I2_S_BLOCK: usize = 128;
/// Bytes of an `I2_S` block.
pub const I2_S_BYTES: usize = 32;
/// Bytes after the codes of an `I2_S` tensor: an f32 scale and garbage.
pub const I2_S_TAIL: usize = 32;
/// Decodes the codes of an `I2_S` tensor (`bytes` may include the tail).
pub(crate) fn decode_i2_s(stored: &Stored<'_>, trits: &mut [i8]) -> Result<(), ModelError> {
    let blocks = stored.bytes.as_chunks::<I2_S_BYTES>().0;
    let bad =
        trits.as_chunks_mut::<I2_S_BLOCK>().0.par_iter_mut().zip(blocks).map(|(out, block)| {
            let mut seen = 0;
            for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                for (trit, byte) in values.iter_mut().zip(block) {
                    let code = (byte >> (6 - 2 * group)) & 3;
                    seen |= code & (code >> 1);
                    *trit = code as i8 - 1;
                }
            }
            seen != 0
        });
    if bad.reduce(|| false, |a, b| a | b) {
        return Err(stored.first_code_three());
    }
    Ok(())
}

/// Decodes a tensor of `TQ1_0` or `TQ2_0` blocks; returns its scale.
pub(crate) fn decode_tq(
    stored: &Stored<'_>,
    block: Block,
    trits: &mut [i8],
) -> Result<f32, ModelError> {
    let size = block.bytes();
    let blocks = trits.par_chunks_exact_mut(TQ_BLOCK).zip(stored.bytes.par_chunks_exact(size));
    // Of several defects, the first in the file.
    let defect = blocks.enumerate().find_map_first(|(i, (trits, bytes))| {
        block.decode_codes(bytes, trits).map(|(byte, problem)| (i * size + byte, problem))
    });
    match defect {
        Some((byte, problem)) => Err(stored.error(byte, problem)),
        None => one_scale(stored, block, trits),
    }
}

/// Returns the scale that all blocks share.
fn one_scale(stored: &Stored<'_>, block: Block, trits: &[i8]) -> Result<f32, ModelError> {
    let blocks = stored.bytes.chunks_exact(block.bytes());
    let mut shared = None;
    for (i, (bytes, values)) in blocks.zip(trits.as_chunks::<TQ_BLOCK>().0).enumerate() {
        let scale = block.scale(bytes).to_f32();
        if scale == 0.0 && values.iter().all(|&trit| trit == 0) {
            continue;
        }
        let offset = i * block.bytes() + block.scale_at();
        if !(scale.is_finite() && scale > 0.0) {
            return Err(stored.error(offset, Problem::BadScale(scale)));
        }
        match shared {
            None => shared = Some(scale),
            Some(first) if first != scale => {
                return Err(stored.error(offset, Problem::MixedScales(first, scale)));
            }
            Some(_) => {}
        }
    }
    // A tensor of zeros gives zero with any scale.
    Ok(shared.unwrap_or(1.0))
}
