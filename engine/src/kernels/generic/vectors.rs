//! The interface of an instruction set ([`Vectors`]) and of a format's expansion ([`Expand`]).

use std::{mem::MaybeUninit, ops::Range};

use crate::{
    formats::{
        i2_s::I2S,
        layout::Layout,
        tl1::Tl1,
        tl2::{self, Tl2},
    },
    kernels::prefetch::Ahead,
};

/// Largest number of code vectors from one [`Expand::codes`].
pub const CODES_MAX: usize = 3;

/// Most independent sums: enough to hide the instruction's latency, and few enough for the registers.
pub const PEAK_SUMS_MAX: usize = 12;

/// Vectors of one instruction set and the arithmetic on them.
///
/// # Safety
/// Methods need the instruction set; pointers must be valid for the reads and writes of each method.
pub trait Vectors: Sized {
    /// A tile's 16 lanes: codes, or sums.
    type Lanes: Copy;
    /// Four activations in every lane.
    type Broadcast: Copy;

    /// Largest number of activation rows with all sums in registers.
    const ROWS_MAX: usize;

    /// Calls of [`Vectors::accumulate`] on one accumulator before it must be widened.
    const ACCUMULATE_MAX: usize;

    /// Smallest number of rows for which two tiles share a broadcast.
    const PAIR_ROWS_MIN: usize;

    /// Numbers of rows for which four tiles share a broadcast.
    const FOUR_ROWS: Range<usize>;

    /// Smallest number of rows for which codes are expanded once for all rows (`many`), unless a format has its own
    /// ([`Expand::MANY_ROWS_MIN`]).
    const MANY_ROWS_MIN: usize;

    /// Most code vectors of a chunk, in `many`, with few rows and with more.
    const CHUNKS: [usize; 2] = [CODES_OF_CHUNK; 2];

    /// Largest number of rows with all sums in registers, in `many`.
    const MANY_ROWS: usize;
    /// Number of tiles with which [`Self::MANY_ROWS`] rows have all sums in registers.
    const MANY_TILES: usize;

    /// Returns zeros in all lanes.
    unsafe fn zero() -> Self::Lanes;

    /// Returns `value` in every int32 lane.
    unsafe fn splat(value: i32) -> Self::Lanes;

    /// Returns the 16 int32 lanes at `from`.
    unsafe fn load(from: *const i32) -> Self::Lanes;

    /// Writes the 16 int32 lanes to `to`.
    unsafe fn store(to: *mut i32, lanes: Self::Lanes);

    /// Returns the 4 bytes at `from` in every lane.
    unsafe fn broadcast(from: *const i8) -> Self::Broadcast;

    /// Adds the products of codes and activations to an accumulator.
    unsafe fn accumulate(sum: Self::Lanes, codes: Self::Lanes, x: Self::Broadcast) -> Self::Lanes;

    /// Adds int32 lanes.
    unsafe fn add(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;

    /// Adds an accumulator to int32 lanes.
    unsafe fn add_widened(total: Self::Lanes, sum: Self::Lanes) -> Self::Lanes;

    /// Runs `blocks::block_rows` for `rows` rows, at most [`Vectors::ROWS_MAX`], and one tile, or two from
    /// [`Vectors::PAIR_ROWS_MIN`] rows of the product on, with the instruction set enabled.
    unsafe fn run<E: Expand<Self>>(work: Work, rows: usize, tiles: usize);

    /// Runs `many::expand` with the instruction set enabled.
    unsafe fn expand<E: Expand<Self>>(
        tile: Tile,
        blocks: Range<usize>,
        ahead: usize,
        codes: &mut Codes<Self>,
    );

    /// Runs `many::rows_by_tiles` for at most [`Vectors::MANY_ROWS`] rows
    /// and [`Vectors::MANY_TILES`] tiles, with the instruction set enabled.
    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize);

    /// Independent sums of `peak::accumulate_all`, at most [`PEAK_SUMS_MAX`].
    const PEAK_SUMS: usize = PEAK_SUMS_MAX;

    /// Runs `peak::accumulate_all` with the instruction set enabled.
    unsafe fn run_peak(rounds: usize);
}

/// The code vectors of a format's blocks, and the place of their indices.
pub trait Parts: Layout {
    /// Parts in which a block is expanded.
    const PARTS: usize;
    /// Code vectors of a part.
    const CODES: usize;

    /// Returns the offset of a block's indices in its tile.
    #[inline(always)]
    fn place(block: usize) -> usize {
        64 * block
    }

    /// Returns the number of cache lines from a block's indices to the next block's.
    #[inline(always)]
    fn lines(_block: usize) -> usize {
        1
    }
}

impl Parts for I2S {
    const PARTS: usize = 4;
    const CODES: usize = 1;
}

impl Parts for Tl1 {
    const PARTS: usize = 2;
    const CODES: usize = 2;
}

impl Parts for Tl2 {
    const PARTS: usize = 2;
    const CODES: usize = 3;

    #[inline(always)]
    fn place(block: usize) -> usize {
        tl2::nibbles_at(block)
    }

    #[inline(always)]
    fn lines(block: usize) -> usize {
        tl2::lines(block)
    }
}

/// Expands a format's bytes to code vectors.
///
/// # Safety
/// As for [`Vectors`]; `block` is a block of `tile`.
pub trait Expand<T: Vectors>: Parts {
    /// Smallest number of rows for which the codes of this format are expanded once for all rows.
    const MANY_ROWS_MIN: usize = T::MANY_ROWS_MIN;

    /// Codes of a part of a block: vector `c` is multiplied by the four activations from
    /// `4 (CODES part + c)` of the block ([`Parts::CODES`]).
    unsafe fn codes(tile: Tile, block: usize, part: usize) -> [T::Lanes; CODES_MAX];
}

/// One tile's bytes.
#[derive(Clone, Copy)]
pub struct Tile {
    pub bytes: *const u8,
    pub blocks: usize,
}

/// Operands of `blocks::block_rows`: up to four tiles, and R rows.
#[derive(Clone, Copy)]
pub struct Work {
    pub tile: Tile,
    /// Bytes from one tile to the next.
    pub tile_bytes: usize,
    /// Prefetch distances, if one group of rows reads a single tile.
    pub ahead: Ahead,
    /// Otherwise: start of the next tiles, for prefetching.
    pub next: *const u8,
    /// The share of the next tiles' lines that this group prefetches, in 256ths.
    pub next_share: usize,
    /// The first row's activations.
    pub x: *const i8,
    pub x_stride: usize,
    pub sums: *const i32,
    /// The first row's outputs for the tile.
    pub y: *mut i32,
    pub y_stride: usize,
}

/// Code vectors of a chunk: 24 KiB for four tiles.
pub const CODES_OF_CHUNK: usize = 96;

/// Most rows that count as few in [`Vectors::CHUNKS`]: their activations of a chunk stay in the first cache.
pub const FEW_ROWS: usize = 48;

/// Code vectors of a chunk of a tile.
pub type Codes<T> = [MaybeUninit<<T as Vectors>::Lanes>; CODES_OF_CHUNK];

/// Operands of `many::rows_by_tiles`: a chunk of a group of tiles, and R rows.
pub struct Many<T: Vectors> {
    pub codes: *const Codes<T>,
    /// Code vectors of the chunk, at least 1.
    pub count: usize,
    /// The first row's activations for the chunk.
    pub x: *const i8,
    /// The activations that are read next, of R rows; the address need not be valid.
    pub next: *const i8,
    pub x_stride: usize,
    /// The first row's sum for the first chunk, null for later ones.
    pub sums: *const i32,
    /// The first row's outputs for the first tile.
    pub y: *mut i32,
    pub y_stride: usize,
}

/// Returns the pointer and hides its origin from the compiler. Otherwise the compiler would add up
/// strides in the innermost loop, on ports that multiply, to save registers that are not needed.
#[inline(always)]
pub fn opaque<T>(mut pointer: *const T) -> *const T {
    // SAFETY: no instruction.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, readonly, nostack, preserves_flags));
    }
    pointer
}
