//! Sums of integer products in sixteen int32 lanes: the inner loops of attention with int8 keys and values. Sums are
//! exact, so their order does not matter.

#[cfg(target_arch = "aarch64")]
pub(super) mod aarch64;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86_64;

use super::{
    lanes::{LANES, Lanes},
    scalar::ScalarLanes,
};

/// Products that are added to one lane at a time.
pub const DEPTH: usize = 4;

/// Largest integer weight, fifteen bits: half of the instruction sets multiply int16 by int16.
pub const WEIGHT_MAX: f32 = 32767.0;

/// Bytes of the weights of sixteen positions.
pub const WEIGHTS_BYTES: usize = 2 * LANES;

/// Sixteen int32 sums.
///
/// # Safety
/// All methods may be called only where the ISA's features are enabled. Sums must not leave the range of int32;
/// pointers must be valid for as many bytes as each method says, at any alignment.
pub trait ByteDots: Copy {
    /// The lanes of the same ISA.
    type Floats: Lanes;
    /// Sixty-four signed bytes, [`DEPTH`] for each lane.
    type Bytes: Copy;
    /// Sixteen sums of products with weights.
    type Weighted: Copy;

    /// Number of running sums that fit the registers besides the operands, and number of [`Self::Weighted`].
    const SUMS: usize;
    const WEIGHTED: usize;

    /// Packs four elements of a query.
    fn pack(elements: [i8; DEPTH]) -> u64 {
        let [a, b, c, d] = elements.map(|element| u64::from(i16::from(element) as u16));
        a | b << 16 | c << 32 | d << 48
    }

    /// Returns zeros.
    unsafe fn zero() -> Self;
    /// Returns zeros.
    unsafe fn zero_weighted() -> Self::Weighted;
    /// Loads sixty-four signed bytes.
    unsafe fn load(from: *const i8) -> Self::Bytes;
    /// Loads sixty-four bytes of keys, for [`Self::add`].
    #[inline(always)]
    unsafe fn load_keys(from: *const i8) -> Self::Bytes {
        // SAFETY: the same contract.
        unsafe { Self::load(from) }
    }
    /// Returns the sums of no products for a query with this sum of elements: zeros, less what [`Self::load_keys`] makes products
    /// too large.
    #[inline(always)]
    unsafe fn start(_query_sum: i32) -> Self {
        // SAFETY: the same contract.
        unsafe { Self::zero() }
    }
    /// Adds to lane `l` the products of byte `4l + i` of the keys and element `i` of four packed ones.
    unsafe fn add(self, packed: u64, bytes: Self::Bytes) -> Self;
    /// Rounds to nearest even.
    unsafe fn to_floats(self) -> Self::Floats;
    /// Writes lanes that hold integers in 0..=[`WEIGHT_MAX`] to [`WEIGHTS_BYTES`] bytes.
    unsafe fn store_weights(weights: Self::Floats, to: *mut u8);
    /// Adds to lane `l` the products of byte `4l + i` and weight `4 · group + i` of those at `weights`.
    unsafe fn weigh(
        sums: Self::Weighted,
        weights: *const u8,
        group: usize,
        bytes: Self::Bytes,
    ) -> Self::Weighted;
    /// Rounds to nearest even.
    unsafe fn weighted_floats(sums: Self::Weighted) -> Self::Floats;
}

/// The sums in plain Rust: the definition.
#[derive(Clone, Copy)]
pub struct ScalarDots([i32; LANES]);

impl ByteDots for ScalarDots {
    type Floats = ScalarLanes;
    type Bytes = [i8; DEPTH * LANES];
    type Weighted = Self;

    const SUMS: usize = 4;
    const WEIGHTED: usize = 4;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0; LANES])
    }
    #[inline(always)]
    unsafe fn zero_weighted() -> Self {
        Self([0; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const i8) -> Self::Bytes {
        // SAFETY: the trait's contract.
        unsafe { from.cast::<Self::Bytes>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn add(self, packed: u64, bytes: Self::Bytes) -> Self {
        Self(std::array::from_fn(|l| {
            let element = |i: usize| i32::from((packed >> (16 * i)) as i16);
            let product = |i: usize| element(i) * i32::from(bytes[DEPTH * l + i]);
            self.0[l] + (0..DEPTH).map(product).sum::<i32>()
        }))
    }
    #[inline(always)]
    unsafe fn to_floats(self) -> ScalarLanes {
        // SAFETY: sixteen integers.
        unsafe { ScalarLanes::load_i32(self.0.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn store_weights(weights: ScalarLanes, to: *mut u8) {
        let mut lanes = [0f32; LANES];
        // SAFETY: the trait's contract.
        unsafe {
            weights.store(lanes.as_mut_ptr());
            to.cast::<[i16; LANES]>().write_unaligned(lanes.map(|lane| lane as i16));
        }
    }
    #[inline(always)]
    unsafe fn weigh(sums: Self, weights: *const u8, group: usize, bytes: Self::Bytes) -> Self {
        // SAFETY: the trait's contract.
        unsafe { sums.add(weights.cast::<u64>().add(group).read_unaligned(), bytes) }
    }
    #[inline(always)]
    unsafe fn weighted_floats(sums: Self) -> ScalarLanes {
        // SAFETY: the trait's contract.
        unsafe { sums.to_floats() }
    }
}
