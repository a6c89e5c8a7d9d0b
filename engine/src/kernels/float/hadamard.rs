//! The normalised Walsh-Hadamard transform in natural order, over blocks of a row: `H[i][j] = (−1)^popcount(i AND j) / √B`.
//!
//! Elements are multiplied by `1 / √B` first. Then come the stages, from neighbours on: each element is the sum or the difference of
//! two, so that no order of lanes can change a bit.

use super::lanes::{LANES, Lanes};

/// Transforms each run of `block` elements: a power of two, at least sixteen, that divides the length.
///
/// # Safety
/// The lanes' ISA must be available.
#[inline(always)]
pub unsafe fn hadamard<L: Lanes>(x: &mut [f32], block: usize) {
    assert!(block.is_power_of_two() && block >= LANES && x.len().is_multiple_of(block));
    let factor = 1.0 / (block as f32).sqrt();
    for block in x.chunks_exact_mut(block) {
        for lanes in block.as_chunks_mut::<LANES>().0 {
            lanes.iter_mut().for_each(|x| *x *= factor);
            stage::<1>(lanes);
            stage::<2>(lanes);
            stage::<4>(lanes);
            stage::<8>(lanes);
        }
        let mut distance = LANES;
        while distance < block.len() {
            for pair in block.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                for at in (0..distance).step_by(LANES) {
                    // SAFETY: both halves have `distance` elements, a multiple of LANES; the caller has the ISA.
                    unsafe {
                        let (low, high) = (low.as_mut_ptr().add(at), high.as_mut_ptr().add(at));
                        let (a, b) = (L::load(low), L::load(high));
                        a.add(b).store(low);
                        a.sub(b).store(high);
                    }
                }
            }
            distance *= 2;
        }
    }
}

/// A stage within sixteen elements.
#[inline(always)]
fn stage<const DISTANCE: usize>(lanes: &mut [f32; LANES]) {
    for pair in lanes.chunks_exact_mut(2 * DISTANCE) {
        let (low, high) = pair.split_at_mut(DISTANCE);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}
