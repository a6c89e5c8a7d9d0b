//! Transcendental functions with one result on every machine: `f64` polynomials made of `+`, `−`,
//! `×`, `÷` alone, which IEEE 754 fixes to the bit. The standard library's versions call the
//! platform's libm and may differ between machines. Accurate to a few ulp in the ranges stated;
//! callers round to `f32`.

use std::f64::consts::{FRAC_2_PI, LN_2, LOG2_E, SQRT_2};

/// ln 2 with 20 trailing zero bits, so that `n * LN_2_HIGH` is exact for |n| < 2^20 (fdlibm).
const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// π/2 in three parts of 33 bits each (fdlibm `e_rem_pio2.c`).
const PI_2_HIGH: f64 = 1.570_796_326_734_125_6;
const PI_2_MIDDLE: f64 = 6.077_100_506_303_966e-11;
const PI_2_LOW: f64 = 2.022_266_248_795_950_6e-21;

/// e^x, for any `x`; 0 below −708 and ∞ above 709.
pub fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < -708.0 {
        return 0.0;
    }
    if x > 709.0 {
        return f64::INFINITY;
    }
    let n = (x * LOG2_E).round_ties_even();
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // Taylor series to r^13 / 13!; |r| ≤ ln 2 / 2.
    let mut sum = 1.0;
    for k in (1..=13).rev() {
        sum = 1.0 + sum * r / f64::from(k);
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// Natural logarithm of a positive, normal, finite `x`; −∞ for zero and subnormals, NaN below.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x < f64::MIN_POSITIVE {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh f, f = (m − 1) / (m + 1), |f| ≤ 0.172.
    let f = (mantissa - 1.0) / (mantissa + 1.0);
    let square = f * f;
    let mut sum = 0.0;
    for k in (0..=11).rev() {
        sum = sum * square + 1.0 / f64::from(2 * k + 1);
    }
    2.0 * f * sum + exponent as f64 * LN_2
}

/// `base^exponent` for a positive base.
pub fn pow(base: f64, exponent: f64) -> f64 {
    exp(exponent * ln(base))
}

/// (sin x, cos x) for |x| below about 10^6.
pub fn sin_cos(x: f64) -> (f64, f64) {
    let n = (x * FRAC_2_PI).round_ties_even();
    let r = ((x - n * PI_2_HIGH) - n * PI_2_MIDDLE) - n * PI_2_LOW;
    let square = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for k in (1..=9).rev() {
        let k = f64::from(k);
        sin = 1.0 - sin * square / ((2.0 * k) * (2.0 * k + 1.0));
        cos = 1.0 - cos * square / ((2.0 * k - 1.0) * (2.0 * k));
    }
    sin *= r;
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, got: f64, want: f64) {
        let error = (got - want).abs() / want.abs().max(1e-3);
        assert!(error < 4e-15, "{name}: {got} instead of {want}, relative error {error:e}");
    }

    #[test]
    fn agrees_with_the_standard_library() {
        for i in 0..20_000 {
            let x = f64::from(i) * 0.037 - 370.0;
            check(&format!("exp {x}"), exp(x), x.exp());
            check(&format!("ln {i}"), ln(f64::from(i) + 0.25), (f64::from(i) + 0.25).ln());
            let angle = f64::from(i) * 3.7;
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 1e-14, "sin {angle}");
            assert!((cos - angle.cos()).abs() < 1e-14, "cos {angle}");
        }
        check("pow", pow(500_000.0, -0.734_375), 500_000f64.powf(-0.734_375));
    }

    #[test]
    fn ends_of_the_range_are_defined() {
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(1000.0), f64::INFINITY);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(-1.0).is_nan());
        assert_eq!(ln(1.0), 0.0);
        assert!(exp(f64::NAN).is_nan());
    }
}
