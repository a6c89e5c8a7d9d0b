//! The loop for many activation rows: codes are expanded once for all rows.
//!
//! ```text
//! for each group of TILES_MAX tiles
//!   for each chunk of blocks            (its codes fit the first cache; no accumulator overflows)
//!     expand the codes of all tiles     (once for all rows)
//!     for each group of R activation rows
//!       for each four inputs
//!         load their codes of each tile
//!         for each row: broadcast 4 activations, accumulate in each tile
//!       (meanwhile, the activations of the next rows come into the first cache)
//!       add the sums to the outputs
//! ```
//!
//! The requests for the next rows were measured on an Intel Xeon only, not on AMD's processors or with NEON.
//!
//! A broadcast serves one product per tile, a load of codes one product per row, and all formats cost
//! the same.

use std::{mem::MaybeUninit, ops::Range};

use super::vectors::{CODES_OF_CHUNK, Codes, Expand, FEW_ROWS, Many, Tile, Vectors, opaque};
use crate::{
    formats::TILE_ROWS,
    kernels::{prefetch, product::Product},
};

/// Largest number of tiles in a group.
pub const TILES_MAX: usize = 4;
/// Runs the product with the vectors of `T`.
///
/// # Safety
/// The machine has `T`'s instruction set; [`blocks::gemm`](super::blocks::gemm) has checked the shapes.
pub unsafe fn gemm<T: Vectors, E: Expand<T>>(product: &mut Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, sums, y, .. } = product;
    let (tile_count, rows) = (tiles.len() / *tile_bytes, sums.len());
    let y_stride = tile_count * TILE_ROWS;
    let codes_of_block = E::PARTS * E::CODES;
    let chunk = T::ACCUMULATE_MAX.min(T::CHUNKS[usize::from(rows > FEW_ROWS)]) / codes_of_block;
    let mut codes: [Codes<T>; TILES_MAX] =
        [const { [const { MaybeUninit::uninit() }; CODES_OF_CHUNK] }; TILES_MAX];
    let groups = rows.div_ceil(T::MANY_ROWS);
    for first in (0..tile_count).step_by(T::MANY_TILES) {
        let count = T::MANY_TILES.min(tile_count - first);
        for start in (0..*blocks).step_by(chunk) {
            let end = (start + chunk).min(*blocks);
            for (codes, index) in codes.iter_mut().zip(first..first + count) {
                let tile = Tile { bytes: tiles[index * *tile_bytes..].as_ptr(), blocks: *blocks };
                // SAFETY: the tile has these blocks, the codes have room for them.
                unsafe { T::expand::<E>(tile, start..end, T::MANY_TILES * *tile_bytes, codes) };
            }
            for group in 0..groups {
                let (row, last) = (group * rows / groups, (group + 1) * rows / groups);
                let next = if last < rows { (last, start) } else { (0, end % *blocks) };
                // SAFETY: rows, outputs and codes are inside their slices.
                unsafe {
                    let many = Many {
                        codes: codes.as_ptr(),
                        count: (end - start) * codes_of_block,
                        x: x.as_ptr().add(row * *x_stride + start * E::BLOCK_COLS),
                        next: x.as_ptr().wrapping_add(next.0 * *x_stride + next.1 * E::BLOCK_COLS),
                        x_stride: *x_stride,
                        sums: if start == 0 { sums.as_ptr().add(row) } else { std::ptr::null() },
                        y: y.as_mut_ptr().add(row * y_stride + first * TILE_ROWS),
                        y_stride,
                    };
                    T::run_many(many, last - row, count);
                }
            }
        }
    }
}

/// Expands some blocks of a tile, and prefetches the lines that are `ahead` bytes further.
///
/// # Safety
/// The tile has these blocks, of at most [`CODES_OF_CHUNK`] vectors; the function is inlined into a
/// caller that enables the instruction set.
#[inline(always)]
pub unsafe fn expand<T: Vectors, E: Expand<T>>(
    tile: Tile,
    blocks: Range<usize>,
    ahead: usize,
    codes: &mut [MaybeUninit<T::Lanes>],
) {
    let mut at = 0;
    for block in blocks {
        // Prefetches the tiles of the next group while this group is multiplied.
        for line in 0..E::lines(block) {
            prefetch::second(tile.bytes.wrapping_add(ahead + E::place(block) + 64 * line));
        }
        for part in 0..E::PARTS {
            // SAFETY: guaranteed by the caller.
            let expanded = unsafe { E::codes(tile, block, part) };
            for code in &expanded[..E::CODES] {
                codes[at].write(*code);
                at += 1;
            }
        }
    }
}

/// Multiplies TILES tiles by R rows.
///
/// # Safety
/// As for [`gemm`]; the function is inlined into a caller that enables the instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
pub unsafe fn rows_by_tiles<T: Vectors, const R: usize, const TILES: usize>(many: Many<T>) {
    // No closures: they would lack the instruction set.
    // SAFETY: `gemm` took the pointers from slices with the rows and tiles, and wrote the first `count`
    // codes of each tile.
    unsafe {
        let mut sums = [[T::zero(); TILES]; R];
        let mut xs = [many.x; R];
        for row in 0..R {
            xs[row] = opaque(many.x.add(row * many.x_stride));
        }
        let mut at = 0;
        while at < many.count {
            for row in 0..R {
                prefetch::first(many.next.wrapping_add(row * many.x_stride + 4 * at));
            }
            let end = many.count.min(at + prefetch::BROADCASTS);
            while at < end {
                let mut codes = [T::zero(); TILES];
                for tile in 0..TILES {
                    let codes_of_tile = (*many.codes.add(tile)).as_ptr();
                    codes[tile] = codes_of_tile.add(at).read().assume_init();
                }
                for row in 0..R {
                    let x = T::broadcast(xs[row].add(4 * at));
                    for tile in 0..TILES {
                        sums[row][tile] = T::accumulate(sums[row][tile], codes[tile], x);
                    }
                }
                at += 1;
            }
        }
        for row in 0..R {
            for tile in 0..TILES {
                let to = many.y.add(row * many.y_stride + tile * TILE_ROWS);
                let total = match many.sums.is_null() {
                    true => T::load(to),
                    false => T::splat(-*many.sums.add(row)),
                };
                T::store(to, T::add_widened(total, sums[row][tile]));
            }
        }
    }
}
