//! One suite for every path of the product with scales of groups, compared bit for bit with a triple loop over unpacked
//! trits, integers and scales.

use half::f16;
use proptest::prelude::*;

use super::{
    Digits, GroupActivations, GroupShape, SCALED_INPUTS,
    conformance::{Random, paths},
    group_gemm::gemm_groups_by,
};
use crate::formats::{Format, GroupScales, PackedMatrix, Scale, TILE_ROWS, TernaryMatrix};

struct Case {
    rows: usize,
    digits: Digits,
    matrix: TernaryMatrix,
    q: Vec<i8>,       // (rows, digits, cols)
    scales: Vec<f32>, // (rows, scales of a row)
}

impl Case {
    fn random((outputs, cols, group): (usize, usize, usize), rows: usize, digits: Digits) -> Self {
        let mut random = Random((outputs * 31 + cols * 7 + rows + group) as u64);
        let trits = (0..outputs * cols).map(|_| (random.next() % 3) as i8 - 1).collect();
        let group_scales = (0..outputs * cols / group)
            .map(|_| f16::from_f32((random.next() % 4096) as f32 / 8192.0))
            .collect();
        let q = (0..rows * digits.count() * cols).map(|_| random.next() as i8).collect();
        let scales = (0..rows * cols.div_ceil(SCALED_INPUTS))
            .map(|_| (random.next() % 100_000) as f32 * 1e-7)
            .collect();
        let groups = Some(GroupScales { size: group, scales: group_scales });
        let scale = Scale::Multiply(1.0);
        let matrix = TernaryMatrix { rows: outputs, cols, trits, scale, groups };
        Self { rows, digits, matrix, q, scales }
    }

    /// Returns the expected product as bits. // (rows, outputs rounded up to tiles)
    fn expected(&self) -> Vec<u32> {
        let TernaryMatrix { rows: outputs, cols, trits, groups, .. } = &self.matrix;
        let (cols, groups) = (*cols, groups.as_ref().expect("scales"));
        let count = cols / groups.size;
        let mut y = Vec::new();
        for (row, q) in self.q.chunks(self.digits.count() * cols).enumerate() {
            let value = |k: usize| q.chunks(cols).fold(0, |high, q| 256 * high + i32::from(q[k]));
            for output in 0..outputs.next_multiple_of(TILE_ROWS) {
                let mut sum = 0f32;
                for group in (0..count).filter(|_| output < *outputs) {
                    let inputs = group * groups.size..(group + 1) * groups.size;
                    let product: i32 =
                        inputs.map(|k| i32::from(trits[output * cols + k]) * value(k)).sum();
                    let of_row = row * cols.div_ceil(SCALED_INPUTS);
                    let scale = self.scales[of_row + group * groups.size / SCALED_INPUTS];
                    let weight_scale = groups.scales[output * count + group].to_f32();
                    sum = (product as f32).mul_add(weight_scale * scale, sum);
                }
                y.push(sum.to_bits());
            }
        }
        y
    }

    fn activations(&self, format: Format) -> GroupActivations {
        let cols = self.matrix.cols;
        let group = self.matrix.groups.as_ref().map_or(0, |groups| groups.size);
        let mut x = GroupActivations::default();
        x.reset(GroupShape { format, digits: self.digits, cols, group }, self.rows);
        let rows = self.q.chunks(self.digits.count() * cols);
        for (row, (q, scales)) in
            rows.zip(self.scales.chunks(cols.div_ceil(SCALED_INPUTS))).enumerate()
        {
            x.set_row(row, q, scales);
        }
        x
    }

    /// Compares every format and path with the expected product.
    fn check(&self) {
        let expected = self.expected();
        for format in Format::ALL {
            let w = PackedMatrix::pack_matrix(format, &self.matrix).expect("trits");
            let x = self.activations(format);
            for path in paths() {
                let mut y = vec![f32::NAN; expected.len()];
                gemm_groups_by(path, &w, 0..w.tile_count(), x.all(), &mut y);
                let y: Vec<u32> = y.into_iter().map(f32::to_bits).collect();
                assert!(
                    y == expected,
                    "{path:?} {format} {}: {} x {} by {} rows differs at {:?}",
                    self.digits,
                    self.matrix.rows,
                    self.matrix.cols,
                    self.rows,
                    y.iter().zip(&expected).position(|(a, b)| a != b)
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_path_matches_the_reference(
        outputs in 1..=70usize, groups in 1..=9usize, rows in 1..=70usize, wide: bool, two: bool
    ) {
        let group = if wide { 128 } else { 64 };
        let digits = if two { Digits::Two } else { Digits::One };
        Case::random((outputs, groups * group, group), rows, digits).check();
    }
}

#[test]
fn all_row_and_tile_counts_around_register_blocks() {
    for digits in Digits::ALL {
        for rows in (1..=26).chain([31, 32, 33, 48, 49, 65]) {
            for outputs in [1, 15, 16, 17, 33] {
                Case::random((outputs, 256, 128), rows, digits).check();
            }
        }
    }
}

#[test]
fn all_widths_around_groups() {
    for digits in Digits::ALL {
        for groups in 1..=12 {
            for group in [64, 128] {
                Case::random((40, groups * group, group), 5, digits).check();
                Case::random((17, groups * group, group), 1, digits).check();
            }
        }
    }
}

#[test]
fn rows_and_widths_around_expanded_groups() {
    for digits in Digits::ALL {
        for rows in [4, 9, 48, 49, 64] {
            for groups in [1, 2, 3, 4, 7] {
                Case::random((65, groups * 128, 128), rows, digits).check();
                Case::random((49, groups * 64, 64), rows, digits).check();
            }
        }
        // Activations that do not fit in the second cache.
        Case::random((33, 16_384, 128), 67, digits).check();
    }
}

#[test]
fn sums_are_exact_at_the_extremes() {
    for digits in Digits::ALL {
        for (trit, q) in [(1, 127), (-1, 127), (1, -128), (-1, -128)] {
            for rows in [1, 2, 9, 13, 50] {
                let mut case = Case::random((17, 384, 128), rows, digits);
                case.matrix.trits.fill(trit);
                case.q.fill(q);
                case.check();
            }
        }
    }
}

#[test]
fn a_range_of_tiles_gives_its_part_of_the_product() {
    let case = Case::random((150, 384, 128), 11, Digits::Two);
    let (expected, stride) = (case.expected(), 160);
    for format in Format::ALL {
        let w = PackedMatrix::pack_matrix(format, &case.matrix).expect("trits");
        let x = case.activations(format);
        for path in paths() {
            for tiles in [0..1, 3..7, 9..10, 4..4] {
                let width = tiles.len() * TILE_ROWS;
                let mut y = vec![f32::NAN; case.rows * width + 1];
                gemm_groups_by(path, &w, tiles.clone(), x.all(), &mut y);
                for row in 0..case.rows {
                    let at = row * stride + tiles.start * TILE_ROWS;
                    let got = y[row * width..(row + 1) * width].iter().map(|y| y.to_bits());
                    assert!(got.eq(expected[at..at + width].iter().copied()), "{path:?} {row}");
                }
                assert!(y[case.rows * width].is_nan(), "one element more must not change");
            }
        }
    }
}
