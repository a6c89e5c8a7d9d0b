//! The products with scales of groups: sums joined in f32, for vectors of 512 bits.

use std::arch::x86_64::*;

use half::f16;

use super::{
    super::{
        groups::{self, GroupWork, Join, enabled_groups},
        many_groups::{self, ManyGroups, ManyJoin, enabled_many_groups},
    },
    Bw, Vnni,
    gfni::Gfni,
};
use crate::kernels::generic::vectors::Expand;

enabled_groups!(Bw, "avx512f,avx512bw,avx512dq,avx512vl", groups_bw);
enabled_groups!(Vnni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni", groups_vnni);
enabled_groups!(Gfni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni", groups_gfni);
enabled_many_groups!(Gfni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni", many_groups_gfni);

/// Implements [`Join`]; `$groups` is [`groups::rows_by_groups`] with the features enabled.
macro_rules! join_512 {
    ($vectors:ty, $groups:ident) => {
        impl Join for $vectors {
            type Floats = __m512;
            const GROUP_ROWS: usize = 8;

            #[inline(always)]
            unsafe fn no_floats() -> __m512 {
                // SAFETY: the caller has AVX-512.
                unsafe { _mm512_setzero_ps() }
            }

            #[inline(always)]
            unsafe fn load_floats(from: *const f32) -> __m512 {
                // SAFETY: the caller has AVX-512 and 16 values at `from`.
                unsafe { _mm512_loadu_ps(from) }
            }

            #[inline(always)]
            unsafe fn store_floats(to: *mut f32, floats: __m512) {
                // SAFETY: the caller has AVX-512 and 16 places at `to`.
                unsafe { _mm512_storeu_ps(to, floats) }
            }

            #[inline(always)]
            unsafe fn load_scales(from: *const f16) -> __m512 {
                // SAFETY: the caller has AVX-512 and 16 values at `from`.
                unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
            }

            #[inline(always)]
            unsafe fn shifted(lanes: __m512i) -> __m512i {
                // SAFETY: the caller has AVX-512.
                unsafe { _mm512_slli_epi32::<8>(lanes) }
            }

            #[inline(always)]
            unsafe fn join(y: __m512, sum: __m512i, scales: __m512, scale: f32) -> __m512 {
                // SAFETY: the caller has AVX-512.
                unsafe {
                    let scales = _mm512_mul_ps(scales, _mm512_set1_ps(scale));
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales, y)
                }
            }

            unsafe fn run_groups<E: Expand<Self>>(work: GroupWork, rows: usize, digits: usize) {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    match (rows, digits) {
                        (1, 1) => $groups::<E, 1, 1, 4>(work),
                        (2, 1) => $groups::<E, 2, 1, 4>(work),
                        (3, 1) => $groups::<E, 3, 1, 2>(work),
                        (4, 1) => $groups::<E, 4, 1, 2>(work),
                        (5, 1) => $groups::<E, 5, 1, 2>(work),
                        (6, 1) => $groups::<E, 6, 1, 2>(work),
                        (7, 1) => $groups::<E, 7, 1, 2>(work),
                        (8, 1) => $groups::<E, 8, 1, 2>(work),
                        (1, 2) => $groups::<E, 1, 2, 4>(work),
                        (2, 2) => $groups::<E, 2, 2, 2>(work),
                        (3, 2) => $groups::<E, 3, 2, 2>(work),
                        (4, 2) => $groups::<E, 4, 2, 1>(work),
                        (5, 2) => $groups::<E, 5, 2, 1>(work),
                        (6, 2) => $groups::<E, 6, 2, 1>(work),
                        (7, 2) => $groups::<E, 7, 2, 1>(work),
                        (8, 2) => $groups::<E, 8, 2, 1>(work),
                        _ => unreachable!("{rows} rows of {digits} digits in a set"),
                    }
                }
            }
        }
    };
}

join_512!(Bw, groups_bw);
join_512!(Vnni, groups_vnni);
join_512!(Gfni, groups_gfni);

impl ManyJoin for Gfni {
    const MANY: [(usize, usize); 2] = [(6, 4), (3, 4)];
    const MANY_GROUP_ROWS_MIN: [usize; 2] = [9, 4];

    unsafe fn run_many_groups(many: ManyGroups<Self>, rows: usize, digits: usize, tiles: usize) {
        /// `many_groups_gfni::<rows, digits, tiles>`.
        macro_rules! by_tiles {
            ($rows:literal, $digits:literal) => {
                match tiles {
                    1 => many_groups_gfni::<$rows, $digits, 1>(many),
                    2 => many_groups_gfni::<$rows, $digits, 2>(many),
                    3 => many_groups_gfni::<$rows, $digits, 3>(many),
                    4 => many_groups_gfni::<$rows, $digits, 4>(many),
                    _ => unreachable!("{tiles} tiles in a set"),
                }
            };
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            match (rows, digits) {
                (1, 1) => by_tiles!(1, 1),
                (2, 1) => by_tiles!(2, 1),
                (3, 1) => by_tiles!(3, 1),
                (4, 1) => by_tiles!(4, 1),
                (5, 1) => by_tiles!(5, 1),
                (6, 1) => by_tiles!(6, 1),
                (1, 2) => by_tiles!(1, 2),
                (2, 2) => by_tiles!(2, 2),
                (3, 2) => by_tiles!(3, 2),
                _ => unreachable!("{rows} rows of {digits} digits in a set"),
            }
        }
    }
}
