//! Blocks of ternary weights: codes or base-3 digits, and an f16 scale.
//!
//! | type | block | bytes | layout |
//! | --- | --- | --- | --- |
//! | `Q2_0` | 64 | 18 | f16 scale; byte `b` holds weights `4 b .. 4 b + 4`, two bits each, lowest first; code = trit + 1 |
//! | `PQ2_0` | 128 | 34 | the same |
//! | `PTQ1_0` | 128 | 28 | base-3 digits, most significant first: weight `e < 80` is digit `e / 16` of byte `e % 16`, the next 40 are five digits of 8 bytes, the last 8 four digits of 2 bytes; then the f16 scale |
//! | `TQ2_0` | 256 | 66 | weight `h·128 + l·32 + m` in byte `h·32 + m` at bit `2l`; code = trit + 1; f16 scale at byte 64 |
//! | `TQ1_0` | 256 | 54 | five base-3 digits per byte (four in the last four bytes), most significant first, stored as `ceil(256·v / 243)`; f16 scale at byte 52 |

use half::f16;

use crate::files::error::Problem;

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

/// Weights of a `TQ1_0` or `TQ2_0` block.
pub const TQ_BLOCK: usize = 256;
/// Bytes of a `TQ1_0` block.
pub const TQ1_0_BYTES: usize = 54;
/// Bytes of a `TQ2_0` block.
pub const TQ2_0_BYTES: usize = 66;

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
    /// Returns the number of weights of a block.
    pub(crate) fn weights(&self) -> usize {
        self.weights
    }

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
    pub(crate) fn group(&self) -> usize {
        self.weights.min(GROUP_MAX)
    }

    /// Writes the trits of a block's codes; returns the first defect and its byte.
    pub(crate) fn decode_codes(&self, block: &[u8], trits: &mut [i8]) -> Option<Defect> {
        let (byte, problem) = (self.trits)(self.codes(block), trits)?;
        Some((self.codes_at + byte, problem))
    }

    /// Decodes a block; returns its scale, or the first defect and its byte.
    pub(crate) fn decode(&self, block: &[u8], trits: &mut [i8]) -> Result<f16, Defect> {
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
pub(super) const DIGITS: [[i8; 5]; 256] = {
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
pub(super) const fn byte_of(trits: &[i8]) -> u8 {
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

/// Decodes whole blocks to f32. Codes that stand for no trit give some value: decoding a tensor refuses them at load.
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
