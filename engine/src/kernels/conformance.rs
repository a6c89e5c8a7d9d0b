//! One suite for every path of the ternary product, compared bit for bit with a triple loop over
//! unpacked trits and activations.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use proptest::prelude::*;

use super::{Activations, gemm::gemm_by, product::Path};
use crate::formats::{Format, PackedMatrix, TILE_ROWS};

/// Returns the paths that this machine can run.
pub(super) fn paths() -> Vec<Path> {
    let mut all = vec![Path::Scalar];
    #[cfg(target_arch = "x86_64")]
    all.extend([Path::Avx2, Path::AvxVnni]);
    #[cfg(target_arch = "x86_64")]
    all.extend([Path::Avx512, Path::Avx512Vnni, Path::Avx512Gfni, Path::Amx]);
    #[cfg(target_arch = "aarch64")]
    all.push(Path::Neon);
    all.retain(|path| path.is_available());
    all
}

/// A small random generator; its quality does not matter.
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub fn trits(&mut self, len: usize) -> Vec<i8> {
        (0..len).map(|_| (self.next() % 3) as i8 - 1).collect()
    }

    fn activations(&mut self, len: usize) -> Vec<i8> {
        (0..len).map(|_| self.next() as i8).collect()
    }
}

struct Case {
    outputs: usize,
    cols: usize,
    rows: usize,
    trits: Vec<i8>, // (outputs, cols)
    q: Vec<i8>,     // (rows, cols)
}

impl Case {
    fn random(outputs: usize, cols: usize, rows: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let (trits, q) = (random.trits(outputs * cols), random.activations(rows * cols));
        Self { outputs, cols, rows, trits, q }
    }

    /// Returns the expected product. // (rows, outputs rounded up to tiles)
    fn expected(&self) -> Vec<i32> {
        let mut y = Vec::new();
        for q in self.q.chunks(self.cols) {
            let start = y.len();
            y.extend(self.trits.chunks(self.cols).map(|trits| -> i32 {
                trits.iter().zip(q).map(|(&t, &q)| i32::from(t) * i32::from(q)).sum()
            }));
            y.resize(start + self.outputs.next_multiple_of(TILE_ROWS), 0);
        }
        y
    }

    fn activations(&self, format: Format) -> Activations {
        let mut x = Activations::new();
        x.reset(format, self.cols, self.rows);
        for (row, q) in self.q.chunks(self.cols).enumerate() {
            x.set_row(row, q);
        }
        x
    }

    /// Compares every format and path with the expected product.
    fn check(&self) {
        let expected = self.expected();
        for format in Format::ALL {
            let w = PackedMatrix::pack(format, self.outputs, self.cols, &self.trits).unwrap();
            let x = self.activations(format);
            for path in paths() {
                let mut y = vec![i32::MIN; expected.len()];
                gemm_by(path, &w, 0..w.tile_count(), x.all(), &mut y);
                assert!(
                    y == expected,
                    "{path:?} {format}: {} x {} by {} rows differs at {:?}",
                    self.outputs,
                    self.cols,
                    self.rows,
                    y.iter().zip(&expected).position(|(a, b)| a != b)
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_path_matches_the_reference(
        outputs in 1..=100usize, cols in 1..=700usize, rows in 1..=70usize, seed: u64
    ) {
        Case::random(outputs, cols, rows, seed).check();
    }
}

#[test]
fn all_row_and_tile_counts_around_register_blocks() {
    for rows in 1..=26 {
        for outputs in [1, 15, 16, 17, 32, 33, 48, 64, 65] {
            Case::random(outputs, 49, rows, (rows * outputs) as u64).check();
        }
    }
}

#[test]
fn rows_and_widths_around_expanded_groups() {
    for rows in [5, 16, 17, 31, 32, 33, 48, 64, 65, 66, 97] {
        for cols in [191, 192, 193, 384, 385, 400, 1153] {
            Case::random(49, cols, rows, (rows * cols) as u64).check();
        }
    }
}

#[test]
fn rows_around_blocks_that_fit_a_cache() {
    for rows in [255, 256, 257, 300, 513] {
        for outputs in [15, 33] {
            Case::random(outputs, 120, rows, (rows * outputs) as u64).check();
        }
    }
    for (rows, cols) in [(97, 14_336), (70, 40_000)] {
        Case::random(20, cols, rows, cols as u64).check();
    }
}

#[test]
fn all_widths_around_blocks() {
    for cols in (1..=100).chain([255, 256, 257, 383, 384, 385, 1023, 1024, 1025]) {
        Case::random(40, cols, 5, cols as u64).check();
        Case::random(17, cols, 1, cols as u64).check();
    }
}

#[test]
fn model_shapes() {
    for (outputs, cols) in [(640, 2560), (48, 6912), (33, 8640)] {
        Case::random(outputs, cols, 3, 7).check();
        Case::random(outputs, cols, 17, 8).check();
    }
}

#[test]
fn accumulators_do_not_overflow_at_the_extremes() {
    for cols in [63, 256, 257, 1024, 1040, 6912, 20_000] {
        for trit in [-1, 1] {
            for q in [-128, -127, 127] {
                for rows in [1, 2, 9] {
                    Case {
                        outputs: 17,
                        cols,
                        rows,
                        trits: vec![trit; 17 * cols],
                        q: vec![q; rows * cols],
                    }
                    .check();
                }
            }
        }
    }
}

#[test]
fn a_range_of_tiles_gives_its_part_of_the_product() {
    let case = Case::random(150, 333, 11, 3);
    let (expected, stride) = (case.expected(), 160);
    for format in Format::ALL {
        let w = PackedMatrix::pack(format, case.outputs, case.cols, &case.trits).unwrap();
        let x = case.activations(format);
        for path in paths() {
            for tiles in [0..1, 3..7, 9..10, 4..4, 0..10] {
                let width = tiles.len() * TILE_ROWS;
                // One element more than needed, which must not change.
                let mut y = vec![i32::MIN; case.rows * width + 1];
                gemm_by(path, &w, tiles.clone(), x.all(), &mut y);
                for row in 0..case.rows {
                    let at = row * stride + tiles.start * TILE_ROWS;
                    assert_eq!(
                        y[row * width..(row + 1) * width],
                        expected[at..at + width],
                        "{path:?} {format} {tiles:?} row {row}"
                    );
                }
                assert_eq!(y[case.rows * width], i32::MIN);
            }
        }
    }
}

#[test]
fn mismatched_shapes_panic() {
    let case = Case::random(20, 30, 2, 1);
    let w = PackedMatrix::pack(Format::I2S, 20, 30, &case.trits).unwrap();
    let x = case.activations(Format::I2S);
    let other = case.activations(Format::Tl1);
    let refused = |tiles: std::ops::Range<usize>, x: &Activations, len: usize| {
        let run = || gemm_by(Path::Scalar, &w, tiles.clone(), x.all(), &mut vec![0; len]);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
    };
    assert!(!refused(0..2, &x, 64));
    assert!(refused(0..3, &x, 96), "tiles past the last");
    assert!(refused(0..2, &x, 63), "outputs too short");
    assert!(refused(0..2, &other, 64), "activations of another format");
}
