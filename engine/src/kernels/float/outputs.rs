//! The steps after the integer products of a linear: scales, the residual and the gate, for all rows of
//! a step in one call. A task has few columns, so a call per row would cost as much as the work.

use std::{marker::PhantomData, ops::Range};

use super::lanes::{LANES, Lanes};
use crate::{config::Activation, formats::Scale};

/// Integer sums of some columns of a linear, for every row of a step. The value of a sum is
/// `(sum / s) · scale` or `sum / (s · scale)`, where `s` is the quantization scale of its row.
#[derive(Debug, Clone, Copy)]
pub struct Sums<'a> {
    /// The sums; a row may have more than there are columns. // (rows, stride)
    pub sums: &'a [i32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// Quantization scale of each row. // (rows)
    pub scales: &'a [f32],
    /// Scale of the matrix.
    pub scale: Scale,
}

/// Values of some columns of a linear, for every row of a step.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// The values; a row may have more than there are columns. // (rows, stride)
    pub values: &'a [f32],
    /// Elements from one row to the next.
    pub stride: usize,
}

/// Columns of a buffer `(rows, width)` that one task writes.
#[derive(Debug)]
pub struct Columns<'a> {
    data: *mut f32, // the first column in row 0
    rows: usize,
    width: usize,
    count: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

impl<'a> Columns<'a> {
    /// Returns the given columns of `buffer`, which has rows of `width`.
    ///
    /// # Panics
    /// If the columns exceed a row, or the last row is not whole.
    pub fn new(buffer: &'a mut [f32], width: usize, columns: Range<usize>) -> Self {
        // SAFETY: the buffer is borrowed for as long as the columns live.
        unsafe { Self::shared(buffer.as_mut_ptr(), buffer.len(), width, columns) }
    }

    /// As [`Columns::new`], for a buffer with other columns in use elsewhere.
    ///
    /// # Panics
    /// As [`Columns::new`].
    ///
    /// # Safety
    /// `data` is valid for reading and writing `len` elements for `'a`, and these columns are not used
    /// elsewhere in that time.
    pub unsafe fn shared(data: *mut f32, len: usize, width: usize, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= width && len.is_multiple_of(width));
        let (rows, count) = (len / width, columns.len());
        // Not dereferenced if there are no rows.
        let data = data.wrapping_add(columns.start);
        Self { data, rows, width, count, buffer: PhantomData }
    }

    fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows);
        // SAFETY: `count` elements of a row of the buffer, which belong to this value.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(row * self.width), self.count) }
    }
}

/// `out = values`
///
/// # Safety
/// The lanes' ISA must be available (as for every function here).
#[inline(always)]
pub unsafe fn rescale<L: Lanes>(sums: &Sums<'_>, out: &mut Columns<'_>) {
    // SAFETY: the caller has the ISA.
    unsafe { each::<L, 1>([sums], out, Set) }
}

/// `out += values`
///
/// # Safety
/// As for [`rescale`].
#[inline(always)]
pub unsafe fn add_rescaled<L: Lanes>(sums: &Sums<'_>, out: &mut Columns<'_>) {
    // SAFETY: the caller has the ISA.
    unsafe { each::<L, 1>([sums], out, Add) }
}

/// Computes the gate of the feed-forward block, `out = act(gate) ⊙ up`.
///
/// # Safety
/// As for [`rescale`].
#[inline(always)]
pub unsafe fn gate<L: Lanes>(
    activation: Activation,
    gate: &Sums<'_>,
    up: &Sums<'_>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller has the ISA.
    unsafe {
        match activation {
            Activation::SquaredRelu => each::<L, 2>([gate, up], out, SquaredRelu),
            Activation::Silu => each::<L, 2>([gate, up], out, Silu),
        }
    }
}

/// `out = values`
///
/// # Safety
/// As for [`rescale`].
#[inline(always)]
pub unsafe fn set_values<L: Lanes>(values: &Values<'_>, out: &mut Columns<'_>) {
    // SAFETY: the caller has the ISA.
    unsafe { each_value::<L, 1>([values], out, Set) }
}

/// `out += values`
///
/// # Safety
/// As for [`rescale`].
#[inline(always)]
pub unsafe fn add_values<L: Lanes>(values: &Values<'_>, out: &mut Columns<'_>) {
    // SAFETY: the caller has the ISA.
    unsafe { each_value::<L, 1>([values], out, Add) }
}

/// As [`gate`], of values.
///
/// # Safety
/// As for [`rescale`].
#[inline(always)]
pub unsafe fn gate_values<L: Lanes>(
    activation: Activation,
    gate: &Values<'_>,
    up: &Values<'_>,
    out: &mut Columns<'_>,
) {
    // SAFETY: the caller has the ISA.
    unsafe {
        match activation {
            Activation::SquaredRelu => each_value::<L, 2>([gate, up], out, SquaredRelu),
            Activation::Silu => each_value::<L, 2>([gate, up], out, Silu),
        }
    }
}

/// Computes an element of the output from the values of linears and the old element. Not a closure,
/// because a closure may not be inlined and then lacks the features of the ISA.
trait Finish<L: Lanes, const N: usize>: Copy {
    unsafe fn finish(self, values: [L; N], old: L) -> L;
}

#[derive(Clone, Copy)]
struct Set;
#[derive(Clone, Copy)]
struct Add;
#[derive(Clone, Copy)]
struct SquaredRelu;
#[derive(Clone, Copy)]
struct Silu;

impl<L: Lanes> Finish<L, 1> for Set {
    #[inline(always)]
    unsafe fn finish(self, [value]: [L; 1], _old: L) -> L {
        value
    }
}

impl<L: Lanes> Finish<L, 1> for Add {
    #[inline(always)]
    unsafe fn finish(self, [value]: [L; 1], old: L) -> L {
        // SAFETY: the caller has the ISA.
        unsafe { old.add(value) }
    }
}

impl<L: Lanes> Finish<L, 2> for SquaredRelu {
    #[inline(always)]
    unsafe fn finish(self, [gate, up]: [L; 2], _old: L) -> L {
        // SAFETY: the caller has the ISA.
        unsafe {
            let positive = gate.max(L::splat(0.0));
            positive.mul(positive).mul(up)
        }
    }
}

impl<L: Lanes> Finish<L, 2> for Silu {
    #[inline(always)]
    unsafe fn finish(self, [gate, up]: [L; 2], _old: L) -> L {
        // SAFETY: the caller has the ISA.
        unsafe {
            let minus = L::splat(0.0).sub(gate);
            gate.div(minus.exp().add(L::splat(1.0))).mul(up)
        }
    }
}

/// Sets every element of `out` to the result of `finish`.
#[inline(always)]
unsafe fn each<L: Lanes, const N: usize>(
    sums: [&Sums<'_>; N],
    out: &mut Columns<'_>,
    finish: impl Finish<L, N>,
) {
    let count = out.count;
    let fits = |of: &Sums<'_>| of.stride >= count && of.scales.len() == out.rows;
    assert!(sums.iter().all(|of| fits(of)));
    for row in 0..out.rows {
        let out = out.row(row);
        let mut rows: [&[i32]; N] = [&[]; N];
        for n in 0..N {
            rows[n] = &sums[n].sums[row * sums[n].stride..][..count];
        }
        let whole = count / LANES * LANES;
        // SAFETY: the caller has the ISA; pointers are valid for sixteen elements, of the slices or, for
        // the tail, of arrays of sixteen.
        unsafe {
            let mut rescales = [Rescale::<L>::new(1.0, Scale::Multiply(1.0)); N];
            for n in 0..N {
                rescales[n] = Rescale::new(sums[n].scales[row], sums[n].scale);
            }
            for at in (0..whole).step_by(LANES) {
                let mut values = [L::splat(0.0); N];
                for n in 0..N {
                    values[n] = rescales[n].value(rows[n].as_ptr().add(at));
                }
                let to = out.as_mut_ptr().add(at);
                finish.finish(values, L::load(to)).store(to);
            }
            if whole < count {
                let rest = count - whole;
                let mut values = [L::splat(0.0); N];
                for n in 0..N {
                    let mut tail = [0i32; LANES];
                    tail[..rest].copy_from_slice(&rows[n][whole..]);
                    values[n] = rescales[n].value(tail.as_ptr());
                }
                let mut new = [0f32; LANES];
                let old = L::load_first(out.as_ptr().add(whole), rest);
                finish.finish(values, old).store(new.as_mut_ptr());
                out[whole..].copy_from_slice(&new[..rest]);
            }
        }
    }
}

/// As [`each`], of values.
#[inline(always)]
unsafe fn each_value<L: Lanes, const N: usize>(
    values: [&Values<'_>; N],
    out: &mut Columns<'_>,
    finish: impl Finish<L, N>,
) {
    let count = out.count;
    assert!(values.iter().all(|of| of.stride >= count));
    let whole = count / LANES * LANES;
    for row in 0..out.rows {
        let out = out.row(row);
        let mut rows: [&[f32]; N] = [&[]; N];
        for n in 0..N {
            rows[n] = &values[n].values[row * values[n].stride..][..count];
        }
        // SAFETY: the caller has the ISA; pointers are valid for sixteen elements of the slices or, for the tail,
        // of an array of sixteen.
        unsafe {
            for at in (0..whole).step_by(LANES) {
                let mut of = [L::splat(0.0); N];
                for n in 0..N {
                    of[n] = L::load(rows[n].as_ptr().add(at));
                }
                let to = out.as_mut_ptr().add(at);
                finish.finish(of, L::load(to)).store(to);
            }
            if whole < count {
                let rest = count - whole;
                let mut of = [L::splat(0.0); N];
                for n in 0..N {
                    of[n] = L::load_first(rows[n].as_ptr().add(whole), rest);
                }
                let mut new = [0f32; LANES];
                let old = L::load_first(out.as_ptr().add(whole), rest);
                finish.finish(of, old).store(new.as_mut_ptr());
                out[whole..].copy_from_slice(&new[..rest]);
            }
        }
    }
}

/// Divisors for which all steps of [`Rescale::quotient`] stay in the normal numbers, for integer
/// dividends below 2^32.
const QUOTIENT_DIVISORS: std::ops::RangeInclusive<f32> = 1e-18..=1e18;

/// Converts the sums of a row to values.
#[derive(Clone, Copy)]
struct Rescale<L> {
    by_quotient: bool,
    divisor: L,
    minus_divisor: L,
    reciprocal: L,
    factor: L,
}

impl<L: Lanes> Rescale<L> {
    #[inline(always)]
    unsafe fn new(s: f32, scale: Scale) -> Self {
        let (divisor, factor) = match scale {
            Scale::Multiply(scale) => (s, scale),
            Scale::Divide(scale) => (s * scale, 1.0),
        };
        // SAFETY: the caller has the ISA.
        unsafe {
            Self {
                by_quotient: L::FUSED && QUOTIENT_DIVISORS.contains(&divisor),
                divisor: L::splat(divisor),
                minus_divisor: L::splat(-divisor),
                reciprocal: L::splat(1.0 / divisor),
                factor: L::splat(factor),
            }
        }
    }

    /// Returns the values of sixteen sums.
    #[inline(always)]
    unsafe fn value(&self, sums: *const i32) -> L {
        // SAFETY: the caller has the ISA and guarantees sixteen sums.
        unsafe {
            let sums = L::load_i32(sums);
            let quotients = match self.by_quotient {
                true => self.quotient(sums),
                false => sums.div(self.divisor),
            };
            quotients.mul(self.factor)
        }
    }

    /// Divides with correct rounding, in a fifth of the time: two corrections by the remainder. With a
    /// reciprocal to half an ulp, a quotient that is off by less than an ulp becomes the nearest one
    /// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", theorem
    /// 8.2); the first correction achieves this precondition.
    #[inline(always)]
    unsafe fn quotient(&self, sum: L) -> L {
        // SAFETY: the caller has the ISA.
        unsafe {
            let estimate = sum.mul(self.reciprocal);
            let near = estimate.mul_add(self.minus_divisor, sum).mul_add(self.reciprocal, estimate);
            near.mul_add(self.minus_divisor, sum).mul_add(self.reciprocal, near)
        }
    }
}
