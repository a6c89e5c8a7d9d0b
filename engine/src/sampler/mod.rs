//! From the logits of one position to a token, as a function of the request alone.
//!
//! The steps, in order: masks (`min_tokens`), logit bias, repetition penalty, presence and
//! frequency penalties ([`penalties`]); then greedy, or temperature, top-k, top-p and min-p
//! ([`filters`]) and a draw with the number that (seed, choice, position) stands for ([`rng`]).
//! Arithmetic is f64 with our own `exp` and `ln` ([`crate::math`]), in fixed order: every machine draws
//! the same token from the same logits.

pub mod filters;
pub mod logprobs;
pub mod params;
pub mod penalties;
pub mod rng;
#[cfg(test)]
mod tests;

pub use filters::Scratch;
pub use logprobs::Logprobs;
use logprobs::RawDistribution;
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;

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

/// Draws the next token. Overwrites `logits`. // (vocab)
///
/// # Errors
/// If a logit is NaN or +∞, or nothing is left to draw.
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    context: Context<'_>,
    scratch: &mut Scratch,
) -> Result<Drawn, SampleError> {
    let raw = match params.logprobs {
        None => None,
        Some(top) => {
            let (_, max) = filters::largest(logits)?;
            Some((RawDistribution::new(logits, max, top), logits.to_vec()))
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
    let logprobs = raw.map(|(distribution, raw)| distribution.report(raw[token as usize]));
    Ok(Drawn { token, logprobs })
}
