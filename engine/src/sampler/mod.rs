//! Draws a token from the logits of one position, as a function of the request alone.
//!
//! The steps, in order: masks (`min_tokens`), logit bias, repetition penalty, presence and
//! frequency penalties ([`penalties`]); then greedy, or temperature, top-k, top-p and min-p
//! ([`filters`]) and a draw with the random number of (seed, choice, position) ([`rng`]). Arithmetic is
//! f64 with the crate's own `exp` and `ln` ([`crate::math`]), in fixed order: every machine draws the
//! same token from the same logits.

pub mod filters;
mod logit_set;
pub mod logprobs;
pub mod params;
pub mod penalties;
pub mod rng;
#[cfg(test)]
mod tests;

pub use filters::Scratch;
pub use logit_set::LogitSet;
pub use logprobs::Logprobs;
use logprobs::RawDistribution;
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;

use std::borrow::BorrowMut;

/// Logits that no token can be drawn from. The request fails; others continue.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// The model computed NaN or +∞.
    #[error("logit of token {token} is {logit}")]
    NotFinite {
        /// The first such token.
        token: u32,
        /// Its logit.
        logit: f32,
    },
    /// Every token has probability zero.
    #[error("every logit is negative infinity")]
    NothingLeft,
}

/// Everything besides logits and parameters that a draw depends on.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Earlier tokens of the sequence.
    pub counts: &'a TokenCounts,
    /// Tokens that must not be drawn.
    pub masked: &'a [u32],
    /// Index of the choice in the request.
    pub choice: u32,
    /// Position of the drawn token, from the start of the prompt.
    pub position: usize,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Log-probabilities, if requested.
    pub logprobs: Option<Logprobs>,
}

/// Returns the number of the model's largest logits that [`sample`] needs to draw the same token as
/// from all;
/// `None` if it needs all.
///
/// Greedy needs the largest, top-k the k largest. Masks, penalties and negative bias only lower logits:
/// if they lower m logits, at most m others move up, so m more of the largest are enough. Parameters
/// that raise logits, a distribution without top-k, and log-probabilities need all.
pub fn logits_needed(params: &SamplingParams, context: Context<'_>) -> Option<usize> {
    let largest = match (params.temperature == 0.0, params.top_k) {
        (true, _) => 1,
        (false, 0) => return None,
        (false, k) => k,
    };
    let raises = params.repetition_penalty < 1.0
        || params.presence_penalty < 0.0
        || params.frequency_penalty < 0.0
        || params.logit_bias.values().any(|bias| *bias > 0.0);
    if raises || params.logprobs.is_some() {
        return None;
    }
    let lowered = context.masked.len() + params.logit_bias.len() + context.counts.distinct();
    Some(largest.saturating_add(lowered))
}

/// Draws the next token. `logits` are of the whole vocabulary or at least the [`logits_needed`]
/// largest, and are overwritten.
///
/// # Errors
/// If a logit is NaN or +∞, or every logit is −∞.
pub fn sample<C: LogitSet + ?Sized>(
    logits: &mut C,
    params: &SamplingParams,
    context: Context<'_>,
    scratch: &mut Scratch,
) -> Result<Drawn, SampleError> {
    let raw = match params.logprobs {
        None => None,
        Some(top) => {
            let (_, max) = filters::largest(logits)?;
            Some((RawDistribution::new(logits, max, top), logits.to_owned()))
        }
    };
    penalties::mask(context.masked.iter().copied(), logits);
    penalties::add_bias(params, logits);
    context.counts.apply(params, logits);
    let token = if params.temperature == 0.0 {
        filters::largest(logits)?.0
    } else {
        let candidates = filters::candidates(logits, params, scratch)?;
        let uniform = rng::uniform(params.seed, context.choice, context.position as u64);
        filters::draw(candidates, uniform).ok_or(SampleError::NothingLeft)?
    };
    let logprobs = raw.map(|(distribution, mut raw)| {
        let logit = raw.borrow_mut().logit_mut(token).copied();
        distribution.report(logit.unwrap_or(f32::NEG_INFINITY))
    });
    Ok(Drawn { token, logprobs })
}
