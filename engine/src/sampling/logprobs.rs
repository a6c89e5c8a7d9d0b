//! Log-probabilities of the model's own distribution: the log-softmax of the model's logits before bias,
//! penalties, temperature and filters (the convention of OpenAI and vLLM).

use super::TokenLogit;
use crate::math;

/// Number of partial sums of [`Distribution::sum`].
pub(crate) const SUMS: usize = 1024;
/// Partial sums that are added in pairs.
const TOGETHER: usize = 32;

/// The model's own distribution of one position: the softmax of its logits, before anything changes them.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// The largest logit.
    pub largest: f32,
    /// The sum of `exp(logit − largest)` over all tokens.
    ///
    /// Sum j of 1,024 adds the tokens j, j + 1024, … one after another. Then sums j and j + 16 of every 32 consecutive ones are
    /// added, then j and j + 8, 4, 2, 1; and the results one after another. Every backend computes these bits.
    pub sum: f64,
    /// The most probable tokens, in descending order; equal ones by ascending id.
    pub top: Vec<TokenLogit>,
}

impl Distribution {
    /// Returns the distribution of all tokens of a position, given by ascending id, with the `top` most probable ones. `largest` is the
    /// largest logit.
    pub fn from_logits(logits: impl Iterator<Item = TokenLogit>, largest: f32, top: usize) -> Self {
        let mut sums = [0.0; SUMS];
        let mut best: Vec<TokenLogit> = Vec::with_capacity(top + 1);
        for token in logits {
            let TokenLogit { id, logit } = token;
            sums[id as usize % SUMS] += math::exp(f64::from(logit) - f64::from(largest));
            if best.len() == top && best.last().is_none_or(|least| logit <= least.logit) {
                continue;
            }
            let place = best.partition_point(|other| other.logit >= logit);
            best.insert(place, token);
            best.truncate(top);
        }
        let of_some = |sums: &mut [f64]| {
            let mut width = sums.len();
            while width > 1 {
                width /= 2;
                (0..width).for_each(|j| sums[j] += sums[j + width]);
            }
            sums[0]
        };
        let sum = sums.chunks_exact_mut(TOGETHER).map(of_some).sum();
        Self { largest, sum, top: best }
    }

    /// Returns the log-probability of a token with this logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        let normaliser = f64::from(self.largest) + math::ln(self.sum);
        (f64::from(logit) - normaliser) as f32
    }
}

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
    pub fn from_distribution(distribution: &Distribution, logit: f32) -> Self {
        let of_token = |logit| distribution.logprob(logit);
        let top = distribution.top.iter().map(|token| (token.id, of_token(token.logit)));
        Self { logprob: of_token(logit), top: top.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::row::every;

    fn report(logits: &[f32], largest: f32, top: usize, logit: f32) -> Logprobs {
        Logprobs::from_distribution(&Distribution::from_logits(every(logits), largest, top), logit)
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
