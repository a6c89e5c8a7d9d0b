//! The counter-based generator behind sampling: Philox4x32-10 of J. K. Salmon, M. A. Moraes,
//! R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
//!
//! A number is a function of (seed, choice, position) and nothing else. There is no state, so a token
//! does not depend on other draws or their order.

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

/// Returns a number in [0, 1), a multiple of 2⁻⁵³, for the token at `position` of a choice. `position`
/// counts from the start of the prompt, so a generation that continues elsewhere, with its tokens as
/// prompt, draws the same tokens.
pub fn uniform(seed: u64, choice: u32, position: u64) -> f64 {
    let counter = [position as u32, (position >> 32) as u32, choice, 0];
    let key = [seed as u32, (seed >> 32) as u32];
    let bits = philox4x32(counter, key);
    let integer = (u64::from(bits[1]) << 32 | u64::from(bits[0])) >> 11;
    integer as f64 / (1u64 << 53) as f64
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

    #[test]
    fn seed_choice_and_position_all_matter() {
        let base = uniform(1, 2, 3);
        assert_eq!(base, uniform(1, 2, 3));
        for other in [uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)] {
            assert_ne!(base, other);
        }
        assert_ne!(uniform(1, 0, 0), uniform(1 << 32, 0, 0));
        assert_ne!(uniform(1, 0, 1), uniform(1, 0, 1 << 32));
    }

    #[test]
    fn numbers_are_uniform_in_the_unit_interval() {
        let mut tenths = [0u32; 10];
        for position in 0..10_000 {
            let number = uniform(7, 0, position);
            assert!((0.0..1.0).contains(&number));
            tenths[(number * 10.0) as usize] += 1;
        }
        assert!(tenths.iter().all(|count| (850..1150).contains(count)), "{tenths:?}");
    }
}
