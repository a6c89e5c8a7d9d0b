//! The product with scales of groups: exact sums of each group, joined in f32 (see `kernels::group_gemm`).
//!
//! ```text
//! for each tile
//!   for each set of R activation rows
//!     for each group
//!       for each block of the group, for each part of it
//!         expand the codes                   (once for R rows and their digits)
//!         for each code vector, row and digit: broadcast 4 activations, accumulate
//!       for each row
//!         total = 256 · high + low − sum of the row's integers      (int32, exact)
//!         y = fma(f32(total), weight scales · row's scale, y)
//! ```
//!
//! A sum of 16-bit pairs ([`Vectors::ACCUMULATE_MAX`]) holds a group: 36 code vectors at most. Weights are read in memory
//! order; per multiply-add 1/4 byte (`i2_s`, `tl1`) or 5/24 byte and 9/8 for padding (`tl2`), and 1/64 byte of scales.

use half::f16;

use crate::{
    formats::TILE_ROWS,
    kernels::{
        generic::vectors::{CODES_MAX, Expand, Tile, Vectors, opaque},
        prefetch::{self, Ahead},
        product::GroupProduct,
    },
};

/// Most parts of a block, of all formats.
const PARTS_MAX: usize = 4;

/// Join of a group's sums with its scales, in sixteen f32 lanes.
///
/// # Safety
/// As for [`Vectors`].
pub(super) trait Join: Vectors {
    /// A tile's 16 outputs.
    type Floats: Copy;

    /// Largest number of rows with the sums of two digits in registers.
    const GROUP_ROWS: usize;

    /// Returns zeros.
    unsafe fn no_floats() -> Self::Floats;
    /// Loads 16 outputs.
    unsafe fn load_floats(from: *const f32) -> Self::Floats;
    /// Stores 16 outputs.
    unsafe fn store_floats(to: *mut f32, floats: Self::Floats);
    /// Loads 16 f16 values, widened exactly.
    unsafe fn load_scales(from: *const f16) -> Self::Floats;
    /// Returns 256 times each int32 lane.
    unsafe fn shifted(lanes: Self::Lanes) -> Self::Lanes;
    /// Returns `fma(f32(sum), scales · scale, y)`.
    unsafe fn join(
        y: Self::Floats,
        sum: Self::Lanes,
        scales: Self::Floats,
        scale: f32,
    ) -> Self::Floats;

    /// Runs [`rows_by_groups`] for 1 to [`Self::GROUP_ROWS`] rows of one or two digits, with the instruction set enabled.
    unsafe fn run_groups<E: Expand<Self>>(work: GroupWork, rows: usize, digits: usize);
}

/// Operands of [`rows_by_groups`]: a tile, and R rows.
#[derive(Clone, Copy)]
pub(super) struct GroupWork {
    tile: Tile,
    groups: usize,
    group_blocks: usize,
    /// Whether to prefetch weights: the tile's first set of rows does.
    prefetches: bool,
    ahead: Ahead,
    tile_scales: *const f16, // (groups, TILE_ROWS)
    /// The first row's activations. // (groups, digits, digit_bytes)
    x: *const i8,
    x_stride: usize,
    digit_bytes: usize,
    sums: *const i32,       // (rows, groups)
    row_scales: *const f32, // (rows, groups)
    /// The first row's outputs for the tile.
    y: *mut f32,
    y_stride: usize,
}

/// Runs the product with the vectors of `T`.
///
/// # Safety
/// The machine has `T`'s instruction set; the shapes of `product` are consistent.
pub(super) unsafe fn gemm<T: Join, E: Expand<T>>(product: GroupProduct<'_>) {
    check_shapes::<T, E>(&product);
    let GroupProduct { tiles, tile_bytes, groups, group_blocks, tile_scales, digits, .. } = product;
    let GroupProduct { digit_bytes, x, x_stride, sums, row_scales, y, .. } = product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len() / groups);
    let y_stride = tile_count * TILE_ROWS;
    // Sets of nearly equal size: 17 rows are 6, 6 and 5, not 8, 8 and 1.
    let sets = rows.div_ceil(T::GROUP_ROWS);
    for index in 0..tile_count {
        let bytes = tiles[index * tile_bytes..].as_ptr();
        for set in 0..sets {
            let (row, end) = (set * rows / sets, (set + 1) * rows / sets);
            // SAFETY: the tile and the rows are inside the product's slices, checked above.
            unsafe {
                let work = GroupWork {
                    tile: Tile { bytes, blocks: groups * group_blocks },
                    groups,
                    group_blocks,
                    prefetches: set == 0,
                    ahead: Ahead::here(),
                    tile_scales: tile_scales.as_ptr().add(index * groups * TILE_ROWS),
                    x: x.as_ptr().add(row * x_stride),
                    x_stride,
                    digit_bytes,
                    sums: sums.as_ptr().add(row * groups),
                    row_scales: row_scales.as_ptr().add(row * groups),
                    y: y.as_mut_ptr().add(row * y_stride + index * TILE_ROWS),
                    y_stride,
                };
                T::run_groups::<E>(work, end - row, digits);
            }
        }
    }
}

/// Checks that the slices of a product have the tiles, the rows and their scales.
///
/// # Panics
/// If they have not.
pub(super) fn check_shapes<T: Vectors, E: Expand<T>>(product: &GroupProduct<'_>) {
    let GroupProduct { tile_bytes, groups, group_blocks, digits, digit_bytes, x_stride, .. } =
        *product;
    let (tile_count, rows) = (product.tiles.len() / tile_bytes, product.sums.len() / groups);
    assert!(digit_bytes == group_blocks * E::BLOCK_COLS && (1..=2).contains(&digits));
    assert!(group_blocks * E::PARTS * E::CODES <= T::ACCUMULATE_MAX);
    assert!(tile_bytes >= E::tile_bytes(groups * group_blocks));
    assert!(x_stride >= groups * digits * digit_bytes && product.x.len() >= rows * x_stride);
    assert!(product.row_scales.len() == rows * groups);
    assert!(product.y.len() >= rows * tile_count * TILE_ROWS);
    assert!(product.tile_scales.len() >= tile_count * groups * TILE_ROWS);
}

/// Prefetches the lines of a block further on.
///
/// # Safety
/// None: a prefetch cannot fault.
#[inline(always)]
unsafe fn prefetch<T: Vectors, E: Expand<T>>(work: &GroupWork, block: usize) {
    for line in 0..E::lines(block) {
        let here = work.tile.bytes.wrapping_add(E::place(block) + 64 * line);
        if work.ahead.first > 0 {
            prefetch::first(here.wrapping_add(work.ahead.first));
        }
        prefetch::second(opaque(here.wrapping_add(work.ahead.second)));
    }
}

/// Adds the products of part P of a block, if the format has it, with the activations from `at` on. The parts are not a
/// loop, because sums stay in registers only if their places are constants.
///
/// # Safety
/// As for [`rows_by_groups`].
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
unsafe fn add_part<
    T: Join,
    E: Expand<T>,
    const R: usize,
    const D: usize,
    const A: usize,
    const P: usize,
>(
    work: &GroupWork,
    xs: &[*const i8; R],
    (at, block): (usize, usize),
    sums: &mut [[[T::Lanes; A]; D]; R],
) {
    const { assert!(E::PARTS <= PARTS_MAX) };
    if P >= E::PARTS {
        return;
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        let codes: [T::Lanes; CODES_MAX] = E::codes(work.tile, block, P);
        for code in 0..E::CODES {
            let vector = P * E::CODES + code;
            for row in 0..R {
                for digit in 0..D {
                    let from = xs[row].add(at + digit * work.digit_bytes + 4 * vector);
                    let sum = &mut sums[row][digit][vector % A];
                    *sum = T::accumulate(*sum, codes[code], T::broadcast(from));
                }
            }
        }
    }
}

/// Multiplies a tile by R rows of D digits with A accumulators per sum: with few rows, a single accumulator would wait for
/// its last addition.
///
/// # Safety
/// As for [`gemm`]; the function is inlined into a caller that enables the instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
pub(super) unsafe fn rows_by_groups<
    T: Join,
    E: Expand<T>,
    const R: usize,
    const D: usize,
    const A: usize,
>(
    work: GroupWork,
) {
    // No closures: they would lack the instruction set.
    // SAFETY: `gemm` checked that the slices hold the tile, its scales and the rows.
    unsafe {
        let mut xs = [work.x; R];
        for row in 0..R {
            xs[row] = opaque(work.x.add(row * work.x_stride));
        }
        for group in 0..work.groups {
            let mut sums = [[[T::zero(); A]; D]; R];
            let (mut at, mut block) = (group * D * work.digit_bytes, group * work.group_blocks);
            let end = block + work.group_blocks;
            while block < end {
                if work.prefetches {
                    prefetch::<T, E>(&work, block);
                }
                add_part::<T, E, R, D, A, 0>(&work, &xs, (at, block), &mut sums);
                add_part::<T, E, R, D, A, 1>(&work, &xs, (at, block), &mut sums);
                add_part::<T, E, R, D, A, 2>(&work, &xs, (at, block), &mut sums);
                add_part::<T, E, R, D, A, 3>(&work, &xs, (at, block), &mut sums);
                (at, block) = (at + E::BLOCK_COLS, block + 1);
            }
            let scales = T::load_scales(work.tile_scales.add(group * TILE_ROWS));
            for row in 0..R {
                let of_row = row * work.groups + group;
                let mut total = T::splat(-*work.sums.add(of_row));
                for digit in 0..D {
                    let mut sum = T::zero();
                    for part in sums[row][digit] {
                        sum = T::add_widened(sum, part);
                    }
                    let is_high = digit + 1 < D;
                    total = T::add(total, if is_high { T::shifted(sum) } else { sum });
                }
                let to = work.y.add(row * work.y_stride);
                let y = if group == 0 { T::no_floats() } else { T::load_floats(to) };
                T::store_floats(to, T::join(y, total, scales, *work.row_scales.add(of_row)));
            }
        }
    }
}

/// Defines [`rows_by_groups`] with the features enabled.
macro_rules! enabled_groups {
    ($vectors:ty, $features:literal, $rows_by_groups:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $rows_by_groups<
            E: Expand<$vectors>,
            const R: usize,
            const D: usize,
            const A: usize,
        >(
            work: GroupWork,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { groups::rows_by_groups::<$vectors, E, R, D, A>(work) }
        }
    };
}

pub(super) use enabled_groups;
