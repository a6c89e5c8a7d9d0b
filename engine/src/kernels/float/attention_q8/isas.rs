//! The functions of each ISA.

use super::{AttentionTile, ByteDots, attention, together::attention as attention_together};
use crate::kernels::float::together::Together;
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

/// Runs queries of several sequences, in tiles of `Q` if each has a multiple of them.
///
/// # Safety
/// The ISA of the sums must be available.
#[inline(always)]
unsafe fn run_together<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    of: &Together<'_>,
    queries: &[f32],
    positions: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let each = positions.len() / of.tables.len();
    // SAFETY: guaranteed by the caller.
    unsafe {
        if each.is_multiple_of(Q) {
            attention_together::<D, Q>(tile, of, queries, positions, scratch, out);
        } else if each.is_multiple_of(4) {
            attention_together::<D, 4>(tile, of, queries, positions, scratch, out);
        } else {
            attention_together::<D, 1>(tile, of, queries, positions, scratch, out);
        }
    }
}

macro_rules! of_isa {
    ($features:literal $name:ident, $dots:path, $queries:literal) => {
        /// The functions of an ISA, which must be available.
        pub mod $name {
            use super::*;

            /// Runs all queries of a sequence.
            #[target_feature(enable = $features)]
            pub unsafe fn of_one(
                tile: &AttentionTile<'_, i8>,
                queries: &[f32],
                positions: &[usize],
                scratch: &mut Vec<f32>,
                out: &mut [f32],
            ) {
                // SAFETY: this function's features are those of the sums.
                unsafe { run::<$dots, $queries>(tile, queries, positions, scratch, out) }
            }

            /// Runs all queries of several sequences.
            #[target_feature(enable = $features)]
            pub unsafe fn together(
                tile: &AttentionTile<'_, i8>,
                of: &Together<'_>,
                queries: &[f32],
                positions: &[usize],
                scratch: &mut Vec<f32>,
                out: &mut [f32],
            ) {
                // SAFETY: this function's features are those of the sums.
                unsafe {
                    run_together::<$dots, $queries>(tile, of, queries, positions, scratch, out)
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
of_isa!("sse2" scalar, crate::kernels::float::byte_dots::ScalarDots, 4);
#[cfg(target_arch = "aarch64")]
of_isa!("neon" scalar, crate::kernels::float::byte_dots::ScalarDots, 4);
#[cfg(target_arch = "aarch64")]
of_isa!("neon,dotprod" neon, crate::kernels::float::byte_dots::aarch64::NeonDots, 4);
#[cfg(target_arch = "x86_64")]
of_isa!("avx2,fma,f16c" avx2, crate::kernels::float::byte_dots::x86_64::Avx2Dots, 4);
#[cfg(target_arch = "x86_64")]
of_isa!(
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
    avx512_without_vnni,
    crate::kernels::float::byte_dots::x86_64::Avx512Dots,
    8
);
#[cfg(target_arch = "x86_64")]
of_isa!(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
    avx512_with_vnni,
    crate::kernels::float::byte_dots::x86_64::VnniDots,
    8
);

/// The functions of AVX-512 F, BW, DQ and VL, with VNNI where the machine has it.
#[cfg(target_arch = "x86_64")]
pub mod avx512 {
    use super::*;
    use crate::kernels::screen::has_vnni;

    /// Runs all queries of a sequence.
    ///
    /// # Safety
    /// The machine has AVX-512.
    pub unsafe fn of_one(
        tile: &AttentionTile<'_, i8>,
        queries: &[f32],
        positions: &[usize],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let run = if has_vnni() { avx512_with_vnni::of_one } else { avx512_without_vnni::of_one };
        // SAFETY: guaranteed by the caller; VNNI is checked.
        unsafe { run(tile, queries, positions, scratch, out) }
    }

    /// Runs all queries of several sequences.
    ///
    /// # Safety
    /// The machine has AVX-512.
    pub unsafe fn together(
        tile: &AttentionTile<'_, i8>,
        of: &Together<'_>,
        queries: &[f32],
        positions: &[usize],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let run =
            if has_vnni() { avx512_with_vnni::together } else { avx512_without_vnni::together };
        // SAFETY: guaranteed by the caller; VNNI is checked.
        unsafe { run(tile, of, queries, positions, scratch, out) }
    }
}
