//! Draws a token from the logits of one position, as a function of the request alone.
//!
//! The steps, in order: masks (`min_tokens`), logit bias, repetition penalty, presence and
//! frequency penalties ([`penalties`]); then greedy, or temperature, top-k, top-p and min-p
//! ([`filters`]), and the token with the largest sum of logit and noise ([`crate::noise`]). Arithmetic is
//! f64 with the crate's own `exp` and `ln` ([`crate::math`]), in fixed order: every machine draws the
//! same token from the same logits.

pub mod filters;
mod logit_set;
pub mod logprobs;
pub mod params;
pub mod penalties;
#[cfg(test)]
mod tests;

use filters::Candidate;
pub use filters::Scratch;
pub use logit_set::LogitSet;
pub use logprobs::Logprobs;
use logprobs::RawDistribution;
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;

use std::borrow::BorrowMut;

use crate::{
    backend::{Noise, Ranking, Rest, ScaledNoise, TokenLogit},
    math,
};

/// Distance from the largest logit of the tokens that top-p looks at, in units of the temperature: others have less than
/// 1/8000 of the largest probability each.
const TOP_P_WITHIN: f32 = 9.0;
/// Factor greater than the roundings of a distance between logits, to f32 included.
const ROUND_UP: f64 = 1.0 + 1e-5;

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
    /// What is known of tokens that are not among the logits, if [`needed`] asks for it.
    pub rest: Option<Rest>,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: u32,
    /// Log-probabilities, if requested.
    pub logprobs: Option<Logprobs>,
}

/// Version of the definition of a draw, for numerics classes.
pub const VERSION: &str = "draw-2";

/// Returns the tokens of which [`sample`] needs the model's logits to draw the same token as from all; `None` if it
/// needs all.
///
/// Greedy needs the largest, top-k the k largest, min-p those within a distance from the largest, and a draw without
/// filters the largest with its noise. Top-p needs the most probable tokens and a bound on the weight of all others, which
/// may turn out not to suffice. Masks, penalties and negative bias only lower logits: if they lower m logits,
/// at most m others move up, so m more are enough. Parameters that raise logits, and log-probabilities need all.
pub fn needed(params: &SamplingParams, context: Context<'_>) -> Option<Ranking> {
    let temperature = params.temperature;
    let ranking = match *params {
        SamplingParams { temperature: 0.0, .. } => Ranking::largest(1),
        SamplingParams { top_k: 1.., .. } => Ranking::largest(params.top_k),
        SamplingParams { top_p: ..1.0, .. } => {
            let (within, weigh) = (TOP_P_WITHIN * temperature, Some(temperature));
            Ranking { within, weigh, ..Ranking::largest(1) }
        }
        SamplingParams { min_p: 0.0, .. } => {
            let noise = Some(ScaledNoise { noise: noise_of(params, context), temperature });
            Ranking { noise, ..Ranking::largest(1) }
        }
        SamplingParams { min_p, .. } => {
            let within = -math::ln(f64::from(min_p)) * f64::from(temperature) * ROUND_UP;
            Ranking { within: within as f32, ..Ranking::largest(1) }
        }
    };
    let raises = params.repetition_penalty < 1.0
        || params.presence_penalty < 0.0
        || params.frequency_penalty < 0.0
        || params.logit_bias.values().any(|bias| *bias > 0.0);
    if raises || params.logprobs.is_some() {
        return None;
    }
    let lowered = context.masked.len() + params.logit_bias.len() + context.counts.distinct();
    Some(Ranking { count: ranking.count.saturating_add(lowered), ..ranking })
}

fn noise_of(params: &SamplingParams, context: Context<'_>) -> Noise {
    Noise::of(params.seed, context.choice, context.position as u64)
}

/// Draws the next token. `logits` are of the whole vocabulary or at least those that are [`needed`], and are
/// overwritten. `None` if they do not decide which token is drawn: then all are needed.
///
/// # Errors
/// If a logit is NaN or +∞, or every logit is −∞.
pub fn sample<C: LogitSet + ?Sized>(
    logits: &mut C,
    params: &SamplingParams,
    context: Context<'_>,
    scratch: &mut Scratch,
) -> Result<Option<Drawn>, SampleError> {
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
        let (noise, temperature) = (noise_of(params, context), params.temperature);
        let noise = ScaledNoise { noise, temperature };
        let first = if params.has_filters() {
            let Some(kept) = filters::candidates(logits, params, context.rest, scratch)? else {
                return Ok(None);
            };
            let logit = |kept: &Candidate| TokenLogit { id: kept.token, logit: kept.logit };
            let first = filters::first(kept.iter().map(logit), &noise);
            let is_first = |kept: &&Candidate| Some(kept.token) == first;
            if kept.iter().find(is_first).is_some_and(|kept| !kept.is_certain) {
                return Ok(None);
            }
            first
        } else {
            filters::largest(logits)?;
            filters::first(logits.entries(), &noise)
        };
        first.ok_or(SampleError::NothingLeft)?
    };
    let logprobs = raw.map(|(distribution, mut raw)| {
        let logit = raw.borrow_mut().logit_mut(token).copied();
        distribution.report(logit.unwrap_or(f32::NEG_INFINITY))
    });
    Ok(Some(Drawn { token, logprobs }))
}
