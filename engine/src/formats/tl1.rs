//! `tl1`: pairs of weights in 4-bit indices, 2 bits a weight.
//!
//! The index of adjacent weights `(w0, w1)` is the published `3 w0 + w1 + 4`, in 0..=8. A block is
//! 16 inputs (8 pairs) in 64 bytes: byte `i` of row `r` (offset `4 r + i`) holds pair `i` in its
//! low nibble and pair `4 + i` in its high one. Two table look-ups expand a vector of nibbles into
//! the codes of the even and of the odd inputs, so activations come as evens, then odds.

use super::layout::{BLOCK_COLS_MAX, Layout, Place};

/// The `tl1` layout.
pub(crate) struct Tl1;

/// Codes (`trit + 1`) of a pair's first and second weight, by index. Indices 9..=15 do not occur.
pub(crate) const CODES: [[u8; 16]; 2] = [
    [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0],
];

/// Returns the index of a pair.
fn index(w0: i8, w1: i8) -> u8 {
    (3 * w0 + w1 + 4) as u8
}

impl Layout for Tl1 {
    const BLOCK_COLS: usize = 16;
    const ORDER: &'static [u8] = &[0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];

    fn set(tile: &mut [u8], place: Place, trits: &[i8]) {
        for (pair, w) in trits.chunks_exact(2).enumerate() {
            tile[place.byte() + pair % 4] |= index(w[0], w[1]) << (4 * (pair / 4));
        }
    }

    fn get(tile: &[u8], place: Place) -> [i8; BLOCK_COLS_MAX] {
        let mut trits = [0; BLOCK_COLS_MAX];
        for pair in 0..Self::BLOCK_COLS / 2 {
            let index = tile[place.byte() + pair % 4] >> (4 * (pair / 4)) & 15;
            trits[2 * pair] = CODES[0][usize::from(index)] as i8 - 1;
            trits[2 * pair + 1] = CODES[1][usize::from(index)] as i8 - 1;
        }
        trits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_the_published_ones() {
        let known = [((-1, -1), 0), ((-1, 0), 1), ((-1, 1), 2), ((0, -1), 3), ((0, 0), 4)];
        for ((w0, w1), expect) in known {
            assert_eq!(index(w0, w1), expect, "({w0}, {w1})");
        }
        assert_eq!((index(0, 1), index(1, -1), index(1, 0), index(1, 1)), (5, 6, 7, 8));
    }

    #[test]
    fn low_nibbles_hold_the_first_four_pairs() {
        let mut tile = [0; 64];
        let trits = [-1, -1, 0, 1, 1, 1, 0, 0, /* pairs 4.. */ 1, 0, -1, 1, 0, -1, 1, -1];
        Tl1::set(&mut tile, Place { block: 0, row: 15 }, &trits);
        assert_eq!(tile[60..], [0x70, 0x25, 0x38, 0x64]);
        assert!(tile[..60].iter().all(|&byte| byte == 0));
    }
}
