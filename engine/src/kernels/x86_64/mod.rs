//! The paths of x86-64: `avx2` and `avx512` define the vectors of the loops in [`super::generic`].

use super::{
    generic::{blocks, peak},
    product::{GroupProduct, Path, Product},
};
use crate::formats::layout::with_layout;

mod avx2;
mod avx512;
mod groups;
mod many_groups;
pub(super) mod registers;
mod tile_stores;

use avx2::{Avx2, vnni::AvxVnni};
use avx512::{Bw, Vnni, gfni::Gfni};

pub use tile_stores::store_in_products;

/// Runs `rounds` rounds of multiply instructions only; returns the number of products.
///
/// # Safety
/// The machine can run `path`.
pub(super) unsafe fn products_of(path: Path, rounds: usize) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match path {
            Path::Scalar => 0,
            Path::Avx2 => peak::products_of::<Avx2>(rounds),
            Path::AvxVnni => peak::products_of::<AvxVnni>(rounds),
            Path::Avx512 => peak::products_of::<Bw>(rounds),
            Path::Avx512Vnni => peak::products_of::<Vnni>(rounds),
            Path::Avx512Gfni => peak::products_of::<Gfni>(rounds),
            Path::Amx => avx512::amx::products_of(rounds),
        }
    }
}

/// Runs the product by a path other than the scalar one.
///
/// # Safety
/// The machine can run `path`; the shapes of `product` are consistent.
pub(super) unsafe fn gemm(path: Path, product: Product<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        with_layout!(product.format, L => match path {
            Path::Scalar => super::scalar::gemm(product),
            Path::Avx2 => blocks::gemm::<Avx2, L>(product),
            Path::AvxVnni => blocks::gemm::<AvxVnni, L>(product),
            Path::Avx512 => blocks::gemm::<Bw, L>(product),
            Path::Avx512Vnni => blocks::gemm::<Vnni, L>(product),
            Path::Avx512Gfni => blocks::gemm::<Gfni, L>(product),
            Path::Amx => avx512::amx::gemm::<L>(product),
        });
    }
}

/// Runs the product with scales of groups by a path other than the scalar one.
///
/// # Safety
/// As for [`gemm`].
pub(super) unsafe fn gemm_groups(path: Path, product: GroupProduct<'_>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        with_layout!(product.format, L => match path {
            Path::Scalar => super::scalar::gemm_groups(product),
            Path::Avx2 => many_groups::gemm::<Avx2, L>(product),
            Path::AvxVnni => many_groups::gemm::<AvxVnni, L>(product),
            Path::Avx512 => groups::gemm::<Bw, L>(product),
            Path::Avx512Vnni => groups::gemm::<Vnni, L>(product),
            Path::Avx512Gfni => many_groups::gemm::<Gfni, L>(product),
            Path::Amx => avx512::amx_groups::gemm::<L>(product),
        });
    }
}
