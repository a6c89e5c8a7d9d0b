//! The copies of a head that a screen reads, and their errors.

use std::ops::Range;

use rayon::prelude::*;

use crate::{
    backend::cpu::sections::{Damaged, PackedReader, Sections},
    files::Dense,
    formats::memory::AlignedBytes,
    kernels::{
        Isa, prefetch,
        screen::{self, Bounds, STRIDE, six},
    },
};

/// A screen finds at most `1 / SCREEN_SHARE` of the vocabulary. A neighbourhood of head rows with a larger
/// share of candidates is computed as a whole.
pub(in crate::backend) const SCREEN_SHARE: usize = 8;
/// Smallest vocabulary that is screened. The whole head of a smaller one is fast enough.
const VOCAB_MIN: usize = 512;
/// Most hidden rows for which both digits are first multiplied by the six-bit copy. For two rows, this
/// takes as long as it saves.
const SIX_BIT_ROWS_MAX: usize = 1;
/// Factor greater than all roundings in the computation of a bound.
pub(super) const ROUND_UP: f32 = 1.0 + 1e-5;

/// Returns whether a matrix can be screened: the vocabulary is large enough, and sums of products fit.
pub(in crate::backend) fn can_screen(dense: Dense<'_>) -> bool {
    dense.rows >= VOCAB_MIN && dense.cols <= screen::LEN_MAX
}

/// The int8 copy of a head. // (vocab, stride)
pub struct Screen {
    rows: AlignedBytes, // of i8
    pub(super) stride: usize,
    pub(super) scales: Vec<f32>,
    pub(super) row_stats: RowStatsArrays,
    /// The high six bits, on machines with a kernel for them.
    pub(super) six: Option<SixBitCopy>,
}

/// The high six bits of the copy. // (vocab, six::size(stride))
pub(super) struct SixBitCopy {
    rows: AlignedBytes,
    pub(super) row_stats: RowStatsArrays,
}

/// Scale, sum and error of a copied row.
#[derive(Clone, Copy)]
pub(in crate::backend) struct RowStats {
    /// `w ≈ scale · int8`
    pub scale: f32,
    /// `Σ int8`
    sum: i32,
    /// `‖w − scale · int8‖`, rounded up.
    pub error: f32,
    /// `‖scale · int8‖`, rounded up.
    pub norm: f32,
}

/// [`RowStats`] of all rows, as arrays. // (vocab,) each
pub(super) struct RowStatsArrays {
    pub sums: Vec<i32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

impl Screen {
    /// Copies a matrix; `None` if it cannot be screened.
    pub fn from_dense(dense: Dense<'_>) -> Option<Self> {
        if !can_screen(dense) {
            return None;
        }
        let stride = dense.cols.next_multiple_of(STRIDE);
        let mut rows = AlignedBytes::zeroed(dense.rows * stride);
        let row_stats: Vec<RowStats> = rows
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
        let scales: Vec<f32> = row_stats.iter().map(|row| row.scale).collect();
        let six =
            screen::machine_has_six().then(|| SixBitCopy::pack(dense, &rows, stride, &scales));
        Some(Self { rows, stride, scales, row_stats: RowStatsArrays::new(&row_stats), six })
    }

    /// Writes the buffers that hold the copy.
    pub fn write<'a>(&'a self, sections: &mut Sections<'a>) {
        sections.push(&self.rows[..]);
        sections.push(&self.scales);
        self.row_stats.write(sections);
        if let Some(six) = &self.six {
            sections.push(&six.rows[..]);
            six.row_stats.write(sections);
        }
    }

    /// Reads what [`Self::write`] wrote for a matrix of this shape; `None` if it cannot be screened.
    pub fn read(dense: Dense<'_>, from: &mut PackedReader<'_>) -> Result<Option<Self>, Damaged> {
        if !can_screen(dense) {
            return Ok(None);
        }
        let stride = dense.cols.next_multiple_of(STRIDE);
        let rows = from.aligned(dense.rows * stride)?;
        let scales = from.array(dense.rows)?;
        let row_stats = RowStatsArrays::read(dense.rows, from)?;
        let six = match screen::machine_has_six() {
            true => {
                let rows = from.aligned(six::size(dense.rows * stride))?;
                Some(SixBitCopy { rows, row_stats: RowStatsArrays::read(dense.rows, from)? })
            }
            false => None,
        };
        Ok(Some(Self { rows, stride, scales, row_stats, six }))
    }

    /// Returns the memory in bytes that [`Self::from_dense`] would take.
    pub fn size_for(dense: Dense<'_>) -> usize {
        if !can_screen(dense) {
            return 0;
        }
        let bytes = dense.rows * dense.cols.next_multiple_of(STRIDE);
        let stats = RowStatsArrays::size_for(dense.rows);
        let six = if screen::machine_has_six() { six::size(bytes) + stats } else { 0 };
        bytes + dense.rows * 4 + stats + six
    }

    /// Returns the memory in bytes.
    pub fn size_bytes(&self) -> usize {
        let six = self.six.as_ref().map_or(0, |six| six.rows.len() + six.row_stats.size_bytes());
        self.rows.len() + self.scales.len() * 4 + self.row_stats.size_bytes() + six
    }

    /// Returns the number of bytes read to estimate all logits of one hidden row.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        let rows = self.six(isa, 1).map_or(&self.rows, |six| &six.rows);
        rows.len() + self.scales.len() * 4 + self.row_stats.size_bytes()
    }

    /// Returns the six-bit copy, if `n` hidden rows are multiplied by it first.
    pub(super) fn six(&self, isa: Isa, n: usize) -> Option<&SixBitCopy> {
        self.six.as_ref().filter(|_| n <= SIX_BIT_ROWS_MAX && screen::has_six(isa))
    }

    /// Returns whether finding `count` largest logits is faster than computing all.
    pub fn pays_for(&self, count: usize) -> bool {
        count.saturating_mul(SCREEN_SHARE) <= self.scales.len()
    }

    /// Asks for a row of the int8 copy before it is read.
    pub(super) fn prefetch(&self, row: usize) {
        prefetch::all(&self.rows[row * self.stride..(row + 1) * self.stride]);
    }

    /// Returns the int8 values of a range of rows. // (rows, stride)
    pub(super) fn rows(&self, range: Range<usize>) -> &[i8] {
        bytemuck::cast_slice(&self.rows[range.start * self.stride..range.end * self.stride])
    }
}

impl RowStatsArrays {
    fn new(rows: &[RowStats]) -> Self {
        Self {
            sums: rows.iter().map(|row| row.sum).collect(),
            errors: rows.iter().map(|row| row.error).collect(),
            norms: rows.iter().map(|row| row.norm).collect(),
        }
    }

    fn write<'a>(&'a self, sections: &mut Sections<'a>) {
        sections.push(&self.sums);
        sections.push(&self.errors);
        sections.push(&self.norms);
    }

    fn read(rows: usize, from: &mut PackedReader<'_>) -> Result<Self, Damaged> {
        Ok(Self { sums: from.array(rows)?, errors: from.array(rows)?, norms: from.array(rows)? })
    }

    fn size_bytes(&self) -> usize {
        Self::size_for(self.sums.len())
    }

    /// Returns the size in bytes of the stats of this many rows; the scales are apart.
    fn size_for(rows: usize) -> usize {
        rows * (size_of::<RowStats>() - size_of::<f32>())
    }

    /// Returns the error bounds of the estimated logits in `range`, from the factors of a hidden row.
    pub fn bounds(&self, range: Range<usize>, (by_error, by_norm): (f32, f32)) -> Bounds<'_> {
        let (errors, norms) = (&self.errors[range.clone()], &self.norms[range]);
        Bounds { errors, norms, by_error, by_norm }
    }
}

impl SixBitCopy {
    /// Packs the high six bits of an int8 copy `(vocab, stride)` of a head.
    fn pack(dense: Dense<'_>, int8: &[u8], stride: usize, scales: &[f32]) -> Self {
        let mut rows = AlignedBytes::zeroed(six::size(int8.len()));
        let packed =
            rows.par_chunks_exact_mut(six::size(stride)).zip(int8.par_chunks_exact(stride));
        let row_stats: Vec<RowStats> = packed
            .enumerate()
            .map_init(
                || vec![0f32; dense.cols],
                |wide, (row, (out, int8))| {
                    let int8: &[i8] = bytemuck::cast_slice(int8);
                    six::pack(int8, out);
                    dense.row(row, wide);
                    row_stats(wide, int8.iter().map(|&element| six::rounded(element)), scales[row])
                },
            )
            .collect();
        Self { rows, row_stats: RowStatsArrays::new(&row_stats) }
    }

    /// Returns the packed bits of a range of rows. // (rows, six::size(stride))
    pub fn rows(&self, range: Range<usize>, stride: usize) -> &[u8] {
        let bytes = six::size(stride);
        &self.rows[range.start * bytes..range.end * bytes]
    }
}

/// Writes `int8 = round_half_even(w / scale)` with `scale = max|w| / 127` to the front of `out`; the rest
/// stays zero.
pub(in crate::backend) fn quantize(w: &[f32], out: &mut [u8]) -> RowStats {
    let largest = w.iter().fold(0f32, |a, b| a.max(b.abs()));
    let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
    for (q, w) in out.iter_mut().zip(w) {
        *q = screen::nearest((w / scale).clamp(-127.0, 127.0)) as i8 as u8;
    }
    row_stats(w, out.iter().map(|&q| q as i8), scale)
}

/// Computes the stats of a row that is stored as `scale · int8`.
fn row_stats(w: &[f32], int8: impl Iterator<Item = i8>, scale: f32) -> RowStats {
    let (mut error, mut norm, mut sum) = (0f64, 0f64, 0i32);
    for (w, q) in w.iter().zip(int8) {
        let value = f64::from(q) * f64::from(scale);
        let lost = f64::from(*w) - value;
        (error, norm, sum) = (error + lost * lost, norm + value * value, sum + i32::from(q));
    }
    RowStats {
        scale,
        sum,
        error: error.sqrt() as f32 * ROUND_UP,
        norm: norm.sqrt() as f32 * ROUND_UP,
    }
}
