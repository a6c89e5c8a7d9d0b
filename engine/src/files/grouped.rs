//! Ternary matrices with a scale for each output and group of consecutive inputs (Ternary Bonsai, BitCPM).
//!
//! | type | block | bytes | layout |
//! | --- | --- | --- | --- |
//! | `Q2_0` | 64 | 18 | f16 scale; byte `b` holds weights `4 b .. 4 b + 4`, two bits each, lowest first; code = trit + 1 |
//! | `PQ2_0` | 128 | 34 | the same |
//! | `PTQ1_0` | 128 | 28 | base-3 digits, most significant first: weight `e < 80` is digit `e / 16` of byte `e % 16`, the next 40 are five digits of 8 bytes, the last 8 four digits of 2 bytes; then the f16 scale |
//! | `TQ2_0`, `TQ1_0` | 256 | 66, 54 | see [`super::gguf_ternary`]: two groups with the same scale |
//! | dense | 64 or 128 | | f32, f16 or bf16 weights that are exactly −s, 0 or s in every group |
//!
//! The decoded form does not depend on the file: a group of zeros has the scale 0, a group with the scale 0 has
//! no other trits, and groups of 64 become groups of 128 if the scales of all pairs in the matrix are equal (a group
//! of zeros takes the other's).

use half::f16;
use rayon::prelude::*;

use super::{
    dense::{DenseType, widen},
    error::{ModelError, Problem},
    gguf_ternary::{TQ_BLOCK, TQ1_0_BYTES, TQ2_0_BYTES},
    ternary::Stored,
};
use crate::formats::GroupScales;

/// Weights of a `Q2_0` block.
pub const Q2_0_BLOCK: usize = 64;
/// Bytes of a `Q2_0` block.
pub const Q2_0_BYTES: usize = 18;
/// Weights of a `PQ2_0` block.
pub const PQ2_0_BLOCK: usize = 128;
/// Bytes of a `PQ2_0` block.
pub const PQ2_0_BYTES: usize = 34;
/// Weights of a `PTQ1_0` block.
pub const PTQ1_0_BLOCK: usize = 128;
/// Bytes of a `PTQ1_0` block.
pub const PTQ1_0_BYTES: usize = 28;

/// The smallest group, and the unit of dense weights.
pub const GROUP_MIN: usize = 64;
/// The group that pairs of [`GROUP_MIN`] become.
pub const GROUP_MAX: usize = 2 * GROUP_MIN;
/// The most weights of a block.
const BLOCK_MAX: usize = TQ_BLOCK;

/// A defect, and its byte.
pub(crate) type Defect = (usize, Problem);

/// A block type.
#[derive(Clone, Copy)]
pub struct Block {
    weights: usize,
    bytes: usize,
    scale_at: usize,
    /// Writes the trits of a block's codes; returns the first defect and its byte in the codes.
    trits: fn(&[u8], &mut [i8]) -> Option<Defect>,
    codes_at: usize,
}

/// See the module.
pub const Q2_0: Block =
    Block { weights: Q2_0_BLOCK, bytes: Q2_0_BYTES, scale_at: 0, trits: two_bits, codes_at: 2 };
/// See the module.
pub const PQ2_0: Block =
    Block { weights: PQ2_0_BLOCK, bytes: PQ2_0_BYTES, scale_at: 0, trits: two_bits, codes_at: 2 };
/// See the module.
pub const PTQ1_0: Block =
    Block { weights: PTQ1_0_BLOCK, bytes: PTQ1_0_BYTES, scale_at: 26, trits: digits, codes_at: 0 };
/// See the module.
pub const TQ1_0: Block =
    Block { weights: TQ_BLOCK, bytes: TQ1_0_BYTES, scale_at: 52, trits: tq1_0_digits, codes_at: 0 };
/// See the module.
pub const TQ2_0: Block =
    Block { weights: TQ_BLOCK, bytes: TQ2_0_BYTES, scale_at: 64, trits: tq2_0_codes, codes_at: 0 };

/// Parts of a block of digits: first byte, bytes, digits of a byte.
type Stages = [(usize, usize, usize); 3];
const STAGES: Stages = [(0, 16, 5), (16, 8, 5), (24, 2, 4)];
const TQ1_0_STAGES: Stages = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];

impl Block {
    /// Returns the number of bytes of a block.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first byte of the scale.
    pub(crate) fn scale_at(&self) -> usize {
        self.scale_at
    }

    pub(crate) fn scale(&self, block: &[u8]) -> f16 {
        f16::from_le_bytes([block[self.scale_at], block[self.scale_at + 1]])
    }

    fn codes<'a>(&self, block: &'a [u8]) -> &'a [u8] {
        let end = if self.scale_at == 0 { self.bytes } else { self.scale_at };
        &block[self.codes_at..end]
    }

    /// Returns the number of weights of a group.
    fn group(&self) -> usize {
        self.weights.min(GROUP_MAX)
    }

    /// Writes the trits of a block's codes; returns the first defect and its byte.
    pub(crate) fn decode_codes(&self, block: &[u8], trits: &mut [i8]) -> Option<Defect> {
        let (byte, problem) = (self.trits)(self.codes(block), trits)?;
        Some((self.codes_at + byte, problem))
    }

    /// Decodes a block; returns its scale, or the first defect and its byte.
    fn decode(&self, block: &[u8], trits: &mut [i8]) -> Result<f16, Defect> {
        if let Some(defect) = self.decode_codes(block, trits) {
            return Err(defect);
        }
        let scale = self.scale(block);
        if !(scale.is_finite() && scale.to_f32() >= 0.0) {
            return Err((self.scale_at, Problem::BadGroupScale(scale.to_f32())));
        }
        if scale == f16::ZERO {
            trits.fill(0);
        }
        Ok(scale)
    }
}

/// 2-bit codes, four a byte, lowest first.
fn two_bits(codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    let mut bad = 0;
    for (trits, &byte) in trits.as_chunks_mut::<4>().0.iter_mut().zip(codes) {
        bad |= byte & (byte >> 1) & 0x55;
        for (i, trit) in trits.iter_mut().enumerate() {
            *trit = ((byte >> (2 * i)) & 3) as i8 - 1;
        }
    }
    if bad == 0 {
        return None;
    }
    let byte = codes.iter().position(|byte| byte & (byte >> 1) & 0x55 != 0)?;
    Some((byte, Problem::BadCode { code: 3 }))
}

/// Digits of every byte, as trits, most significant first. A byte `q` is `ceil(256 · v / 243)` of the number `v` with
/// these five digits.
const DIGITS: [[i8; 5]; 256] = {
    let mut table = [[0; 5]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut rest = byte as u8;
        let mut digit = 0;
        while digit < 5 {
            table[byte][digit] = ((rest as u16 * 3) >> 8) as i8 - 1;
            rest = rest.wrapping_mul(3);
            digit += 1;
        }
        byte += 1;
    }
    table
};

/// Returns the byte of some digits, at most five; missing ones are 0.
const fn byte_of(trits: &[i8]) -> u8 {
    let (mut value, mut digit) = (0u16, 0);
    while digit < 5 {
        value = 3 * value + if digit < trits.len() { (trits[digit] + 1) as u16 } else { 0 };
        digit += 1;
    }
    (value * 256).div_ceil(243) as u8
}

/// `TQ2_0` codes: four a byte, lowest first, of weights 32 apart.
fn tq2_0_codes(codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    for (half, trits) in codes.as_chunks::<32>().0.iter().zip(trits.chunks_exact_mut(128)) {
        for (l, trits) in trits.chunks_exact_mut(32).enumerate() {
            for (trit, byte) in trits.iter_mut().zip(half) {
                *trit = ((byte >> (2 * l)) & 3) as i8 - 1;
            }
        }
    }
    let byte = codes.iter().position(|byte| byte & (byte >> 1) & 0x55 != 0)?;
    Some((byte, Problem::BadCode { code: 3 }))
}

/// `PTQ1_0` digits.
fn digits(codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    digits_of(STAGES, codes, trits)
}

/// `TQ1_0` digits.
fn tq1_0_digits(codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    digits_of(TQ1_0_STAGES, codes, trits)
}

fn digits_of(stages: Stages, codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    let (mut weight, mut bad) = (0, None);
    for (first, width, count) in stages {
        for (i, &byte) in codes[first..first + width].iter().enumerate() {
            let digits = &DIGITS[usize::from(byte)][..count];
            if byte_of(digits) != byte && bad.is_none() {
                bad = Some((first + i, Problem::BadDigits { byte }));
            }
            for (n, &trit) in digits.iter().enumerate() {
                trits[weight + n * width + i] = trit;
            }
        }
        weight += width * count;
    }
    bad
}

/// Writes the bytes of `PTQ1_0` digits: the inverse of [`digits`].
pub(crate) fn write_digits(trits: &[i8], codes: &mut [u8]) {
    let mut weight = 0;
    for (first, width, count) in STAGES {
        for i in 0..width {
            let mut of_byte = [0i8; 5];
            for (n, trit) in of_byte[..count].iter_mut().enumerate() {
                *trit = trits[weight + n * width + i];
            }
            codes[first + i] = byte_of(&of_byte[..count]);
        }
        weight += width * count;
    }
}

/// Decodes whole blocks to f32. Codes that stand for no trit give some value: [`decode`] refuses them at load.
pub fn dequantize(block: Block, bytes: &[u8], out: &mut [f32]) {
    let mut trits = [0i8; BLOCK_MAX];
    for (bytes, out) in bytes.chunks_exact(block.bytes).zip(out.chunks_exact_mut(block.weights)) {
        let trits = &mut trits[..block.weights];
        (block.trits)(block.codes(bytes), trits);
        let scale = block.scale(bytes).to_f32();
        for (value, &trit) in out.iter_mut().zip(&*trits) {
            *value = f32::from(trit) * scale;
        }
    }
}

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
    let blocks = bytes.chunks_exact(block.bytes);
    let group = block.group();
    let groups =
        trits.chunks_exact_mut(block.weights).zip(scales.chunks_exact_mut(block.weights / group));
    for (index, (bytes, (trits, scales))) in blocks.zip(groups).enumerate() {
        let decoded = block.decode(bytes, trits);
        let of_block = decoded.map_err(|(byte, problem)| (index * block.bytes + byte, problem))?;
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
