//! Dot products of int8 head rows and unsigned digits: the cheap estimate by which the exact head skips
//! rows.
//!
//! A row of floats becomes two rows of [`Digits`]. `half` is added to make the digits unsigned:
//!
//! ```text
//! x[k] ≈ step · (2^bits · h[k] + l[k])      −half ≤ h[k], l[k] < half = 2^(bits − 1)
//! step = max|x| / (2^bits · (half − 1) + half − 1)
//! ```
//!
//! [`dots`] multiplies the first digits by all rows, or [`six_dots`] both digits by the high six bits of
//! all rows. [`second_dot`] and [`both_dots`] then multiply both digits by the rows that are not ruled out. All are
//! exact: `Σ_k (h[k] + half) · row[k]`, from which the caller subtracts `half · Σ row`.
//!
//! With AVX-512 VNNI a digit has 8 bits. Without VNNI, `vpmaddubsw` adds two products in int16: 2 · 127 · 127
//! = 32258 fits, so a digit has 7. The same with NEON, as its `sdot` takes signed bytes, and with AVX-VNNI, so that AVX2
//! has one size of digits. A sum of [`LEN_MAX`] products is below 2^31 either way.

use bytemuck::Zeroable;

use super::Isa;
use crate::formats::memory::Line;

mod estimate;
pub mod six;
#[cfg(test)]
mod tests;

pub use estimate::{Bounds, Products, RangeNoise, with_second};
pub(super) use estimate::{estimate, select_candidates, weigh_below};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod tiles;

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::has_vnni;

/// Longest row: `255 · 127 · LEN_MAX < 2^31`.
pub const LEN_MAX: usize = 1 << 16;
/// Rows are padded with zeros to a multiple of this.
pub const STRIDE: usize = six::BLOCK;

/// Rows of floats as unsigned digits.
#[derive(Debug, Clone, Default)]
pub struct Digits {
    bits: u32,
    len: usize,
    first: Vec<Line>,  // (row, len) of u8
    second: Vec<Line>, // (row, len) of u8
    rows: Vec<DigitRow>,
    /// The first digits in the layout for AMX; empty if AMX is not used.
    #[cfg(target_arch = "x86_64")]
    columns: x86_64::amx::Columns,
}

/// Step and norms of one row of [`Digits`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DigitRow {
    /// Value of one unit of the second digit.
    pub step: f32,
    /// Euclidean norm of the row.
    pub norm: f64,
    /// Euclidean norm of the error of the first digits alone.
    pub first_error: f64,
    /// Euclidean norm of the error of both digits.
    pub error: f64,
}

/// Digits to fill in: row `i` has the `len` elements from `i * len` on.
pub struct Unfilled<'a> {
    /// The first digits, initially zero. // (row, len)
    pub first: &'a mut [u8],
    /// The second digits, initially zero. // (row, len)
    pub second: &'a mut [u8],
    /// Steps and norms of the rows. // (row,)
    pub rows: &'a mut [DigitRow],
    /// Length of a row, padded.
    pub len: usize,
    /// Bits of a digit.
    pub bits: u32,
}

impl Digits {
    /// Splits rows of `width` floats into digits for the kernels of `isa`.
    ///
    /// # Panics
    /// If a row is longer than [`LEN_MAX`].
    pub fn set(&mut self, isa: Isa, xs: &[f32], width: usize) {
        let Unfilled { first, second, rows, len, bits } = self.begin(isa, xs.len() / width, width);
        let digits = first.chunks_exact_mut(len).zip(second.chunks_exact_mut(len));
        for ((x, (first, second)), row) in xs.chunks_exact(width).zip(digits).zip(rows) {
            *row = split(x, bits, first, second);
        }
        self.end(isa);
    }

    /// Resizes to `n` rows. The caller fills each with [`split`], then calls [`Self::end`].
    ///
    /// # Panics
    /// If a row is longer than [`LEN_MAX`].
    pub fn begin(&mut self, isa: Isa, n: usize, width: usize) -> Unfilled<'_> {
        assert!((1..=LEN_MAX).contains(&width));
        let len = width.next_multiple_of(STRIDE);
        (self.bits, self.len) = (digit_bits(isa), len);
        for digits in [&mut self.first, &mut self.second] {
            digits.clear();
            digits.resize(n * len / size_of::<Line>(), Line::zeroed());
        }
        self.rows.clear();
        self.rows.resize(n, DigitRow::default());
        Unfilled {
            first: bytemuck::cast_slice_mut(&mut self.first),
            second: bytemuck::cast_slice_mut(&mut self.second),
            rows: &mut self.rows,
            len,
            bits: self.bits,
        }
    }

    /// Completes the digits after all rows are filled.
    pub fn end(&mut self, isa: Isa) {
        #[cfg(target_arch = "x86_64")]
        self.columns.set(isa, bytemuck::cast_slice(&self.first), self.len);
        let _ = isa;
    }

    /// Returns the steps and norms of the rows.
    pub fn rows(&self) -> &[DigitRow] {
        &self.rows
    }

    /// Bits of a digit.
    fn bits(&self) -> u32 {
        self.bits
    }

    /// Returns the offset that makes digits unsigned.
    fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Returns the first and the second digits of a row. // (len,)
    fn both(&self, index: usize) -> [&[u8]; 2] {
        [&self.first, &self.second].map(|lines| {
            let digits: &[u8] = bytemuck::cast_slice(lines);
            &digits[index * self.len..(index + 1) * self.len]
        })
    }

    /// Returns the first digits. // (row, len)
    fn first(&self) -> &[u8] {
        bytemuck::cast_slice(&self.first)
    }
}

/// Rounds a value below 2^22 in magnitude to the nearest integer, ties to even: adding `WHOLE` leaves no
/// bits for the fraction. A library call for each weight would take longer than everything else.
pub fn nearest(value: f32) -> f32 {
    const WHOLE: f32 = 1.5 * (1 << 23) as f32;
    (value + WHOLE) - WHOLE
}

/// Writes the digits of a row.
pub fn split(x: &[f32], bits: u32, first: &mut [u8], second: &mut [u8]) -> DigitRow {
    let half = 1i32 << (bits - 1);
    let largest = x.iter().fold(0f32, |largest, v| largest.max(v.abs()));
    let limit = (((half - 1) << bits) + half - 1) as f32;
    let step = if largest > 0.0 { largest / limit } else { 1.0 };
    let (mut norm, mut first_error, mut error) = (0f64, 0f64, 0f64);
    for ((v, first), second) in x.iter().zip(first).zip(second) {
        let whole = nearest((v / step).clamp(-limit, limit)) as i32;
        let high = (whole + half) >> bits;
        *first = (high + half) as u8;
        *second = (whole - (high << bits) + half) as u8;
        let (v, step) = (f64::from(*v), f64::from(step));
        let left = v - f64::from(whole) * step;
        let first_left = v - f64::from(high << bits) * step;
        norm += v * v;
        first_error += first_left * first_left;
        error += left * left;
    }
    DigitRow { step, norm: norm.sqrt(), first_error: first_error.sqrt(), error: error.sqrt() }
}

/// Returns the digit size in bits of an ISA; its kernels multiply such digits exactly.
pub fn digit_bits(isa: Isa) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && has_vnni() {
        return 8;
    }
    let _ = isa;
    7
}

/// Dot products of `rows` `(r, len)`, int8 in −127..=127, with the first digits `(n, len)`, into `out`
/// `(n, r)`. `len` is the width of a row of floats, rounded up to a multiple of [`STRIDE`].
///
/// # Panics
/// If this machine cannot run `isa`, the shapes do not match, or the digits have more bits than the
/// kernels of `isa` support.
pub fn dots(isa: Isa, rows: &[i8], digits: &Digits, out: &mut [i32]) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Amx && !digits.columns.is_empty() {
        let (len, first) = (digits.len, digits.first());
        check(isa, rows, first, digits, out);
        // SAFETY: the machine has the ISA, and the shapes were checked above.
        return unsafe { x86_64::amx::dots(rows, first, &digits.columns, len, out) };
    }
    dots_of(isa, rows, digits.first(), digits, out);
}

/// Returns the dot products of one row with the first and the second digits of row `index`.
///
/// # Panics
/// As [`dots`].
pub fn both_dots(isa: Isa, row: &[i8], digits: &Digits, index: usize) -> [i32; 2] {
    digits.both(index).map(|data| dot(isa, row, data, digits))
}

/// Returns the dot product of one row with the second digits of row `index`.
///
/// # Panics
/// As [`dots`].
pub fn second_dot(isa: Isa, row: &[i8], digits: &Digits, index: usize) -> i32 {
    dot(isa, row, digits.both(index)[1], digits)
}

fn dot(isa: Isa, row: &[i8], data: &[u8], digits: &Digits) -> i32 {
    let mut out = [0];
    dots_of(isa, row, data, digits, &mut out);
    out[0]
}

/// Returns whether [`six_dots`] of an ISA is faster than [`dots`] for few rows of digits.
pub fn has_six(isa: Isa) -> bool {
    digit_bits(isa) == 8
}

/// Returns whether [`has_six`] holds for an ISA of this machine.
pub fn machine_has_six() -> bool {
    Isa::ALL.into_iter().any(|isa| isa.is_available() && has_six(isa))
}

/// Dot products of rows, as [`six::pack`] writes them, with the first and with the second digits of row
/// `index`. Each of the two outputs has `r` elements.
///
/// # Panics
/// As [`dots`].
pub fn six_dots(isa: Isa, rows: &[u8], digits: &Digits, index: usize, out: [&mut [i32]; 2]) {
    let row_bytes = six::size(digits.len);
    assert!(row_bytes > 0 && rows.len().is_multiple_of(row_bytes), "whole rows");
    assert!(out.iter().all(|out| out.len() == rows.len() / row_bytes), "an output for each pair");
    let both = digits.both(index);
    #[cfg(target_arch = "x86_64")]
    if has_six(isa) {
        assert!(isa.is_available(), "this machine cannot run {isa} kernels");
        // SAFETY: the machine has the ISA with VNNI; the shapes were checked above.
        return unsafe { x86_64::six::dots(rows, both, out) };
    }
    let _ = isa;
    for (digits, out) in both.into_iter().zip(out) {
        scalar_six(rows, digits, row_bytes, out);
    }
}

/// The reference of [`six_dots`].
fn scalar_six(rows: &[u8], digits: &[u8], row_bytes: usize, out: &mut [i32]) {
    for (row, out) in rows.chunks_exact(row_bytes).zip(out) {
        let products = digits.iter().enumerate().map(|(k, x)| {
            let weight = six::element(row, k);
            i32::from(weight) * i32::from(*x)
        });
        *out = products.sum();
    }
}

fn check(isa: Isa, rows: &[i8], data: &[u8], digits: &Digits, out: &[i32]) {
    let len = digits.len;
    assert!(len > 0 && rows.len().is_multiple_of(len), "whole rows");
    assert_eq!(out.len(), rows.len() / len * (data.len() / len), "an output for each pair");
    assert!(digits.bits <= digit_bits(isa) && isa.is_available(), "digits of another ISA");
}

fn dots_of(isa: Isa, rows: &[i8], data: &[u8], digits: &Digits, out: &mut [i32]) {
    check(isa, rows, data, digits, out);
    let len = digits.len;
    match isa {
        Isa::Scalar => scalar(rows, data, len, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the ISA, and the shapes were checked above.
        Isa::Avx2 => unsafe { x86_64::dots_avx2(x86_64::has_avx_vnni(), rows, data, len, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 | Isa::Amx => unsafe { x86_64::dots_avx512(0, rows, data, len, out) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon => unsafe { aarch64::dots_neon(rows, data, len, out) },
        #[cfg(not(target_arch = "aarch64"))]
        Isa::Neon => unreachable!("{isa} is not available here"),
        #[cfg(not(target_arch = "x86_64"))]
        Isa::Avx2 | Isa::Avx512 | Isa::Amx => unreachable!("{isa} is not available here"),
    }
}

/// The reference of [`dots`].
fn scalar(rows: &[i8], digits: &[u8], len: usize, out: &mut [i32]) {
    let count = rows.len() / len;
    for (digits, out) in digits.chunks_exact(len).zip(out.chunks_exact_mut(count.max(1))) {
        for (row, out) in rows.chunks_exact(len).zip(out) {
            *out = row.iter().zip(digits).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        }
    }
}
