//! Ternary matrices with a scale for each output and group of consecutive inputs (Ternary Bonsai, BitCPM).
//!
//! The weights are in blocks of [`super::blocks`], where a block of 256 is two groups with the same scale, or dense: f32, f16
//! or bf16 weights that are exactly −s, 0 or s in every group of 64.
//!
//! The decoded form does not depend on the file: a group of zeros has the scale 0, a group with the scale 0 has
//! no other trits, and groups of 64 become groups of 128 if the scales of all pairs in the matrix are equal (a group
//! of zeros takes the other's).

use half::f16;
use rayon::prelude::*;

use super::{
    blocks::{Block, Defect, GROUP_MAX, GROUP_MIN, PQ2_0, PTQ1_0, Q2_0, TQ1_0, TQ2_0},
    dense::{DenseType, widen},
    stored::Stored,
};
use crate::{
    files::error::{ModelError, Problem},
    formats::GroupScales,
};

/// Decodes a tensor's trits and returns its scales; `dtype` is one of the types of the module.
pub(crate) fn decode(
    stored: &Stored<'_>,
    dtype: DenseType,
    trits: &mut [i8],
) -> Result<GroupScales, ModelError> {
    let block = match dtype {
        DenseType::Q2_0 => Some(Q2_0),
        DenseType::Pq2_0 => Some(PQ2_0),
        DenseType::Ptq1_0 => Some(PTQ1_0),
        DenseType::Tq1_0 => Some(TQ1_0),
        DenseType::Tq2_0 => Some(TQ2_0),
        _ => None,
    };
    let size = block.map_or(GROUP_MIN, |block| block.group());
    let per_row = stored.cols / size;
    let mut scales = vec![f16::ZERO; stored.rows * per_row];
    let row_bytes = stored.bytes.len() / stored.rows;
    let rows = trits
        .par_chunks_mut(stored.cols)
        .zip(scales.par_chunks_mut(per_row))
        .zip(stored.bytes.par_chunks_exact(row_bytes))
        .enumerate();
    // Of several defects, the first in the file.
    let defect = rows.find_map_first(|(row, ((trits, scales), bytes))| {
        let decoded = match block {
            Some(block) => blocks_of_row(block, bytes, trits, scales),
            None => dense_row(dtype, bytes, trits, scales),
        };
        decoded.err().map(|(byte, problem)| (row * row_bytes + byte, problem))
    });
    if let Some((byte, problem)) = defect {
        return Err(stored.error(byte, problem));
    }
    Ok(merged(stored.cols, GroupScales { size, scales }))
}

fn blocks_of_row(
    block: Block,
    bytes: &[u8],
    trits: &mut [i8],
    scales: &mut [f16],
) -> Result<(), Defect> {
    let blocks = bytes.chunks_exact(block.bytes());
    let group = block.group();
    let groups = trits
        .chunks_exact_mut(block.weights())
        .zip(scales.chunks_exact_mut(block.weights() / group));
    for (index, (bytes, (trits, scales))) in blocks.zip(groups).enumerate() {
        let decoded = block.decode(bytes, trits);
        let of_block =
            decoded.map_err(|(byte, problem)| (index * block.bytes() + byte, problem))?;
        for (scale, trits) in scales.iter_mut().zip(trits.chunks_exact(group)) {
            let is_zero = trits.iter().all(|&trit| trit == 0);
            *scale = if is_zero { f16::ZERO } else { of_block };
        }
    }
    Ok(())
}

/// Finds trits and scales of dense weights, in groups of [`GROUP_MIN`].
fn dense_row(
    dtype: DenseType,
    bytes: &[u8],
    trits: &mut [i8],
    scales: &mut [f16],
) -> Result<(), Defect> {
    let (_, element_bytes) = dtype.block();
    let mut weights = [0f32; GROUP_MIN];
    let groups = bytes.chunks_exact(GROUP_MIN * element_bytes);
    let out = trits.chunks_exact_mut(GROUP_MIN).zip(scales);
    for (index, (bytes, (trits, group_scale))) in groups.zip(out).enumerate() {
        widen(dtype, bytes, &mut weights);
        let at = |weight: usize| (index * GROUP_MIN + weight) * element_bytes;
        if let Some(weight) = weights.iter().position(|weight| !weight.is_finite()) {
            return Err((at(weight), Problem::NotFinite));
        }
        let scale = weights.iter().fold(0f32, |largest, weight| largest.max(weight.abs()));
        let is_ternary = |weight: f32| weight == 0.0 || weight.abs() == scale;
        if let Some(index) = weights.iter().position(|&weight| !is_ternary(weight)) {
            let (weight, group) = (weights[index], GROUP_MIN);
            return Err((at(index), Problem::NotTernary { weight, scale, group }));
        }
        *group_scale = f16::from_f32(scale);
        if group_scale.to_f32() != scale {
            return Err((at(0), Problem::Other("the scale of a group has more digits than f16")));
        }
        for (trit, &weight) in trits.iter_mut().zip(&weights) {
            *trit = i8::from(weight > 0.0) - i8::from(weight < 0.0);
        }
    }
    Ok(())
}

/// Joins pairs of groups if all scales of the matrix allow it.
fn merged(cols: usize, groups: GroupScales) -> GroupScales {
    if groups.size == GROUP_MAX || !cols.is_multiple_of(GROUP_MAX) {
        return groups;
    }
    let pair = |&[a, b]: &[f16; 2]| match (a, b) {
        (a, b) if a == b || b == f16::ZERO => Some(a),
        (a, b) if a == f16::ZERO => Some(b),
        _ => None,
    };
    let pairs = groups.scales.as_chunks::<2>().0;
    match pairs.iter().map(pair).collect() {
        Some(scales) => GroupScales { size: GROUP_MAX, scales },
        None => groups,
    }
}

#[cfg(test)]
mod tests;
