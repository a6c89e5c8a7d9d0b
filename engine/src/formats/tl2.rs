//! `tl2`: triples of weights in a 4-bit magnitude and a sign, 1.67 bits a weight.
//!
//! With `v = 9 w0 + 3 w1 + w2`, in −13..=13, the published index of adjacent weights is `|v|` and
//! the sign bit `v < 0`. A block is 24 inputs (8 triples) in 64 bytes of nibbles and 16 bytes of
//! signs. Byte `i` of row `r` (offset `4 r + i`) holds triple `i` in its low nibble and triple
//! `4 + i` in its high one; their signs are bit `4 r + i` of two little-endian 64-bit words, low
//! nibbles first. Four blocks are a group: their nibbles, then their signs, five consecutive cache
//! lines; the last group of a tile is padded with zeros. Activations come in
//! thirds: the first, second and third inputs of triples 0..4, then of triples 4..8.

use super::layout::{BLOCK_COLS_MAX, Layout, Place};

/// The `tl2` layout.
pub(crate) struct Tl2;

/// Codes (`trit + 1`) of a triple's weights by magnitude, if the sign bit is clear; 2 minus the code if
/// it is set. Magnitudes 14 and 15 do not occur.
pub(crate) const CODES: [[u8; 16]; 3] = [
    [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0],
    [1, 1, 2, 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0],
    [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0],
];

/// Blocks of a group.
const GROUP_BLOCKS: usize = 4;
/// Bytes of signs of a block.
const SIGN_BYTES: usize = 16;
/// Bytes of a group.
const GROUP_BYTES: usize = GROUP_BLOCKS * (64 + SIGN_BYTES);

/// Returns the offset in a tile of a block's nibbles.
#[inline(always)]
pub(crate) fn nibbles_at(block: usize) -> usize {
    GROUP_BYTES * (block / GROUP_BLOCKS) + 64 * (block % GROUP_BLOCKS)
}

/// Returns the offset in a tile of a block's signs.
#[inline(always)]
pub(crate) fn signs_at(block: usize) -> usize {
    let group = GROUP_BYTES * (block / GROUP_BLOCKS);
    group + 64 * GROUP_BLOCKS + SIGN_BYTES * (block % GROUP_BLOCKS)
}

/// Returns the number of cache lines from a block's nibbles to the next block's.
#[inline(always)]
pub(crate) fn lines(block: usize) -> usize {
    1 + usize::from(block % GROUP_BLOCKS == GROUP_BLOCKS - 1)
}

/// Returns the magnitude and sign of a triple.
fn index(w: &[i8]) -> (u8, bool) {
    let value = 9 * w[0] + 3 * w[1] + w[2];
    (value.unsigned_abs(), value < 0)
}

/// Returns the byte and bit of the sign of `triple`.
fn sign_bit(place: Place, triple: usize) -> (usize, usize) {
    let bit = 64 * (triple / 4) + 4 * place.row + triple % 4;
    (signs_at(place.block) + bit / 8, bit % 8)
}

/// Returns the byte of the nibble of `triple`.
fn nibble_byte(place: Place, triple: usize) -> usize {
    nibbles_at(place.block) + 4 * place.row + triple % 4
}

impl Layout for Tl2 {
    const BLOCK_COLS: usize = 24;
    const ORDER: &'static [u8] =
        &[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 15, 18, 21, 13, 16, 19, 22, 14, 17, 20, 23];

    fn tile_bytes(blocks: usize) -> usize {
        GROUP_BYTES * blocks.div_ceil(GROUP_BLOCKS)
    }

    fn set(tile: &mut [u8], place: Place, trits: &[i8]) {
        for (triple, w) in trits.chunks_exact(3).enumerate() {
            let (magnitude, negative) = index(w);
            tile[nibble_byte(place, triple)] |= magnitude << (4 * (triple / 4));
            let (byte, bit) = sign_bit(place, triple);
            tile[byte] |= u8::from(negative) << bit;
        }
    }

    fn get(tile: &[u8], place: Place) -> [i8; BLOCK_COLS_MAX] {
        let mut trits = [0; BLOCK_COLS_MAX];
        for triple in 0..Self::BLOCK_COLS / 3 {
            let magnitude = tile[nibble_byte(place, triple)] >> (4 * (triple / 4)) & 15;
            let (byte, bit) = sign_bit(place, triple);
            let sign = 1 - 2 * (tile[byte] >> bit & 1) as i8;
            for (digit, codes) in CODES.iter().enumerate() {
                trits[3 * triple + digit] = sign * (codes[usize::from(magnitude)] as i8 - 1);
            }
        }
        trits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_the_published_ones() {
        assert_eq!(index(&[0, 0, 0]), (0, false));
        assert_eq!(index(&[0, 0, -1]), (1, true));
        assert_eq!(index(&[0, 1, -1]), (2, false));
        assert_eq!(index(&[1, -1, -1]), (5, false));
        assert_eq!(index(&[-1, 1, 0]), (6, true));
        assert_eq!(index(&[1, 1, 1]), (13, false));
        assert_eq!(index(&[-1, -1, -1]), (13, true));
    }

    #[test]
    fn nibbles_and_signs_are_at_the_documented_offsets() {
        let mut tile = vec![0; Tl2::tile_bytes(6)];
        let mut trits = [0; 24];
        trits[3..6].copy_from_slice(&[-1, -1, -1]); // triple 1
        trits[15..18].copy_from_slice(&[1, -1, -1]); // triple 5
        trits[21..24].copy_from_slice(&[0, 0, -1]); // triple 7
        Tl2::set(&mut tile, Place { block: 5, row: 3 }, &trits);
        assert_eq!(tile.len(), 2 * 320);
        assert_eq!(tile[320 + 64 + 12..320 + 64 + 16], [0, 0x5d, 0, 0x10]);
        let signs = &tile[320 + 256 + 16..320 + 256 + 32];
        assert_eq!(u64::from_le_bytes(signs[..8].try_into().expect("8 bytes")), 1 << 13);
        assert_eq!(u64::from_le_bytes(signs[8..].try_into().expect("8 bytes")), 1 << 15);
    }
}
