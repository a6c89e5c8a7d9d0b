//! The copies of a head that it is screened by, and how far they are from it.

use std::ops::Range;

use rayon::prelude::*;

use super::SHARE;
use crate::{
    files::Dense,
    formats::memory::AlignedBytes,
    kernels::{
        Isa,
        screen::{self, Bounds, STRIDE, six},
    },
};

/// Smallest vocabulary that is screened: below, all of it is soon computed.
const VOCAB_MIN: usize = 512;
/// Hidden rows up to which six bits are multiplied first, by both digits. With two, that takes as long as
/// it saves.
const FEW: usize = 1;
/// More than the roundings on the way to a bound.
pub(super) const UP: f32 = 1.0 + 1e-5;

/// Whether a matrix is large enough to be screened.
pub(in crate::backend) fn is_worth(dense: Dense<'_>) -> bool {
    dense.rows >= VOCAB_MIN && dense.cols <= screen::LEN_MAX
}

/// The int8 copy of a head. // (vocab, stride)
pub struct Screen {
    rows: AlignedBytes, // of i8
    pub(super) stride: usize,
    pub(super) scales: Vec<f32>,
    pub(super) of_rows: OfRows,
    /// Where a kernel makes use of them.
    six: Option<Six>,
}

/// The high six bits of the copy. // (vocab, six::size(stride))
pub(super) struct Six {
    rows: AlignedBytes,
    pub(super) of_rows: OfRows,
}

/// What is known of a row.
#[derive(Clone, Copy)]
pub(in crate::backend) struct OfRow {
    /// `w ≈ scale · int8`
    pub scale: f32,
    /// `Σ int8`
    sum: i32,
    /// `‖w − scale · int8‖`, rounded up.
    pub error: f32,
    /// `‖scale · int8‖`, rounded up.
    pub norm: f32,
}

/// As in [`OfRow`], of all rows.
pub(super) struct OfRows {
    pub sums: Vec<i32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

impl Screen {
    /// The copy of a matrix that is large enough to be worth one.
    pub fn of(dense: Dense<'_>) -> Option<Self> {
        if !is_worth(dense) {
            return None;
        }
        let stride = dense.cols.next_multiple_of(STRIDE);
        let mut rows = AlignedBytes::zeroed(dense.rows * stride);
        let of_rows: Vec<OfRow> = rows
            .par_chunks_exact_mut(stride)
            .enumerate()
            .map_init(
                || vec![0f32; dense.cols],
                |wide, (row, out)| {
                    dense.row(row, wide);
                    quantize(wide, out)
                },
            )
            .collect();
        let scales: Vec<f32> = of_rows.iter().map(|row| row.scale).collect();
        let six = screen::machine_has_six().then(|| Six::of(dense, &rows, stride, &scales));
        Some(Self { rows, stride, scales, of_rows: OfRows::new(&of_rows), six })
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        let six = self.six.as_ref().map_or(0, |six| six.rows.len() + six.of_rows.size_bytes());
        self.rows.len() + self.scales.len() * 4 + self.of_rows.size_bytes() + six
    }

    /// Bytes read to estimate all logits of one hidden row.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        let rows = self.six(isa, 1).map_or(&self.rows, |six| &six.rows);
        rows.len() + self.scales.len() * 4 + self.of_rows.size_bytes()
    }

    /// The bits that so many hidden rows are multiplied by first.
    pub(super) fn six(&self, isa: Isa, n: usize) -> Option<&Six> {
        self.six.as_ref().filter(|_| n <= FEW && screen::has_six(isa))
    }

    /// Whether so many of the largest logits are found faster than all.
    pub fn pays_for(&self, count: usize) -> bool {
        count.saturating_mul(SHARE) <= self.scales.len()
    }

    /// Int8 of some rows.
    pub(super) fn rows(&self, range: Range<usize>) -> &[i8] {
        bytemuck::cast_slice(&self.rows[range.start * self.stride..range.end * self.stride])
    }
}

impl OfRows {
    fn new(rows: &[OfRow]) -> Self {
        Self {
            sums: rows.iter().map(|row| row.sum).collect(),
            errors: rows.iter().map(|row| row.error).collect(),
            norms: rows.iter().map(|row| row.norm).collect(),
        }
    }

    fn size_bytes(&self) -> usize {
        self.sums.len() * (size_of::<OfRow>() - size_of::<f32>())
    }

    /// How far estimates of some logits may be off, by the factors of a hidden row.
    pub fn bounds(&self, range: Range<usize>, (by_error, by_norm): (f32, f32)) -> Bounds<'_> {
        let (errors, norms) = (&self.errors[range.clone()], &self.norms[range]);
        Bounds { errors, norms, by_error, by_norm }
    }
}

impl Six {
    /// The bits of an int8 copy `(vocab, stride)` of a head.
    fn of(dense: Dense<'_>, int8: &[u8], stride: usize, scales: &[f32]) -> Self {
        let mut rows = AlignedBytes::zeroed(six::size(int8.len()));
        let packed =
            rows.par_chunks_exact_mut(six::size(stride)).zip(int8.par_chunks_exact(stride));
        let of_rows: Vec<OfRow> = packed
            .enumerate()
            .map_init(
                || vec![0f32; dense.cols],
                |wide, (row, (out, int8))| {
                    let int8: &[i8] = bytemuck::cast_slice(int8);
                    six::pack(int8, out);
                    dense.row(row, wide);
                    of_row(wide, int8.iter().map(|&element| six::rounded(element)), scales[row])
                },
            )
            .collect();
        Self { rows, of_rows: OfRows::new(&of_rows) }
    }

    pub fn rows(&self, range: Range<usize>, stride: usize) -> &[u8] {
        let bytes = six::size(stride);
        &self.rows[range.start * bytes..range.end * bytes]
    }
}

/// `scale = max|w| / 127`, `int8 = round_half_even(w / scale)`, into `out`, whose rest stays zero.
pub(in crate::backend) fn quantize(w: &[f32], out: &mut [u8]) -> OfRow {
    let largest = w.iter().fold(0f32, |a, b| a.max(b.abs()));
    let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
    for (q, w) in out.iter_mut().zip(w) {
        *q = screen::nearest((w / scale).clamp(-127.0, 127.0)) as i8 as u8;
    }
    of_row(w, out.iter().map(|&q| q as i8), scale)
}

/// What is known of a row of which `scale · int8` are held.
fn of_row(w: &[f32], int8: impl Iterator<Item = i8>, scale: f32) -> OfRow {
    let (mut error, mut norm, mut sum) = (0f64, 0f64, 0i32);
    for (w, q) in w.iter().zip(int8) {
        let value = f64::from(q) * f64::from(scale);
        let left = f64::from(*w) - value;
        (error, norm, sum) = (error + left * left, norm + value * value, sum + i32::from(q));
    }
    OfRow { scale, sum, error: error.sqrt() as f32 * UP, norm: norm.sqrt() as f32 * UP }
}
