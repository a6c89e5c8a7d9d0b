//! The product with scales of groups ([`crate::kernels::group_gemm`]) with AMX-INT8.
//!
//! The sets of activations of a product are 16 rows and 16 more, or the high and the low digits of 16 rows. A group
//! of 128 inputs is two steps. Its sums are stored, and vectors join them with the scales while the tile registers
//! multiply the next group.
//!
//! ```text
//! for each pair of tiles
//!   for each set of rows
//!     for each group: expand the codes of the next group (once for all rows), multiply, store the sums,
//!                     join the sums of the previous group
//! ```

use std::arch::x86_64::*;

use half::f16;

use super::{
    super::{
        many_groups,
        registers::{Registers, SIDE, Shape, clear_sums, multiply, store_registers},
    },
    amx::{CODES, FEW, expand},
    gfni::Gfni,
};
use crate::{
    formats::TILE_ROWS,
    kernels::{
        generic::vectors::{Expand, Tile},
        product::GroupProduct,
    },
};

/// Sums of a group: each set's with the first tile, then the second.
#[repr(C, align(64))]
struct Sums([[[i32; TILE_ROWS]; SIDE]; 4]);

/// Runs the product.
///
/// # Safety
/// The machine has AVX-512 with VNNI and GFNI, and AMX; the shapes of `product` are consistent.
pub(in super::super) unsafe fn gemm<E: Expand<Gfni>>(product: GroupProduct<'_>) {
    let GroupProduct { tiles, tile_bytes, groups, group_blocks, tile_scales, digits, .. } = product;
    let GroupProduct { digit_bytes, x, x_stride, sums, row_scales, y, .. } = &product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len() / groups);
    if rows < FEW {
        // SAFETY: guaranteed by the caller.
        return unsafe { many_groups::gemm::<Gfni, E>(product) };
    }
    assert!(*digit_bytes == group_blocks * E::BLOCK_COLS && (1..=2).contains(&digits));
    assert!(tile_bytes >= E::tile_bytes(groups * group_blocks));
    // The last step of a digit may read up to a line more than the digit has; the rows end with such a line.
    assert!(x.len() >= (rows - 1) * x_stride + groups * digits * digit_bytes + 64);
    assert!(row_scales.len() == rows * groups && y.len() >= rows * tile_count * TILE_ROWS);
    assert!(tile_scales.len() >= tile_count * groups * TILE_ROWS);
    // SAFETY: the shapes were just checked.
    unsafe { run::<E>(product, tile_count, rows) }
}

/// # Safety
/// As for [`gemm`], after its checks.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
unsafe fn run<E: Expand<Gfni>>(product: GroupProduct<'_>, tile_count: usize, rows: usize) {
    let GroupProduct { tiles, tile_bytes, groups, group_blocks, tile_scales, digits, .. } = product;
    let GroupProduct { digit_bytes, x, x_stride, sums, row_scales, y, .. } = product;
    let steps = (group_blocks * E::PARTS * E::CODES).div_ceil(SIDE);
    // Rows of both sets of activations.
    let set = if digits == 2 { SIDE } else { 2 * SIDE };
    let mut buffer = CODES.take();
    buffer.grow(2 * groups * steps * SIDE * 64);
    let codes = buffer.as_mut_ptr().cast::<__m512i>();
    let codes_at =
        |group: usize| [0, groups].map(|first| codes.wrapping_add((first + group) * steps * SIDE));
    let mut registers = Registers::default();
    let mut stored = [const { Sums([[[0; TILE_ROWS]; SIDE]; 4]) }; 2];
    for first in (0..tile_count).step_by(2) {
        let pair = tile_count - first > 1;
        for row in (0..rows).step_by(set) {
            let count = set.min(rows - row);
            let shape = match digits {
                2 => Shape { rows: [count; 2], pair },
                _ => Shape::of_rows(count, pair),
            };
            // SAFETY: `gemm` checked that the slices hold the tiles, their scales and the rows; the codes of a group
            // are expanded before they are multiplied.
            unsafe {
                registers.configure(shape);
                for group in 0..groups + AHEAD {
                    if row == 0 && group < groups {
                        let blocks = group * group_blocks..(group + 1) * group_blocks;
                        for (tile, codes) in (first..tile_count).zip(codes_at(group)) {
                            let bytes = tiles[tile * tile_bytes..].as_ptr();
                            let tile = Tile { bytes, blocks: groups * group_blocks };
                            expand::<E>(tile, blocks.clone(), codes, steps * SIDE);
                        }
                    }
                    let Some(group) = group.checked_sub(AHEAD) else { continue };
                    clear_sums();
                    let x = x.as_ptr().add(row * x_stride + group * digits * digit_bytes);
                    let second = if digits == 2 { digit_bytes } else { SIDE * x_stride };
                    let x = [x, x.wrapping_add(second)];
                    let codes = codes_at(group).map(|codes| codes.cast_const().cast());
                    multiply(shape, steps, x, x_stride, codes);
                    store_registers(shape, stored[group % 2].0.as_mut_ptr().cast());
                    let mut join_group = |group: usize| {
                        let of_rows = row * groups + group;
                        for tile in 0..1 + usize::from(pair) {
                            let of_tile = ((first + tile) * groups + group) * TILE_ROWS;
                            let join = Join {
                                sums: &stored[group % 2],
                                tile,
                                digits,
                                rows: count,
                                less: sums[of_rows..].as_ptr(),
                                row_scales: row_scales[of_rows..].as_ptr(),
                                stride: groups,
                                scales: tile_scales[of_tile..].as_ptr(),
                                is_first: group == 0,
                            };
                            let at = (row * tile_count + first + tile) * TILE_ROWS;
                            join.add(y[at..].as_mut_ptr(), tile_count * TILE_ROWS);
                        }
                    };
                    if group > 0 {
                        join_group(group - 1);
                    }
                    if group + 1 == groups {
                        join_group(group);
                    }
                }
            }
        }
    }
    CODES.set(buffer);
}

/// Groups between the expansion of codes and their products.
const AHEAD: usize = 1;

/// Sums of a group to be joined with its scales, for a tile.
struct Join<'a> {
    sums: &'a Sums,
    tile: usize,
    digits: usize,
    rows: usize,
    /// The first row's sum of the group's integers; those of rows are `stride` apart.
    less: *const i32,
    row_scales: *const f32,
    stride: usize,
    scales: *const f16,
    is_first: bool,
}

impl Join<'_> {
    /// `y = fma(f32(256 · high + low − sum of the row's integers), scales · row's scale, y)` for each row, with `y = 0`
    /// at the first group.
    ///
    /// # Safety
    /// The pointers are valid for the rows, and `y` for rows `y_stride` apart.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
    unsafe fn add(&self, y: *mut f32, y_stride: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let load = |sums: &[i32; TILE_ROWS]| _mm512_load_si512(sums.as_ptr().cast());
            let scales = _mm512_cvtph_ps(_mm256_loadu_si256(self.scales.cast()));
            for row in 0..self.rows {
                let total = if self.digits == 2 {
                    let high = load(&self.sums.0[self.tile][row]);
                    let low = load(&self.sums.0[2 + self.tile][row]);
                    _mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)
                } else {
                    load(&self.sums.0[2 * (row / SIDE) + self.tile][row % SIDE])
                };
                let less = _mm512_set1_epi32(*self.less.add(row * self.stride));
                let scale = _mm512_set1_ps(*self.row_scales.add(row * self.stride));
                let to = y.add(row * y_stride);
                let before = if self.is_first { _mm512_setzero_ps() } else { _mm512_loadu_ps(to) };
                let total = _mm512_cvtepi32_ps(_mm512_sub_epi32(total, less));
                let after = _mm512_fmadd_ps(total, _mm512_mul_ps(scales, scale), before);
                _mm512_storeu_ps(to, after);
            }
        }
    }
}
