//! [`gemm`], the safe entry point of the ternary kernels: checks shapes, then runs one [`Path`].

use std::ops::Range;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::{sync::LazyLock, time::Instant};

#[cfg(target_arch = "aarch64")]
use super::aarch64 as native;
#[cfg(target_arch = "x86_64")]
use super::x86_64 as native;
use super::{Activations, Isa, scalar};
use crate::formats::{Format, PackedMatrix, TILE_ROWS};

/// Implementations of the ternary product. An [`Isa`] has one or, for AVX-512, two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// The reference.
    Scalar,
    /// NEON with dot products.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with VNNI as well.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512 with VNNI, and AMX-INT8.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// One product with checked shapes.
pub(super) struct Product<'a> {
    pub format: Format,
    pub tiles: &'a [u8],   // (tile, tile_bytes)
    pub tile_bytes: usize, // a multiple of 64
    pub blocks: usize,     // of a tile
    pub x: &'a [i8],       // (row, x_stride), the first blocks * BLOCK_COLS of each in use
    pub x_stride: usize,   // a multiple of 4
    pub sums: &'a [i32],   // (row,)
    pub y: &'a mut [i32],  // (row, tile, TILE_ROWS)
}

impl Path {
    /// Returns the fastest path of an ISA on this machine, looked up once.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            static AVX2: LazyLock<bool> = LazyLock::new(|| Isa::Avx2.is_available());
            static AMX: LazyLock<bool> = LazyLock::new(|| Isa::Amx.is_available());
            static AVX512: LazyLock<Option<Path>> = LazyLock::new(|| {
                let paths = [Path::Avx512Vnni, Path::Avx512];
                paths.into_iter().find(|path| path.is_available())
            });
            match isa {
                Isa::Scalar => Some(Self::Scalar),
                Isa::Neon => None,
                Isa::Avx2 => AVX2.then_some(Self::Avx2),
                Isa::Avx512 => *AVX512,
                Isa::Amx => AMX.then_some(Self::Amx),
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            static NEON: LazyLock<bool> = LazyLock::new(|| Path::Neon.is_available());
            match isa {
                Isa::Scalar => Some(Self::Scalar),
                Isa::Neon => NEON.then_some(Self::Neon),
                Isa::Avx2 | Isa::Avx512 | Isa::Amx => None,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        (isa == Isa::Scalar).then_some(Self::Scalar)
    }

    /// Returns whether this machine can run the path.
    pub(super) fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Self::Neon => Isa::Neon.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => Isa::Avx2.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Isa::Avx512.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                Isa::Avx512.is_available() && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Isa::Amx.is_available(),
        }
    }
}

/// Returns the peak rate of an ISA's multiply instruction on one thread with all operands in registers,
/// in products per second. Takes some hundredths of a second; `None` for scalar code and unavailable
/// ISAs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub fn peak_products_per_s(isa: Isa) -> Option<f64> {
    const ROUNDS: usize = 200_000;
    const PASSES: usize = 20;
    let path = Path::of(isa).filter(|path| *path != Path::Scalar)?;
    let pass = || {
        let started = Instant::now();
        // SAFETY: `Path::of` checked the features.
        let count = unsafe { native::products_of(path, ROUNDS) };
        count as f64 / started.elapsed().as_secs_f64().max(1e-9)
    };
    let mut rates: Vec<f64> = (0..PASSES).map(|_| pass()).collect();
    rates.sort_by(f64::total_cmp);
    Some(rates[PASSES / 2])
}

/// Returns `None`, because no ISA with vectors is available.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn peak_products_per_s(_isa: Isa) -> Option<f64> {
    None
}

/// Returns the time of a store of an AMX register after `steps` steps, in units of a product's time; `None` without AMX.
pub fn tile_store(steps: usize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    return native::store_in_products(steps);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = steps;
        None
    }
}

/// Multiplies a range of tiles of `w` by all rows of `x`:
/// `y[i * stride + j] = Σ_k q[i, k] * t[16 * tiles.start + j, k]`, exact, with
/// `stride = 16 * tiles.len()`. Outputs past the matrix's last row (its last tile may be partial)
/// are 0.
///
/// # Panics
/// If this machine cannot run `isa`, `tiles` exceeds the matrix, `x` was reset for another format or
/// width, or `y` is shorter than `x.rows() * stride`.
pub fn gemm(isa: Isa, w: &PackedMatrix, tiles: Range<usize>, x: &Activations, y: &mut [i32]) {
    let Some(path) = Path::of(isa) else { panic!("this machine has no {isa}") };
    gemm_by(path, w, tiles, x, y);
}

/// Runs [`gemm`] by a given path, which must be available.
pub(super) fn gemm_by(
    path: Path,
    w: &PackedMatrix,
    tiles: Range<usize>,
    x: &Activations,
    y: &mut [i32],
) {
    let stride = tiles.len() * TILE_ROWS;
    assert!(tiles.end <= w.tile_count(), "tiles {tiles:?} of {}", w.tile_count());
    assert_eq!((x.format(), x.cols()), (w.format(), w.cols()), "activations for another matrix");
    assert!(w.group().is_none(), "a matrix with scales of groups");
    assert!(y.len() >= x.rows() * stride, "{} outputs for {} x {stride}", y.len(), x.rows());
    if stride == 0 || x.rows() == 0 {
        return;
    }
    let product = Product {
        format: w.format(),
        tiles: w.tiles(tiles),
        tile_bytes: w.tile_bytes(),
        blocks: w.blocks(),
        x: x.data(),
        x_stride: x.stride(),
        sums: x.sums(),
        y: &mut y[..x.rows() * stride],
    };
    match path {
        Path::Scalar => scalar::gemm(product),
        // SAFETY: `Path::of` or the test that created the path checked its features; the shapes were
        // checked above.
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        path => unsafe { native::gemm(path, product) },
    }
}
