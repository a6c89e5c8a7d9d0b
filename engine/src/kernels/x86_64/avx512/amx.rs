//! AMX-INT8: 16 × 16 sums in a tile register, in addition to the vectors of AVX-512.
//!
//! `tdpbsud` multiplies a register of 16 rows of 64 activations by one of 16 code vectors: row `k` of the
//! second holds, for each of 16 outputs, the codes of inputs `4 k..4 k + 4`, which is exactly a code
//! vector. A step multiplies 16 code vectors of two tiles by up to 32 rows: four products for four loads.
//! Sums equal the sums of `vpdpbusd`. Steps with few rows use vectors, because a tile register takes as long
//! for few rows as for many.
//!
//! ```text
//! for each block of rows                (its activations fit the second cache)
//!   for each pair of tiles
//!     first group of up to 32 rows:     (all sums in registers)
//!       for each unit of steps: expand the codes of a later unit, multiply
//!     other groups: multiply by the same codes, in alternate orders of the inputs, so that the codes that were
//!       used last, and are still in the first cache, are used first
//! ```
//!
//! All inputs are summed in registers: sums that are stored and loaded in parts take longer. A tile store after
//! some 2,000 cycles without any takes 1,000 cycles more (benches/RESULTS.md), so a register is stored from time to
//! time for no other reason ([`Registers::keep_awake`]).

use std::{
    arch::{asm, x86_64::*},
    cell::Cell,
    mem::MaybeUninit,
    ops::Range,
};

use super::{
    super::registers::{AWAKE, ROWS_MAX, Registers, SIDE, Shape, load_rows, multiply, store_sums},
    gfni::Gfni,
};
use crate::{
    formats::{TILE_ROWS, memory::AlignedBytes},
    kernels::{
        generic::{
            blocks,
            vectors::{CODES_MAX, Expand, Tile},
        },
        isa::{AMX_BLOCK_ROWS, Isa},
        prefetch,
        product::Product,
    },
};

/// Smallest number of rows for which tile registers are faster than vectors.
pub(super) const FEW: usize = 5;
/// Units between the expansion of codes and their products: a tile load waits for the stores of its lines.
const AHEAD: usize = 2;
/// Units whose codes are kept if there is one group of rows.
const RING: usize = 2 * AHEAD;
/// Prefetch distance in bytes from the second into the first cache.
const NEAR: usize = 768;
/// Size of the pages that the hardware prefetcher does not look beyond.
const PAGE: usize = 4096;
/// Bytes at the start of a page that are prefetched from the page before.
const PAGE_START: usize = 4 * 64;

/// Runs `rounds` rounds of multiply instructions only; returns the number of products.
///
/// # Safety
/// As for [`gemm`].
pub(in super::super) unsafe fn products_of(rounds: usize) -> usize {
    let mut registers = Registers::default();
    // SAFETY: the caller has AMX; the registers are zero.
    unsafe {
        registers.configure(Shape::of_rows(ROWS_MAX, true));
        for _ in 0..rounds {
            asm!(
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm1, tmm4, tmm7",
                "tdpbsud tmm2, tmm5, tmm6",
                "tdpbsud tmm3, tmm5, tmm7",
                options(nomem, nostack, preserves_flags)
            );
        }
    }
    rounds * 4 * SIDE * SIDE * 64
}

/// Runs the product.
///
/// # Safety
/// The machine has AVX-512 with VNNI and GFNI, and AMX ([`super::super::registers::is_available`]); the shapes
/// of `product` are consistent.
pub(in super::super) unsafe fn gemm<E: Expand<Gfni>>(product: Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, sums, y, .. } = product;
    let rows = sums.len();
    if rows < FEW {
        let product = Product { y, ..product };
        // SAFETY: guaranteed by the caller.
        return unsafe { blocks::gemm::<Gfni, E>(product) };
    }
    let tile_count = tiles.len() / tile_bytes;
    let y_stride = tile_count * TILE_ROWS;
    assert!(x_stride >= blocks * E::BLOCK_COLS && x.len() >= rows * x_stride);
    assert!(y.len() >= rows * y_stride);
    let unit = const { unit_blocks(E::PARTS * E::CODES) };
    let size = Isa::Amx.rows_per_block(rows, x_stride);
    for first in (0..rows).step_by(size) {
        let end = rows.min(first + size);
        let block = Block {
            tiles,
            tile_bytes,
            tile_count,
            blocks,
            units: blocks.div_ceil(unit),
            steps: (blocks * E::PARTS * E::CODES).div_ceil(SIDE),
            x: &x[first * x_stride..end * x_stride],
            x_stride,
            sums: &sums[first..end],
            y: &mut y[first * y_stride..end * y_stride],
        };
        // SAFETY: the shapes are consistent, and the caller guarantees the instruction set.
        unsafe {
            match block.sums.len() {
                ..=ROWS_MAX => few_rows::<E>(block),
                _ => many_rows::<E>(block),
            }
        }
    }
}

/// A product with a block of rows, whose inputs are cut into units of steps.
struct Block<'a> {
    tiles: &'a [u8], // (tile, tile_bytes)
    tile_bytes: usize,
    tile_count: usize,
    blocks: usize, // of a tile
    units: usize,  // of a tile
    steps: usize,  // of a tile
    x: &'a [i8],   // (row, x_stride)
    x_stride: usize,
    sums: &'a [i32],  // (row,), at most AMX_BLOCK_ROWS
    y: &'a mut [i32], // (row, tile, TILE_ROWS)
}

/// Returns the smallest number of blocks of `vectors` code vectors that are whole steps.
const fn unit_blocks(vectors: usize) -> usize {
    let mut blocks = 1;
    while !(blocks * vectors).is_multiple_of(SIDE) {
        blocks += 1;
    }
    blocks
}

/// Returns the number of steps of a unit.
const fn unit_steps(vectors: usize) -> usize {
    unit_blocks(vectors) * vectors / SIDE
}

/// Returns `−Σ q` of each row, for each output: the sums start from them.
fn less_of<const ROWS: usize>(sums: &[i32]) -> [[i32; TILE_ROWS]; ROWS] {
    let mut less = [[0; TILE_ROWS]; ROWS];
    for (less, sum) in less.iter_mut().zip(sums) {
        *less = [-sum; TILE_ROWS];
    }
    less
}

/// Code vectors of a unit in any format.
const UNIT: usize = 3 * SIDE;

impl Block<'_> {
    fn pairs(&self) -> usize {
        self.tile_count.div_ceil(2)
    }

    /// Returns whether a pair has two tiles; the last one may have one.
    fn is_whole(&self, pair: usize) -> bool {
        self.tile_count - 2 * pair > 1
    }

    /// Expands a unit of the tiles of a pair.
    ///
    /// # Safety
    /// The machine has the instruction set; `codes` are valid for the codes of a unit.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
    unsafe fn expand<E: Expand<Gfni>>(&self, pair: usize, unit: usize, codes: [*mut __m512i; 2]) {
        let size = const { unit_blocks(E::PARTS * E::CODES) };
        let range = unit * size..((unit + 1) * size).min(self.blocks);
        for (tile, codes) in (2 * pair..self.tile_count).zip(codes) {
            let bytes = self.tiles[tile * self.tile_bytes..].as_ptr();
            let tile = Tile { bytes, blocks: self.blocks };
            // SAFETY: the tile has these blocks; the caller guarantees the rest.
            unsafe { expand::<E>(tile, range.clone(), codes, size * E::PARTS * E::CODES) };
        }
    }

    /// Stores the sums of the rows from `row` on for a pair.
    ///
    /// # Safety
    /// The registers are configured for the shape, which the block has at this place.
    unsafe fn store(&mut self, shape: Shape, row: usize, pair: usize) {
        let y_stride = self.tile_count * TILE_ROWS;
        let y = self.y[row * y_stride + 2 * pair * TILE_ROWS..].as_mut_ptr();
        // SAFETY: guaranteed by the caller.
        unsafe { store_sums(shape, y, y_stride) };
    }
}

/// One group of rows. The codes of a unit are used once, so they take turns in few places, which stay in the first
/// cache; units of all pairs follow one another, so that no pair waits for its first codes.
///
/// # Safety
/// As for [`gemm`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
unsafe fn few_rows<E: Expand<Gfni>>(mut block: Block<'_>) {
    let (units, pairs, rows) = (block.units, block.pairs(), block.sums.len());
    let unit_steps = const { unit_steps(E::PARTS * E::CODES) };
    let mut ring: [[[MaybeUninit<__m512i>; UNIT]; 2]; RING] =
        [const { [const { [const { MaybeUninit::uninit() }; UNIT] }; 2] }; RING];
    let less: [_; ROWS_MAX] = less_of(block.sums);
    let mut registers = Registers::default();
    let (mut ahead, mut pair, mut unit) = ((0, 0), 0, 0);
    for at in 0..pairs * units + AHEAD {
        if ahead.0 < pairs {
            let codes = ring[at % RING].each_mut().map(|codes| codes.as_mut_ptr().cast());
            // SAFETY: the pair has the unit, and a place of the ring has room for it.
            unsafe { block.expand::<E>(ahead.0, ahead.1, codes) };
            ahead = if ahead.1 + 1 < units { (ahead.0, ahead.1 + 1) } else { (ahead.0 + 1, 0) };
        }
        let Some(at) = at.checked_sub(AHEAD) else { continue };
        let shape = Shape::of_rows(rows, block.is_whole(pair));
        // SAFETY: the activations are inside the block; the unit has been expanded.
        unsafe {
            if unit == 0 {
                registers.configure(shape);
                load_rows(shape, less.as_ptr().cast());
            }
            let step = unit * unit_steps;
            let x = x_of_sets(block.x.as_ptr().add(step * 64), block.x_stride);
            let codes = ring[at % RING].each_ref().map(|codes| codes.as_ptr().cast());
            multiply(shape, unit_steps.min(block.steps - step), x, block.x_stride, codes);
            unit += 1;
            if unit == units {
                block.store(shape, 0, pair);
                (pair, unit) = (pair + 1, 0);
            } else if unit * unit_steps % AWAKE < unit_steps {
                registers.keep_awake();
            }
        }
    }
}

/// Returns where each set of [`SIDE`] rows starts, of which the second may not exist.
fn x_of_sets(x: *const i8, x_stride: usize) -> [*const i8; 2] {
    [x, x.wrapping_add(SIDE * x_stride)]
}

thread_local! {
    /// Expanded codes of a pair of tiles.
    pub(super) static CODES: Cell<AlignedBytes> = Cell::default();
}

/// Several groups of rows. The first expands all codes of a pair, some units before it multiplies by them.
///
/// # Safety
/// As for [`gemm`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
unsafe fn many_rows<E: Expand<Gfni>>(mut block: Block<'_>) {
    let (units, rows, x_stride) = (block.units, block.sums.len(), block.x_stride);
    let unit_steps = const { unit_steps(E::PARTS * E::CODES) };
    let (steps, places) = (block.steps, units * unit_steps);
    let mut buffer = CODES.take();
    buffer.grow(2 * places * SIDE * 64);
    let codes = buffer.as_mut_ptr().cast::<__m512i>();
    // The codes of each tile from a step on.
    let codes_at = |step: usize| [0, places].map(|first| codes.wrapping_add((first + step) * SIDE));
    let less: [_; AMX_BLOCK_ROWS] = less_of(block.sums);
    let mut registers = Registers::default();
    for pair in 0..block.pairs() {
        for row in (0..rows).step_by(ROWS_MAX) {
            let shape = Shape::of_rows(ROWS_MAX.min(rows - row), block.is_whole(pair));
            // SAFETY: rows and pairs are inside the block, and codes are expanded before they are multiplied.
            unsafe {
                let x = block.x.as_ptr().add(row * x_stride);
                registers.configure(shape);
                load_rows(shape, less[row..].as_ptr().cast());
                if row == 0 {
                    for unit in 0..units + AHEAD {
                        if unit < units {
                            block.expand::<E>(pair, unit, codes_at(unit * unit_steps));
                        }
                        let Some(unit) = unit.checked_sub(AHEAD) else { continue };
                        let step = unit * unit_steps;
                        let codes = codes_at(step).map(|codes| codes.cast_const().cast());
                        let count = unit_steps.min(steps - step);
                        let x = x_of_sets(x.add(step * 64), x_stride);
                        multiply(shape, count, x, x_stride, codes);
                        if step % AWAKE < unit_steps {
                            registers.keep_awake();
                        }
                    }
                } else {
                    let runs = steps.div_ceil(AWAKE);
                    let is_reversed = row / ROWS_MAX % 2 == 1;
                    for run in 0..runs {
                        let step = AWAKE * if is_reversed { runs - 1 - run } else { run };
                        let codes = codes_at(step).map(|codes| codes.cast_const().cast());
                        let count = AWAKE.min(steps - step);
                        let x = x_of_sets(x.add(step * 64), x_stride);
                        multiply(shape, count, x, x_stride, codes);
                        registers.keep_awake();
                    }
                }
                block.store(shape, row, pair);
            }
        }
    }
    CODES.set(buffer);
}

/// Expands blocks, padded with zeros to `total` code vectors, and prefetches later ones. Few lines can be on their way
/// into the first cache, and the loads of activations need them, so the hardware prefetcher does most: it is only
/// shown the start of the next small page. `tl2` expands slowly enough to prefetch all lines of the next pair.
///
/// # Safety
/// The tile has these blocks; `codes` is valid for `total` code vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")]
pub(super) unsafe fn expand<E: Expand<Gfni>>(
    tile: Tile,
    blocks: Range<usize>,
    codes: *mut __m512i,
    total: usize,
) {
    let vectors = E::PARTS * E::CODES;
    let count = blocks.len();
    for (at, block) in blocks.enumerate() {
        for line in 0..E::lines(block) {
            let here = tile.bytes.wrapping_add(E::place(block) + 64 * line);
            if E::CODES == CODES_MAX {
                prefetch::second(here.wrapping_add(2 * E::tile_bytes(tile.blocks)));
                continue;
            }
            prefetch::first(here.wrapping_add(NEAR));
            if here.addr() % PAGE < PAGE_START {
                prefetch::second(here.wrapping_add(PAGE));
            }
        }
        for part in 0..E::PARTS {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let expanded = E::codes(tile, block, part);
                let to = codes.add(at * vectors + part * E::CODES);
                for (at, code) in expanded[..E::CODES].iter().enumerate() {
                    to.add(at).write(*code);
                }
            }
        }
    }
    for at in count * vectors..total {
        // SAFETY: guaranteed by the caller.
        unsafe { codes.add(at).write(_mm512_setzero_si512()) };
    }
}
