//! Requests for cache lines before they are read. They are hints: an address need not be valid, and results do not
//! depend on them.

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
