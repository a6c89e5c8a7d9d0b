//! [`gemm_groups`], the safe entry point of the product with scales of groups: checks shapes, then runs one [`Path`].
//!
//! With trits `t`, integers `q` of the activations ([`super::GroupActivations`]), weight scales `w` and activation
//! scales `s`, output `j` of row `i` is, over the groups `g` in ascending order,
//!
//! ```text
//! y = 0
//! y = fma(f32(Σ_k q[i, k] · t[j, k]), w[j, g] · s[i, g], y)      (k in group g)
//! ```
//!
//! The sums are exact; the product of the scales and the fused multiply-add are rounded once each. So every ISA,
//! format and number of digits has one result.

use std::ops::Range;

use super::{
    group_activations::GroupRows,
    isa::Isa,
    product::{GroupProduct, Path},
    scalar,
};
use crate::formats::{PackedMatrix, TILE_ROWS};

/// Multiplies a range of tiles of `w` by some rows of `x`; `y[i * stride + j]` is the output `16 * tiles.start + j` of the `i`-th
/// of them, with `stride = 16 * tiles.len()`. Outputs past the matrix's last row are 0 (or NaN if an activation is).
///
/// # Panics
/// If this machine cannot run `isa`, `w` has no scales of groups, `tiles` exceeds it, `x` was reset for other matrices or has
/// fewer rows, or `y` is shorter than one row of `stride` for each.
pub fn gemm_groups(
    isa: Isa,
    w: &PackedMatrix,
    tiles: Range<usize>,
    x: GroupRows<'_>,
    y: &mut [f32],
) {
    let Some(path) = Path::for_isa(isa) else { panic!("this machine has no {isa}") };
    gemm_groups_by(path, w, tiles, x, y);
}

/// Runs [`gemm_groups`] by a given path, which must be available.
pub(super) fn gemm_groups_by(
    path: Path,
    w: &PackedMatrix,
    tiles: Range<usize>,
    x: GroupRows<'_>,
    y: &mut [f32],
) {
    let stride = tiles.len() * TILE_ROWS;
    let (rows, shape) = (x.count, x.shape);
    assert!(tiles.end <= w.tile_count(), "tiles {tiles:?} of {}", w.tile_count());
    let of_matrix = (w.format(), w.cols(), w.group());
    let of_rows = (shape.format, shape.cols, Some(shape.group));
    assert_eq!(of_rows, of_matrix, "activations for another matrix");
    assert!(y.len() >= rows * stride, "{} outputs for {rows} x {stride}", y.len());
    let Some(tile_scales) = w.group_scales(tiles.clone()) else {
        panic!("a matrix without scales of groups")
    };
    if stride == 0 || rows == 0 {
        return;
    }
    let groups = shape.groups();
    let product = GroupProduct {
        format: w.format(),
        tiles: w.tiles(tiles),
        tile_bytes: w.tile_bytes(),
        groups,
        group_blocks: w.blocks() / groups,
        tile_scales,
        digits: shape.digits.count(),
        digit_bytes: shape.digit_bytes(),
        x: x.data,
        x_stride: shape.stride(),
        sums: x.sums,
        row_scales: x.scales,
        y: &mut y[..rows * stride],
    };
    match path {
        Path::Scalar => scalar::gemm_groups(product),
        // No vectors join groups there yet.
        #[cfg(target_arch = "aarch64")]
        Path::Neon => scalar::gemm_groups(product),
        // SAFETY: `Path::for_isa` or the test that created the path checked its features; the shapes were
        // checked above.
        #[cfg(target_arch = "x86_64")]
        path => unsafe { super::x86_64::gemm_groups(path, product) },
    }
}
