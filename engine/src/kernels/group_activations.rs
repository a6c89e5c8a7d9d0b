//! [`GroupActivations`]: the rows of a step for matrices with scales of groups, as one or two int8 digits.
//!
//! A token's activations have one scale for each [`SCALED_INPUTS`] inputs (fewer in the last group of a row that is not
//! a multiple). With `a = max(1e-5, max|x|)` of such a group, activation `x` becomes the integer
//!
//! - one digit: `q = round_half_even(x / s)` with `s = a / 127`;
//! - two digits: `q = round_half_even(x / s)` with `s = a / 32639`, stored as `q = 256 · high + low` with
//!   `high = ⌊(q + 128) / 256⌋`, so that both are int8. The error of `x` is at most `a / 65278`: 15 bits and a sign.
//!
//! A sum of 128 products of trits and `q` is below 2^23, so it is exact as an int32 and as an f32.
//!
//! Layout: `(row, group, digit, group's inputs)`. A group is one of the matrix (64 or 128 inputs), in the order of the
//! format's code vectors, zero-padded to whole blocks. Rows are an odd number of cache lines apart, as in
//! [`super::Activations`].

use std::{marker::PhantomData, ops::Range};

use super::order;
use crate::{
    formats::{
        Format,
        layout::{Layout, with_layout},
        memory::AlignedBytes,
    },
    names::names,
};

/// Inputs of a token that share a scale.
pub const SCALED_INPUTS: usize = 128;

/// The number of int8 digits of an activation, where a model leaves the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Digits {
    /// One digit: 8 bits.
    One,
    /// Two digits: about 16 bits.
    Two,
}

names!(Digits, "activation type", One = "int8", Two = "int16");

impl Digits {
    /// Returns the number of digits.
    pub fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Returns the largest integer of an activation.
    pub fn limit(self) -> f32 {
        match self {
            Self::One => 127.0,
            Self::Two => 32_639.0, // 256 · 127 + 127
        }
    }
}

/// The shape of [`GroupActivations`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShape {
    /// Packing of the matrices.
    pub format: Format,
    /// Digits of an activation.
    pub digits: Digits,
    /// Activations of a row.
    pub cols: usize,
    /// Inputs of a group of the matrices.
    pub group: usize,
}

impl GroupShape {
    /// Returns the number of groups of a row.
    pub fn groups(self) -> usize {
        self.cols / self.group
    }

    /// Returns the number of scales of a row.
    pub fn scales(self) -> usize {
        self.cols.div_ceil(SCALED_INPUTS)
    }

    /// Returns the number of bytes of a digit of a group.
    pub(super) fn digit_bytes(self) -> usize {
        with_layout!(self.format, L => self.group.next_multiple_of(L::BLOCK_COLS))
    }

    /// Returns the number of bytes from one row to the next.
    pub(crate) fn stride(self) -> usize {
        let bytes = self.groups() * self.digits.count() * self.digit_bytes();
        (bytes.div_ceil(64) | 1) * 64
    }

    /// Returns the size in bytes of the activations of a row, with their sums and scales.
    pub(crate) fn row_bytes(self) -> usize {
        self.stride() + self.groups() * (size_of::<i32>() + size_of::<f32>())
    }
}

/// Quantized activations of all rows of a step, with the scale and the sum of each group. Reused from step to step: it
/// allocates only for the largest step so far.
#[derive(Debug)]
pub struct GroupActivations {
    shape: GroupShape,
    rows: usize,
    data: AlignedBytes, // (rows, stride) of i8, a line, then leftovers of larger steps
    sums: Vec<i32>,     // (rows, groups): exact sums of the integers
    scales: Vec<f32>,   // (rows, groups)
}

impl Default for GroupActivations {
    fn default() -> Self {
        let (format, digits) = (Format::I2S, Digits::One);
        let shape = GroupShape { format, digits, cols: 0, group: SCALED_INPUTS };
        Self { shape, rows: 0, data: AlignedBytes::default(), sums: Vec::new(), scales: Vec::new() }
    }
}

impl GroupActivations {
    /// Resizes to `rows` rows. The contents are unspecified until they are set.
    ///
    /// # Panics
    /// If a row is not a whole number of groups, or a group has neither 64 nor 128 inputs.
    pub fn reset(&mut self, shape: GroupShape, rows: usize) {
        assert!(matches!(shape.group, 64 | SCALED_INPUTS), "groups of {}", shape.group);
        assert!(shape.cols.is_multiple_of(shape.group), "{} in groups", shape.cols);
        (self.shape, self.rows) = (shape, rows);
        // Kernels may read a line past the last digit, whose values do not count.
        self.data.grow(rows * shape.stride() + 64);
        self.sums.resize(rows * shape.groups(), 0);
        self.scales.resize(rows * shape.groups(), 0.0);
    }

    /// Returns the shape of the rows.
    pub fn shape(&self) -> GroupShape {
        self.shape
    }

    /// Returns the number of rows of the step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns all rows.
    pub fn all(&self) -> GroupRows<'_> {
        self.part(0..self.rows)
    }

    /// Returns some rows.
    ///
    /// # Panics
    /// If they exceed those that there are.
    pub fn part(&self, rows: Range<usize>) -> GroupRows<'_> {
        assert!(rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (stride, groups) = (self.shape.stride(), self.shape.groups());
        let data: &[i8] = bytemuck::cast_slice(&self.data);
        GroupRows {
            shape: self.shape,
            count: rows.len(),
            data: &data[rows.start * stride..rows.end * stride + 64],
            sums: &self.sums[rows.start * groups..rows.end * groups],
            scales: &self.scales[rows.start * groups..rows.end * groups],
        }
    }

    /// Sets row `index`; see [`GroupRowWriter::set_row`].
    ///
    /// # Panics
    /// If `index` or a length does not fit.
    pub fn set_row(&mut self, index: usize, q: &[i8], scales: &[f32]) {
        // SAFETY: `&mut self` is the only access.
        unsafe { self.writer().set_row(index, q, scales) }
    }

    /// Returns a writer that sets rows from several threads at once.
    pub fn writer(&mut self) -> GroupRowWriter<'_> {
        GroupRowWriter {
            shape: self.shape,
            rows: self.rows,
            data: self.data.as_mut_ptr().cast(),
            sums: self.sums.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            borrow: PhantomData,
        }
    }

    #[cfg(test)]
    pub(crate) fn size_bytes(&self) -> usize {
        self.rows * self.shape.row_bytes()
    }
}

/// Some rows of [`GroupActivations`].
#[derive(Debug, Clone, Copy)]
pub struct GroupRows<'a> {
    pub(super) shape: GroupShape,
    pub(super) count: usize,
    /// The rows, and a line more. // (rows, stride)
    pub(super) data: &'a [i8],
    /// Exact sum of each group. // (rows, groups)
    pub(super) sums: &'a [i32],
    /// Scale of each group of the matrix. // (rows, groups)
    pub(super) scales: &'a [f32],
}

/// Sets different rows of one [`GroupActivations`] from different threads.
#[derive(Debug, Clone, Copy)]
pub struct GroupRowWriter<'a> {
    shape: GroupShape,
    rows: usize,
    data: *mut i8,
    sums: *mut i32,
    scales: *mut f32,
    borrow: PhantomData<&'a mut GroupActivations>,
}

// SAFETY: the pointers are into a `GroupActivations` that is borrowed mutably for 'a and contains plain
// numbers; the contract of `set_row` excludes two threads on one row.
unsafe impl Send for GroupRowWriter<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for GroupRowWriter<'_> {}

impl GroupRowWriter<'_> {
    /// Sets row `index` to digits `q`, `(digits, cols)` with the high digits first, and their scales, one for each
    /// [`SCALED_INPUTS`] inputs.
    ///
    /// # Panics
    /// If `index` or a length does not fit.
    ///
    /// # Safety
    /// No other call for the same `index` runs at the same time.
    pub unsafe fn set_row(&self, index: usize, q: &[i8], scales: &[f32]) {
        let GroupShape { format, digits, cols, group } = self.shape;
        assert!(index < self.rows, "row {index} of {}", self.rows);
        assert_eq!((q.len(), scales.len()), (digits.count() * cols, self.shape.scales()));
        let (groups, stride) = (self.shape.groups(), self.shape.stride());
        // SAFETY: `index < rows`, and the buffers hold `rows` rows; the caller guarantees that no other call uses this
        // row, and rows do not overlap.
        let (row, sums, group_scales) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.data.add(index * stride), stride),
                std::slice::from_raw_parts_mut(self.sums.add(index * groups), groups),
                std::slice::from_raw_parts_mut(self.scales.add(index * groups), groups),
            )
        };
        let digit_bytes = self.shape.digit_bytes();
        let places = row.chunks_exact_mut(digits.count() * digit_bytes);
        for (g, ((place, sum), scale)) in places.zip(sums).zip(group_scales).enumerate() {
            *scale = scales[g * group / SCALED_INPUTS];
            *sum = 0;
            for (digit, place) in place.chunks_exact_mut(digit_bytes).enumerate() {
                let q = &q[digit * cols + g * group..][..group];
                *sum = 256 * *sum + order::write_in(format, place, q);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_digits_sums_and_scales_by_group() {
        let mut x = GroupActivations::default();
        let shape = GroupShape { format: Format::I2S, digits: Digits::Two, cols: 192, group: 64 };
        x.reset(shape, 2);
        let q: Vec<i8> = (0..2 * 192).map(|i| (i * 7) as u8 as i8).collect();
        x.set_row(1, &q, &[0.5, 0.25]);
        let row = &x.part(1..2).data;
        for group in 0..3 {
            assert_eq!(row[group * 128..][..64], q[group * 64..][..64], "high");
            assert_eq!(row[group * 128 + 64..][..64], q[192 + group * 64..][..64], "low");
            let sum = |from: usize| q[from..from + 64].iter().map(|&q| i32::from(q)).sum::<i32>();
            let expected = 256 * sum(group * 64) + sum(192 + group * 64);
            assert_eq!(x.part(1..2).sums[group], expected);
        }
        assert_eq!(x.part(1..2).scales, [0.5, 0.5, 0.25]);
    }

    #[test]
    fn groups_are_padded_to_blocks() {
        let of = |format, group| GroupShape { format, digits: Digits::One, cols: 384, group };
        assert_eq!(of(Format::Tl2, 128).digit_bytes(), 144);
        assert_eq!(of(Format::Tl2, 64).digit_bytes(), 72);
        assert_eq!(of(Format::Tl1, 128).digit_bytes(), 128);
        let mut x = GroupActivations::default();
        x.reset(of(Format::Tl2, 128), 1);
        x.set_row(0, &[1; 384], &[1.0; 3]);
        let total: i32 = x.all().data[..3 * 144].iter().map(|&q| i32::from(q)).sum();
        assert_eq!((total, x.all().sums), (384, &[128; 3][..]));
    }
}
