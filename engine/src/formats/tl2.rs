//! `tl2`: triples of weights in a 4-bit magnitude and a sign, 1.67 bits a weight.
//!
//! With `v = 9 w0 + 3 w1 + w2`, in −13..=13, the published index of adjacent weights is `|v|` and
//! the sign bit `v < 0`. A block is 24 inputs (8 triples) in 64 bytes of nibbles and 16 bytes of
//! signs. Byte `i` of row `r` (offset `4 r + i`) holds triple `i` in its low nibble and triple
//! `4 + i` in its high one; their signs are bit `4 r + i` of two little-endian 64-bit words, low
//! nibbles first. A tile is all its nibbles, then all its signs, then zeros to a multiple of 64
//! bytes, so that every vector is aligned. Activations come in thirds: the first, second and third
//! inputs of triples 0..4, then of triples 4..8.

use super::layout::{BLOCK_COLS_MAX, Layout, Place};

/// The `tl2` layout.
pub(crate) struct Tl2;

/// Magnitude → codes (`trit + 1`) of the triple's weights where the sign bit is clear; where it is
/// set, 2 minus these. Magnitudes 14 and 15 do not occur.
pub(crate) const CODES: [[u8; 16]; 3] = [
    [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0],
    [1, 1, 2, 2, 2, 0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0],
    [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0],
];

/// Bytes of signs of a block.
pub(crate) const SIGN_BYTES: usize = 16;

/// Magnitude and sign of a triple.
fn index(w: &[i8]) -> (u8, bool) {
    let value = 9 * w[0] + 3 * w[1] + w[2];
    (value.unsigned_abs(), value < 0)
}

/// Byte and bit of the sign of `triple`.
fn sign_bit(blocks: usize, place: Place, triple: usize) -> (usize, usize) {
    let bit = 64 * (triple / 4) + 4 * place.row + triple % 4;
    (64 * blocks + SIGN_BYTES * place.block + bit / 8, bit % 8)
}

impl Layout for Tl2 {
    const BLOCK_COLS: usize = 24;
    const ORDER: &'static [u8] =
        &[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 12, 15, 18, 21, 13, 16, 19, 22, 14, 17, 20, 23];

    fn tile_bytes(blocks: usize) -> usize {
        64 * blocks + (SIGN_BYTES * blocks).next_multiple_of(64)
    }

    fn set(tile: &mut [u8], blocks: usize, place: Place, trits: &[i8]) {
        for (triple, w) in trits.chunks_exact(3).enumerate() {
            let (magnitude, negative) = index(w);
            tile[place.byte() + triple % 4] |= magnitude << (4 * (triple / 4));
            let (byte, bit) = sign_bit(blocks, place, triple);
            tile[byte] |= u8::from(negative) << bit;
        }
    }

    fn get(tile: &[u8], blocks: usize, place: Place) -> [i8; BLOCK_COLS_MAX] {
        let mut trits = [0; BLOCK_COLS_MAX];
        for triple in 0..Self::BLOCK_COLS / 3 {
            let magnitude = tile[place.byte() + triple % 4] >> (4 * (triple / 4)) & 15;
            let (byte, bit) = sign_bit(blocks, place, triple);
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
    fn nibbles_and_signs_lie_at_the_documented_places() {
        let mut tile = vec![0; Tl2::tile_bytes(2)];
        let mut trits = [0; 24];
        trits[3..6].copy_from_slice(&[-1, -1, -1]); // triple 1
        trits[15..18].copy_from_slice(&[1, -1, -1]); // triple 5
        trits[21..24].copy_from_slice(&[0, 0, -1]); // triple 7
        Tl2::set(&mut tile, 2, Place { block: 1, row: 3 }, &trits);
        assert_eq!(tile.len(), 128 + 64);
        assert_eq!(tile[64 + 12..64 + 16], [0, 0x5d, 0, 0x10]);
        let signs = &tile[128 + 16..128 + 32];
        assert_eq!(u64::from_le_bytes(signs[..8].try_into().expect("8 bytes")), 1 << 13);
        assert_eq!(u64::from_le_bytes(signs[8..].try_into().expect("8 bytes")), 1 << 15);
    }
}
