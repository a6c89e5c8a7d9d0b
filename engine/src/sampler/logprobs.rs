//! Log-probabilities of the model's own distribution: the log-softmax of the model's logits before bias,
//! penalties, temperature and filters (the convention of OpenAI and vLLM).

use super::LogitSet;
use crate::{backend::TokenLogit, math};

/// The log-probability of a drawn token, and the most probable ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Log-probability of the drawn token; −∞ if its probability is zero.
    pub logprob: f32,
    /// The most probable tokens, in descending order; equal ones by ascending id.
    pub top: Vec<(u32, f32)>,
}

/// Normaliser and most probable tokens of one position, taken before the logits are changed.
#[derive(Debug, Clone, PartialEq)]
pub struct RawDistribution {
    /// Maximum plus the logarithm of the sum of `exp(logit − maximum)`, summed by ascending id.
    normaliser: f64,
    top: Vec<(u32, f32)>,
}

impl RawDistribution {
    /// Computes the normaliser and the `top` most probable tokens. `max` is the largest logit.
    pub fn new<C: LogitSet + ?Sized>(logits: &C, max: f32, top: usize) -> Self {
        let max = f64::from(max);
        let sum: f64 =
            logits.entries().map(|choice| math::exp(f64::from(choice.logit) - max)).sum();
        let normaliser = max + math::ln(sum);
        let mut best: Vec<(u32, f32)> = Vec::with_capacity(top + 1);
        for TokenLogit { id, logit } in logits.entries() {
            if best.len() == top && best.last().is_none_or(|(_, least)| logit <= *least) {
                continue;
            }
            let place = best.partition_point(|(_, other)| *other >= logit);
            best.insert(place, (id, logit));
            best.truncate(top);
        }
        for (_, value) in &mut best {
            *value = (f64::from(*value) - normaliser) as f32;
        }
        Self { normaliser, top: best }
    }

    /// Returns the log-probability of a token with the raw logit `logit`, and the most probable tokens.
    pub fn report(self, logit: f32) -> Logprobs {
        Logprobs { logprob: (f64::from(logit) - self.normaliser) as f32, top: self.top }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        let logits = [1.0f32, 3.0, 3.0, f32::NEG_INFINITY, -2.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let report = RawDistribution::new(&logits[..], 3.0, 3).report(-2.0);
        assert!((f64::from(report.logprob) - (-2.0 - sum.ln())).abs() < 1e-6);
        let tokens: Vec<u32> = report.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 2, 0], "equal ones by ascending id");
        assert!((f64::from(report.top[0].1) - (3.0 - sum.ln())).abs() < 1e-6);
    }

    #[test]
    fn top_zero_lists_no_alternatives() {
        let report = RawDistribution::new(&[0.0, 0.0][..], 0.0, 0).report(0.0);
        assert!(report.top.is_empty());
        assert!((report.logprob + std::f32::consts::LN_2).abs() < 1e-7);
    }
}
