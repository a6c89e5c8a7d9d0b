//! Log-probabilities of the model's own distribution: the log-softmax of the model's logits before bias,
//! penalties, temperature and filters (the convention of OpenAI and vLLM).

use crate::backend::Distribution;

/// The log-probability of a drawn token, and the most probable ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// Log-probability of the drawn token; −∞ if its probability is zero.
    pub logprob: f32,
    /// The most probable tokens, in descending order; equal ones by ascending id.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Returns the log-probabilities of a token with the raw logit `logit`, and of the most probable tokens.
    pub fn of(distribution: &Distribution, logit: f32) -> Self {
        let of_token = |logit| distribution.logprob(logit);
        let top = distribution.top.iter().map(|token| (token.id, of_token(token.logit)));
        Self { logprob: of_token(logit), top: top.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::logits;

    fn report(logits: &[f32], largest: f32, top: usize, logit: f32) -> Logprobs {
        Logprobs::of(&Distribution::of(logits::every(logits), largest, top), logit)
    }

    #[test]
    fn logprobs_are_those_of_the_softmax() {
        let logits = [1.0f32, 3.0, 3.0, f32::NEG_INFINITY, -2.0];
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let report = report(&logits, 3.0, 3, -2.0);
        assert!((f64::from(report.logprob) - (-2.0 - sum.ln())).abs() < 1e-6);
        let tokens: Vec<u32> = report.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [1, 2, 0], "equal ones by ascending id");
        assert!((f64::from(report.top[0].1) - (3.0 - sum.ln())).abs() < 1e-6);
    }

    #[test]
    fn top_zero_lists_no_alternatives() {
        let report = report(&[0.0, 0.0], 0.0, 0, 0.0);
        assert!(report.top.is_empty());
        assert!((report.logprob + std::f32::consts::LN_2).abs() < 1e-7);
    }
}
