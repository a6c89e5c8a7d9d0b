//! The lanes in one 512-bit register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::lanes::Lanes;

/// Sixteen `f32` values in a 512-bit register. Needs AVX-512 F, BW, DQ, VL.
#[derive(Clone, Copy)]
pub struct Avx512Lanes(__m512);

const ROUND_EVEN: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The lane-wise operations of two vectors.
macro_rules! lane_wise {
    ($($name:ident = $intrinsic:ident),+) => {$(
        #[inline(always)]
        unsafe fn $name(self, other: Self) -> Self {
            // SAFETY: the trait's contract.
            unsafe { Self($intrinsic(self.0, other.0)) }
        }
    )+};
}

/// Conversions to and from integers.
///
/// # Safety
/// As for [`Lanes`].
impl Avx512Lanes {
    /// Converts sixteen integers, rounded to nearest even.
    #[inline(always)]
    pub unsafe fn from_integers(integers: __m512i) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm512_cvtepi32_ps(integers)) }
    }
    /// Converts the sums of neighbouring integers of thirty-two.
    #[inline(always)]
    pub unsafe fn from_pairs([a, b]: [__m512i; 2]) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            Self::from_integers(_mm512_add_epi32(
                _mm512_permutex2var_epi32(a, even, b),
                _mm512_permutex2var_epi32(a, odd, b),
            ))
        }
    }
    /// Converts lanes that hold integers.
    #[inline(always)]
    pub unsafe fn to_integers(self) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_cvttps_epi32(self.0) }
    }
    /// Writes lanes that hold integers within int16.
    #[inline(always)]
    pub unsafe fn store_i16(self, to: *mut i16) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(self.to_integers())) }
    }
}

impl Lanes for Avx512Lanes {
    const SUMS: usize = 16;

    #[inline(always)]
    fn prefetch<T>(at: *const T) {
        // SAFETY: a prefetch cannot fault, and every x86-64 has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_i32(from: *const i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_loadu_si512(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        // SAFETY: the trait's contract.
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        // SAFETY: the trait's contract.
        unsafe {
            let rounded = _mm512_cvt_roundps_epi32::<ROUND_EVEN>(self.0);
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(rounded));
        }
    }
    lane_wise!(
        add = _mm512_add_ps,
        sub = _mm512_sub_ps,
        mul = _mm512_mul_ps,
        div = _mm512_div_ps,
        max = _mm512_max_ps,
        min = _mm512_min_ps
    );
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_roundscale_ps::<ROUND_EVEN>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    unsafe fn first(self, count: usize, other: Self) -> Self {
        let mask = ((1u32 << count.min(16)) - 1) as __mmask16;
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_mask_blend_ps(mask, other.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            super::avx2::sum_of_eight(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe {
            let low = _mm512_castps512_ps256(self.0);
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            super::avx2::max_of_eight(_mm256_max_ps(low, high))
        }
    }
}
