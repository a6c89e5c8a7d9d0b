//! The functions of each ISA.

use super::{AttentionTile, ByteDots, attention};
use crate::kernels::float::byte_dots::ScalarDots;
#[cfg(target_arch = "aarch64")]
use crate::kernels::float::byte_dots::aarch64::NeonDots;
#[cfg(target_arch = "x86_64")]
use crate::kernels::{
    float::byte_dots::x86_64::{Avx2Dots, Avx512Dots, VnniDots},
    screen::has_vnni,
};

/// Runs whole tiles of `Q` queries, then smaller ones.
///
/// # Safety
/// The ISA of the sums must be available.
#[inline(always)]
unsafe fn run<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    queries: &[f32],
    positions: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let mut at = 0;
    while at < positions.len() {
        let left = positions.len() - at;
        // SAFETY: guaranteed by the caller.
        at += unsafe {
            if left >= Q {
                run_tile::<D, Q>(tile, queries, positions, at, scratch, out)
            } else if left >= 4 {
                run_tile::<D, 4>(tile, queries, positions, at, scratch, out)
            } else {
                run_tile::<D, 1>(tile, queries, positions, at, scratch, out)
            }
        };
    }
}

/// Runs `Q` queries from query `at` on; returns `Q`.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_tile<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    queries: &[f32],
    positions: &[usize],
    at: usize,
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) -> usize {
    let (dim, padded) = (tile.head_dim, tile.padded_head_dim);
    let queries = &queries[at * dim..(at + Q) * dim];
    let positions = std::array::from_fn(|i| positions[at + i]);
    let out = &mut out[at * padded..(at + Q) * padded];
    // SAFETY: guaranteed by the caller.
    unsafe { attention::<D, Q>(tile, queries, &positions, scratch, out) };
    Q
}

macro_rules! of_isa {
    ($(#[$attribute:meta])* $name:ident, $dots:ty, $queries:literal) => {
        /// Runs all queries.
        ///
        /// # Safety
        /// The ISA must be available.
        $(#[$attribute])*
        pub unsafe fn $name(
            tile: &AttentionTile<'_, i8>,
            queries: &[f32],
            positions: &[usize],
            scratch: &mut Vec<f32>,
            out: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { run::<$dots, $queries>(tile, queries, positions, scratch, out) }
        }
    };
}

of_isa!(scalar, ScalarDots, 4);
#[cfg(target_arch = "aarch64")]
of_isa!(
    #[target_feature(enable = "neon,dotprod")]
    neon,
    NeonDots,
    4
);
#[cfg(target_arch = "x86_64")]
of_isa!(
    #[target_feature(enable = "avx2,fma,f16c")]
    avx2,
    Avx2Dots,
    4
);
#[cfg(target_arch = "x86_64")]
of_isa!(
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    avx512_without_vnni,
    Avx512Dots,
    8
);
#[cfg(target_arch = "x86_64")]
of_isa!(
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    avx512_with_vnni,
    VnniDots,
    8
);

/// Runs all queries.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
pub unsafe fn avx512(
    tile: &AttentionTile<'_, i8>,
    queries: &[f32],
    positions: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    // SAFETY: guaranteed by the caller; VNNI is checked.
    unsafe {
        if has_vnni() {
            avx512_with_vnni(tile, queries, positions, scratch, out);
        } else {
            avx512_without_vnni(tile, queries, positions, scratch, out);
        }
    }
}
