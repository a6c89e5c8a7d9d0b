//! The loop for few activation rows: all sums of a group of rows stay in registers.

use super::{
    many,
    vectors::{CODES_MAX, Expand, Tile, Vectors, Work, opaque},
};
use crate::{
    formats::TILE_ROWS,
    kernels::{
        prefetch::{self, Ahead},
        product::Product,
    },
};

/// Prefetch distance in bytes from the second into the first cache, where four tiles are read at once.
const PREFETCH_NEAR_BYTES: usize = 1024;

/// Runs the product with the vectors of `T`.
///
/// # Safety
/// The machine has `T`'s instruction set; the shapes of `product` are consistent.
pub unsafe fn gemm<T: Vectors, E: Expand<T>>(mut product: Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, sums, ref mut y, .. } = product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len());
    let y_stride = tile_count * TILE_ROWS;
    assert!(x_stride >= blocks * E::BLOCK_COLS && x.len() >= rows * x_stride);
    assert!(y.len() >= rows * y_stride);
    if rows >= E::MANY_ROWS_MIN {
        // SAFETY: guaranteed by the caller; the shapes were just checked.
        return unsafe { many::gemm::<T, E>(&mut product) };
    }
    // Groups of nearly equal size: 17 rows are 9 and 8, not 16 and 1.
    let groups = rows.div_ceil(T::ROWS_MAX);
    let together = match rows {
        rows if T::FOUR_ROWS.contains(&rows) => 4,
        rows if rows >= T::PAIR_ROWS_MIN => 2,
        _ => 1,
    };
    let ahead = Ahead::here();
    let mut first = 0;
    while first < tile_count {
        let count = if tile_count - first < together { 1 } else { together };
        let tile = &tiles[first * tile_bytes..];
        for group in 0..groups {
            let (row, end) = (group * rows / groups, (group + 1) * rows / groups);
            // SAFETY: the tiles and rows are inside the product's slices, checked above.
            unsafe {
                let next = together * tile_bytes + tile_bytes * group / groups;
                let work = Work {
                    tile: Tile { bytes: tile.as_ptr(), blocks },
                    tile_bytes,
                    ahead,
                    next: tile.as_ptr().wrapping_add(next),
                    next_share: 256 / groups,
                    x: x.as_ptr().add(row * x_stride),
                    x_stride,
                    sums: sums.as_ptr().add(row),
                    y: y.as_mut_ptr().add(row * y_stride + first * TILE_ROWS),
                    y_stride,
                };
                T::run::<E>(work, end - row, count);
            }
        }
        first += count;
    }
}

/// Multiplies TILES tiles by R rows with A accumulators per sum: with few rows, a single accumulator
/// would wait for its last addition.
///
/// # Safety
/// As for [`gemm`]; the function is inlined into a caller that enables the instruction set.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
pub unsafe fn block_rows<
    T: Vectors,
    E: Expand<T>,
    const R: usize,
    const A: usize,
    const TILES: usize,
>(
    work: Work,
) {
    // No closures: they would lack the instruction set.
    // SAFETY: `gemm` checked that the slices hold the tiles and the rows.
    unsafe {
        let chunk = T::ACCUMULATE_MAX / (E::PARTS * E::CODES);
        let mut totals = [[T::zero(); TILES]; R];
        let (mut tiles, mut xs) = ([work.tile; TILES], [work.x; R]);
        for tile in 0..TILES {
            tiles[tile].bytes = work.tile.bytes.add(tile * work.tile_bytes);
        }
        for row in 0..R {
            xs[row] = opaque(work.x.add(row * work.x_stride));
        }
        let mut start = 0;
        while start < work.tile.blocks {
            let end = work.tile.blocks.min(start.saturating_add(chunk));
            let mut sums = [[[T::zero(); A]; TILES]; R];
            for block in start..end {
                let place = E::place(block);
                for tile in 0..TILES {
                    for line in 0..E::lines(block) {
                        let here = tiles[tile].bytes.wrapping_add(place + 64 * line);
                        // A single tile needs its lines soon, so they go into the first cache.
                        match TILES {
                            4 => {
                                let next = here.wrapping_add(4 * work.tile_bytes);
                                prefetch::first(here.wrapping_add(PREFETCH_NEAR_BYTES));
                                prefetch::second(next);
                            }
                            1 if work.next_share == 256 => {
                                if work.ahead.first > 0 {
                                    prefetch::first(here.wrapping_add(work.ahead.first));
                                }
                                // Without `opaque`, this prefetch is a displacement of the first one
                                // and has no effect on some machines: 24 GB/s instead of 33.
                                prefetch::second(opaque(here.wrapping_add(work.ahead.second)));
                            }
                            _ => {
                                let next = work.next.wrapping_add(tile * work.tile_bytes);
                                let part = (place + 64 * line) * work.next_share / 256;
                                prefetch::second(next.wrapping_add(part));
                            }
                        }
                    }
                }
                for part in 0..E::PARTS {
                    let mut codes = [[T::zero(); CODES_MAX]; TILES];
                    for tile in 0..TILES {
                        codes[tile] = E::codes(tiles[tile], block, part);
                    }
                    for code in 0..E::CODES {
                        let group = part * E::CODES + code;
                        for row in 0..R {
                            let x = T::broadcast(xs[row].add(block * E::BLOCK_COLS + 4 * group));
                            for tile in 0..TILES {
                                let sum = &mut sums[row][tile][group % A];
                                *sum = T::accumulate(*sum, codes[tile][code], x);
                            }
                        }
                    }
                }
            }
            for row in 0..R {
                for tile in 0..TILES {
                    for sum in sums[row][tile] {
                        totals[row][tile] = T::add_widened(totals[row][tile], sum);
                    }
                }
            }
            start = end;
        }
        for row in 0..R {
            for tile in 0..TILES {
                let total = T::add(totals[row][tile], T::splat(-*work.sums.add(row)));
                T::store(work.y.add(row * work.y_stride + tile * TILE_ROWS), total);
            }
        }
    }
}
