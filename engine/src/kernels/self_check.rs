//! A quick check of the kernels on this machine: every format is compared with the scalar kernel, on a
//! matrix of partial tiles and blocks. Loading a model runs a longer test on its weights.

use std::ops::Range;

use super::{Activations, Digits, GroupActivations, GroupShape, Isa, gemm, gemm_groups};
use crate::formats::{Format, PackedMatrix, TILE_ROWS};

const OUTPUTS: usize = 3 * TILE_ROWS + 5;
const COLS: usize = 1000;
/// Few rows and many, for which all instruction sets have loops of their own.
const ROWS: [usize; 2] = [7, 67];

/// Returns whether the kernels of `isa` agree with the scalar ones.
///
/// # Panics
/// If this machine cannot run `isa`.
pub fn self_check(isa: Isa) -> bool {
    let trits: Vec<i8> = (0..OUTPUTS * COLS).map(|i| (wave(i) % 3) as i8 - 1).collect();
    Format::ALL.into_iter().all(|format| {
        let matrix = PackedMatrix::pack(format, OUTPUTS, COLS, &trits);
        matrix.is_ok_and(|matrix| {
            ROWS.iter().all(|rows| agrees_with_scalar(isa, &matrix, *rows, 0..matrix.tile_count()))
        })
    })
}

/// Returns whether the product of some tiles with `rows` rows agrees with the scalar one.
pub(crate) fn agrees_with_scalar(
    isa: Isa,
    matrix: &PackedMatrix,
    rows: usize,
    tiles: Range<usize>,
) -> bool {
    let mut x = Activations::new();
    x.reset(matrix.format(), matrix.cols(), rows);
    for row in 0..rows {
        let q: Vec<i8> = (0..matrix.cols()).map(|i| wave(i + row * 7919) as u8 as i8).collect();
        x.set_row(row, &q);
    }
    let product = |isa| {
        let mut y = vec![0i32; rows * tiles.len() * TILE_ROWS]; // (row, tile, TILE_ROWS)
        gemm(isa, matrix, tiles.clone(), x.all(), &mut y);
        y
    };
    product(isa) == product(Isa::Scalar)
}

/// Returns whether the product of some tiles of a matrix with scales of groups with `rows` rows equals the scalar one to
/// the bit.
pub(crate) fn groups_agree_with_scalar(
    isa: Isa,
    matrix: &PackedMatrix,
    rows: usize,
    tiles: Range<usize>,
) -> bool {
    let Some(group) = matrix.group() else { return false };
    let (format, cols) = (matrix.format(), matrix.cols());
    Digits::ALL.into_iter().all(|digits| {
        let shape = GroupShape { format, digits, cols, group };
        let mut x = GroupActivations::default();
        x.reset(shape, rows);
        for row in 0..rows {
            let count = digits.count() * cols;
            let q: Vec<i8> = (0..count).map(|i| wave(i + row * 7919) as u8 as i8).collect();
            let scale = |i| (1 + wave(i + row) % 1000) as f32 / 3e6;
            let scales: Vec<f32> = (0..shape.scales()).map(scale).collect();
            x.set_row(row, &q, &scales);
        }
        let product = |isa| {
            let mut y = vec![0f32; rows * tiles.len() * TILE_ROWS]; // (row, tile, TILE_ROWS)
            gemm_groups(isa, matrix, tiles.clone(), x.all(), &mut y);
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        product(isa) == product(Isa::Scalar)
    })
}

/// Pseudo-random numbers without a short period.
pub(crate) fn wave(i: usize) -> usize {
    i.wrapping_mul(i).wrapping_mul(40_503) >> 7
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_isa_passes() {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert!(self_check(isa), "{isa}");
        }
    }
}
