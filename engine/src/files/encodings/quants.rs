//! Block quantizations of ggml that models use for dense matrices: `Q8_0`, `Q6_K` and `Q4_K`.
//!
//! Formulas and layouts: ggml `ggml-quants.c`, `dequantize_row_q8_0`, `dequantize_row_q6_K` and `dequantize_row_q4_K`;
//! products have the same order, so results are equal bit for bit.

use half::f16;

/// Elements of a `Q8_0` block.
pub const Q8_0_BLOCK: usize = 32;
/// Bytes of a `Q8_0` block: f16 scale, 32 × i8.
pub const Q8_0_BYTES: usize = 34;
/// Elements of a `Q6_K` super-block.
pub const Q6K_BLOCK: usize = 256;
/// Bytes of a `Q6_K` super-block: 128 low nibbles, 64 high pairs, 16 × i8 scales, f16 scale.
pub const Q6K_BYTES: usize = 210;

/// Elements of a `Q4_K` super-block.
pub const Q4K_BLOCK: usize = 256;
/// Bytes of a `Q4_K` super-block: f16 scales of the scales and of the minima, 16 × 6 bits of these, 128 nibbles.
pub const Q4K_BYTES: usize = 144;

fn f16_at(bytes: &[u8], offset: usize) -> f32 {
    f16::from_le_bytes([bytes[offset], bytes[offset + 1]]).to_f32()
}

/// `x = d · q`.
pub fn dequantize_q8_0(bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.as_chunks::<Q8_0_BYTES>().0;
    for (block, values) in blocks.iter().zip(out.as_chunks_mut::<Q8_0_BLOCK>().0) {
        let d = f16_at(block, 0);
        for (value, &q) in values.iter_mut().zip(&block[2..]) {
            *value = f32::from(q as i8) * d;
        }
    }
}

/// `x = d · scale · (q − 32)`, `q` of 6 bits: low 4 from `ql`, high 2 from `qh`, in two halves of
/// 128 elements; scales cover 16 elements each.
pub fn dequantize_q6_k(bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.as_chunks::<Q6K_BYTES>().0;
    for (block, values) in blocks.iter().zip(out.as_chunks_mut::<Q6K_BLOCK>().0) {
        let d = f16_at(block, 208);
        for half in 0..2 {
            let ql = &block[half * 64..][..64];
            let qh = &block[128 + half * 32..][..32];
            let scales = &block[192 + half * 8..][..8];
            let values = &mut values[half * 128..][..128];
            for l in 0..32 {
                let codes = [
                    (ql[l] & 15) | ((qh[l] & 3) << 4),
                    (ql[l + 32] & 15) | (((qh[l] >> 2) & 3) << 4),
                    (ql[l] >> 4) | (((qh[l] >> 4) & 3) << 4),
                    (ql[l + 32] >> 4) | ((qh[l] >> 6) << 4),
                ];
                for (quarter, code) in codes.into_iter().enumerate() {
                    let scale = f32::from(scales[quarter * 2 + l / 16] as i8);
                    values[quarter * 32 + l] = d * scale * (f32::from(code) - 32.0);
                }
            }
        }
    }
}

/// `x = d · scale · q − d_min · min`, `q` of 4 bits; scale and min, of 6 bits, cover 32 elements each. A byte holds the nibbles
/// of two elements 32 apart.
pub fn dequantize_q4_k(bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.as_chunks::<Q4K_BYTES>().0;
    for (block, values) in blocks.iter().zip(out.as_chunks_mut::<Q4K_BLOCK>().0) {
        let (d, d_min) = (f16_at(block, 0), f16_at(block, 2));
        let (packed, nibbles) = (&block[4..16], &block[16..]);
        for (part, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (scale, min) = match part {
                0..4 => (packed[part] & 63, packed[part + 4] & 63),
                _ => (
                    (packed[part + 4] & 15) | ((packed[part - 4] >> 6) << 4),
                    (packed[part + 4] >> 4) | ((packed[part] >> 6) << 4),
                ),
            };
            let (scale, min) = (d * f32::from(scale), d_min * f32::from(min));
            for (value, &byte) in values.iter_mut().zip(&nibbles[part / 2 * 32..]) {
                let q = if part % 2 == 0 { byte & 15 } else { byte >> 4 };
                *value = scale * f32::from(q) - min;
            }
        }
    }
}
