//! Layout of weights on the device: `kernels/cuda/README.md`, *Layouts*.

use half::f16;
use rayon::prelude::*;

/// Output features of a tile, and tokens of a screen's group.
pub const TILE_ROWS: usize = 16;
/// Columns of a k block.
pub const K_BLOCK: usize = 128;
/// Bytes of a tile of a k block.
const TILE_BYTES: usize = 512;
/// Codes of four zero weights, which pad tiles.
const ZERO: u8 = 0b0101_0101;

/// Returns the number of k blocks of a row.
pub fn k_blocks(cols: usize) -> usize {
    cols.div_ceil(K_BLOCK)
}

/// Returns the bytes of a packed ternary matrix.
pub fn ternary_bytes(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * k_blocks(cols) * TILE_BYTES
}

/// Packs trits `(rows, cols)`.
pub fn pack_ternary(rows: usize, cols: usize, trits: &[i8]) -> Vec<u8> {
    assert_eq!(trits.len(), rows * cols, "trits of the stated shape");
    let mut out = vec![ZERO; ternary_bytes(rows, cols)];
    let of_tile = k_blocks(cols) * TILE_BYTES;
    out.par_chunks_exact_mut(of_tile).enumerate().for_each(|(tile, out)| {
        for row in 0..TILE_ROWS.min(rows - tile * TILE_ROWS) {
            let start = (tile * TILE_ROWS + row) * cols;
            for (col, trit) in trits[start..start + cols].iter().enumerate() {
                let (byte, shift) = ternary_place(row, col);
                out[byte] = out[byte] & !(3 << shift) | ((trit + 1) as u8) << shift;
            }
        }
    });
    out
}

/// Returns the bytes of the scales of a matrix with `groups` groups a row.
pub fn scale_bytes(rows: usize, groups: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * groups * TILE_ROWS * size_of::<f16>()
}

/// Packs the scales of groups, `(rows, groups)`, tile by tile, with zeros after the last row. // (tiles, groups, 16)
pub fn pack_scales(groups: usize, scales: &[f16]) -> Vec<f16> {
    let of_tile = groups * TILE_ROWS;
    let mut out = vec![f16::ZERO; scales.len().next_multiple_of(of_tile)];
    for (row, of_row) in scales.chunks_exact(groups).enumerate() {
        let tile = &mut out[row / TILE_ROWS * of_tile..][..of_tile];
        let places = tile.iter_mut().skip(row % TILE_ROWS).step_by(TILE_ROWS);
        places.zip(of_row).for_each(|(place, scale)| *place = *scale);
    }
    out
}

/// Returns the byte (within a tile of all k blocks) and the bit of a code.
fn ternary_place(row: usize, col: usize) -> (usize, usize) {
    let (block, col) = (col / K_BLOCK, col % K_BLOCK);
    let s = 2 * (col / 64) + col / 8 % 2;
    let lane = 4 * (row % 8) + col / 16 % 4;
    let register = row / 8 + 2 * (col / 4 % 2);
    ((block * 32 + lane) * 16 + 4 * s + col % 4, 2 * register)
}

/// Returns the bytes of a group of the screen's head.
pub fn group_bytes(cols: usize) -> usize {
    TILE_ROWS * k_blocks(cols) * K_BLOCK
}

/// Writes a row of int8 to its group's bytes; the rest stays zero.
pub fn pack_screen_row(row: usize, int8: &[u8], group: &mut [u8]) {
    for (col, value) in int8.iter().enumerate() {
        let part = 2 * (col / 64) + col / 8 % 2;
        let lane = 4 * (row % 8) + col / 16 % 4;
        let register = row / 8 + 2 * (col / 4 % 2);
        group[(part * 32 + lane) * 16 + 4 * register + col % 4] = *value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ternary_matrices_have_the_documented_layout() {
        let (rows, cols) = (21, 300);
        let trits: Vec<i8> = (0..rows * cols).map(|i| (i * i / 7 % 3) as i8 - 1).collect();
        let packed = pack_ternary(rows, cols, &trits);
        let blocks = k_blocks(cols);
        for (at, byte) in packed.iter().enumerate() {
            let (tile, b) = (at / TILE_BYTES / blocks, at / TILE_BYTES % blocks);
            let (l, s, i) = (at / 16 % 32, at / 4 % 4, at % 4);
            for j in 0..4 {
                let row = 16 * tile + l / 4 + 8 * (j & 1);
                let col = 128 * b + 64 * (s / 2) + 16 * (l % 4) + 8 * (s % 2) + 4 * (j / 2) + i;
                let inside = row < rows && col < cols;
                let trit = if inside { trits[row * cols + col] } else { 0 };
                assert_eq!(i32::from(byte >> (2 * j) & 3), i32::from(trit) + 1);
            }
        }
    }

    #[test]
    fn scales_of_groups_have_the_documented_layout() {
        let (rows, groups) = (37, 3);
        let scales: Vec<f16> = (0..rows * groups).map(|i| f16::from_f32(i as f32)).collect();
        let packed = pack_scales(groups, &scales);
        assert_eq!(packed.len() * 2, scale_bytes(rows, groups));
        for (at, scale) in packed.iter().enumerate() {
            let (row, group) = (at / 48 * 16 + at % 16, at / 16 % groups);
            let expected = if row < rows { scales[row * groups + group] } else { f16::ZERO };
            assert_eq!(*scale, expected, "row {row}, group {group}");
        }
    }

    #[test]
    fn groups_of_the_screen_have_the_documented_layout() {
        let cols = 200;
        let value = |row: usize, col: usize| (row * 31 + col * 7) as u8;
        let mut group = vec![0; group_bytes(cols)];
        for row in 0..TILE_ROWS {
            let bytes: Vec<u8> = (0..cols).map(|col| value(row, col)).collect();
            pack_screen_row(row, &bytes, &mut group);
        }
        for (at, byte) in group.iter().enumerate() {
            let (part, l, j, i) = (at / 512, at / 16 % 32, at / 4 % 4, at % 4);
            let row = l / 4 + 8 * (j & 1);
            let col = 64 * (part / 2) + 16 * (l % 4) + 8 * (part % 2) + 4 * (j / 2) + i;
            assert_eq!(*byte, if col < cols { value(row, col) } else { 0 });
        }
    }
}
