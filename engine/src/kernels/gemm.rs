//! [`gemm`], the safe entry point of the ternary kernels: checks shapes, then runs one [`Path`].

use std::ops::Range;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::time::Instant;

#[cfg(target_arch = "aarch64")]
use super::aarch64 as native;
#[cfg(target_arch = "x86_64")]
use super::x86_64 as native;
use super::{
    ActivationRows,
    isa::Isa,
    product::{Path, Product},
    scalar,
};
use crate::formats::{PackedMatrix, TILE_ROWS};

/// Returns the peak rate of an ISA's multiply instruction on one thread with all operands in registers,
/// in products per second. Takes some hundredths of a second; `None` for scalar code and unavailable
/// ISAs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub fn peak_products_per_s(isa: Isa) -> Option<f64> {
    const ROUNDS: usize = 200_000;
    const PASSES: usize = 20;
    let path = Path::for_isa(isa).filter(|path| *path != Path::Scalar)?;
    let pass = || {
        let started = Instant::now();
        // SAFETY: `Path::for_isa` checked the features.
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

/// Multiplies a range of tiles of `w` by some rows of `x`:
/// `y[i * stride + j] = Σ_k q[i, k] * t[16 * tiles.start + j, k]`, exact, with
/// `stride = 16 * tiles.len()`. Outputs past the matrix's last row (its last tile may be partial)
/// are 0.
///
/// # Panics
/// If this machine cannot run `isa`, `tiles` exceeds the matrix, `x` was reset for another format or
/// width, or `y` is shorter than one row of `stride` for each.
pub fn gemm(isa: Isa, w: &PackedMatrix, tiles: Range<usize>, x: ActivationRows<'_>, y: &mut [i32]) {
    let Some(path) = Path::for_isa(isa) else { panic!("this machine has no {isa}") };
    gemm_by(path, w, tiles, x, y);
}

/// Runs [`gemm`] by a given path, which must be available.
pub(super) fn gemm_by(
    path: Path,
    w: &PackedMatrix,
    tiles: Range<usize>,
    x: ActivationRows<'_>,
    y: &mut [i32],
) {
    let stride = tiles.len() * TILE_ROWS;
    assert!(tiles.end <= w.tile_count(), "tiles {tiles:?} of {}", w.tile_count());
    assert_eq!((x.format, x.cols), (w.format(), w.cols()), "activations for another matrix");
    assert!(w.group().is_none(), "a matrix with scales of groups");
    let rows = x.sums.len();
    assert!(y.len() >= rows * stride, "{} outputs for {rows} x {stride}", y.len());
    if stride == 0 || rows == 0 {
        return;
    }
    let product = Product {
        format: w.format(),
        tiles: w.tiles(tiles),
        tile_bytes: w.tile_bytes(),
        blocks: w.blocks(),
        x: x.data,
        x_stride: x.stride,
        sums: x.sums,
        y: &mut y[..rows * stride],
    };
    match path {
        Path::Scalar => scalar::gemm(product),
        // SAFETY: `Path::for_isa` or the test that created the path checked its features; the shapes were
        // checked above.
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        path => unsafe { native::gemm(path, product) },
    }
}
