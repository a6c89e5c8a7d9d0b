//! The loop that the x86-64 paths share; `avx2` and `avx512` bring its vectors.
//!
//! A vector has one 32-bit lane for each of 8 or 16 output rows. Weights come as unsigned codes
//! `trit + 1`, four inputs a lane; four activations of a row are broadcast to all lanes; a dot
//! product of four adds to each lane. So nothing is ever added across lanes, and
//! `Σ code · q − Σ q = Σ trit · q`.
//!
//!     for each group of V weight vectors (output rows)
//!       for each group of R activation rows
//!         for each chunk of blocks                (as long as the accumulator cannot overflow)
//!           for each block, for each of its code vectors
//!             expand the V vectors' codes         (once for R rows)
//!             for each row: broadcast 4 activations, accumulate V times
//!
//! Bytes of weights read a multiply-add: 1/4 (`i2_s`, `tl1`) or 5/24 (`tl2`), over R.

use super::gemm::Product;
use crate::formats::TILE_ROWS;

pub(super) mod avx2;
pub(super) mod avx512;

/// Most code vectors that one [`Expand::codes`] returns.
const CODES_MAX: usize = 3;

/// Rows of activations whose sums stay in registers at once.
const ROWS_MAX: usize = 8;

/// Vectors of one instruction set and the arithmetic on them.
///
/// # Safety
/// Methods need the instruction set; pointers must be valid for what each reads or writes.
trait Vectors {
    /// Bytes: codes. 32-bit lanes: activations and sums.
    type Vector: Copy;

    /// 32-bit lanes of a vector; divides [`TILE_ROWS`].
    const LANES: usize;

    /// Calls of [`Vectors::accumulate`] on one accumulator before it must be widened.
    const ACCUMULATE_MAX: usize;

    /// All zeros.
    unsafe fn zero() -> Self::Vector;

    /// The 4 bytes at `from` in every lane.
    unsafe fn broadcast(from: *const i8) -> Self::Vector;

    /// Adds the products of codes and activations to an accumulator.
    unsafe fn accumulate(sum: Self::Vector, codes: Self::Vector, x: Self::Vector) -> Self::Vector;

    /// An accumulator as int32 lanes.
    unsafe fn widen(sum: Self::Vector) -> Self::Vector;

    /// Adds int32 lanes.
    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Writes `lanes − minus` to `to`.
    unsafe fn store_less(to: *mut i32, lanes: Self::Vector, minus: i32);

    /// Runs [`block`] with the instruction set enabled.
    unsafe fn run<E: Expand<Self>, const V: usize, const R: usize, const A: usize>(work: Work)
    where
        Self: Sized;
}

/// How a format's bytes become code vectors.
///
/// # Safety
/// As for [`Vectors`].
trait Expand<T: Vectors> {
    /// Inputs of a block.
    const BLOCK_COLS: usize;
    /// Parts a block is expanded in.
    const PARTS: usize;
    /// Code vectors of a part.
    const CODES: usize;

    /// Codes of part `part` of block `block`: vector `c` meets activations
    /// `4 (CODES part + c) ..` of the block. `tile` is the tile moved to the vector's output rows:
    /// `vector` counts vectors in the tile.
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [T::Vector; CODES_MAX];
}

/// A vector's share of a tile.
#[derive(Clone, Copy)]
struct Tile {
    /// The tile's bytes.
    bytes: *const u8,
    /// Which of the tile's vectors.
    vector: usize,
    /// Blocks of the tile.
    blocks: usize,
}

/// What [`block`] works on: V weight vectors and R rows.
#[derive(Clone, Copy)]
struct Work {
    tiles: *const u8,
    tile_bytes: usize,
    blocks: usize,
    /// First of the weight vectors.
    vector: usize,
    /// The first row's activations.
    x: *const i8,
    x_stride: usize,
    sums: *const i32,
    /// The first row's output for `vector`.
    y: *mut i32,
    y_stride: usize,
}

/// Runs the product by `T`'s vectors.
///
/// # Safety
/// The machine has `T`'s instruction set and `product` keeps its shapes.
#[inline(always)]
unsafe fn gemm<T: Vectors, E: Expand<T>>(product: Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, sums, y, .. } = product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len());
    let y_stride = tile_count * TILE_ROWS;
    assert!(x_stride >= blocks * E::BLOCK_COLS && x.len() >= rows * x_stride);
    assert!(y.len() >= rows * y_stride);
    let vectors = y_stride / T::LANES;
    // Rows in groups of nearly one size: 9 are 5 and 4, not 8 and 1.
    let groups = rows.div_ceil(ROWS_MAX);
    let mut vector = 0;
    while vector < vectors {
        let pair = vector + 2 <= vectors;
        for group in 0..groups {
            let (row, end) = (group * rows / groups, (group + 1) * rows / groups);
            // SAFETY: the vectors and rows are inside the product's slices, checked above.
            unsafe {
                let work = Work {
                    tiles: tiles.as_ptr(),
                    tile_bytes,
                    blocks,
                    vector,
                    x: x.as_ptr().add(row * x_stride),
                    x_stride,
                    sums: sums.as_ptr().add(row),
                    y: y.as_mut_ptr().add(row * y_stride + vector * T::LANES),
                    y_stride,
                };
                if pair {
                    run_rows::<T, E, 2>(work, end - row)
                } else {
                    run_rows::<T, E, 1>(work, end - row)
                }
            }
        }
        vector += if pair { 2 } else { 1 };
    }
}

/// Picks the loop for a number of rows. Few rows take several accumulators a sum, lest each
/// addition wait for the one before.
///
/// # Safety
/// As for [`gemm`].
unsafe fn run_rows<T: Vectors, E: Expand<T>, const V: usize>(work: Work, rows: usize) {
    // SAFETY: passed on from the caller.
    unsafe {
        match rows {
            1 => T::run::<E, V, 1, 4>(work),
            2 => T::run::<E, V, 2, 2>(work),
            3 => T::run::<E, V, 3, 2>(work),
            4 => T::run::<E, V, 4, 1>(work),
            5 => T::run::<E, V, 5, 1>(work),
            6 => T::run::<E, V, 6, 1>(work),
            7 => T::run::<E, V, 7, 1>(work),
            8 => T::run::<E, V, 8, 1>(work),
            _ => unreachable!("{rows} rows in a group of at most {ROWS_MAX}"),
        }
    }
}

/// V weight vectors by R rows, A accumulators a sum.
///
/// # Safety
/// As for [`gemm`]; the caller enables the instruction set, this inlines into it.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "constant bounds, so that sums stay in registers")]
unsafe fn block<T: Vectors, E: Expand<T>, const V: usize, const R: usize, const A: usize>(
    work: Work,
) {
    // SAFETY: `gemm` checked that the slices hold the vectors and rows.
    unsafe {
        let per_tile = TILE_ROWS / T::LANES;
        let tiles: [Tile; V] = std::array::from_fn(|v| Tile {
            bytes: work.tiles.add((work.vector + v) / per_tile * work.tile_bytes),
            vector: (work.vector + v) % per_tile,
            blocks: work.blocks,
        });
        let chunk = T::ACCUMULATE_MAX / (E::PARTS * E::CODES);
        let mut totals = [[T::zero(); R]; V];
        let mut start = 0;
        while start < work.blocks {
            let end = work.blocks.min(start.saturating_add(chunk));
            let mut sums = [[[T::zero(); A]; R]; V];
            for block in start..end {
                let x = work.x.add(block * E::BLOCK_COLS);
                for part in 0..E::PARTS {
                    let codes: [_; V] = std::array::from_fn(|v| E::codes(tiles[v], block, part));
                    for code in 0..E::CODES {
                        let group = part * E::CODES + code;
                        for row in 0..R {
                            let x = T::broadcast(x.add(row * work.x_stride + 4 * group));
                            for v in 0..V {
                                let sum = &mut sums[v][row][group % A];
                                *sum = T::accumulate(*sum, codes[v][code], x);
                            }
                        }
                    }
                }
            }
            for v in 0..V {
                for row in 0..R {
                    for sum in sums[v][row] {
                        totals[v][row] = T::add(totals[v][row], T::widen(sum));
                    }
                }
            }
            start = end;
        }
        for (v, totals) in totals.into_iter().enumerate() {
            for (row, total) in totals.into_iter().enumerate() {
                let to = work.y.add(row * work.y_stride + v * T::LANES);
                T::store_less(to, total, *work.sums.add(row));
            }
        }
    }
}
