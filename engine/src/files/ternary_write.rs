//! Encodes trits for model files: the inverse of [`super::ternary`] and [`super::gguf_ternary`].

use half::f16;
use rayon::prelude::*;

use super::gguf_ternary::{I2_S_BLOCK, I2_S_BYTES, I2_S_TAIL, TQ_BLOCK, TQ2_0_BYTES};

fn code(trit: i8) -> u8 {
    (trit + 1) as u8
}

/// Encodes a matrix in Hugging Face's planar packing; its row count is a multiple of 4.
pub(crate) fn encode_planar(trits: &[i8], rows: usize, cols: usize) -> Vec<u8> {
    let quarter = rows / 4;
    let mut bytes = vec![0; quarter * cols];
    bytes.par_chunks_mut(cols).enumerate().for_each(|(row, out)| {
        for plane in 0..4 {
            let source = &trits[(plane * quarter + row) * cols..][..cols];
            for (byte, &trit) in out.iter_mut().zip(source) {
                *byte |= code(trit) << (2 * plane);
            }
        }
    });
    bytes
}

/// `I2_S` in the x86 layout; `trits` is a whole number of blocks. The tail after the scale is zero.
pub(crate) fn encode_i2_s(trits: &[i8], scale: f32) -> Vec<u8> {
    let mut bytes = vec![0; trits.len() / 4 + I2_S_TAIL];
    let (codes, tail) = bytes.split_at_mut(trits.len() / 4);
    codes.par_chunks_exact_mut(I2_S_BYTES).zip(trits.par_chunks_exact(I2_S_BLOCK)).for_each(
        |(out, block)| {
            for (j, &trit) in block.iter().enumerate() {
                out[j % 32] |= code(trit) << (6 - 2 * (j / 32));
            }
        },
    );
    tail[..4].copy_from_slice(&scale.to_le_bytes());
    bytes
}

/// `TQ2_0`; `trits` is a whole number of blocks, all with the same scale.
pub(crate) fn encode_tq2_0(trits: &[i8], scale: f16) -> Vec<u8> {
    let mut bytes = vec![0; trits.len() / TQ_BLOCK * TQ2_0_BYTES];
    bytes.par_chunks_exact_mut(TQ2_0_BYTES).zip(trits.par_chunks_exact(TQ_BLOCK)).for_each(
        |(out, block)| {
            for (j, &trit) in block.iter().enumerate() {
                let (half, within) = (j / 128, j % 128);
                out[half * 32 + within % 32] |= code(trit) << (2 * (within / 32));
            }
            out[64..].copy_from_slice(&scale.to_le_bytes());
        },
    );
    bytes
}
