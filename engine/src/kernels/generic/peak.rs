//! Peak rate of the multiply instruction with all operands in registers, the bound for the loops over
//! weights.

use std::hint::black_box;

use super::vectors::{PEAK_SUMS_MAX, Vectors, opaque};

/// Runs [`accumulate_all`] with the instruction set enabled; returns the number of products.
///
/// # Safety
/// The machine has `T`'s instruction set.
pub unsafe fn products_of<T: Vectors>(rounds: usize) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe { T::run_peak(rounds) };
    rounds * T::PEAK_SUMS * 64
}

/// `rounds` times [`Vectors::PEAK_SUMS`] accumulations.
///
/// # Safety
/// The function is inlined into a caller that enables the instruction set.
#[inline(always)]
pub unsafe fn accumulate_all<T: Vectors>(rounds: usize) {
    let activations = black_box([1i8, -2, 3, -4]);
    // SAFETY: guaranteed by the caller; `activations` has four elements.
    unsafe {
        let codes = black_box(T::splat(0x0102_0001));
        let mut from = activations.as_ptr();
        let mut x = T::broadcast(from);
        let mut sums = [T::zero(); PEAK_SUMS_MAX];
        for _ in 0..rounds {
            for sum in &mut sums[..T::PEAK_SUMS] {
                // Where the product and the sum are two instructions, the compiler would multiply once before the loop.
                if T::ACCUMULATE_MAX < usize::MAX {
                    from = opaque(from);
                    x = T::broadcast(from);
                }
                *sum = T::accumulate(*sum, codes, x);
            }
        }
        black_box(sums);
    }
}
