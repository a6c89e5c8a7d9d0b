//! `i2_s`: 2 bits a weight, code = trit + 1.
//!
//! A block is 16 inputs in 64 bytes. Byte `i` of row `r` (offset `4 r + i`) holds input `4 g + i`
//! of the block at bits `2 g`, `2 g + 1`, for `g` in `0..4`: one shift and one mask turn the whole
//! vector into the codes of four consecutive inputs of all rows. The codes are the published ones
//! (0, 1, 2 for −1, 0, +1); the byte order is chosen for this kernel.

use super::layout::{BLOCK_COLS_MAX, Layout, Place};

/// The `i2_s` layout.
pub(crate) struct I2S;

impl Layout for I2S {
    const BLOCK_COLS: usize = 16;
    const ORDER: &'static [u8] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    fn set(tile: &mut [u8], place: Place, trits: &[i8]) {
        for (col, &trit) in trits.iter().enumerate() {
            tile[place.byte() + col % 4] |= ((trit + 1) as u8) << (2 * (col / 4));
        }
    }

    fn get(tile: &[u8], place: Place) -> [i8; BLOCK_COLS_MAX] {
        let mut trits = [0; BLOCK_COLS_MAX];
        for (col, trit) in trits[..Self::BLOCK_COLS].iter_mut().enumerate() {
            *trit = (tile[place.byte() + col % 4] >> (2 * (col / 4)) & 3) as i8 - 1;
        }
        trits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_at_the_documented_bits() {
        let mut tile = [0; 64];
        let trits = [-1, 0, 1, 1, 0, 0, 0, 0, 1, -1, -1, -1, 1, 1, 0, -1];
        I2S::set(&mut tile, Place { block: 0, row: 2 }, &trits);
        // Byte i holds the codes of inputs i, 4 + i, 8 + i, 12 + i from the low bits up.
        assert_eq!(tile[8..12], [0b10_10_01_00, 0b10_00_01_01, 0b01_00_01_10, 0b00_00_01_10]);
        assert!(tile[..8].iter().chain(&tile[12..]).all(|&byte| byte == 0));
    }
}
