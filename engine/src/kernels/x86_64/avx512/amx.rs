//! AMX-INT8: 16 × 16 sums in a tile register, in addition to the vectors of AVX-512.
//!
//! `tdpbsud` multiplies a register of 16 rows of 64 activations by one of 16 code vectors: row `k` of the
//! second holds, for each of 16 outputs, the codes of inputs `4 k..4 k + 4`, which is exactly a code
//! vector. Steps with many rows therefore use the loop of [`many`] with 16 code vectors at a time,
//! and their sums equal the sums of `vpdpbusd`. Steps with few rows use vectors, because a tile register
//! takes as long for few rows as for many.

use std::{
    arch::{asm, x86_64::*},
    mem::MaybeUninit,
    ops::Range,
};

use super::{
    super::registers::{
        ROWS_MAX, Registers, SIDE, Shape, clear_sums, load_sums, multiply, store_sums,
    },
    Vnni,
};
use crate::{
    formats::TILE_ROWS,
    kernels::{
        gemm::Product,
        generic::{
            self, Expand, Tile, Vectors, Work, block_rows, enabled,
            many::{self, Codes, Many},
            peak,
        },
    },
};

/// AVX-512 with VNNI, and AMX-INT8.
pub(in super::super) struct Amx;

/// Smallest number of rows for which tile registers are faster than vectors.
const FEW: usize = 5;
/// Code vectors that are expanded while the previous ones are multiplied: whole blocks in every format.
const UNIT: usize = 3 * SIDE;

/// Runs the product.
///
/// # Safety
/// The machine has AVX-512 with VNNI and AMX ([`super::super::registers::is_available`]); the shapes
/// of `product` are consistent.
pub(in super::super) unsafe fn gemm<E: Expand<Amx>>(product: Product<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match product.sums.len() {
            FEW..=ROWS_MAX => gemm_in_registers::<E>(product),
            _ => generic::gemm::<Amx, E>(product),
        }
    }
}

/// The product with at most [`ROWS_MAX`] rows: all sums of a pair of tiles stay in registers.
///
/// # Safety
/// As for [`gemm`].
unsafe fn gemm_in_registers<E: Expand<Amx>>(product: Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, sums, y, .. } = product;
    let (tile_count, rows) = (tiles.len() / tile_bytes, sums.len());
    let y_stride = tile_count * TILE_ROWS;
    assert!(x_stride >= blocks * E::BLOCK_COLS && x.len() >= rows * x_stride);
    assert!(y.len() >= rows * y_stride);
    let mut registers = Registers::default();
    for first in (0..tile_count).step_by(2) {
        let shape = Shape { rows, pair: tile_count - first > 1 };
        // SAFETY: the tiles, rows and outputs are inside the product's slices, checked above.
        unsafe {
            registers.configure(rows);
            let pair = Pair {
                tile: Tile { bytes: tiles.as_ptr().add(first * tile_bytes), blocks },
                tile_bytes,
                x: x.as_ptr(),
                x_stride,
                sums: sums.as_ptr(),
                y: y.as_mut_ptr().add(first * TILE_ROWS),
                y_stride,
            };
            multiply_pair::<E>(pair, shape);
        }
    }
}

/// Runs `rounds` rounds of multiply instructions only; returns the number of products.
///
/// # Safety
/// As for [`gemm`].
pub(in super::super) unsafe fn products_of(rounds: usize) -> usize {
    let mut registers = Registers::default();
    // SAFETY: the caller has AMX; the registers are zero.
    unsafe {
        registers.configure(ROWS_MAX);
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

/// Operands of [`multiply_pair`]: one or two tiles, and up to 32 rows.
#[derive(Clone, Copy)]
struct Pair {
    tile: Tile,
    /// Bytes from one tile to the next.
    tile_bytes: usize,
    x: *const i8,
    x_stride: usize,
    sums: *const i32,
    /// The first row's outputs for the first tile.
    y: *mut i32,
    y_stride: usize,
}

/// Expanded codes of each tile.
type Units = [[MaybeUninit<__m512i>; UNIT]; 2];

/// Computes all sums of a pair of tiles. The expansion of a unit and the products of the previous one are
/// independent, so the processor overlaps them.
///
/// # Safety
/// The registers are configured for the rows; the pointers of `pair` are valid.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply_pair<E: Expand<Amx>>(pair: Pair, shape: Shape) {
    let unit = UNIT / (E::PARTS * E::CODES);
    let units_count = pair.tile.blocks.div_ceil(unit);
    let range = |index: usize| index * unit..((index + 1) * unit).min(pair.tile.blocks);
    let mut units: [Units; 2] =
        [const { [const { [const { MaybeUninit::uninit() }; UNIT] }; 2] }; 2];
    // SAFETY: the blocks of a unit are in the tile; units are expanded before they are multiplied.
    unsafe {
        clear_sums();
        let mut steps = expand_unit::<E>(pair, shape, range(0), &mut units[0]);
        for index in 0..units_count {
            let steps_now = steps;
            if index + 1 < units_count {
                steps =
                    expand_unit::<E>(pair, shape, range(index + 1), &mut units[(index + 1) % 2]);
            }
            let x = pair.x.add(index * unit * E::BLOCK_COLS);
            let [first, second] = &units[index % 2];
            let codes = [first.as_ptr().cast(), second.as_ptr().cast()];
            multiply(shape, steps_now, x, pair.x_stride, codes);
        }
        store_sums(shape, pair.y, pair.y_stride);
        for row in 0..shape.rows {
            let less = _mm512_set1_epi32(*pair.sums.add(row));
            for tile in 0..1 + usize::from(shape.pair) {
                let y = pair.y.add(row * pair.y_stride + tile * TILE_ROWS).cast();
                _mm512_storeu_si512(y, _mm512_sub_epi32(_mm512_loadu_si512(y), less));
            }
        }
    }
}

/// Expands the given blocks of each tile, and prefetches the same blocks of the next pair. Returns the
/// number of steps of 16 code vectors.
///
/// # Safety
/// As for [`multiply_pair`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_unit<E: Expand<Amx>>(
    pair: Pair,
    shape: Shape,
    blocks: Range<usize>,
    units: &mut Units,
) -> usize {
    for (index, unit) in units.iter_mut().take(1 + usize::from(shape.pair)).enumerate() {
        // SAFETY: the tile and its blocks are inside the slice.
        unsafe {
            let bytes = pair.tile.bytes.add(index * pair.tile_bytes);
            let tile = Tile { bytes, ..pair.tile };
            many::expand::<Amx, E>(tile, blocks.clone(), 2 * pair.tile_bytes, unit);
        }
    }
    (blocks.len() * E::PARTS * E::CODES).div_ceil(SIDE)
}

enabled!(Amx, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", block_amx, expand_amx, peak_amx);

/// Sets the outputs to `−Σ q` before the first chunk.
#[target_feature(enable = "avx512f")]
unsafe fn begin(many: &Many<Amx>, rows: usize, tiles: usize) {
    for row in 0..rows {
        // SAFETY: the pointers are valid for the sums and outputs of all rows.
        unsafe {
            let less = _mm512_set1_epi32(-*many.sums.add(row));
            for tile in 0..tiles {
                _mm512_storeu_si512(
                    many.y.add(row * many.y_stride + tile * TILE_ROWS).cast(),
                    less,
                );
            }
        }
    }
}

impl Vectors for Amx {
    vectors_512!(block_amx, expand_amx, peak_amx);
    const ACCUMULATE_MAX: usize = usize::MAX;
    const MANY_ROWS_MIN: usize = FEW;
    const MANY_ROWS: usize = ROWS_MAX;
    const MANY_TILES: usize = 4;
    const MANY_CODES: usize = SIDE;
    type Kept = Registers;

    #[inline(always)]
    unsafe fn accumulate(sum: __m512i, codes: __m512i, x: __m512i) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { Vnni::accumulate(sum, codes, x) }
    }

    #[inline(always)]
    unsafe fn add_widened(total: __m512i, sum: __m512i) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { Vnni::add_widened(total, sum) }
    }

    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize, registers: &mut Registers) {
        // SAFETY: the pointers are valid for the rows and tiles; the machine has AMX.
        unsafe {
            if !many.sums.is_null() {
                begin(&many, rows, tiles);
            }
            registers.configure(rows);
            for tile in (0..tiles).step_by(2) {
                let shape = Shape { rows, pair: tiles - tile > 1 };
                let y = many.y.add(tile * TILE_ROWS);
                let codes = [0, 1].map(|i| many.codes.wrapping_add(tile + i).cast());
                load_sums(shape, y, many.y_stride);
                multiply(shape, many.count / SIDE, many.x, many.x_stride, codes);
                store_sums(shape, y, many.y_stride);
            }
        }
    }
}
