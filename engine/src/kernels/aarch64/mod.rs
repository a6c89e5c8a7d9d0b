//! The paths of aarch64: `neon` defines the vectors of the loops in [`super::generic`].

use super::{
    generic::{blocks, peak},
    product::{Path, Product},
};
use crate::formats::layout::with_layout;

pub(super) mod dot;
mod neon;

use neon::Neon;

/// Runs `rounds` rounds of multiply instructions only; returns the number of products.
///
/// # Safety
/// The machine can run `path`.
pub(super) unsafe fn products_of(path: Path, rounds: usize) -> usize {
    match path {
        Path::Scalar => 0,
        // SAFETY: guaranteed by the caller.
        Path::Neon => unsafe { peak::products_of::<Neon>(rounds) },
    }
}

/// Runs the product by a path other than the scalar one.
///
/// # Safety
/// The machine can run `path`; the shapes of `product` are consistent.
pub(super) unsafe fn gemm(path: Path, product: Product<'_>) {
    match path {
        Path::Scalar => super::scalar::gemm(product),
        // SAFETY: guaranteed by the caller.
        Path::Neon => unsafe {
            with_layout!(product.format, L => blocks::gemm::<Neon, L>(product));
        },
    }
}
