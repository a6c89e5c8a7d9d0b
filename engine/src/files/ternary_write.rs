//! Encodes trits for model files: the inverse of [`super::ternary`], [`super::gguf_ternary`] and [`super::grouped`].

use half::f16;
use rayon::prelude::*;

use super::{
    dense::DenseType,
    gguf_ternary::{I2_S_BLOCK, I2_S_BYTES, I2_S_TAIL, TQ_BLOCK, TQ2_0_BYTES},
    grouped,
};
use crate::formats::{GroupScales, TernaryMatrix};

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

/// Encodes a matrix with scales of groups in blocks of a type of [`super::grouped`]; `None` if a block would have two
/// scales, or a row is not a whole number of blocks.
pub(crate) fn encode_groups(matrix: &TernaryMatrix, dtype: DenseType) -> Option<Vec<u8>> {
    let GroupScales { size, scales } = matrix.groups.as_ref()?;
    let (weights, block_bytes) = dtype.block();
    if weights > *size || !matrix.cols.is_multiple_of(weights) {
        return None;
    }
    let mut bytes = vec![0; matrix.trits.len() / weights * block_bytes];
    let blocks =
        bytes.par_chunks_exact_mut(block_bytes).zip(matrix.trits.par_chunks_exact(weights));
    blocks.enumerate().for_each(|(index, (out, trits))| {
        let scale = scales[index * weights / size].to_le_bytes();
        if dtype == DenseType::Ptq1_0 {
            grouped::write_digits(trits, out);
            out[block_bytes - 2..].copy_from_slice(&scale);
            return;
        }
        out[..2].copy_from_slice(&scale);
        for (byte, four) in out[2..].iter_mut().zip(trits.as_chunks::<4>().0) {
            *byte = four.iter().rev().fold(0, |byte, &trit| byte << 2 | code(trit));
        }
    });
    Some(bytes)
}
