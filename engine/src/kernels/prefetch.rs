//! Requests for cache lines before they are read. They are hints: an address need not be valid, and results do not
//! depend on them.

#[cfg(target_arch = "x86_64")]
use std::{arch::x86_64::__cpuid, sync::LazyLock};

/// Prefetch distances in bytes, where tiles are read one after another. The hardware prefetcher stops at
/// every 4 KiB.
#[derive(Clone, Copy)]
pub struct Ahead {
    /// Into the first cache; 0 if the hardware prefetcher does better.
    pub first: usize,
    /// Into the second cache, which has room for more requests.
    pub second: usize,
}

impl Ahead {
    /// Returns the best measured distances for this processor's vendor (benches/RESULTS.md).
    #[cfg(target_arch = "x86_64")]
    pub fn here() -> Self {
        static HERE: LazyLock<Ahead> = LazyLock::new(|| match is_amd() {
            true => Ahead { first: 0, second: 64 * 128 },
            false => Ahead { first: 64 * 64, second: 64 * 704 },
        });
        *HERE
    }

    /// Returns distances that were not measured: the shorter ones of x86-64.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn here() -> Self {
        Self { first: 0, second: 64 * 128 }
    }
}

/// Returns whether the processor is AMD's.
#[cfg(target_arch = "x86_64")]
pub fn is_amd() -> bool {
    let vendor = __cpuid(0);
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    name.as_flattened() == b"AuthenticAMD"
}

/// Prefetches the cache line of an address into the first cache.
#[inline(always)]
pub fn first<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch cannot fault, and every x86-64 has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch cannot fault, and every aarch64 has it. The intrinsic is not stable.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Prefetches the cache line of an address into the second cache, which has room for more requests.
#[inline(always)]
pub fn second<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as for `first`.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as for `first`.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Broadcasts of four activations that a cache line holds.
pub const BROADCASTS: usize = LINE / 4;

/// Prefetches the cache lines of some bytes into the second cache, but for the last if the first is not whole.
pub fn all(bytes: &[u8]) {
    bytes.iter().step_by(LINE).for_each(|byte| second(byte));
}
