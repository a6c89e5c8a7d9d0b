//! From the logits of one position to a token, as a function of the request alone.
//!
//! The steps, in order: masks (`min_tokens`), logit bias, repetition penalty, presence and
//! frequency penalties ([`penalties`]); then greedy, or temperature, top-k, top-p and min-p
//! ([`filters`]) and a draw with the number that (seed, choice, position) stands for ([`rng`]).
//! Arithmetic is f64 with our own `exp` and `ln` ([`crate::math`]), in fixed order: every machine draws
//! the same token from the same logits.

mod choices;
pub mod filters;
pub mod logprobs;
pub mod params;
pub mod penalties;
pub mod rng;
#[cfg(test)]
mod tests;

pub use choices::Choices;
pub use filters::Scratch;
pub use logprobs::Logprobs;
use logprobs::RawDistribution;
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;

use std::borrow::BorrowMut;

/// Logits no token can be drawn from. The sequence fails; others go on.
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
    /// Every token is impossible.
    #[error("no token may follow: every logit is negative infinity")]
    NothingLeft,
}

/// What a draw depends on besides logits and parameters.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Earlier tokens of the sequence.
    pub counts: &'a TokenCounts,
    /// Tokens that may not be drawn.
    pub masked: &'a [u32],
    /// Which of the request's choices.
    pub choice: u32,
    /// Position of the drawn token, from the start of the prompt.
    pub position: usize,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<Logprobs>,
}

/// How many of the largest logits, as the model gives them, decide what [`sample`] draws; `None` if
/// all do.
///
/// Greedy needs the largest, top-k the k largest. Whatever only lowers logits (masks, penalties,
/// negative bias) lets as many others move up as it lowers: among so many more of the largest
/// are all that may be drawn. What raises a logit, a distribution that is not cut, and
/// log-probabilities need all.
pub fn deciding(params: &SamplingParams, context: Context<'_>) -> Option<usize> {
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

/// Draws the next token. Overwrites `logits`, those of the whole vocabulary or the [`deciding`] ones.
///
/// # Errors
/// If a logit is NaN or +∞, or nothing is left to draw.
pub fn sample<C: Choices + ?Sized>(
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
