//! Which tokens of a position are found, when not all logits are needed.

use crate::noise::ScaledNoise;

/// The first tokens of a position, by logit or by logit with noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranking {
    /// At least this many tokens, with all that equal the last of these.
    pub count: usize,
    /// Further tokens: those with a value at most this much below.
    pub within: f32,
    /// Ranks tokens by `logit + temperature · noise` instead of by logit.
    pub noise: Option<ScaledNoise>,
    /// Keeps what [`tokens_above`](super::Backend::tokens_above) finds further tokens with.
    pub keeps: bool,
    /// The draw that the tokens are for, if it has filters or changes. A backend may draw the token itself:
    /// [`PositionLogits::Drawn`](super::PositionLogits::Drawn).
    pub draw: Option<TokenDraw>,
    /// Number of [changes](super::LogitsFor::Each) of logits before the draw.
    pub changes: usize,
    /// Whether the changes before the next draw depend on the token of this one.
    pub counts_token: bool,
    /// The backend also [reports](super::Backend::draws) the position's distribution, with so many most probable tokens.
    pub report: Option<usize>,
}

/// A draw from the tokens that top-k, top-p and min-p leave, decided by the logits alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenDraw {
    /// The noise of tokens; with a temperature of 0, the most probable token is drawn.
    pub noise: ScaledNoise,
    /// As in [`SamplingParams`](crate::SamplingParams), like the others.
    pub top_k: usize,
    /// Below 1 if it leaves out tokens.
    pub top_p: f32,
    /// Above 0 if it leaves out tokens.
    pub min_p: f32,
}

impl TokenDraw {
    /// Returns whether filters decide it, too, and not only logits and noise.
    pub(crate) fn has_filters(&self) -> bool {
        let leaves_out = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0;
        leaves_out && self.noise.temperature > 0.0
    }
}

/// Tokens to find after a step: those with at least some logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Above {
    /// The smallest logit.
    pub logit: f32,
    /// Bounds the logits that may be this much below more closely: at least 0.
    pub close: f32,
    /// The temperature of [`Rest::weight`]: above 0.
    pub temperature: f32,
}

/// The tokens of a position that were not found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rest {
    /// All tokens with at least this logit were found.
    pub below: f32,
    /// At least the sum of `exp((logit − below) / temperature)` over the others.
    pub weight: f64,
}

impl Ranking {
    /// The tokens with the `count` largest logits.
    pub const fn largest(count: usize) -> Self {
        Self {
            count,
            within: 0.0,
            noise: None,
            keeps: false,
            draw: None,
            changes: 0,
            counts_token: false,
            report: None,
        }
    }

    /// Returns the ranking of the same choice at the next position.
    pub(crate) fn next(self) -> Self {
        let next = |noise: ScaledNoise| ScaledNoise { noise: noise.noise.next(), ..noise };
        let draw = self.draw.map(|draw| TokenDraw { noise: next(draw.noise), ..draw });
        Self { noise: self.noise.map(next), draw, ..self }
    }
}
