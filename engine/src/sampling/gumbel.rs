//! Gumbel noise and the token with the largest sum of logit and noise. The noise is a function of (seed, choice, position, token).
//!
//! The token with the largest `logit + temperature · noise` is distributed as the softmax of
//! `logit / temperature` (the Gumbel-max trick; Maddison, Tarlow, Minka, "A* Sampling", NeurIPS 2014). The drawn
//! token is therefore a maximum, found like the token with the largest logit: without the logits of all tokens.
//!
//! With `V` uniform in (0, 1), `−ln(−ln(1 − V))` has the standard Gumbel distribution. `V` has 52 bits:
//!
//! ```text
//! V = (2²⁰ · first + second / 2¹² + ½) / 2⁵²        first, second: 32 bits each
//! ```
//!
//! `first` alone gives an upper bound ([`GumbelNoise::upper_of_token`]) with a few integer operations, so that `second` and the
//! logarithms are computed for few tokens.
//!
//! The bits come from a hash of the token with four keys. The keys are one block of the counter-based generator
//! Philox4x32-10 (J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
//! SC 2011) for (seed, choice, position). The hash is `triple32` of C. Wellons' "hash-prospector". Its rounds are
//! bijections of 32 bits; one key is added before and the other after the first round. Nothing is kept between draws, so
//! a token does not depend on other draws or their order.

use super::TokenLogit;
use crate::math;

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Golden ratio and √3 − 1, as 32-bit fractions.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns 128 random bits for a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut c = counter;
    let mut k = key;
    for round in 0..ROUNDS {
        if round > 0 {
            k = [k[0].wrapping_add(KEY_STEPS[0]), k[1].wrapping_add(KEY_STEPS[1])];
        }
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
    }
    c
}

/// Bits of `V` that [`GumbelNoise::upper_of_token`] uses: as many as an f32 represents.
const UPPER_BITS: i32 = 24;
/// `ln 2 · 2⁻²³`: what one unit of an f32's bits adds to the logarithm.
const UPPER_STEP: f32 = std::f32::consts::LN_2 / (1 << 23) as f32;
/// `ln 2 · (24 + 127)`, and more than all roundings: those of values up to 105.
const UPPER_START: f32 = std::f32::consts::LN_2 * (UPPER_BITS + 127) as f32 + 2e-4;

/// The Gumbel noise of all tokens at one position of a choice, and the temperature that multiplies it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GumbelNoise {
    keys: [u32; 4],
    seed: u64,
    choice: u32,
    position: u64,
    /// Factor of the noise; 0 for greedy draws, which have none.
    pub(crate) temperature: f32,
}

impl GumbelNoise {
    /// Returns the noise of the draw at `position` of a choice. `position` counts from the start of the prompt, so a
    /// generation that continues elsewhere, with its tokens as prompt, draws the same tokens.
    pub fn new(seed: u64, choice: u32, position: u64, temperature: f32) -> Self {
        let counter = [position as u32, (position >> 32) as u32, choice, 0];
        let keys = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
        Self { keys, seed, choice, position, temperature }
    }

    /// Returns the noise of the choice's next draw.
    #[must_use]
    pub fn next(self) -> Self {
        Self::new(self.seed, self.choice, self.position + 1, self.temperature)
    }

    /// Returns the keys of the hash: two for the first 32 bits of a token, two for the second.
    pub(crate) fn keys(self) -> [u32; 4] {
        self.keys
    }

    /// Returns a token's value from its logit: `logit + temperature · noise`, in f64.
    pub fn add_to(&self, token: u32, logit: f32) -> f64 {
        f64::from(logit) + f64::from(self.temperature) * self.of_token(token)
    }

    /// Returns an upper bound of [`add_to`](Self::add_to).
    pub fn upper(&self, token: u32, logit: f32) -> f64 {
        f64::from(logit) + f64::from(self.temperature) * f64::from(self.upper_of_token(token))
    }

    /// Returns the noise of a token, without the temperature: in −3.6 to 36.8.
    pub fn of_token(self, token: u32) -> f64 {
        let [_, _, a, b] = self.keys;
        gumbel(self.first(token), hash(token, a, b))
    }

    /// Returns an upper bound of [`of_token`](Self::of_token), for noise between 4 and 11 at most 0.08 too large.
    ///
    /// `−ln(−ln(1 − V)) ≤ −ln V`, and the bits of a positive f32, divided by 2²³, are at most 127 plus its binary logarithm,
    /// as the mantissa `m` of `1 + m` is at most `log₂(1 + m)`.
    #[inline(always)]
    pub fn upper_of_token(self, token: u32) -> f32 {
        let uniform = (self.first(token) >> (32 - UPPER_BITS)) as i32 as f32;
        UPPER_START - uniform.to_bits() as i32 as f32 * UPPER_STEP
    }

    #[inline(always)]
    fn first(self, token: u32) -> u32 {
        hash(token, self.keys[0], self.keys[1])
    }
}

/// Returns the token with the largest sum of logit and noise, the lowest id among equals; they ascend by id. `None` if no
/// logit is above −∞.
pub fn argmax(logits: impl Iterator<Item = TokenLogit>, noise: &GumbelNoise) -> Option<u32> {
    let (mut token, mut most) = (None, f64::NEG_INFINITY);
    for TokenLogit { id, logit } in logits {
        // Rounding is monotonic, so the bound holds for the rounded value, too.
        if noise.upper(id, logit) > most {
            let value = noise.add_to(id, logit);
            if value > most {
                (token, most) = (Some(id), value);
            }
        }
    }
    token
}

/// Returns the noise with these bits.
fn gumbel(first: u32, second: u32) -> f64 {
    let bits = u64::from(first) << 20 | u64::from(second >> 12);
    // Both are exact: an odd number below 2⁵³, scaled.
    let uniform = (2 * bits + 1) as f64 / (1u64 << 53) as f64;
    -math::ln(-math::ln(1.0 - uniform))
}

/// Returns 32 bits of a token for two keys.
#[inline(always)]
fn hash(token: u32, a: u32, b: u32) -> u32 {
    let mut x = token.wrapping_add(a);
    x = (x ^ x >> 17).wrapping_mul(0xED5A_D4BB);
    x = x.wrapping_add(b);
    x = (x ^ x >> 11).wrapping_mul(0xAC4C_1B51);
    x = (x ^ x >> 15).wrapping_mul(0x3184_8BAB);
    x ^ x >> 14
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors of Random123's `kat_vectors`, `philox4x32 10`.
    #[test]
    fn known_vectors_are_reproduced() {
        let all = u32::MAX;
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([all; 4], [all; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (pi, [0xa409_3822, 0x299f_31d0], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ] {
            assert_eq!(philox4x32(counter, key), expected);
        }
    }

    /// Values of an independent implementation, in Python, with integers and decimals of 60 digits.
    #[test]
    fn bits_and_noise_are_those_of_the_definition() {
        let hashes = [1, 2, 0xdead_beef].map(|token| hash(token, 0, 0));
        assert_eq!(hashes, [0x0427_41d6, 0xf1df_e8e9, 0x0921_725e], "triple32");
        let of_token = |seed, choice, position, token| {
            GumbelNoise::new(seed, choice, position, 1.0).of_token(token)
        };
        let all = u32::MAX;
        for (noise, expected) in [
            (gumbel(0, 0), 36.736_800_569_677_1),
            (gumbel(0, 1 << 12), 35.638_188_281_008_99),
            (gumbel(all, all), -3.603_778_992_970_457_5),
            (gumbel(1 << 31, 5 << 12), 0.366_512_920_581_660_8),
            (of_token(1, 2, 3, 4), 1.006_613_267_642_565_9),
            (of_token(7 << 32 | 9, 0, 3 << 32 | 5, 128_000), -1.184_189_166_961_833),
            (of_token(8 << 32 | 9, 0, 3 << 32 | 5, 128_000), 0.706_198_408_788_727_7),
            (of_token(7 << 32 | 9, 0, 4 << 32 | 5, 128_000), 1.140_490_006_463_559_5),
        ] {
            assert!((noise - expected).abs() <= 1e-14 * expected.abs(), "{noise}, not {expected}");
        }
    }

    #[test]
    fn next_noise_is_that_of_the_next_position() {
        assert_eq!(GumbelNoise::new(4, 1, 9, 1.0).next(), GumbelNoise::new(4, 1, 10, 1.0));
        assert_ne!(GumbelNoise::new(4, 1, 9, 1.0).next(), GumbelNoise::new(4, 1, 9, 1.0));
    }

    #[test]
    fn seed_choice_position_and_token_all_matter() {
        let noise = |seed, choice, position, token| {
            GumbelNoise::new(seed, choice, position, 1.0).of_token(token)
        };
        let base = noise(1, 2, 3, 4);
        assert_eq!(base, noise(1, 2, 3, 4));
        for other in [noise(2, 2, 3, 4), noise(1, 3, 3, 4), noise(1, 2, 4, 4), noise(1, 2, 3, 5)] {
            assert_ne!(base, other);
        }
        assert_ne!(noise(1, 0, 0, 0), noise(1 << 32, 0, 0, 0));
        assert_ne!(noise(1, 0, 1, 0), noise(1, 0, 1 << 32, 0));
    }

    #[test]
    fn bounds_are_upper_and_close() {
        for position in 0..20 {
            let noise = GumbelNoise::new(5, 0, position, 1.0);
            for token in 0..100_000 {
                let (value, upper) =
                    (noise.of_token(token), f64::from(noise.upper_of_token(token)));
                assert!(value <= upper, "token {token} at {position}: {value} > {upper}");
                assert!(
                    !(1.0..11.0).contains(&value) || upper < value + 0.25,
                    "token {token}: {value}, {upper}"
                );
                let is_common = (4.0..11.0).contains(&value);
                assert!(!is_common || upper < value + 0.08, "token {token}: {value}, {upper}");
            }
        }
    }

    #[test]
    fn bounds_hold_for_the_least_and_greatest_bits() {
        let upper = |first: u32| {
            let uniform = (first >> 8) as i32 as f32;
            f64::from(UPPER_START - uniform.to_bits() as i32 as f32 * UPPER_STEP)
        };
        for first in (0..2000u32).chain((0..2000).map(|i| u32::MAX - i)) {
            let bits = u64::from(first) << 20;
            let uniform = (2 * bits + 1) as f64 / (1u64 << 53) as f64;
            let largest = -math::ln(-math::ln(1.0 - uniform));
            assert!(largest <= upper(first), "{first}: {largest} > {}", upper(first));
        }
    }

    /// The Kolmogorov–Smirnov distance from the Gumbel distribution, times the root of the number of values.
    fn distance(mut values: Vec<f64>) -> f64 {
        let n = values.len() as f64;
        values.sort_by(f64::total_cmp);
        let apart = values.iter().zip(1u32..).map(|(value, place)| {
            let expected = (-(-value).exp()).exp();
            (f64::from(place) / n - expected).abs()
        });
        apart.fold(0.0, f64::max) * n.sqrt()
    }

    #[test]
    fn noise_has_the_gumbel_distribution_over_tokens_and_over_positions() {
        // Exceeded by a good generator with probability 1e-4 each.
        let most = 2.23;
        for fixed in [0, 7, 1 << 20] {
            let over_tokens = |token| GumbelNoise::new(9, 0, fixed, 1.0).of_token(token);
            let over_positions =
                |position| GumbelNoise::new(9, 0, position, 1.0).of_token(fixed as u32);
            let over_seeds = |seed| GumbelNoise::new(seed, 3, 11, 1.0).of_token(fixed as u32);
            assert!(distance((0..100_000).map(over_tokens).collect()) < most, "{fixed}");
            assert!(distance((0..100_000).map(over_positions).collect()) < most, "{fixed}");
            assert!(distance((0..100_000).map(over_seeds).collect()) < most, "{fixed}");
        }
    }

    #[test]
    fn neighbouring_tokens_and_positions_are_uncorrelated() {
        let n = 100_000u32;
        for step in [1, 2, 16, 64, 4096] {
            let noise = GumbelNoise::new(3, 1, 2, 1.0);
            let tokens = |i| (noise.of_token(i), noise.of_token(i + step));
            let positions = |i: u32| {
                let of = |position| GumbelNoise::new(3, 1, u64::from(position), 1.0).of_token(77);
                (of(i), of(i + step))
            };
            for pairs in
                [(0..n).map(tokens).collect::<Vec<_>>(), (0..n).map(positions).collect::<Vec<_>>()]
            {
                // The mean of the Gumbel distribution is Euler's constant, its variance π²/6.
                let centre = |value: f64| value - 0.577_215_664_901_532_9;
                let sum: f64 = pairs.iter().map(|(a, b)| centre(*a) * centre(*b)).sum();
                let correlation = sum / f64::from(n) / (std::f64::consts::PI.powi(2) / 6.0);
                assert!(correlation.abs() < 4.0 / f64::from(n).sqrt(), "{step}: {correlation}");
            }
        }
    }
}
