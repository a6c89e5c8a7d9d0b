//! The ternary tensor types of GGUF files: `I2_S` (bitnet.cpp), `TQ1_0` and `TQ2_0` (llama.cpp).
//!
//! - `I2_S`, x86 layout: all weights as one row-major stream, blocks of 128 weights in 32 bytes;
//!   weight `j` of a block is in byte `j mod 32` at bit `6 − 2·(j div 32)`; code = trit + 1. One
//!   f32 scale follows the codes, then 28 bytes of garbage that the encoder does not write.
//! - `TQ2_0`: blocks of 256 in 66 bytes: weight `h·128 + l·32 + m` in byte `h·32 + m` at bit `2l`,
//!   code = trit + 1; f16 scale at byte 64.
//! - `TQ1_0`: blocks of 256 in 54 bytes: five base-3 digits per byte (four in the last four bytes),
//!   most significant first, stored as `ceil(256·v / 243)`; f16 scale at byte 52.
//!
//! `I2_S` has a variant with the same type id: 64 weights in 16 bytes, written by ARM builds of
//! bitnet.cpp since November 2025. **Nothing in a file distinguishes the two**; the reader assumes
//! the x86 layout, which the published models use.
//!
//! Each `TQ` block has a scale. A ternary model has one scale per tensor, so all blocks must agree;
//! blocks of zeros may have the scale 0.

use half::f16;
use rayon::prelude::*;

use super::{
    error::{ModelError, Problem},
    ternary::Stored,
};

/// Weights of an `I2_S` block.
pub const I2_S_BLOCK: usize = 128;
/// Bytes of an `I2_S` block.
pub const I2_S_BYTES: usize = 32;
/// Bytes after the codes of an `I2_S` tensor: an f32 scale and garbage.
pub const I2_S_TAIL: usize = 32;
/// Weights of a `TQ1_0` or `TQ2_0` block.
pub const TQ_BLOCK: usize = 256;
/// Bytes of a `TQ1_0` block.
pub const TQ1_0_BYTES: usize = 54;
/// Bytes of a `TQ2_0` block.
pub const TQ2_0_BYTES: usize = 66;

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

/// Decodes a `TQ2_0` tensor; returns its scale.
pub(crate) fn decode_tq2_0(stored: &Stored<'_>, trits: &mut [i8]) -> Result<f32, ModelError> {
    let blocks = stored.bytes.as_chunks::<TQ2_0_BYTES>().0;
    let bad = trits.as_chunks_mut::<TQ_BLOCK>().0.par_iter_mut().zip(blocks).map(|(out, block)| {
        let mut seen = 0;
        for (group, values) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, shift) = (group / 4, 2 * (group % 4));
            for (trit, byte) in values.iter_mut().zip(&block[half * 32..][..32]) {
                let code = (byte >> shift) & 3;
                seen |= code & (code >> 1);
                *trit = code as i8 - 1;
            }
        }
        seen != 0
    });
    if bad.reduce(|| false, |a, b| a | b) {
        let is_bad =
            |block: &[u8; TQ2_0_BYTES]| block[..64].iter().position(|b| b & (b >> 1) & 0x55 != 0);
        let found = blocks.iter().enumerate().find_map(|(i, block)| Some((i, is_bad(block)?)));
        let byte = found.map_or(0, |(block, byte)| block * TQ2_0_BYTES + byte);
        return Err(stored.error(byte, Problem::BadCode { code: 3 }));
    }
    one_scale(stored, blocks, trits)
}

/// Decodes a `TQ1_0` tensor; returns its scale.
///
/// Digit `n` of byte `q` is `((q · 3ⁿ mod 256) · 3) >> 8`: the multiplication moves the digit to the
/// front of a base-3 fraction of 256, and the shift extracts it.
pub(crate) fn decode_tq1_0(stored: &Stored<'_>, trits: &mut [i8]) -> Result<f32, ModelError> {
    let blocks = stored.bytes.as_chunks::<TQ1_0_BYTES>().0;
    let digit = |byte: u8, power: u8| ((u16::from(byte.wrapping_mul(power)) * 3) >> 8) as i8 - 1;
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    trits.as_chunks_mut::<TQ_BLOCK>().0.par_iter_mut().zip(blocks).for_each(|(out, block)| {
        // Bytes 0..32 hold weights 0..160, 32..48 hold 160..240, 48..52 hold 240..256.
        for (bytes, first, digits) in [(0..32, 0, 5), (32..48, 160, 5), (48..52, 240, 4)] {
            let width = bytes.len();
            for (n, power) in POWERS.into_iter().take(digits).enumerate() {
                let values = &mut out[first + n * width..][..width];
                for (trit, &byte) in values.iter_mut().zip(&block[bytes.clone()]) {
                    *trit = digit(byte, power);
                }
            }
        }
    });
    one_scale(stored, blocks, trits)
}

/// Returns the scale that all blocks share; it is in the last two bytes of a block.
fn one_scale<const N: usize>(
    stored: &Stored<'_>,
    blocks: &[[u8; N]],
    trits: &[i8],
) -> Result<f32, ModelError> {
    let mut shared = None;
    for (i, (block, values)) in blocks.iter().zip(trits.as_chunks::<TQ_BLOCK>().0).enumerate() {
        let scale = f16::from_le_bytes([block[N - 2], block[N - 1]]).to_f32();
        if scale == 0.0 && values.iter().all(|&trit| trit == 0) {
            continue;
        }
        let offset = i * N + N - 2;
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
