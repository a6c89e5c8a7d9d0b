//! Encodes trits for model files: the inverse of [`super::ternary`].

use half::f16;
use rayon::prelude::*;

use super::{
    blocks::{TQ_BLOCK, TQ2_0_BYTES, write_digits},
    dense::DenseType,
    gguf_ternary::{I2_S_BLOCK, I2_S_BYTES, I2_S_TAIL},
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
            write_tq2_0(out, block);
            out[64..].copy_from_slice(&scale.to_le_bytes());
        },
    );
    bytes
}

/// Writes the codes of a block; `out` is zero.
fn write_tq2_0(out: &mut [u8], block: &[i8]) {
    for (j, &trit) in block.iter().enumerate() {
        let (half, within) = (j / 128, j % 128);
        out[half * 32 + within % 32] |= code(trit) << (2 * (within / 32));
    }
}

/// Encodes a matrix with scales of groups in blocks of a type of [`super::blocks`]; `None` if a block would have two
/// scales, or a row is not a whole number of blocks.
pub(crate) fn encode_groups(matrix: &TernaryMatrix, dtype: DenseType) -> Option<Vec<u8>> {
    let groups = matrix.groups.as_ref()?;
    let (weights, block_bytes) = dtype.block();
    if !matrix.cols.is_multiple_of(weights) {
        return None;
    }
    let scales = block_scales(groups, weights)?;
    let mut bytes = vec![0; matrix.trits.len() / weights * block_bytes];
    let blocks =
        bytes.par_chunks_exact_mut(block_bytes).zip(matrix.trits.par_chunks_exact(weights));
    blocks.zip(scales).for_each(|((out, trits), scale)| {
        let scale = scale.to_le_bytes();
        match dtype {
            DenseType::Tq2_0 => write_tq2_0(out, trits),
            DenseType::Ptq1_0 => write_digits(trits, out),
            _ => {
                out[..2].copy_from_slice(&scale);
                for (byte, four) in out[2..].iter_mut().zip(trits.as_chunks::<4>().0) {
                    *byte = four.iter().rev().fold(0, |byte, &trit| byte << 2 | code(trit));
                }
                return;
            }
        }
        out[block_bytes - 2..].copy_from_slice(&scale);
    });
    Some(bytes)
}

/// Returns the scale of each block of `weights` inputs; `None` if a block has several. Groups of zeros have no scale.
fn block_scales(groups: &GroupScales, weights: usize) -> Option<Vec<f16>> {
    let GroupScales { size, scales } = groups;
    if weights <= *size {
        let blocks = scales.len() * size / weights;
        return Some((0..blocks).map(|block| scales[block * weights / size]).collect());
    }
    let common = |scales: &[f16]| {
        let mut some = scales.iter().copied().filter(|&scale| scale != f16::ZERO);
        let Some(first) = some.next() else { return Some(f16::ZERO) };
        some.all(|scale| scale == first).then_some(first)
    };
    scales.chunks_exact(weights / size).map(common).collect()
}
