//! The error bounds of estimates, on rows with errors close to them: a bound that is a tenth smaller fails.
//!
//! By the inequality of Cauchy and Schwarz, an error reaches its bound where the vectors are parallel: the error `e` of a
//! head row and the hidden row `x`, or the error `f` of a hidden row's digits and the head row `q`.

use super::{
    super::{HeadMode, head::Head},
    tests::isas,
    *,
};
use crate::{
    files::{Dense, DenseType},
    kernels::{Isa, float::FloatKernels},
};

/// Whole blocks of the six-bit copy.
const WIDTH: usize = 256;
/// Rows of a head: copies of one row.
const VOCAB: usize = 512;

fn pattern(i: usize) -> usize {
    i.wrapping_mul(i).wrapping_mul(40_503) >> 7
}

/// A random sign.
fn sign(i: usize) -> f32 {
    if pattern(i + 5).is_multiple_of(2) { 1.0 } else { -1.0 }
}

/// A head row with int8 elements `q` and errors `e`, in units of its scale. The first element is the largest and
/// exact, so that the scale is 1.
fn head_row(q: impl Fn(usize) -> f32, e: impl Fn(usize) -> f32) -> Vec<f32> {
    (0..WIDTH).map(|k| if k == 0 { 127.0 } else { q(k) + e(k) }).collect()
}

/// Estimates of a logit.
struct Estimated {
    /// Whole int8 and both digits.
    refined: (f32, f32),
    /// As the first estimate of several rows, or of one: whole int8 and the first digit, or six bits.
    first: (f32, f32),
}

/// Estimates the logit of a head row `w` and a hidden row `x`, among `n` hidden rows; each with its error bound.
fn estimated(isa: Isa, w: &[f32], x: &[f32], n: usize) -> (f32, Estimated) {
    let questions = &vec![Largest::logits(1); n][..];
    let kernels = FloatKernels::for_isa(isa).expect("the ISA is available");
    let (weights, xs) = (w.repeat(VOCAB), x.repeat(n));
    let bytes = bytemuck::cast_slice(&weights);
    let dense = Dense { dtype: DenseType::F32, rows: VOCAB, cols: WIDTH, bytes };
    let head = Head::from_dense(dense, HeadMode::Exact, || {});
    let mut logit = [0.0];
    head.logits(kernels, 3, 1, x, &mut Vec::new(), &mut logit);
    let (xs, given, allowed) = (&xs[..], &[][..], &[][..]);
    let input = ScreenInput { head: &head, kernels, isa, xs, questions, given, allowed };
    let screen = head.screen().expect("the vocabulary is large enough");
    let mut digits = Digits::default();
    digits.set(isa, xs, WIDTH);
    let estimates = Estimates { screen, input: &input, digits: &digits };
    let (mut dots, mut out) = (vec![0; 4 * n.max(2)], [0.0; 4]);
    let bounds = match screen.six(isa, n) {
        Some(six) => estimates.estimate_six(six, n - 1, 0..4, &mut dots, &mut out),
        None => {
            screen::dots(isa, screen.rows(0..4), &digits, &mut dots[..4 * n]);
            estimates.estimate_first(n - 1, 0..4, &dots, &mut out)
        }
    };
    let first = (out[3], bounds.at(3));
    let (_, estimate, bound) = estimates.refined(n - 1, 3, None);
    if screen.six(isa, n).is_none() {
        let (_, from_first, _) = estimates.refined(n - 1, 3, Some(first.0));
        assert_eq!(from_first.to_bits(), estimate.to_bits(), "{isa}: what was known is used");
    }
    (logit[0], Estimated { refined: (estimate, bound), first })
}

/// Checks that the error is below its bound, and above nine tenths of it.
fn check_tight(name: &str, isa: Isa, logit: f32, (estimate, bound): (f32, f32)) {
    let share = (f64::from(logit) - f64::from(estimate)).abs() / f64::from(bound);
    assert!(share <= 1.0, "{name}, {isa}: the error is {share} of the bound");
    assert!(share > 0.92, "{name}, {isa}: the error is only {share} of the bound");
}

/// Factors of head rows and hidden rows: the bounds are relative.
const SCALES: [(f32, f32); 4] = [(1.0, 1.0), (1e-18, 1e12), (3e15, 1e9), (1e-20, 1e-9)];

#[test]
fn error_of_int8_rows_comes_close_to_its_bound() {
    // The error of each element points to the hidden row.
    let x = |k| if k == 0 { 0.0 } else { sign(k) * (0.5 + (pattern(k) % 512) as f32 / 1024.0) };
    for direction in [1.0, -1.0] {
        let w = head_row(|k| (pattern(k + 9) % 200) as f32 - 100.0, |k| 0.49 * direction * x(k));
        for (isa, (by_w, by_x)) in isas().flat_map(|isa| SCALES.map(|scales| (isa, scales))) {
            let w: Vec<f32> = w.iter().map(|w| w * by_w).collect();
            let x: Vec<f32> = (0..WIDTH).map(|k| x(k) * by_x).collect();
            let (logit, Estimated { refined, .. }) = estimated(isa, &w, &x, 3);
            check_tight("int8", isa, logit, refined);
        }
    }
}

#[test]
fn error_of_six_bits_comes_close_to_its_bound() {
    // Elements of the form 4 m + 1 and 4 m + 3 are represented by 4 m + 2.
    let q = |k| 4.0 * ((pattern(k) % 50) as f32 - 25.0) + 2.0 + sign(k);
    let mut used = 0;
    for (isa, (by_w, by_x)) in isas().flat_map(|isa| SCALES.map(|scales| (isa, scales))) {
        let w: Vec<f32> = head_row(q, |_| 0.0).iter().map(|w| w * by_w).collect();
        let x: Vec<f32> = (0..WIDTH).map(|k| if k == 0 { 0.0 } else { sign(k) * by_x }).collect();
        let (logit, Estimated { first, .. }) = estimated(isa, &w, &x, 1);
        if screen::has_six(isa) {
            used += 1;
            check_tight("six bits", isa, logit, first);
        }
    }
    assert!(used > 0 || !screen::machine_has_six());
}

#[test]
fn error_of_the_first_digit_comes_close_to_its_bound() {
    for (isa, (by_w, by_x)) in isas().flat_map(|isa| SCALES.map(|scales| (isa, scales))) {
        let bits = screen::digit_bits(isa);
        let (half, digit) = (1i32 << (bits - 1), 1i32 << bits);
        for direction in [1, -1] {
            // The second digits are as large as they can be, with the signs of the head row; the first element is the
            // largest, so that a unit of the second digit is `by_x`.
            let whole = |k: usize| match k {
                0 => direction * ((half - 1) * digit + half - 1),
                _ => {
                    (pattern(k) as i32 % half - half / 2) * digit
                        + direction * (half - 1) * sign(k) as i32
                }
            };
            let x: Vec<f32> = (0..WIDTH).map(|k| whole(k) as f32 * by_x).collect();
            let w: Vec<f32> =
                head_row(|k| 127.0 * sign(k), |_| 0.0).iter().map(|w| w * by_w).collect();
            let (logit, Estimated { first, .. }) = estimated(isa, &w, &x, 5);
            check_tight("first digit", isa, logit, first);
        }
    }
}

#[test]
fn error_of_both_digits_comes_close_to_its_bound() {
    for isa in isas() {
        let bits = screen::digit_bits(isa);
        let limit = (((1i32 << (bits - 1)) - 1) << bits) + (1 << (bits - 1)) - 1;
        // Half a unit, less so that rounding does not go the other way, is left by both digits.
        let x = |k: usize| match k {
            0 => limit as f32,
            _ => (pattern(k) % 1000) as f32 - 500.0 + 0.49 * sign(k),
        };
        let x: Vec<f32> = (0..WIDTH).map(x).collect();
        let w = head_row(|k| 127.0 * sign(k), |_| 0.0);
        let (_, Estimated { refined: (estimate, bound), .. }) = estimated(isa, &w, &x, 2);
        // In f64: an f32 logit has errors of its own, which the bound includes.
        let exact: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
        let share = (exact - f64::from(estimate)).abs() / f64::from(bound);
        assert!(share <= 1.0 && share > 0.5, "{isa}: the error is {share} of the bound");
    }
}

/// Without errors of int8 and digits, what is left is the rounding of the f32 sum.
#[test]
fn rounding_of_the_sum_is_in_the_bound() {
    let mut rounded = 0;
    for isa in isas() {
        let bits = screen::digit_bits(isa);
        let limit = (((1i32 << (bits - 1)) - 1) << bits) + (1 << (bits - 1)) - 1;
        for seed in 0..20 {
            // Products of one sign, so that most sums are too large to be exact.
            let x = |k| sign(k) * (pattern(k + 1000 * seed) % limit as usize) as f32;
            let x: Vec<f32> =
                (0..WIDTH).map(|k| if k == 0 { limit as f32 } else { x(k) }).collect();
            let w = head_row(|k| sign(k) * (pattern(k + 77 * seed) % 128) as f32, |_| 0.0);
            let (logit, Estimated { refined: (estimate, bound), .. }) = estimated(isa, &w, &x, 2);
            let exact: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            rounded += usize::from(f64::from(logit) != exact);
            for other in [f64::from(logit), exact] {
                let error = (other - f64::from(estimate)).abs();
                assert!(error <= f64::from(bound), "{isa}: {error} > {bound}");
            }
        }
    }
    assert!(rounded > 10, "{rounded} sums were rounded");
}

/// A token that is the largest by less than the errors is found although its estimate is the lowest possible, and all
/// others' are the highest possible.
#[test]
fn near_ties_against_the_estimates_are_found() {
    let x: Vec<f32> = (0..WIDTH).map(|k| if k == 0 { 0.0 } else { sign(k) }).collect();
    let q = |k| (pattern(k + 9) % 200) as f32 - 100.0;
    let others = head_row(q, |k| -0.49 * sign(k));
    // More than the others by a little, from an error in the other direction and one element less.
    let mut first = head_row(q, |k| 0.49 * sign(k));
    let dot = |w: &[f32]| -> f64 { w.iter().zip(&x).map(|(w, x)| f64::from(w * x)).sum() };
    let apart = dot(&first) - dot(&others);
    for (w, x) in first.iter_mut().zip(&x).skip(1) {
        // Whole steps of int8 keep the errors.
        let left = apart - 1.5;
        let each = (left / (WIDTH - 1) as f64).trunc();
        *w -= x * each as f32;
    }
    let mut left = dot(&first) - dot(&others) - 0.8;
    for (w, x) in first.iter_mut().zip(&x).skip(1) {
        if left >= 1.0 {
            *w -= x;
            left -= 1.0;
        }
    }
    let vocab = 8 * TASK_ROWS;
    let place = vocab - 2;
    let weights: Vec<f32> = (0..vocab)
        .flat_map(|token| if token == place { &first } else { &others })
        .copied()
        .collect();
    let bytes = bytemuck::cast_slice(&weights);
    let dense = Dense { dtype: DenseType::F32, rows: vocab, cols: WIDTH, bytes };
    let head = Head::from_dense(dense, HeadMode::Exact, || {});
    for (isa, n) in isas().flat_map(|isa| [(isa, 1), (isa, 3)]) {
        let kernels = FloatKernels::for_isa(isa).expect("the ISA is available");
        let xs = x.repeat(n);
        let questions = vec![Largest::logits(1); n];
        let input = ScreenInput {
            head: &head,
            kernels,
            isa,
            xs: &xs,
            questions: &questions,
            given: &[],
            allowed: &[],
        };
        let (mut pool, mut state) = (Pool::new(None, 1), ScreenState::default());
        head.screen().expect("the vocabulary is large enough").largest(
            &input,
            &mut ScreenedRows::default(),
            &mut pool,
            &mut state,
        );
        for list in state.found() {
            let most = list.iter().reduce(|a, b| if b.logit > a.logit { b } else { a });
            assert_eq!(most.map(|token| token.id), Some(place as u32), "{isa}, {n} rows");
        }
    }
}
