//! Transcendental functions in f64, computed with additions, multiplications and divisions only, so that
//! every machine computes the same bits; the functions of libm differ between systems and versions. Fused
//! multiply-adds are not used, because machines without the instruction would emulate them slowly.

/// ln 2 in two parts: `LN2_HIGH` has 32 trailing zero bits, so that `k * LN2_HIGH` is exact for
/// every exponent `k` (the split of fdlibm's `e_exp.c` and `e_log.c`).
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// π/2 in three parts of 33 bits each (fdlibm `e_rem_pio2.c`).
const PI_2_HIGH: f64 = 1.570_796_326_734_125_6;
const PI_2_MIDDLE: f64 = 6.077_100_506_303_966e-11;
const PI_2_LOW: f64 = 2.022_266_248_795_950_6e-21;

/// 1.5 · 2⁵²: adding it to a number below 2⁵¹ rounds that number to an integer, ties to even.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// Results of `exp` below the smallest normal number are zero.
const EXP_MIN: f64 = -708.0;
/// `exp` overflows above this.
const EXP_MAX: f64 = 709.782_712_893_384;

/// 1/n! for n = 13 down to 0. On |r| ≤ ln 2 / 2 the first omitted term is below 5e-18.
const EXP_TERMS: [f64; 14] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    1.0 / 2.0,
    1.0,
    1.0,
];

/// eˣ, within 2 units in the last place; 0 where the result would be below about 3e-308.
///
/// x = k ln 2 + r with |r| ≤ ln 2 / 2; eʳ by its Taylor polynomial; the result is 2ᵏ eʳ.
#[inline]
pub fn exp(x: f64) -> f64 {
    if x.is_nan() || x > EXP_MAX {
        return x + f64::INFINITY;
    }
    let clamped = x.max(EXP_MIN);
    let k = (clamped * std::f64::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - k * LN2_HIGH) - k * LN2_LOW;
    let mut sum = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        sum = sum * r + term;
    }
    // Two factors, since 2¹⁰²⁴ is not finite.
    let half = (k as i64) >> 1;
    let value = sum * power_of_two(half) * power_of_two(k as i64 - half);
    if x < EXP_MIN { 0.0 } else { value }
}

/// 2ᵏ for −1022 ≤ k ≤ 1023.
#[inline]
fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// Terms of the series in [`ln`].
const LN_TERMS: u32 = 12;

/// ln x, within 2 units in the last place. NaN for negative numbers and NaN, −∞ for zero.
///
/// x = 2ᵏ m with √½ ≤ m < √2; s = (m − 1) / (m + 1), so |s| ≤ 0.172; ln m = 2 artanh s
/// = 2 (s + s³/3 + s⁵/5 + …). The first omitted term is below 1e-19 relative to s.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 || x == f64::INFINITY {
        return if x == 0.0 { f64::NEG_INFINITY } else { x };
    }
    // Subnormal numbers have no hidden bit: scale them up first.
    let (x, shift) = if x < f64::MIN_POSITIVE { (x * power_of_two(54), -54) } else { (x, 0) };
    let bits = x.to_bits();
    let mut k = ((bits >> 52) as i64) - 1023 + shift;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m >= std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut sum = 0.0;
    for n in (1..LN_TERMS).rev() {
        sum = (sum + 1.0 / f64::from(2 * n + 1)) * z;
    }
    let k = k as f64;
    k * LN2_HIGH + (2.0 * s + (2.0 * s * sum + k * LN2_LOW))
}

/// `base^exponent` for a positive base.
pub fn pow(base: f64, exponent: f64) -> f64 {
    exp(exponent * ln(base))
}

/// (sin x, cos x) for |x| below about 10^6.
pub fn sin_cos(x: f64) -> (f64, f64) {
    let n = (x * std::f64::consts::FRAC_2_PI).round_ties_even();
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
    use proptest::prelude::*;

    use super::*;

    /// Distance in units of the last place of `expected`.
    fn ulps(actual: f64, expected: f64) -> f64 {
        let ulp = f64::from_bits(expected.abs().to_bits() + 1) - expected.abs();
        (actual - expected).abs() / ulp
    }

    #[test]
    fn exp_has_its_exact_and_limiting_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp(-708.5), 0.0);
        assert_eq!(exp(f64::INFINITY), f64::INFINITY);
        assert_eq!(exp(710.0), f64::INFINITY);
        assert!(exp(f64::NAN).is_nan());
        assert!(ulps(exp(709.7), 709.7f64.exp()) <= 2.0);
        assert!(ulps(exp(1.0), std::f64::consts::E) <= 1.0);
    }

    #[test]
    fn ln_has_its_exact_and_limiting_values() {
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert_eq!(ln(f64::INFINITY), f64::INFINITY);
        assert!(ln(-1.0).is_nan());
        assert!(ln(f64::NAN).is_nan());
        assert!(ulps(ln(5e-324), 5e-324f64.ln()) <= 2.0);
        assert!(ulps(ln(f64::MAX), f64::MAX.ln()) <= 2.0);
        assert!(ulps(ln(2.0), std::f64::consts::LN_2) <= 1.0);
    }

    #[test]
    fn bits_of_some_values_are_fixed() {
        // Equal on every machine; a change here changes sampled tokens.
        assert_eq!(exp(-1.0).to_bits(), 0x3fd7_8b56_362c_ef38);
        assert_eq!(ln(10.0).to_bits(), 0x4002_6bb1_bbb5_5516);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn exp_is_within_two_ulps(x in -707.0f64..709.0) {
            prop_assert!(ulps(exp(x), x.exp()) <= 2.0, "exp({x}) = {}", exp(x));
        }

        #[test]
        fn ln_is_within_two_ulps(bits in 1u64..0x7ff0_0000_0000_0000) {
            let x = f64::from_bits(bits);
            prop_assert!(ulps(ln(x), x.ln()) <= 2.0, "ln({x}) = {}", ln(x));
        }

        #[test]
        fn ln_is_within_two_ulps_near_one(x in 0.5f64..2.0) {
            prop_assume!(x != 1.0);
            prop_assert!(ulps(ln(x), x.ln()) <= 2.0, "ln({x}) = {}", ln(x));
        }
    }

    #[test]
    fn sin_cos_and_pow_agree_with_the_standard_library() {
        for i in 0..20_000 {
            let angle = f64::from(i) * 3.7;
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 1e-14, "sin {angle}");
            assert!((cos - angle.cos()).abs() < 1e-14, "cos {angle}");
        }
        let power = pow(500_000.0, -0.734_375);
        assert!((power / 500_000f64.powf(-0.734_375) - 1.0).abs() < 4e-15);
    }
}
