//! AMX-INT8: 16 × 16 sums in a tile register, beside the vectors of AVX-512.
//!
//! `tdpbsud` multiplies a register of 16 rows of 64 activations by one of 16 code vectors: row `k` of
//! the second holds, for each of 16 outputs, the codes of inputs `4 k..4 k + 4`, which is what a code
//! vector is. So many rows work as [`super::many`] lays it out, 16 code vectors at a time; what is added
//! is what `vpdpbusd` adds. Few rows are multiplied by vectors: a register takes as long for them.

use std::{
    arch::{asm, x86_64::*},
    mem::MaybeUninit,
    ops::Range,
    sync::LazyLock,
};

use super::{
    super::{
        Expand, Tile, Vectors, Work, block_rows,
        many::{self, Codes, Many},
    },
    Vnni,
};
use crate::{
    formats::{Format, TILE_ROWS, i2_s::I2S, tl1::Tl1, tl2::Tl2},
    kernels::gemm::Product,
};

/// AVX-512 with VNNI, and AMX-INT8.
struct Amx;

/// Rows and columns of sums in a register.
pub(in crate::kernels) const SIDE: usize = 16;
/// Rows that are multiplied at a time.
pub(in crate::kernels) const ROWS_MAX: usize = 2 * SIDE;
/// Rows from which registers of tiles are faster than vectors.
const FEW: usize = 5;
/// Code vectors that are expanded while those before are multiplied: whole blocks of every format.
const UNIT: usize = 3 * SIDE;

/// Whether the processor has AMX-INT8 and the system lets this process use it.
pub(in crate::kernels) fn is_available() -> bool {
    static AVAILABLE: LazyLock<bool> = LazyLock::new(|| has_amx_int8() && is_permitted());
    *AVAILABLE
}

fn has_amx_int8() -> bool {
    const TILE_AND_INT8: u32 = 0b11 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

/// Linux saves the registers of those who asked for it only.
fn is_permitted() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: the call takes two numbers and changes nothing but what the process may use.
        let status =
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        status == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Runs the product.
///
/// # Safety
/// As for [`super::gemm_vnni`], and [`is_available`].
pub(in crate::kernels) unsafe fn gemm(product: Product<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match product.format {
            Format::I2S => gemm_as::<I2S>(product),
            Format::Tl1 => gemm_as::<Tl1>(product),
            Format::Tl2 => gemm_as::<Tl2>(product),
        }
    }
}

unsafe fn gemm_as<E: Expand<Amx>>(product: Product<'_>) {
    // SAFETY: passed on from the caller.
    unsafe {
        match product.sums.len() {
            FEW..=ROWS_MAX => gemm_in_registers::<E>(product),
            _ => super::super::gemm::<Amx, E>(product),
        }
    }
}

/// The product with so few rows that all sums of a pair of tiles stay in registers.
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
            registers.hold(rows);
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

/// Products of so many rounds of nothing but multiplications.
///
/// # Safety
/// As for [`gemm`].
pub(in crate::kernels) unsafe fn products_of(rounds: usize) -> usize {
    let mut registers = Registers::default();
    // SAFETY: the caller has AMX; registers are zero.
    unsafe {
        registers.hold(ROWS_MAX);
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

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The shapes of the registers: sums in 0 to 3, two sets of activations in 4 and 5, codes in 6 and 7.
#[derive(Default)]
pub(in crate::kernels) struct Registers {
    /// Rows of activations they are laid out for, of 2 × [`SIDE`].
    rows: Option<usize>,
}

impl Registers {
    /// Lays them out for so many rows, 1 to 32, and clears them, unless they already are.
    ///
    /// # Safety
    /// [`is_available`].
    pub(in crate::kernels) unsafe fn hold(&mut self, rows: usize) {
        if self.rows == Some(rows) {
            return;
        }
        let (first, second) = (rows.min(SIDE) as u8, rows.saturating_sub(SIDE).max(1) as u8);
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        config.row_bytes[..8].fill(64);
        config.rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
        // SAFETY: the caller has AMX; the layout is one of palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags))
        };
        self.rows = Some(rows);
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        if self.rows.is_some() {
            // SAFETY: they were laid out, so the machine has them. The system need not save them now.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }
}

/// Which registers have a part in a product: the second set of activations where there are more rows
/// than [`SIDE`], the second codes for a pair of tiles.
#[derive(Clone, Copy)]
struct Shape {
    rows: usize,
    pair: bool,
}

/// The asm of all shapes: `both` and more.
macro_rules! by_shape {
    ($shape:expr, $one:literal, $tiles:literal, $rows:literal, $both:literal, $($operands:tt)*) => {
        match ($shape.rows > SIDE, $shape.pair) {
            (false, false) => asm!($one, $($operands)*),
            (false, true) => asm!($one, $tiles, $($operands)*),
            (true, false) => asm!($one, $rows, $($operands)*),
            (true, true) => asm!($one, $tiles, $rows, $both, $($operands)*),
        }
    };
}

/// Fills the sums with outputs `y`, `stride` apart.
///
/// # Safety
/// Registers are laid out for the shape, whose outputs are there.
unsafe fn load_sums(shape: Shape, y: *const i32, stride: usize) {
    // SAFETY: passed on from the caller.
    unsafe {
        by_shape!(
            shape,
            "tileloadd tmm0, [{first} + {stride}] /* {second} */",
            "tileloadd tmm1, [{first} + {stride} + 64]",
            "tileloadd tmm2, [{second} + {stride}]",
            "tileloadd tmm3, [{second} + {stride} + 64]",
            first = in(reg) y,
            second = in(reg) y.wrapping_add(SIDE * stride),
            stride = in(reg) 4 * stride,
            options(nostack, preserves_flags)
        );
    }
}

/// Writes the sums to outputs `y`, `stride` apart.
///
/// # Safety
/// As for [`load_sums`].
unsafe fn store_sums(shape: Shape, y: *mut i32, stride: usize) {
    // SAFETY: passed on from the caller.
    unsafe {
        by_shape!(
            shape,
            "tilestored [{first} + {stride}], tmm0 /* {second} */",
            "tilestored [{first} + {stride} + 64], tmm1",
            "tilestored [{second} + {stride}], tmm2",
            "tilestored [{second} + {stride} + 64], tmm3",
            first = in(reg) y,
            second = in(reg) y.wrapping_add(SIDE * stride),
            stride = in(reg) 4 * stride,
            options(nostack, preserves_flags)
        );
    }
}

/// Adds the products of `steps` times 64 activations with as many codes of each tile, which begin at
/// `codes`.
///
/// # Safety
/// As for [`load_sums`]; activations and codes are there, and `steps` is at least 1.
#[inline(always)]
unsafe fn multiply(
    shape: Shape,
    steps: usize,
    x: *const i8,
    x_stride: usize,
    codes: [*const u8; 2],
) {
    macro_rules! steps {
        ($step:literal) => {
            asm!(
                "2:",
                $step,
                "add {x0}, 64",
                "add {x1}, 64",
                "add {c0}, 1024",
                "add {c1}, 1024",
                "dec {steps}",
                "jnz 2b",
                steps = inout(reg) steps => _,
                x0 = inout(reg) x => _,
                x1 = inout(reg) x.wrapping_add(SIDE * x_stride) => _,
                c0 = inout(reg) codes[0] => _,
                c1 = inout(reg) codes[1] => _,
                stride = in(reg) x_stride,
                line = in(reg) 64usize,
                options(nostack)
            )
        };
    }
    // SAFETY: passed on from the caller.
    unsafe {
        match (shape.rows > SIDE, shape.pair) {
            (true, true) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm7, [{c1} + {line}]
                 tdpbsud tmm1, tmm4, tmm7
                 tileloadd tmm5, [{x1} + {stride}]
                 tdpbsud tmm2, tmm5, tmm6
                 tdpbsud tmm3, tmm5, tmm7"
            ),
            (true, false) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm5, [{x1} + {stride}]
                 tdpbsud tmm2, tmm5, tmm6"
            ),
            (false, true) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6
                 tileloadd tmm7, [{c1} + {line}]
                 tdpbsud tmm1, tmm4, tmm7"
            ),
            (false, false) => steps!(
                "tileloadd tmm4, [{x0} + {stride}]
                 tileloadd tmm6, [{c0} + {line}]
                 tdpbsud tmm0, tmm4, tmm6"
            ),
        }
    }
}

/// What [`multiply_pair`] works on: one tile or two, and up to 32 rows.
#[derive(Clone, Copy)]
struct Pair {
    tile: Tile,
    /// From one tile to the next.
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

/// All sums of a pair of tiles. The expansion of a unit and the products of the one before depend on
/// nothing of each other: the processor does both at once.
///
/// # Safety
/// Registers are laid out for the rows; all that the pair points to is there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn multiply_pair<E: Expand<Amx>>(pair: Pair, shape: Shape) {
    let unit = UNIT / (E::PARTS * E::CODES);
    let units_count = pair.tile.blocks.div_ceil(unit);
    let range = |index: usize| index * unit..((index + 1) * unit).min(pair.tile.blocks);
    let mut units: [Units; 2] =
        [const { [const { [const { MaybeUninit::uninit() }; UNIT] }; 2] }; 2];
    // SAFETY: blocks of a unit are the tile's; what is multiplied was expanded before.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nomem, nostack, preserves_flags)
        );
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

/// Expands these blocks of each tile, and asks for those of the pair that follows. Returns how many
/// steps of 16 code vectors they are.
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
        // SAFETY: the tile is there, and so are its blocks.
        unsafe {
            let bytes = pair.tile.bytes.add(index * pair.tile_bytes);
            let tile = Tile { bytes, ..pair.tile };
            many::expand::<Amx, E>(tile, blocks.clone(), 2 * pair.tile_bytes, unit);
        }
    }
    (blocks.len() * E::PARTS * E::CODES).div_ceil(SIDE)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn block_amx<E: Expand<Amx>, const R: usize, const A: usize, const TILES: usize>(
    work: Work,
) {
    // SAFETY: passed on from the caller.
    unsafe { block_rows::<Amx, E, R, A, TILES>(work) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn expand_amx<E: Expand<Amx>>(
    tile: Tile,
    blocks: Range<usize>,
    ahead: usize,
    codes: &mut Codes<Amx>,
) {
    // SAFETY: passed on from the caller.
    unsafe { many::expand::<Amx, E>(tile, blocks, ahead, codes) }
}

/// The first chunk's sums begin at `−Σ q`.
#[target_feature(enable = "avx512f")]
unsafe fn begin(many: &Many<Amx>, rows: usize, tiles: usize) {
    for row in 0..rows {
        // SAFETY: the rows' sums and outputs are there.
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

unsafe fn peak_amx(_rounds: usize) {
    unreachable!("its peak is that of `products_of`");
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
        // SAFETY: passed on from the caller.
        unsafe { Vnni::accumulate(sum, codes, x) }
    }

    #[inline(always)]
    unsafe fn add_widened(total: __m512i, sum: __m512i) -> __m512i {
        // SAFETY: passed on from the caller.
        unsafe { Vnni::add_widened(total, sum) }
    }

    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize, registers: &mut Registers) {
        // SAFETY: the rows and tiles, their outputs and codes are there; `Amx` is made only where
        // `is_available`.
        unsafe {
            if !many.sums.is_null() {
                begin(&many, rows, tiles);
            }
            registers.hold(rows);
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
