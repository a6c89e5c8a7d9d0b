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

use std::f32::consts::PI;

use crate::config::RopeScaling;

/// Scales the frequencies of a head. // (head_dim / 2)
pub(super) fn scale(frequencies: &mut [f32], scaling: &RopeScaling) {
    match scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
        RopeScaling::Divisors { divisors } => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backend::positions::rope_frequencies, files::shape};

    /// Compares with recorded values; the relative error allows for the rounding of the base to f32.
    fn check(theta: f32, head_dim: usize, scaling: RopeScaling, expected: &[(usize, f64)]) {
        let mut config = shape("bitnet-2b").expect("a known shape");
        (config.rope_theta, config.head_dim, config.rope_scaling) = (theta, head_dim, scaling);
        let frequencies = rope_frequencies(&config);
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
        check(1e4, 8, RopeScaling::Divisors { divisors }, &expected);
    }
}
