//! Scaled RoPE frequencies, computed once at load.
//!
//! The formulas and their order of operations in f32 are those of transformers' `modeling_rope_utils.py`
//! (`_compute_linear_scaling_rope_parameters`, `_compute_llama3_parameters`); the divisors of a GGUF file divide
//! as in ggml's `rope` operator. With wave length w = 2π / f and original context L, Llama 3 has
//!
//! ```text
//! w > L / low     f / factor
//! w < L / high    f
//! otherwise       (1 − s) · f / factor + s · f      with s = (L / w − low) / (high − low)
//! ```
//!
//! YaRN (`_compute_yarn_parameters`; Peng et al. 2023) has, for pair j of head_dim elements d and base θ,
//!
//! ```text
//! pair(turns) = d · ln(L / (2π · turns)) / (2 ln θ)
//! low, high   = pair(32) rounded down, pair(1) rounded up, within 0 … d − 1
//! ramp(j)     = clamp((j − low) / (high − low), 0, 1)
//! frequency   = f · (1 − ramp(j)) + f / factor · ramp(j)
//! ```
//!
//! and multiplies cosines and sines by 0.1 ln factor + 1.

use std::f32::consts::PI;

use crate::{
    config::{ModelConfig, RopeScaling, Yarn},
    math,
};

/// Returns the frequencies of a head, `(head_dim / 2)`, and the factor of cosines and sines. `powers` are
/// θ^(2j / head_dim).
pub(super) fn frequencies(powers: &[f32], config: &ModelConfig) -> (Vec<f32>, f32) {
    if let &RopeScaling::Yarn(yarn) = &config.rope_scaling {
        return yarn_frequencies(powers, yarn, f64::from(config.rope_theta));
    }
    let mut frequencies: Vec<f32> = powers.iter().map(|power| 1.0 / power).collect();
    scale(&mut frequencies, &config.rope_scaling);
    (frequencies, 1.0)
}

fn scale(frequencies: &mut [f32], scaling: &RopeScaling) {
    match scaling {
        RopeScaling::None | RopeScaling::Yarn(_) => {}
        RopeScaling::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
        RopeScaling::Divisors { divisors, .. } => {
            frequencies.iter_mut().zip(divisors).for_each(|(f, divisor)| *f /= divisor);
        }
        &RopeScaling::Llama3 {
            factor,
            low_frequency_factor: low,
            high_frequency_factor: high,
            original_context_length,
        } => {
            let context = original_context_length as f32;
            for f in frequencies {
                *f = llama3(*f, factor, low, high, context);
            }
        }
    }
}

fn llama3(frequency: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wave = 2.0 * PI / frequency;
    if wave > context / low {
        frequency / factor
    } else if wave < context / high {
        frequency
    } else {
        let share = (context / wave - low) / (high - low);
        (1.0 - share) * frequency / factor + share * frequency
    }
}

/// Turns within the original context above which YaRN keeps a frequency, and below which it divides it.
const YARN_TURNS: [f64; 2] = [32.0, 1.0];

fn yarn_frequencies(powers: &[f32], yarn: Yarn, theta: f64) -> (Vec<f32>, f32) {
    let (low, high) = yarn_ramp(yarn, theta, 2 * powers.len());
    let frequency = |(j, power): (usize, &f32)| {
        let ramp = ((j as f32 - low) / (high - low)).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        (1.0 / (yarn.factor * power)) * (1.0 - kept) + (1.0 / power) * kept
    };
    let factor = (0.1 * math::ln(f64::from(yarn.factor)) + 1.0) as f32;
    (powers.iter().enumerate().map(frequency).collect(), factor)
}

/// Returns the pairs between which YaRN passes from kept to divided frequencies.
fn yarn_ramp(yarn: Yarn, theta: f64, dim: usize) -> (f32, f32) {
    let pair = |turns: f64| {
        let turns_of_unit = yarn.original_context as f64 / (turns * 2.0 * std::f64::consts::PI);
        dim as f64 * math::ln(turns_of_unit) / (2.0 * math::ln(theta))
    };
    let last = (dim - 1) as f64;
    let low = pair(YARN_TURNS[0]).floor().max(0.0);
    let high = pair(YARN_TURNS[1]).ceil().min(last);
    // As the reference, so that the ramp is not empty.
    let high = if high == low { high + 0.001 } else { high };
    (low as f32, high as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::positions::Rope, files::shape};

    /// Compares with recorded values; the relative error allows for the rounding of the base to f32.
    fn check(theta: f32, head_dim: usize, scaling: RopeScaling, expected: &[(usize, f64)]) {
        let mut config = shape("bitnet-2b").expect("a known shape");
        (config.rope_theta, config.head_dim, config.rope_scaling) = (theta, head_dim, scaling);
        let frequencies = Rope::from_config(&config).frequencies;
        assert_eq!(frequencies.len(), head_dim / 2);
        for &(index, value) in expected {
            let error = (f64::from(frequencies[index]) - value).abs() / value;
            assert!(error < 1e-6, "{index}: {} is not {value}", frequencies[index]);
        }
    }

    #[test]
    fn linear_scaling_is_that_of_numpy() {
        // numpy 2.4: 1 / 1e4 ** (arange(0, 16, 2) / 16) / 2.5
        let expected = [4e-1, 1.264911e-1, 4e-2, 1.264911e-2, 4e-3, 1.264911e-3, 4e-4, 1.264911e-4];
        let expected: Vec<_> = expected.into_iter().enumerate().collect();
        check(1e4, 16, RopeScaling::Linear { factor: 2.5 }, &expected);
    }

    #[test]
    fn llama3_scaling_is_that_of_numpy() {
        // In f64 by the formulas above, numpy 2.4, with the parameters of Llama 3.1 8B and 64 elements a head.
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context_length: 8192,
        };
        let expected = [
            (0, 1.0),
            (1, 6.636012377e-1),
            (13, 4.839421346e-3),
            (14, 3.211445995e-3),
            (15, 1.371893568e-3),
            (16, 5.248461610e-4),
            (17, 1.785078128e-4),
            (18, 7.784655274e-5),
            (19, 5.165906875e-5),
            (31, 3.767322690e-7),
        ];
        check(5e5, 64, scaling, &expected);
    }

    #[test]
    fn divisors_divide_each_frequency() {
        let divisors = vec![1.0, 2.0, 4.0, 8.0];
        let expected = [(0, 1.0), (1, 0.5e-1), (2, 0.25e-2), (3, 0.125e-3)];
        check(1e4, 8, RopeScaling::Divisors { divisors, long_factors: None }, &expected);
    }
}
