//! AVX2 with VNNI: Intel's processors for desktops and laptops since Alder Lake, and its servers of small cores, which have
//! no AVX-512.
//!
//! `vpdpbusd` adds four products to an int32 lane, exactly, as in [`avx512`](super::super::avx512). Sixteen registers hold the
//! sums of six rows of a tile, its codes and a broadcast.

use super::*;

/// AVX2 with VNNI.
pub(in super::super) struct AvxVnni;

enabled!(AvxVnni, "avx2,avxvnni", block_vnni, expand_vnni, peak_vnni, many_vnni);

impl Vectors for AvxVnni {
    vectors_256!(expand_vnni, peak_vnni);
    const ROWS_MAX: usize = 5;
    const MANY_ROWS_MIN: usize = 16;
    const MANY_ROWS: usize = 6;
    const ACCUMULATE_MAX: usize = usize::MAX;

    #[inline(always)]
    unsafe fn accumulate(sum: Lanes, codes: Lanes, x: __m256i) -> Lanes {
        // SAFETY: the caller has AVX-VNNI.
        unsafe {
            [
                _mm256_dpbusd_avx_epi32(sum[0], codes[0], x),
                _mm256_dpbusd_avx_epi32(sum[1], codes[1], x),
            ]
        }
    }

    #[inline(always)]
    unsafe fn add_widened(total: Lanes, sum: Lanes) -> Lanes {
        // SAFETY: the caller has AVX2.
        unsafe { Self::add(total, sum) }
    }

    unsafe fn run_many(many: Many<Self>, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => many_vnni::<1, 1>(many),
                (2, 1) => many_vnni::<2, 1>(many),
                (3, 1) => many_vnni::<3, 1>(many),
                (4, 1) => many_vnni::<4, 1>(many),
                (5, 1) => many_vnni::<5, 1>(many),
                (6, 1) => many_vnni::<6, 1>(many),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }

    unsafe fn run<E: Expand<Self>>(work: Work, rows: usize, tiles: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, tiles) {
                (1, 1) => block_vnni::<E, 1, 4, 1>(work),
                (2, 1) => block_vnni::<E, 2, 2, 1>(work),
                (3, 1) => block_vnni::<E, 3, 2, 1>(work),
                (4, 1) => block_vnni::<E, 4, 1, 1>(work),
                (5, 1) => block_vnni::<E, 5, 1, 1>(work),
                _ => unreachable!("{rows} rows and {tiles} tiles in a group"),
            }
        }
    }
}

expand_256!(AvxVnni);

enabled_groups!(AvxVnni, "avx2,fma,f16c,avxvnni", groups_vnni);
enabled_many_groups!(AvxVnni, "avx2,fma,f16c,avxvnni", many_groups_vnni);
join_256!(AvxVnni, groups_vnni);
many_join_256!(AvxVnni, many_groups_vnni, [8, 4]);
