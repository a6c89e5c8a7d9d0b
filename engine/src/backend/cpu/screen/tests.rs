//! Screened logits compared with the whole head.

use super::{super::HeadMode, *};
use crate::files::{Dense, DenseType};

const VOCAB: usize = 700;
const WIDTH: usize = 100;

fn wave(i: usize) -> f32 {
    ((i.wrapping_mul(i).wrapping_mul(40_503) >> 7) % 2001) as f32 / 1000.0 - 1.0
}

fn head(weights: &[f32], mode: HeadMode) -> Head {
    let bytes = bytemuck::cast_slice(weights);
    Head::of(Dense { dtype: DenseType::F32, rows: VOCAB, cols: WIDTH, bytes }, mode, || {})
}

/// Returns the logits of the whole head, and the logits that the screen computes for the `count`
/// largest.
fn both(isa: Isa, weights: &[f32], xs: &[f32], count: usize) -> (Vec<f32>, Vec<f32>) {
    let n = xs.len() / WIDTH;
    let kernels = FloatKernels::of(isa).expect("the ISA is available");
    let (head, mut scratch) = (head(weights, HeadMode::Exact), Vec::new());
    let mut whole = vec![0.0; n * VOCAB];
    for (x, logits) in xs.chunks_exact(WIDTH).zip(whole.chunks_exact_mut(VOCAB)) {
        head.logits(kernels, 0, VOCAB, x, &mut scratch, logits);
    }
    let input = ScreenInput { head: &head, kernels, isa, xs, counts: &vec![count; n] };
    let screen = head.screen().expect("the vocabulary is large enough");
    let (mut pool, mut state) = (Pool::new(2), ScreenState::default());
    screen.largest(&input, &mut pool, &mut state);
    assert_eq!(state.found().count(), n);
    let mut screened = vec![f32::NEG_INFINITY; n * VOCAB];
    for (list, screened) in state.found().zip(screened.chunks_exact_mut(VOCAB)) {
        assert!(list.is_sorted_by(|a, b| a.id < b.id), "tokens ascend without duplicates");
        list.iter().for_each(|found| screened[found.id as usize] = found.logit);
    }
    (whole, screened)
}

/// Checks every row; returns the number of computed logits.
fn check(isa: Isa, weights: &[f32], xs: &[f32], count: usize) -> usize {
    let (whole, screened) = both(isa, weights, xs, count);
    let mut computed = 0;
    for (whole, screened) in whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB)) {
        let mut sorted = whole.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        for (token, (exact, found)) in whole.iter().zip(screened).enumerate() {
            if found.to_bits() == exact.to_bits() {
                computed += 1;
                continue;
            }
            assert_eq!(*found, f32::NEG_INFINITY, "token {token}");
            assert!(*exact < sorted[count - 1], "token {token} is among the {count} largest");
        }
    }
    computed
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn largest_logits_are_exact_and_most_others_are_not_computed() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
    for (isa, n, count) in
        isas().flat_map(|isa| [(isa, 1, 1), (isa, 3, 20), (isa, 9, 1), (isa, 9, 20)])
    {
        let xs: Vec<f32> = (0..n * WIDTH).map(|i| wave(i + 31) * 3.0).collect();
        let computed = check(isa, &weights, &xs, count);
        assert!(computed < n * (count + VOCAB / 8), "{isa}, {n} rows, {count}: {computed}");
    }
}

#[test]
fn all_of_equal_logits_are_found() {
    let weights: Vec<f32> = (0..VOCAB * WIDTH).map(|i| wave(i % (50 * WIDTH))).collect();
    for isa in isas() {
        let xs: Vec<f32> = (0..5 * WIDTH).map(|i| wave(i + 7)).collect();
        // Every logit occurs fourteen times.
        assert!(check(isa, &weights, &xs, 1) >= 5 * 14);
        check(isa, &weights, &xs, 20);
    }
}

#[test]
fn outliers_zeros_nan_and_infinity_do_not_change_the_result() {
    for isa in isas() {
        let mut weights: Vec<f32> = (0..VOCAB * WIDTH).map(wave).collect();
        weights[3 * WIDTH..4 * WIDTH].fill(0.0);
        weights[5 * WIDTH + 3] = 1e6;
        weights[6 * WIDTH + 3] = f32::NAN;
        weights[7 * WIDTH + 9] = f32::INFINITY;
        let mut xs: Vec<f32> = (0..6 * WIDTH).map(|i| wave(i + 11)).collect();
        xs[WIDTH..2 * WIDTH].fill(0.0);
        xs[2 * WIDTH + 1] = 1e9;
        xs[3 * WIDTH + 1] = f32::NAN;
        xs[4 * WIDTH + 1] = f32::INFINITY;
        let (whole, screened) = both(isa, &weights, &xs, 1);
        for (token, (whole, screened)) in whole.iter().zip(&screened).enumerate() {
            let same = whole.to_bits() == screened.to_bits() || whole.is_nan() && screened.is_nan();
            assert!(same || *screened == f32::NEG_INFINITY, "token {token}");
            assert!(same || !whole.is_nan(), "token {token}");
        }
        for (whole, screened) in whole.chunks_exact(VOCAB).zip(screened.chunks_exact(VOCAB)) {
            let largest = |logits: &[f32]| logits.iter().fold(f32::MIN, |a, b| a.max(*b));
            assert_eq!(largest(whole).to_bits(), largest(screened).to_bits());
        }
    }
}
