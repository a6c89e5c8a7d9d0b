//! The dot products of [`super::super::dots`] with AMX-INT8, for at least [`FEW`] rows of digits.
//!
//! `tdpbsud` multiplies 16 head rows by 16 rows of digits that are stored as columns: line `k` of a
//! register's 16 lines holds elements `4 k..4 k + 4` of each digit row. A step is 64 elements of all
//! rows.

use std::{arch::asm, arch::x86_64::*};

use bytemuck::Zeroable;

use super::dots_avx512;
use crate::{
    formats::memory::Line,
    kernels::{
        Isa,
        x86_64::registers::{AWAKE, ROWS_MAX, Registers, SIDE, Shape, clear_sums},
    },
};

/// Smallest number of digit rows for which this is faster than vectors.
const FEW: usize = 5;
/// Registers of columns that are multiplied at a time.
const GROUPS: usize = 4;
/// Elements of a row in a register.
const STEP: usize = 64;

/// Rows of digits as columns. // (len / STEP, group, SIDE lines)
#[derive(Debug, Clone, Default)]
pub struct Columns {
    lines: Vec<Line>,
    groups: usize,
}

impl Columns {
    /// Stores digits `(n, len)` as columns, if the ISA is AMX and there are at least [`FEW`] rows.
    pub fn set(&mut self, isa: Isa, digits: &[u8], len: usize) {
        self.lines.clear();
        let n = digits.len() / len;
        if isa != Isa::Amx || n < FEW {
            return;
        }
        self.groups = n.div_ceil(SIDE);
        self.lines.resize(len / STEP * self.groups * SIDE, Line::zeroed());
        for (row, digits) in digits.chunks_exact(len).enumerate() {
            let (group, column) = (row / SIDE, row % SIDE);
            for (k, four) in digits.chunks_exact(4).enumerate() {
                let line = (k / SIDE * self.groups + group) * SIDE + k % SIDE;
                self.lines[line].0[4 * column..4 * column + 4].copy_from_slice(four);
            }
        }
    }

    /// Returns whether AMX is not used.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

/// Sums of 16 head rows with 16 rows of digits each. // (group, head row, row of digits)
#[repr(C, align(64))]
struct Sums([[[i32; SIDE]; SIDE]; GROUPS]);

/// As [`super::super::dots`]; `columns` holds the digits.
///
/// # Safety
/// The machine has AMX; `out` has an element for each pair of rows of `len`.
pub unsafe fn dots(rows: &[i8], digits: &[u8], columns: &Columns, len: usize, out: &mut [i32]) {
    let (count, n) = (rows.len() / len, digits.len() / len);
    assert!(
        columns.lines.len() == len / STEP * columns.groups * SIDE && columns.groups * SIDE >= n
    );
    let mut sums = Sums([[[0; SIDE]; SIDE]; GROUPS]);
    let mut registers = Registers::default();
    let whole = count / SIDE * SIDE;
    for first in (0..whole).step_by(SIDE) {
        let rows = rows[first * len..].as_ptr();
        for group in (0..columns.groups).step_by(GROUPS) {
            let groups = GROUPS.min(columns.groups - group);
            // SAFETY: the caller has AMX; the slices hold 16 rows and these groups of every step.
            unsafe {
                registers.configure(Shape::of_rows(ROWS_MAX, true));
                let columns_of_step = columns.groups * SIDE;
                let lines = columns.lines[group * SIDE..].as_ptr();
                multiply(rows, len, lines, columns_of_step, groups, &mut sums, &mut registers);
            }
            for (index, sums) in sums.0[..groups].iter().enumerate() {
                let row = (group + index) * SIDE;
                for x in row..(row + SIDE).min(n) {
                    let out = &mut out[x * count + first..][..SIDE];
                    for (out, sums) in out.iter_mut().zip(sums) {
                        *out = sums[x - row];
                    }
                }
            }
        }
    }
    // SAFETY: passed on from the caller.
    unsafe { dots_avx512(whole, rows, digits, len, out) }
}

/// Multiplies 16 head rows by up to four groups of columns. The steps of the columns are `stride`
/// lines apart.
///
/// # Safety
/// The registers are configured for whole rows; the pointers are valid for rows and columns of `len`
/// elements.
unsafe fn multiply(
    rows: *const i8,
    len: usize,
    columns: *const Line,
    stride: usize,
    groups: usize,
    sums: &mut Sums,
    registers: &mut Registers,
) {
    /// Adds the products with a group's columns.
    macro_rules! group {
        ($product:literal, $index:literal, $columns:expr) => {
            if groups > $index {
                asm!(
                    "tileloadd tmm5, [{columns} + {line}]",
                    $product,
                    columns = in(reg) $columns.wrapping_add($index * SIDE),
                    line = in(reg) 64usize,
                    options(nostack, preserves_flags)
                );
            }
        };
    }
    // SAFETY: guaranteed by the caller; a prefetch cannot fault.
    unsafe {
        clear_sums();
        for step in 0..len / STEP {
            let row = rows.add(step * STEP);
            for next in SIDE..2 * SIDE {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(next * len));
            }
            asm!(
                "tileloadd tmm4, [{row} + {len}]",
                row = in(reg) row,
                len = in(reg) len,
                options(nostack, preserves_flags)
            );
            let columns = columns.add(step * stride);
            group!("tdpbsud tmm0, tmm4, tmm5", 0, columns);
            group!("tdpbsud tmm1, tmm4, tmm5", 1, columns);
            group!("tdpbsud tmm2, tmm4, tmm5", 2, columns);
            group!("tdpbsud tmm3, tmm4, tmm5", 3, columns);
            if step % AWAKE == AWAKE - 1 {
                registers.keep_awake();
            }
        }
        asm!(
            "tilestored [{sums} + {line}], tmm0",
            "tilestored [{sums} + {line} + 1024], tmm1",
            "tilestored [{sums} + {line} + 2048], tmm2",
            "tilestored [{sums} + {line} + 3072], tmm3",
            sums = in(reg) sums.0.as_mut_ptr(),
            line = in(reg) 64usize,
            options(nostack, preserves_flags)
        );
    }
}
