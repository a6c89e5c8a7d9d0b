//! The product with scales of groups for many activation rows: codes are expanded once for all rows.
//!
//! ```text
//! for each set of TILES tiles
//!   for each chunk of groups            (its codes fit the first cache)
//!     expand the codes of all tiles     (once for all rows)
//!     for each set of R activation rows
//!       for each group
//!         for each four inputs
//!           load their codes of each tile
//!           for each row and digit: broadcast 4 activations, accumulate in each tile
//!         (meanwhile, the activations of the next rows come into the first cache)
//!         join the sums with the outputs, as in `groups`
//! ```

use std::mem::MaybeUninit;

use half::f16;

use super::groups::{self, Join};
use crate::{
    formats::TILE_ROWS,
    kernels::{
        generic::{
            many::TILES_MAX,
            vectors::{CODES_OF_CHUNK, Codes, Expand, FEW_ROWS, Tile, Vectors, opaque},
        },
        prefetch,
        product::GroupProduct,
    },
};

/// Operands of [`rows_by_tiles`]: a chunk of groups of a set of tiles, and R rows.
#[derive(Clone, Copy)]
pub(super) struct ManyGroups<T: Vectors> {
    codes: *const Codes<T>,
    /// Groups of the chunk, and code vectors of each.
    groups: usize,
    vectors: usize,
    /// Whether the chunk is the first.
    first: bool,
    /// The scales of the first tile and group of the chunk. // (tiles, groups of a row, TILE_ROWS)
    tile_scales: *const f16,
    row_groups: usize,
    /// The first row's activations for the chunk. // (groups, digits, digit_bytes)
    x: *const i8,
    /// The activations that are read next, of R rows; the address need not be valid.
    next: *const i8,
    x_stride: usize,
    digit_bytes: usize,
    sums: *const i32,       // (rows, groups of a row)
    row_scales: *const f32, // (rows, groups of a row)
    /// The first row's outputs for the first tile.
    y: *mut f32,
    y_stride: usize,
}

/// Vectors with enough registers for the sums of several rows. Sums of 16-bit pairs hold a group: `groups` checks that it has at most
/// `ACCUMULATE_MAX` code vectors.
///
/// # Safety
/// As for [`Vectors`].
pub(super) trait ManyJoin: Join {
    /// Largest numbers of rows and tiles with all sums in registers, for one and two digits.
    const MANY: [(usize, usize); 2];

    /// Smallest numbers of rows for which codes are expanded once for all rows, for one and two digits.
    const MANY_GROUP_ROWS_MIN: [usize; 2];

    /// Runs [`rows_by_tiles`] for at most [`Self::MANY`] rows and tiles, with the instruction set enabled.
    unsafe fn run_many_groups(many: ManyGroups<Self>, rows: usize, digits: usize, tiles: usize);
}

/// Runs the product with the vectors of `T`.
///
/// # Safety
/// The machine has `T`'s instruction set; the shapes of `product` are consistent.
pub(super) unsafe fn gemm<T: ManyJoin, E: Expand<T>>(product: GroupProduct<'_>) {
    groups::check_shapes::<T, E>(&product);
    if product.sums.len() / product.groups < T::MANY_GROUP_ROWS_MIN[product.digits - 1] {
        // SAFETY: guaranteed by the caller.
        return unsafe { groups::gemm::<T, E>(product) };
    }
    let GroupProduct { tiles, tile_bytes, groups, group_blocks, tile_scales, digits, .. } = product;
    let GroupProduct { digit_bytes, x, x_stride, sums, row_scales, y, .. } = product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len() / groups);
    let y_stride = tile_count * TILE_ROWS;
    let vectors = group_blocks * E::PARTS * E::CODES;
    let chunk = (T::CHUNKS[usize::from(rows > FEW_ROWS)] / vectors).max(1);
    let mut codes: [Codes<T>; TILES_MAX] =
        [const { [const { MaybeUninit::uninit() }; CODES_OF_CHUNK] }; TILES_MAX];
    let (most_rows, most_tiles) = T::MANY[digits - 1];
    let sets = rows.div_ceil(most_rows);
    for first in (0..tile_count).step_by(most_tiles) {
        let count = most_tiles.min(tile_count - first);
        for start in (0..groups).step_by(chunk) {
            let end = (start + chunk).min(groups);
            for (codes, index) in codes.iter_mut().zip(first..first + count) {
                let bytes = tiles[index * tile_bytes..].as_ptr();
                let tile = Tile { bytes, blocks: groups * group_blocks };
                let blocks = start * group_blocks..end * group_blocks;
                // SAFETY: the tile has these blocks, the codes have room for them.
                unsafe { T::expand::<E>(tile, blocks, most_tiles * tile_bytes, codes) };
            }
            for set in 0..sets {
                let (row, last) = (set * rows / sets, (set + 1) * rows / sets);
                let from = start * digits * digit_bytes;
                let next = if last < rows { (last, start) } else { (0, end % groups) };
                // SAFETY: rows, outputs, scales and codes are inside their slices.
                unsafe {
                    let many = ManyGroups {
                        codes: codes.as_ptr(),
                        groups: end - start,
                        vectors,
                        first: start == 0,
                        tile_scales: tile_scales.as_ptr().add((first * groups + start) * TILE_ROWS),
                        row_groups: groups,
                        x: x.as_ptr().add(row * x_stride + from),
                        next: x
                            .as_ptr()
                            .wrapping_add(next.0 * x_stride + next.1 * digits * digit_bytes),
                        x_stride,
                        digit_bytes,
                        sums: sums.as_ptr().add(row * groups + start),
                        row_scales: row_scales.as_ptr().add(row * groups + start),
                        y: y.as_mut_ptr().add(row * y_stride + first * TILE_ROWS),
                        y_stride,
                    };
                    T::run_many_groups(many, last - row, digits, count);
                }
            }
        }
    }
}

/// Prefetches the line of R rows that is read next, in the place of the line of a group's vector `at`.
#[inline(always)]
fn prefetch_next<T: ManyJoin, const R: usize, const D: usize>(
    many: &ManyGroups<T>,
    group: usize,
    at: usize,
) {
    for row in 0..R {
        for digit in 0..D {
            let x = row * many.x_stride + (D * group + digit) * many.digit_bytes;
            prefetch::first(many.next.wrapping_add(x + 4 * at));
        }
    }
}

/// Multiplies TILES tiles by R rows of D digits.
///
/// # Safety
/// As for [`gemm`]; the function is inlined into a caller that enables the instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
pub(super) unsafe fn rows_by_tiles<
    T: ManyJoin,
    const R: usize,
    const D: usize,
    const TILES: usize,
>(
    many: ManyGroups<T>,
) {
    // Sums of 16-bit pairs have no room for the row's sum, which is then subtracted at the end of a group.
    let is_wide = const { T::ACCUMULATE_MAX == usize::MAX };
    // No closures: they would lack the instruction set.
    // SAFETY: `gemm` took the pointers from slices with the rows, tiles and scales, and wrote the codes.
    unsafe {
        let mut xs = [many.x; R];
        for row in 0..R {
            xs[row] = opaque(many.x.add(row * many.x_stride));
        }
        for group in 0..many.groups {
            let mut sums = [[[T::zero(); TILES]; D]; R];
            // The codes are trits plus 1, so the sum of the row's integers is subtracted.
            for row in 0..R {
                if is_wide {
                    let sum = *many.sums.add(row * many.row_groups + group);
                    sums[row][D - 1] = [T::splat(-sum); TILES];
                }
            }
            let mut at = 0;
            while at < many.vectors {
                prefetch_next::<T, R, D>(&many, group, at);
                let end = many.vectors.min(at + prefetch::BROADCASTS);
                while at < end {
                    let mut codes = [T::zero(); TILES];
                    for tile in 0..TILES {
                        let codes_of_tile = (*many.codes.add(tile)).as_ptr();
                        codes[tile] =
                            codes_of_tile.add(group * many.vectors + at).read().assume_init();
                    }
                    for row in 0..R {
                        for digit in 0..D {
                            let x = T::broadcast(xs[row].add(digit * many.digit_bytes + 4 * at));
                            for tile in 0..TILES {
                                let sum = &mut sums[row][digit][tile];
                                *sum = T::accumulate(*sum, codes[tile], x);
                            }
                        }
                    }
                    at += 1;
                }
            }
            for row in 0..R {
                xs[row] = xs[row].add(D * many.digit_bytes);
            }
            for tile in 0..TILES {
                let of_tile = (tile * many.row_groups + group) * TILE_ROWS;
                let scales = T::load_scales(many.tile_scales.add(of_tile));
                for row in 0..R {
                    let mut total = sums[row][D - 1][tile];
                    if !is_wide {
                        let sum = *many.sums.add(row * many.row_groups + group);
                        total = T::add_widened(T::splat(-sum), total);
                    }
                    if D == 2 {
                        let high = T::add_widened(T::zero(), sums[row][0][tile]);
                        total = T::add(total, T::shifted(high));
                    }
                    let to = many.y.add(row * many.y_stride + tile * TILE_ROWS);
                    let is_first = many.first && group == 0;
                    let y = if is_first { T::no_floats() } else { T::load_floats(to) };
                    let scale = *many.row_scales.add(row * many.row_groups + group);
                    T::store_floats(to, T::join(y, total, scales, scale));
                }
            }
        }
    }
}

/// Defines [`rows_by_tiles`] with the features enabled.
macro_rules! enabled_many_groups {
    ($vectors:ty, $features:literal, $rows_by_tiles:ident) => {
        #[target_feature(enable = $features)]
        unsafe fn $rows_by_tiles<const R: usize, const D: usize, const TILES: usize>(
            many: ManyGroups<$vectors>,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { many_groups::rows_by_tiles::<$vectors, R, D, TILES>(many) }
        }
    };
}

pub(super) use enabled_many_groups;
