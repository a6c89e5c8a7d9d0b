//! Int8 rows times rows of unsigned digits: the cheap product that the exact head is screened by.
//!
//! [`dots`] is exact: `out[i, j] = Σ_k digits[i, k] · rows[j, k]`. A row of floats becomes one or two
//! rows of [`Digits`]:
//!
//! ```text
//! x[k] ≈ step · (X[k] − offset),   X[k] = Σ_d digit[d, k] · 2^(bits · (count − 1 − d))
//! offset = 2^(bits · count − 1),   step = max|x| / (offset − 1)
//! ```
//!
//! With VNNI a digit has 8 bits. Without, `vpmaddubsw` adds two products in int16: 2 · 127 · 127 =
//! 32258 fits, so a digit has 7. A sum of [`LEN_MAX`] products is below 2^31 either way.

use super::Isa;

mod estimate;

pub use estimate::{Bounds, Products};
pub(super) use estimate::{estimate, leave_out};

#[cfg(target_arch = "x86_64")]
mod x86_64;

/// Longest row: `255 · 127 · LEN_MAX < 2^31`.
pub const LEN_MAX: usize = 1 << 16;
/// Rows are padded with zeros to a multiple of this: whole vectors.
pub const STRIDE: usize = 64;

/// Rows of floats as unsigned digits.
#[derive(Debug, Clone, Default)]
pub struct Digits {
    bits: u32,
    count: usize,
    len: usize,
    data: Vec<u8>, // (row, digit, len), the most significant digit first
    rows: Vec<DigitRow>,
    /// The same as AMX reads it; empty where it does not.
    #[cfg(target_arch = "x86_64")]
    columns: x86_64::amx::Columns,
}

/// What [`Digits`] know of one row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DigitRow {
    /// Value of one unit of `X`.
    pub step: f32,
    /// What `X` is more than `x / step`.
    pub offset: i64,
    /// Euclidean norm of the row.
    pub norm: f64,
    /// Euclidean norm of what the digits leave out.
    pub error: f64,
}

impl Digits {
    /// Takes rows `(n, width)` apart, each element into `count` digits, for the kernels of `isa`.
    ///
    /// # Panics
    /// If `count` is neither 1 nor 2, or a row is longer than [`LEN_MAX`].
    pub fn set(&mut self, isa: Isa, xs: &[f32], width: usize, count: usize) {
        assert!((1..=2).contains(&count) && (1..=LEN_MAX).contains(&width));
        let len = width.next_multiple_of(STRIDE);
        (self.bits, self.count, self.len) = (digit_bits(isa), count, len);
        self.data.clear();
        self.data.resize(xs.len() / width * count * len, 0);
        let (bits, offset) = (self.bits, 1i64 << (self.bits * count as u32 - 1));
        let digits = self.data.chunks_exact_mut(count * len);
        let take = |(x, digits): (&[f32], &mut [u8])| split(x, bits, offset, len, digits);
        self.rows.clear();
        self.rows.extend(xs.chunks_exact(width).zip(digits).map(take));
        #[cfg(target_arch = "x86_64")]
        self.columns.set(isa, &self.data, len);
    }

    /// The rows.
    pub fn rows(&self) -> &[DigitRow] {
        &self.rows
    }

    /// Bits of a digit.
    fn bits(&self) -> u32 {
        self.bits
    }

    /// Digits of an element.
    pub fn count(&self) -> usize {
        self.count
    }

    /// `Σ_k X[k] · w[k]` from the dot products of a row's digits with `w`.
    pub fn join(&self, dots: impl IntoIterator<Item = i32>) -> i64 {
        dots.into_iter().fold(0, |sum, dot| (sum << self.bits) + i64::from(dot))
    }
}

/// The nearest whole number, the even one of two, of a value below 2^22 in magnitude: what is added
/// leaves no bits for the rest. A call of the library for each weight would take longer than all else.
pub fn nearest(value: f32) -> f32 {
    const WHOLE: f32 = 1.5 * (1 << 23) as f32;
    (value + WHOLE) - WHOLE
}

/// Writes a row's digits, `(digit, len)`, one or two of them.
fn split(x: &[f32], bits: u32, offset: i64, len: usize, digits: &mut [u8]) -> DigitRow {
    let largest = x.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    let limit = (offset - 1) as f32;
    let step = if largest > 0.0 { largest / limit } else { 1.0 };
    let (mut norm, mut error) = (0f64, 0f64);
    let (first, second) = digits.split_at_mut(len);
    for (k, v) in x.iter().enumerate() {
        let nearest = nearest((v / step).clamp(-limit, limit));
        let (v, left) = (f64::from(*v), f64::from(*v) - f64::from(nearest) * f64::from(step));
        (norm, error) = (norm + v * v, error + left * left);
        let unsigned = (nearest as i64 + offset) as u32;
        if second.is_empty() {
            first[k] = unsigned as u8;
        } else {
            first[k] = (unsigned >> bits) as u8;
            second[k] = (unsigned & ((1 << bits) - 1)) as u8;
        }
    }
    DigitRow { step, offset, norm: norm.sqrt(), error: error.sqrt() }
}

/// Bits of a digit that the kernels of an ISA multiply exactly.
pub fn digit_bits(isa: Isa) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && x86_64::has_vnni() {
        return 8;
    }
    let _ = isa;
    7
}

/// Dot products of `rows` `(r, len)`, int8 in −127..=127, with all digits `(n, count, len)`, into
/// `out` `(n, count, r)`. `len` is a row of floats' width, rounded up to [`STRIDE`].
///
/// # Panics
/// If the machine lacks `isa`, the shapes do not fit, or the digits were made for wider kernels.
pub fn dots(isa: Isa, rows: &[i8], digits: &Digits, out: &mut [i32]) {
    let Digits { len, data, .. } = digits;
    assert!(*len > 0 && rows.len().is_multiple_of(*len), "whole rows");
    assert_eq!(out.len(), rows.len() / len * (data.len() / len), "an output for each pair");
    assert!(digits.bits <= digit_bits(isa) && isa.is_available(), "digits of another ISA");
    match isa {
        Isa::Scalar => scalar(rows, data, *len, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the ISA, and the shapes were checked above.
        Isa::Avx2 => unsafe { x86_64::dots_avx2(rows, data, *len, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Amx if !digits.columns.is_empty() => unsafe {
            x86_64::amx::dots(rows, data, &digits.columns, *len, out);
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { x86_64::dots_avx512(0, rows, data, *len, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("no such ISA is available here"),
    }
}

/// The definition.
fn scalar(rows: &[i8], digits: &[u8], len: usize, out: &mut [i32]) {
    let count = rows.len() / len;
    for (digits, out) in digits.chunks_exact(len).zip(out.chunks_exact_mut(count.max(1))) {
        for (row, out) in rows.chunks_exact(len).zip(out) {
            *out = row.iter().zip(digits).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(i: usize) -> usize {
        i.wrapping_mul(i).wrapping_mul(40_503) >> 7
    }

    fn row(seed: usize, width: usize) -> Vec<f32> {
        (0..width).map(|k| ((wave(k + 977 * seed) % 2001) as f32 - 1000.0) / 37.0).collect()
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available())
    }

    #[test]
    fn every_isa_gives_the_dot_products_of_the_definition() {
        for isa in isas() {
            for (width, count, n) in
                [(64, 1, 1), (100, 2, 2), (2560, 1, 7), (2560, 2, 1), (192, 2, 33), (64, 1, 130)]
            {
                let xs: Vec<f32> = (0..n).flat_map(|i| row(i, width)).collect();
                let mut digits = Digits::default();
                digits.set(isa, &xs, width, count);
                let len = width.next_multiple_of(STRIDE);
                for head_rows in [1, 4, 13, 39] {
                    let rows: Vec<i8> = (0..head_rows * len)
                        .map(|i| ((wave(i) % 255) as i16 - 127) as i8)
                        .collect();
                    let mut want = vec![0; n * count * head_rows];
                    let mut got = want.clone();
                    scalar(&rows, &digits.data, len, &mut want);
                    dots(isa, &rows, &digits, &mut got);
                    assert_eq!(got, want, "{isa}: {head_rows} × {width}, {n} × {count}");
                }
            }
        }
    }

    #[test]
    fn nearest_is_the_even_one_of_two() {
        for i in -(4 << 16)..(4 << 16) {
            let value = i as f32 / 8.0;
            assert_eq!(nearest(value), value.round_ties_even());
        }
        assert!(nearest(f32::NAN).is_nan());
    }

    #[test]
    fn the_largest_products_do_not_overflow() {
        for isa in isas() {
            for (weight, x) in [(127, 1.0), (-127, 1.0), (127, -1.0), (-127, -1.0)] {
                let mut digits = Digits::default();
                digits.set(isa, &vec![x; LEN_MAX], LEN_MAX, 2);
                let mut out = vec![0; 10];
                dots(isa, &vec![weight; 5 * LEN_MAX], &digits, &mut out);
                let DigitRow { step, offset, .. } = digits.rows()[0];
                let sum =
                    digits.join([out[4], out[9]]) - offset * i64::from(weight) * LEN_MAX as i64;
                let want = f64::from(weight) * f64::from(x) * LEN_MAX as f64;
                assert!((sum as f64 * f64::from(step) / want - 1.0).abs() < 1e-4, "{isa}");
            }
        }
    }

    #[test]
    fn what_the_digits_leave_out_is_known() {
        for (isa, count) in isas().flat_map(|isa| [(isa, 1), (isa, 2)]) {
            let x = row(3, 500);
            let mut digits = Digits::default();
            digits.set(isa, &x, 500, count);
            let DigitRow { step, offset, norm, error } = digits.rows()[0];
            let value = |k: usize| {
                let unsigned = digits.join((0..count).map(|d| i32::from(digits.data[d * 512 + k])));
                f64::from(step) * (unsigned - offset) as f64
            };
            let left = |(k, v): (usize, &f32)| (f64::from(*v) - value(k)).powi(2);
            let left = x.iter().enumerate().map(left).sum::<f64>().sqrt();
            assert!((left - error).abs() <= 1e-9 * norm, "{left} is not {error}");
            assert!(error <= norm * if count == 1 { 0.02 } else { 0.0002 });
        }
    }
}
