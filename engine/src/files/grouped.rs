//! Ternary matrices with a scale for each output and group of consecutive inputs (Ternary Bonsai, BitCPM).
//!
//! | type | block | bytes | layout |
//! | --- | --- | --- | --- |
//! | `Q2_0` | 64 | 18 | f16 scale; byte `b` holds weights `4 b .. 4 b + 4`, two bits each, lowest first; code = trit + 1 |
//! | `PQ2_0` | 128 | 34 | the same |
//! | `PTQ1_0` | 128 | 28 | base-3 digits, most significant first: weight `e < 80` is digit `e / 16` of byte `e % 16`, the next 40 are five digits of 8 bytes, the last 8 four digits of 2 bytes; then the f16 scale |
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
const GROUP_MAX: usize = 2 * GROUP_MIN;

/// A defect, and its byte.
type Defect = (usize, Problem);

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

/// Parts of a `PTQ1_0` block: first byte, bytes, digits of a byte.
const STAGES: [(usize, usize, usize); 3] = [(0, 16, 5), (16, 8, 5), (24, 2, 4)];

impl Block {
    fn scale(&self, block: &[u8]) -> f16 {
        f16::from_le_bytes([block[self.scale_at], block[self.scale_at + 1]])
    }

    fn codes<'a>(&self, block: &'a [u8]) -> &'a [u8] {
        let end = if self.scale_at == 0 { self.bytes } else { self.scale_at };
        &block[self.codes_at..end]
    }

    /// Decodes a block; returns its scale, or the first defect and its byte.
    fn decode(&self, block: &[u8], trits: &mut [i8]) -> Result<f16, Defect> {
        if let Some((byte, problem)) = (self.trits)(self.codes(block), trits) {
            return Err((self.codes_at + byte, problem));
        }
        let scale = self.scale(block);
        if !(scale.is_finite() && scale.to_f32() >= 0.0) {
            return Err((self.scale_at, Problem::BadGroupScale(scale.to_f32())));
        }
        if scale == f16::ZERO {
            trits.fill(0);
        }
        let is_zero = trits.iter().all(|&trit| trit == 0);
        Ok(if is_zero { f16::ZERO } else { scale })
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

/// `PTQ1_0` digits.
fn digits(codes: &[u8], trits: &mut [i8]) -> Option<Defect> {
    let (mut weight, mut bad) = (0, None);
    for (first, width, count) in STAGES {
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
    let mut trits = [0i8; GROUP_MAX];
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
        _ => None,
    };
    let size = block.map_or(GROUP_MIN, |block| block.weights);
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
    let groups = trits.chunks_exact_mut(block.weights).zip(scales);
    for (index, (bytes, (trits, scale))) in blocks.zip(groups).enumerate() {
        *scale = block
            .decode(bytes, trits)
            .map_err(|(byte, problem)| (index * block.bytes + byte, problem))?;
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
mod tests {
    use super::*;
    use crate::files::ternary::Packing;

    fn decoded(
        dtype: DenseType,
        cols: usize,
        bytes: &[u8],
    ) -> Result<(Vec<i8>, GroupScales), String> {
        let row_bytes = dtype.row_bytes(cols).expect("whole blocks");
        let rows = bytes.len() / row_bytes;
        let packing = Packing::Grouped(dtype);
        let stored = Stored { name: "w", rows, cols, packing, bytes, offset: 1000 };
        let matrix = stored.decode().map_err(|error| error.to_string())?;
        Ok((matrix.trits, matrix.groups.expect("it has groups")))
    }

    /// A `Q2_0` block of a scale and the same code everywhere.
    fn q2_0(scale: f32, code: u8) -> Vec<u8> {
        [&f16::from_f32(scale).to_le_bytes()[..], &[code * 0b0101_0101; 16]].concat()
    }

    #[test]
    fn pairs_of_equal_scales_merge_and_zeros_take_the_other_scale() {
        let scales = |blocks: &[Vec<u8>]| {
            decoded(DenseType::Q2_0, 128, &blocks.concat()).map(|(_, groups)| groups)
        };
        let half = f16::from_f32(0.5);
        let merged = |scales: Vec<f16>| Ok(GroupScales { size: 128, scales });
        assert_eq!(scales(&[q2_0(0.5, 2), q2_0(0.5, 0)]), merged(vec![half]));
        assert_eq!(scales(&[q2_0(0.25, 1), q2_0(0.5, 0)]), merged(vec![half]));
        assert_eq!(scales(&[q2_0(0.5, 2), q2_0(0.0, 2)]), merged(vec![half]));
        assert_eq!(scales(&[q2_0(-0.0, 0), q2_0(7.0, 1)]), merged(vec![f16::ZERO]));
        let mixed = [q2_0(0.5, 2), q2_0(0.5, 0), q2_0(0.5, 2), q2_0(0.25, 2)];
        let apart = GroupScales { size: 64, scales: vec![half, half, half, f16::from_f32(0.25)] };
        assert_eq!(scales(&mixed), Ok(apart));
    }

    #[test]
    fn a_scale_of_zero_leaves_no_trits() {
        let (trits, _) = decoded(DenseType::Q2_0, 64, &q2_0(0.0, 2)).expect("a good block");
        assert_eq!(trits, [0; 64]);
    }

    #[test]
    fn defects_have_their_offset() {
        let refused = |dtype, cols, bytes: &[u8]| decoded(dtype, cols, bytes).expect_err("bad");
        let mut bytes = [q2_0(0.5, 2), q2_0(0.5, 1)].concat();
        bytes[18 + 2 + 5] = 0b0011_0000;
        let error = refused(DenseType::Q2_0, 64, &bytes);
        assert_eq!(error, "tensor w at byte 1025: code 3 is not a ternary value");
        for scale in [f32::NAN, f32::INFINITY, -1.0] {
            let bytes = [q2_0(0.5, 2), q2_0(scale, 1)].concat();
            let error = refused(DenseType::Q2_0, 128, &bytes);
            assert!(error.starts_with("tensor w at byte 1018: scale"), "{error}");
        }
        let mut digits =
            [vec![byte_of(&[0; 5]); 24], vec![byte_of(&[0; 4]); 2], vec![0, 0x38]].concat();
        assert!(decoded(DenseType::Ptq1_0, 128, &digits).is_ok());
        digits[25] = byte_of(&[0, 0, 0, 0, 1]);
        let error = refused(DenseType::Ptq1_0, 128, &digits);
        assert!(error.starts_with("tensor w at byte 1025: byte"), "{error}");
    }

    #[test]
    fn dense_weights_are_refused_where_they_are_not_ternary() {
        let f16s = |weights: &[f32]| -> Vec<u8> {
            weights.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect()
        };
        let mut weights = [0.0; 128];
        (weights[0], weights[5], weights[70]) = (0.5, -0.5, -0.0);
        let (trits, groups) = decoded(DenseType::F16, 128, &f16s(&weights)).expect("ternary");
        assert_eq!((trits[0], trits[5], trits[70], groups.size), (1, -1, 0, 128));
        weights[70] = 0.25;
        let (_, groups) = decoded(DenseType::F16, 128, &f16s(&weights)).expect("groups of 64");
        assert_eq!(groups.size, 64);
        weights[6] = 0.25;
        let error = decoded(DenseType::F16, 128, &f16s(&weights)).expect_err("not ternary");
        assert!(error.starts_with("tensor w at byte 1012: weight 0.25 is neither"), "{error}");
        let wide = 0.1f32.to_le_bytes().repeat(64);
        let error = decoded(DenseType::F32, 64, &wide).expect_err("not an f16");
        assert!(error.contains("more digits than f16"), "{error}");
    }

    #[test]
    fn every_byte_of_digits_is_the_one_of_its_trits_or_refused() {
        let mut valid = 0;
        for (byte, digits) in DIGITS.iter().enumerate() {
            valid += usize::from(usize::from(byte_of(digits)) == byte);
        }
        assert_eq!(valid, 243);
    }
}
