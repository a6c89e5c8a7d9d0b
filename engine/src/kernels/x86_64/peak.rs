//! Peak rate of the multiply instruction with all operands in registers, the bound for the loops over
//! weights.

use std::hint::black_box;

use super::Vectors;

/// Independent sums: enough to hide the instruction's latency, and few enough for the registers.
const SUMS: usize = 12;

/// Products of one round of [`accumulate_all`].
pub(super) const PRODUCTS: usize = SUMS * 64;

/// `rounds` times [`SUMS`] accumulations.
///
/// # Safety
/// The function is inlined into a caller that enables the instruction set.
#[inline(always)]
pub(super) unsafe fn accumulate_all<T: Vectors>(rounds: usize) {
    let activations = black_box([1i8, -2, 3, -4]);
    // SAFETY: guaranteed by the caller; `activations` has four elements.
    unsafe {
        let (codes, x) = (black_box(T::splat(0x0102_0001)), T::broadcast(activations.as_ptr()));
        let mut sums = [T::zero(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = T::accumulate(*sum, codes, x);
            }
        }
        black_box(sums);
    }
}
