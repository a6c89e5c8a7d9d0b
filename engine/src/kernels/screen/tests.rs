//! Dot products of every ISA against the reference, and the errors of digits.

use super::*;

fn wave(i: usize) -> usize {
    i.wrapping_mul(i).wrapping_mul(40_503) >> 7
}

fn row(seed: usize, width: usize) -> Vec<f32> {
    (0..width).map(|k| ((wave(k + 977 * seed) % 2001) as f32 - 1000.0) / 37.0).collect()
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn every_isa_matches_the_reference() {
    for isa in isas() {
        for (width, n) in [(64, 1), (100, 2), (2560, 7), (2560, 1), (192, 33), (64, 130)] {
            let xs: Vec<f32> = (0..n).flat_map(|i| row(i, width)).collect();
            let mut digits = Digits::default();
            digits.set(isa, &xs, width);
            let len = width.next_multiple_of(STRIDE);
            for head_rows in [1, 4, 6, 13, 39] {
                let rows: Vec<i8> =
                    (0..head_rows * len).map(|i| ((wave(i) % 255) as i16 - 127) as i8).collect();
                let mut want = vec![0; n * head_rows];
                let mut got = want.clone();
                scalar(&rows, digits.first(), len, &mut want);
                dots(isa, &rows, &digits, &mut got);
                assert_eq!(got, want, "{isa}: {head_rows} × {width}, {n}");
                #[cfg(target_arch = "x86_64")]
                if isa == Isa::Avx2 {
                    got.fill(0);
                    // SAFETY: the ISA is available, and `dots` has checked the shapes.
                    unsafe { x86_64::dots_avx2(false, &rows, digits.first(), len, &mut got) };
                    assert_eq!(got, want, "AVX2 without VNNI: {head_rows} × {width}, {n}");
                }
                let second: &[u8] = bytemuck::cast_slice(&digits.second);
                scalar(&rows, second, len, &mut want);
                for (i, want) in want.iter().enumerate() {
                    let head_row = &rows[i % head_rows * len..][..len];
                    let both = both_dots(isa, head_row, &digits, i / head_rows);
                    assert_eq!(both, [got[i], *want]);
                    assert_eq!(second_dot(isa, head_row, &digits, i / head_rows), *want);
                }
                let mut packed = vec![0; six::size(rows.len())];
                six::pack(&rows, &mut packed);
                let (mut first, mut second) = (vec![0; head_rows], vec![0; head_rows]);
                let mut want = first.clone();
                six_dots(isa, &packed, &digits, n - 1, [&mut first, &mut second]);
                for (data, got) in digits.both(n - 1).into_iter().zip([first, second]) {
                    scalar_six(&packed, data, six::size(len), &mut want);
                    assert_eq!(got, want, "{isa}: six bits of {head_rows} × {width}");
                }
            }
        }
    }
}

/// Weights that are powers of two have no error but that of roundings, which the bound exceeds by little.
#[test]
fn weights_are_bounded_where_they_are_exact() {
    let exponents = [1u8, 2, 3, 5, 8, 13, 21, 34];
    let exact: f64 = exponents.iter().map(|k| f64::from(-f32::from(*k)).exp2()).sum();
    for (isa, repeats) in isas().flat_map(|isa| [(isa, 1), (isa, 2), (isa, 5)]) {
        let kernels = crate::kernels::float::FloatKernels::for_isa(isa).expect("it is available");
        let values: Vec<f32> = exponents.iter().map(|k| -f32::from(*k)).collect();
        // The threshold itself is not below.
        let values = [values.repeat(repeats), vec![0.0]].concat();
        let bound = kernels.weigh_values(&values, 0.0, std::f32::consts::LOG2_E);
        let share = f64::from(bound) / (exact * repeats as f64);
        assert!((1.0..1.005).contains(&share), "{isa}: {share} of the sum");
    }
}

#[test]
fn nearest_rounds_ties_to_even() {
    for i in -(4 << 16)..(4 << 16) {
        let value = i as f32 / 8.0;
        assert_eq!(nearest(value), value.round_ties_even());
    }
    assert!(nearest(f32::NAN).is_nan());
}

#[test]
fn the_largest_products_do_not_overflow() {
    for isa in isas() {
        for (weight, x) in [(127, 1.0), (-127, 1.0), (127, -1.0), (-127, -1.0)] {
            let mut digits = Digits::default();
            digits.set(isa, &vec![x; LEN_MAX], LEN_MAX);
            let rows = vec![weight; 5 * LEN_MAX];
            let mut out = vec![0; 5];
            dots(isa, &rows, &digits, &mut out);
            let [first, second] = both_dots(isa, &rows[..LEN_MAX], &digits, 0);
            assert_eq!(out, [first; 5]);
            let offset = i64::from(digits.half()) * i64::from(weight) * LEN_MAX as i64;
            let first = (i64::from(first) - offset) << digits.bits();
            let sum = first + i64::from(second) - offset;
            let step = digits.rows()[0].step;
            let want = f64::from(weight) * f64::from(x) * LEN_MAX as f64;
            assert!((sum as f64 * f64::from(step) / want - 1.0).abs() < 1e-4, "{isa}");
        }
    }
}

#[test]
fn digit_errors_are_exact() {
    for isa in isas() {
        let x = row(3, 500);
        let mut digits = Digits::default();
        digits.set(isa, &x, 500);
        let DigitRow { step, norm, first_error, error } = digits.rows()[0];
        let (half, bits) = (digits.half(), digits.bits());
        let second: &[u8] = bytemuck::cast_slice(&digits.second);
        let first = |k: usize| (i32::from(digits.first()[k]) - half) << bits;
        let both = |k: usize| first(k) + i32::from(second[k]) - half;
        let left = |value: &dyn Fn(usize) -> i32| {
            let left = |k: usize| f64::from(x[k]) - f64::from(step) * f64::from(value(k));
            (0..500).map(|k| left(k).powi(2)).sum::<f64>().sqrt()
        };
        assert!((left(&first) - first_error).abs() <= 1e-9 * norm);
        assert!((left(&both) - error).abs() <= 1e-9 * norm);
        assert!(first_error <= norm * 0.02 && error <= norm * 0.0002);
    }
}
