//! The lanes in two 256-bit registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::Lanes;

/// Sixteen `f32` values in two 256-bit registers. Needs AVX2, FMA, F16C.
#[derive(Clone, Copy)]
pub struct Avx2Lanes(__m256, __m256);

const ROUND_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Lane `i` + lane `i + 4`, then + 2, + 1.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub(super) unsafe fn sum_of_eight(v: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        let one = _mm_add_ss(two, _mm_movehdup_ps(two));
        _mm_cvtss_f32(one)
    }
}

/// The larger of lane `i` and lane `i + 4`, then + 2, + 1.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub(super) unsafe fn max_of_eight(v: __m256) -> f32 {
    // SAFETY: the caller has AVX.
    unsafe {
        let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        let one = _mm_max_ss(two, _mm_movehdup_ps(two));
        _mm_cvtss_f32(one)
    }
}

/// The lane-wise operations of two vectors.
macro_rules! lane_wise {
    ($($name:ident = $intrinsic:ident),+) => {$(
        #[inline(always)]
        unsafe fn $name(self, other: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Self($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
        }
    )+};
}

/// Conversions to and from integers.
///
/// # Safety
/// As for [`Lanes`].
impl Avx2Lanes {
    /// Converts the sums of neighbouring integers of thirty-two, rounded to nearest even.
    #[inline(always)]
    pub unsafe fn from_pairs([a, b, c, d]: [__m256i; 4]) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            // `hadd` returns halves of both operands in turns.
            let sums = |a, b| {
                let sums = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(a, b));
                _mm256_cvtepi32_ps(sums)
            };
            Self(sums(a, b), sums(c, d))
        }
    }
    /// Writes lanes that hold integers within int16.
    #[inline(always)]
    pub unsafe fn store_i16(self, to: *mut i16) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (low, high) = (_mm256_cvttps_epi32(self.0), _mm256_cvttps_epi32(self.1));
            let packed = _mm256_packs_epi32(low, high);
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.cast(), packed);
        }
    }
}

impl Lanes for Avx2Lanes {
    const SUMS: usize = 4;

    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // SAFETY: a prefetch cannot fault, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let eight = |from: *const i8| _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            Self(_mm256_cvtepi32_ps(eight(from)), _mm256_cvtepi32_ps(eight(from.add(8))))
        }
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let eight = |from: *const i32| _mm256_cvtepi32_ps(_mm256_loadu_si256(from.cast()));
            Self(eight(from), eight(from.add(8)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        // SAFETY: the trait's contract.
        unsafe {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(
                to.add(8).cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            );
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        // SAFETY: the trait's contract.
        unsafe {
            // cvtps rounds to nearest even: the default rounding mode, which Rust code does not change.
            let a = _mm256_cvtps_epi32(self.0);
            let b = _mm256_cvtps_epi32(self.1);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(a, b));
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.cast(), bytes);
        }
    }
    lane_wise!(
        add = _mm256_add_ps,
        sub = _mm256_sub_ps,
        mul = _mm256_mul_ps,
        div = _mm256_div_ps,
        max = _mm256_max_ps,
        min = _mm256_min_ps
    );
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, factor.0, addend.0),
                _mm256_fmadd_ps(self.1, factor.1, addend.1),
            )
        }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fff_ffff));
            Self(_mm256_and_ps(self.0, mask), _mm256_and_ps(self.1, mask))
        }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            Self(_mm256_round_ps::<ROUND_EVEN>(self.0), _mm256_round_ps::<ROUND_EVEN>(self.1))
        }
    }
    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(self.1), bias);
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        }
    }
    #[inline(always)]
    unsafe fn first(self, count: usize, other: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let limit = _mm256_set1_epi32(count.min(16) as i32);
            let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
            let keep_low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low));
            let keep_high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high));
            Self(
                _mm256_blendv_ps(other.0, self.0, keep_low),
                _mm256_blendv_ps(other.1, self.1, keep_high),
            )
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe { sum_of_eight(_mm256_add_ps(self.0, self.1)) }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe { max_of_eight(_mm256_max_ps(self.0, self.1)) }
    }
}
