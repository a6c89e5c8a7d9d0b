//! The high six bits of int8 rows: enough to rule out most rows, and a quarter less to read.
//!
//! An element is represented by the middle of the four values that share its high six bits:
//! [`rounded`]. In a block of [`BLOCK`] elements, the high bits of element `64 s + i` are stored as
//! follows:
//!
//! ```text
//! bits 4..8   are in byte i of line s / 2, from bit 4 (s % 2) on
//! bits 2..4   are in byte i of line 2, from bit 2 s on
//! ```

/// Elements of a block.
pub const BLOCK: usize = 256;
/// Bytes of a block: three cache lines.
pub(super) const BLOCK_BYTES: usize = 3 * LINE;
const LINE: usize = 64;
/// The bits in a block's first two lines.
pub(super) const TOP: u8 = 0xf0;
/// All bits that are kept.
pub(super) const KEPT: u8 = TOP | 0x0c;
/// The value that stands for the other bits.
pub(super) const MIDDLE: u8 = 2;

/// Returns the packed size in bytes of `elements` elements, whole blocks.
pub const fn size(elements: usize) -> usize {
    elements / BLOCK * BLOCK_BYTES
}

/// Returns the value that represents an element after packing: −126..=126 for −128..=127.
pub fn rounded(element: i8) -> i8 {
    (element as u8 & KEPT | MIDDLE) as i8
}

/// Packs elements, whole blocks.
pub fn pack(elements: &[i8], out: &mut [u8]) {
    for (elements, out) in elements.chunks_exact(BLOCK).zip(out.chunks_exact_mut(BLOCK_BYTES)) {
        out.fill(0);
        for (s, elements) in elements.chunks_exact(LINE).enumerate() {
            for (i, &element) in elements.iter().enumerate() {
                let byte = element as u8;
                out[s / 2 * LINE + i] |= byte >> 4 << (4 * (s % 2));
                out[2 * LINE + i] |= (byte >> 2 & 3) << (2 * s);
            }
        }
    }
}

/// Element `index` of a packed row, as [`rounded`].
pub(super) fn element(row: &[u8], index: usize) -> i8 {
    let (block, s, i) = (index / BLOCK, index % BLOCK / LINE, index % LINE);
    let line = |line: usize| row[block * BLOCK_BYTES + line * LINE + i];
    let (top, rest) = (line(s / 2) >> (4 * (s % 2)) << 4, (line(2) >> (2 * s) & 3) << 2);
    (top | rest | MIDDLE) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_elements_read_as_rounded() {
        let elements: Vec<i8> =
            (0..5 * BLOCK).map(|i| (i.wrapping_mul(i).wrapping_mul(40_503) >> 7) as i8).collect();
        let mut packed = vec![0; size(elements.len())];
        pack(&elements, &mut packed);
        for (index, want) in elements.into_iter().enumerate() {
            assert_eq!(element(&packed, index), rounded(want));
        }
    }

    #[test]
    fn rounding_error_is_at_most_two() {
        for element in i8::MIN..=i8::MAX {
            let left = i32::from(element) - i32::from(rounded(element));
            assert!((-2..2).contains(&left));
        }
    }
}
