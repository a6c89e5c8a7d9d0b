//! [`Activations`]: the int8 rows of a step, in the order in which a format's kernels read them.
//!
//! Kernels broadcast four activations at a time and multiply them by four codes, so a row is stored in
//! the order of the format's code vectors (`Layout::ORDER`), zero-padded to whole blocks. The stride
//! is an odd number of cache lines, because rows at a power of two would share one cache set.

#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;
use std::{marker::PhantomData, ops::Range};

use super::order;
use crate::formats::{
    Format,
    layout::{Layout, with_layout},
    memory::AlignedBytes,
};

/// Quantized activations of all rows of a step, and their sums. Reused from step to step: it allocates
/// only for the largest step so far.
#[derive(Debug)]
pub struct Activations {
    format: Format,
    cols: usize,
    rows: usize,
    stride: usize,
    data: AlignedBytes, // (rows, stride) of i8, then leftovers of larger steps
    sums: Vec<i32>,     // (rows,): exact sum of each row
}

impl Activations {
    /// Activations without rows.
    pub fn new() -> Self {
        Self {
            format: Format::I2S,
            cols: 0,
            rows: 0,
            stride: 0,
            data: AlignedBytes::default(),
            sums: Vec::new(),
        }
    }

    /// Resizes to `rows` rows of `cols` activations for matrices packed as `format`. The contents are
    /// unspecified until they are set.
    pub fn reset(&mut self, format: Format, cols: usize, rows: usize) {
        self.stride = Self::stride(format, cols);
        (self.format, self.cols, self.rows) = (format, cols, rows);
        self.data.grow(rows * self.stride);
        self.sums.resize(rows, 0);
    }

    /// Returns the number of bytes from one row to the next.
    pub(crate) fn stride(format: Format, cols: usize) -> usize {
        (padded_cols(format, cols).div_ceil(64) | 1) * 64
    }

    /// Returns the size in bytes of the activations of a row, and of its sum.
    pub(crate) fn row_bytes(format: Format, cols: usize) -> usize {
        Self::stride(format, cols) + size_of::<i32>()
    }

    /// Returns the packing of the matrices that these rows can be multiplied by.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Activations of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the number of rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the exact sum of each row. // (rows,)
    pub fn sums(&self) -> &[i32] {
        &self.sums
    }

    /// Sets row `index` to `q`, `cols` values.
    ///
    /// # Panics
    /// If `index` or the length of `q` does not fit.
    pub fn set_row(&mut self, index: usize, q: &[i8]) {
        assert!(index < self.rows, "row {index} of {}", self.rows);
        let row: &mut [i8] = bytemuck::cast_slice_mut(&mut self.data);
        let row = &mut row[index * self.stride..(index + 1) * self.stride];
        self.sums[index] = write_row(self.format, self.cols, row, q);
    }

    /// Returns a writer that sets rows from several threads at once.
    pub fn writer(&mut self) -> RowWriter<'_> {
        RowWriter {
            format: self.format,
            cols: self.cols,
            rows: self.rows,
            stride: self.stride,
            data: self.data.as_mut_ptr().cast(),
            sums: self.sums.as_mut_ptr(),
            borrow: PhantomData,
        }
    }

    /// Returns all rows.
    pub fn all(&self) -> ActivationRows<'_> {
        self.part(0..self.rows)
    }

    /// Returns some rows.
    ///
    /// # Panics
    /// If they exceed those that there are.
    pub fn part(&self, rows: Range<usize>) -> ActivationRows<'_> {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let data: &[i8] = bytemuck::cast_slice(&self.data);
        ActivationRows {
            format: self.format,
            cols: self.cols,
            stride: self.stride,
            data: &data[rows.start * self.stride..rows.end * self.stride],
            sums: &self.sums[rows],
        }
    }
}

impl Default for Activations {
    fn default() -> Self {
        Self::new()
    }
}

/// Some rows of [`Activations`].
#[derive(Debug, Clone, Copy)]
pub struct ActivationRows<'a> {
    pub(super) format: Format,
    pub(super) cols: usize,
    /// Bytes from one row to the next.
    pub(super) stride: usize,
    pub(super) data: &'a [i8], // (rows, stride)
    /// Exact sum of each row. // (rows,)
    pub(super) sums: &'a [i32],
}

/// Sets different rows of one [`Activations`] from different threads.
#[derive(Debug, Clone, Copy)]
pub struct RowWriter<'a> {
    format: Format,
    cols: usize,
    rows: usize,
    stride: usize,
    data: *mut i8,
    sums: *mut i32,
    borrow: PhantomData<&'a mut Activations>,
}

// SAFETY: the pointers are into an `Activations` that is borrowed mutably for 'a and contains plain
// integers; the contract of `set_row` excludes two threads on one row.
unsafe impl Send for RowWriter<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for RowWriter<'_> {}

impl RowWriter<'_> {
    /// Sets row `index` to `q`, `cols` values.
    ///
    /// # Panics
    /// If `index` or the length of `q` does not fit.
    ///
    /// # Safety
    /// No other call for the same `index` runs at the same time.
    pub unsafe fn set_row(&self, index: usize, q: &[i8]) {
        assert!(index < self.rows, "row {index} of {}", self.rows);
        // SAFETY: `index < rows`, and `data` holds rows * stride bytes; the caller guarantees that no
        // other call uses this row, and rows do not overlap.
        let row = unsafe {
            std::slice::from_raw_parts_mut(self.data.add(index * self.stride), self.stride)
        };
        let sum = write_row(self.format, self.cols, row, q);
        // SAFETY: `sums` holds `rows` sums; the caller guarantees that no other call uses this one.
        unsafe { self.sums.add(index).write(sum) };
    }
}

/// Returns the length of a row of `cols` activations once padded to whole blocks.
pub fn padded_cols(format: Format, cols: usize) -> usize {
    with_layout!(format, L => cols.next_multiple_of(L::BLOCK_COLS))
}

/// Writes `q` in the format's order, padded with zeros to whole blocks; returns its sum.
fn write_row(format: Format, cols: usize, row: &mut [i8], q: &[i8]) -> i32 {
    assert_eq!(q.len(), cols, "activations of a row");
    order::write_in(format, &mut row[..padded_cols(format, cols)], q)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tl1_rows_are_evens_then_odds_of_eight() {
        let mut x = Activations::new();
        x.reset(Format::Tl1, 18, 1);
        x.set_row(0, &std::array::from_fn::<i8, 18, _>(|k| k as i8 + 1));
        let expect = [1, 3, 5, 7, 2, 4, 6, 8, 9, 11, 13, 15, 10, 12, 14, 16, 17, 0, 0, 0, 18, 0];
        assert_eq!(x.all().data[..22], expect);
        assert_eq!(x.all().data[22..32], [0; 10]);
        assert_eq!(x.sums(), [171]);
    }

    #[test]
    fn tl2_rows_are_thirds_of_twelve() {
        let mut x = Activations::new();
        x.reset(Format::Tl2, 24, 1);
        x.set_row(0, &std::array::from_fn::<i8, 24, _>(|k| k as i8));
        assert_eq!(x.all().data[..12], [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]);
        assert_eq!(x.all().data[12..24], [12, 15, 18, 21, 13, 16, 19, 22, 14, 17, 20, 23]);
    }

    #[test]
    fn padding_is_zero_after_a_larger_step() {
        let mut x = Activations::new();
        for format in Format::ALL {
            x.reset(format, 480, 2);
            (0..2).for_each(|row| x.set_row(row, &[-7; 480]));
            x.reset(format, 50, 2);
            (0..2).for_each(|row| x.set_row(row, &[1; 50]));
            for row in x.all().data.chunks(x.stride) {
                let total: i32 = row[..padded_cols(format, 50)].iter().map(|&q| i32::from(q)).sum();
                assert_eq!(total, 50, "{format}");
            }
            assert_eq!(x.sums(), [50, 50]);
        }
    }

    #[test]
    fn threads_set_rows_of_one_step() {
        let mut x = Activations::new();
        x.reset(Format::Tl2, 100, 8);
        let writer = x.writer();
        std::thread::scope(|scope| {
            for first in 0..2 {
                scope.spawn(move || {
                    for row in (first..8).step_by(2) {
                        // SAFETY: one thread has the even rows, the other the odd ones.
                        unsafe { writer.set_row(row, &[row as i8; 100]) };
                    }
                });
            }
        });
        assert_eq!(x.sums(), [0, 100, 200, 300, 400, 500, 600, 700]);
    }
}
