//! The distribution of the tokens of a position, as log-probabilities report it.

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
    pub fn of(logits: impl Iterator<Item = TokenLogit>, largest: f32, top: usize) -> Self {
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
