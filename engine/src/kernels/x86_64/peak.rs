//! How many products a second the multiplying instruction does with everything in registers: what the
//! loops over weights are measured against.

use std::hint::black_box;

use super::Vectors;

/// Independent sums: more than the instruction's latency keeps busy, as many as registers hold.
const SUMS: usize = 12;

/// Products that [`accumulate_all`] does in a round.
pub(super) const PRODUCTS: usize = SUMS * 64;

/// `rounds` times [`SUMS`] accumulations.
///
/// # Safety
/// The caller enables the instruction set, this inlines into it.
#[inline(always)]
pub(super) unsafe fn accumulate_all<T: Vectors>(rounds: usize) {
    let activations = black_box([1i8, -2, 3, -4]);
    // SAFETY: passed on from the caller; four activations are there.
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
