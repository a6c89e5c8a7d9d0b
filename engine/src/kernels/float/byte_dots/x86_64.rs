//! The sums in the registers of x86-64.

use std::arch::x86_64::*;

use super::{
    super::{avx2::Avx2Lanes, avx512::Avx512Lanes, lanes::LANES},
    ByteDots, DEPTH,
};

/// What is added to each key: a key with its highest bit inverted, unsigned.
const KEY_BIAS: i32 = 128;

/// Sixteen sums in one 512-bit register. Needs AVX-512 F, BW, DQ, VL, VNNI, which multiplies unsigned by signed bytes:
/// keys are loaded plus 128, and weights are stored as high and low bytes.
#[derive(Clone, Copy)]
pub struct VnniDots(__m512i);

impl ByteDots for VnniDots {
    type Floats = Avx512Lanes;
    type Bytes = __m512i;
    type Weighted = [__m512i; 2];

    const SUMS: usize = 16;
    const WEIGHTED: usize = 8;

    #[inline(always)]
    fn pack(elements: [i8; DEPTH]) -> u64 {
        u64::from(u32::from_le_bytes(elements.map(|element| element as u8)))
    }
    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_setzero_si512()) }
    }
    #[inline(always)]
    unsafe fn zero_weighted() -> [__m512i; 2] {
        // SAFETY: the trait's contract.
        unsafe { [_mm512_setzero_si512(); 2] }
    }
    #[inline(always)]
    unsafe fn load(from: *const i8) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_keys(from: *const i8) -> __m512i {
        // SAFETY: the trait's contract.
        unsafe { _mm512_xor_si512(Self::load(from), _mm512_set1_epi8(KEY_BIAS as i8)) }
    }
    #[inline(always)]
    unsafe fn start(query_sum: i32) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_set1_epi32(-KEY_BIAS * query_sum)) }
    }
    #[inline(always)]
    unsafe fn add(self, packed: u64, keys: __m512i) -> Self {
        // SAFETY: the trait's contract.
        unsafe { Self(_mm512_dpbusd_epi32(self.0, keys, _mm512_set1_epi32(packed as i32))) }
    }
    #[inline(always)]
    unsafe fn to_floats(self) -> Avx512Lanes {
        // SAFETY: the trait's contract.
        unsafe { Avx512Lanes::from_integers(self.0) }
    }
    #[inline(always)]
    unsafe fn store_weights(weights: Avx512Lanes, to: *mut u8) {
        // SAFETY: the trait's contract.
        unsafe {
            let lanes = weights.to_integers();
            let high = _mm512_cvtepi32_epi8(_mm512_srli_epi32::<8>(lanes));
            _mm_storeu_si128(to.cast(), high);
            _mm_storeu_si128(to.add(LANES).cast(), _mm512_cvtepi32_epi8(lanes));
        }
    }
    #[inline(always)]
    unsafe fn weigh(
        [high, low]: [__m512i; 2],
        weights: *const u8,
        group: usize,
        bytes: __m512i,
    ) -> [__m512i; 2] {
        // SAFETY: the trait's contract.
        unsafe {
            let at = weights.add(DEPTH * group).cast::<i32>();
            let high_bytes = _mm512_set1_epi32(at.read_unaligned());
            let low_bytes = _mm512_set1_epi32(at.add(LANES / DEPTH).read_unaligned());
            [
                _mm512_dpbusd_epi32(high, high_bytes, bytes),
                _mm512_dpbusd_epi32(low, low_bytes, bytes),
            ]
        }
    }
    #[inline(always)]
    unsafe fn weighted_floats([high, low]: [__m512i; 2]) -> Avx512Lanes {
        // SAFETY: the trait's contract.
        unsafe { Avx512Lanes::from_integers(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low)) }
    }
}

/// Sums of two products each, in `$count` registers: lane `l` is the sum of elements `2l` and `2l + 1`.
macro_rules! pair_dots {
    ($name:ident, $floats:ty, $register:ty, $count:literal, $sums:literal, $width:literal,
     $zero:ident, $load:ident as $part:ty, $widen:ident, $splat:ident, $add:ident, $multiply:ident) => {
        #[derive(Clone, Copy)]
        pub struct $name([$register; $count]);

        impl ByteDots for $name {
            type Floats = $floats;
            type Bytes = [$register; $count];
            type Weighted = Self;

            const SUMS: usize = $sums;
            const WEIGHTED: usize = $sums;

            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the trait's contract.
                unsafe { Self([$zero(); $count]) }
            }
            #[inline(always)]
            unsafe fn zero_weighted() -> Self {
                // SAFETY: the trait's contract.
                unsafe { Self::zero() }
            }
            #[inline(always)]
            unsafe fn load(from: *const i8) -> Self::Bytes {
                // SAFETY: the trait's contract.
                let mut bytes = [unsafe { $zero() }; $count];
                for (i, part) in bytes.iter_mut().enumerate() {
                    // SAFETY: the trait's contract.
                    *part = unsafe { $widen($load(from.add(i * $width).cast::<$part>())) };
                }
                bytes
            }
            #[inline(always)]
            unsafe fn add(mut self, packed: u64, bytes: Self::Bytes) -> Self {
                // SAFETY: the trait's contract.
                unsafe {
                    let packed = $splat(packed as i64);
                    for (sum, part) in self.0.iter_mut().zip(bytes) {
                        *sum = $add(*sum, $multiply(packed, part));
                    }
                }
                self
            }
            #[inline(always)]
            unsafe fn to_floats(self) -> $floats {
                // SAFETY: the trait's contract.
                unsafe { <$floats>::from_pairs(self.0) }
            }
            #[inline(always)]
            unsafe fn store_weights(weights: $floats, to: *mut u8) {
                // SAFETY: the trait's contract.
                unsafe { weights.store_i16(to.cast()) }
            }
            #[inline(always)]
            unsafe fn weigh(
                sums: Self,
                weights: *const u8,
                group: usize,
                bytes: Self::Bytes,
            ) -> Self {
                // SAFETY: the trait's contract.
                unsafe { sums.add(weights.cast::<u64>().add(group).read_unaligned(), bytes) }
            }
            #[inline(always)]
            unsafe fn weighted_floats(sums: Self) -> $floats {
                // SAFETY: the trait's contract.
                unsafe { sums.to_floats() }
            }
        }
    };
}

// For processors with AVX-512 F, BW, DQ, VL and without VNNI.
pair_dots!(
    Avx512Dots,
    Avx512Lanes,
    __m512i,
    2,
    8,
    32,
    _mm512_setzero_si512,
    _mm256_loadu_si256 as __m256i,
    _mm512_cvtepi8_epi16,
    _mm512_set1_epi64,
    _mm512_add_epi32,
    _mm512_madd_epi16
);
// Needs AVX2.
pair_dots!(
    Avx2Dots,
    Avx2Lanes,
    __m256i,
    4,
    2,
    16,
    _mm256_setzero_si256,
    _mm_loadu_si128 as __m128i,
    _mm256_cvtepi8_epi16,
    _mm256_set1_epi64x,
    _mm256_add_epi32,
    _mm256_madd_epi16
);
