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

pub use filters::Scratch;
use filters::{Candidate, Filtered};
pub use logit_set::LogitSet;
pub use logprobs::Logprobs;
pub use params::{InvalidParam, SamplingParams};
pub use penalties::TokenCounts;

use std::borrow::BorrowMut;

use crate::{
    backend::{
        Above, Distribution, LogitChange, Noise, Ranking, Rest, ScaledNoise, TokenDraw, TokenLogit,
    },
    math,
};

/// The tokens that top-p looks at first, and after that did not decide a draw: by their distance from the largest logit, and
/// the further distance of those with a weight that is bounded closely, in units of the temperature.
const LOOKS: [(f32, f32); 3] = [(5.0, 0.0), (9.0, 3.0), (13.0, 4.0)];
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
    /// What is known of tokens that are not among the logits, after [`Sampled::Undecided`].
    pub known: Option<Known>,
    /// The model's distribution, if the backend has reported it.
    pub distribution: Option<&'a Distribution>,
}

/// What is known of the tokens of a position besides their logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Known {
    /// The tokens that are not among the logits.
    pub rest: Rest,
    /// The token with the largest sum of logit and noise.
    pub first: u32,
    /// Number of times that further tokens were found.
    pub looks: usize,
}

/// What becomes of a draw.
#[derive(Debug, Clone, PartialEq)]
pub enum Sampled {
    /// A token.
    Drawn(Drawn),
    /// The logits do not decide which token is drawn.
    Undecided {
        /// The token with the largest sum of logit and noise.
        first: u32,
        /// The tokens that may decide it; all, if there are none.
        above: Option<Above>,
    },
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

/// Returns the tokens of which [`sample`] needs the model's logits to draw the same token as from all, and the
/// distribution to report.
///
/// Greedy needs the largest, top-k the k largest, min-p those within a distance from the largest, and a draw without
/// filters the largest with its noise. For top-p, too, that is the first look: see [`Sampled::Undecided`]. If masks, penalties
/// and bias change m logits, at most m others move up, so m more are enough, together with those that may
/// [rise](raised_tokens). If none are changed, a backend may [draw](Ranking::draw) by itself; otherwise it needs
/// [the changes](needed_with_changes).
pub fn needed(params: &SamplingParams, context: Context<'_>) -> Ranking {
    let temperature = params.temperature;
    let ranking = match *params {
        SamplingParams { temperature: 0.0, .. } => Ranking::largest(1),
        SamplingParams { top_k: 1.., .. } => Ranking::largest(params.top_k),
        SamplingParams { top_p: ..1.0, .. } | SamplingParams { min_p: 0.0, .. } => {
            let noise = Some(ScaledNoise { noise: noise_of(params, context), temperature });
            Ranking { noise, keeps: params.top_p < 1.0, ..Ranking::largest(1) }
        }
        SamplingParams { min_p, .. } => {
            let within = -math::ln(f64::from(min_p)) * f64::from(temperature) * ROUND_UP;
            Ranking { within: within as f32, ..Ranking::largest(1) }
        }
    };
    let changed = context.masked.len() + params.logit_bias.len() + context.counts.distinct();
    let (count, keeps) = (ranking.count.saturating_add(changed), ranking.keeps || raises(params));
    let draws = temperature > 0.0 && params.has_filters() && changed == 0;
    let draw = draws.then(|| draw_of(&ranking, params, context));
    Ranking { count, keeps, draw, report: params.logprobs, ..ranking }
}

/// Returns the draw that a ranking is for, for a backend that makes it.
fn draw_of(ranking: &Ranking, params: &SamplingParams, context: Context<'_>) -> TokenDraw {
    let SamplingParams { temperature, top_k, top_p, min_p, .. } = *params;
    let of_draw = || ScaledNoise { noise: noise_of(params, context), temperature };
    TokenDraw { noise: ranking.noise.unwrap_or_else(of_draw), top_k, top_p, min_p }
}

/// As [`needed`], for a backend that changes logits and draws by itself. Adds the changes to `changes`, by ascending token.
pub fn needed_with_changes(
    params: &SamplingParams,
    context: Context<'_>,
    changes: &mut Vec<LogitChange>,
) -> Ranking {
    let (ranking, before) = (needed(params, context), changes.len());
    let ranking = Ranking { counts_token: context.counts.counts_output(), ..ranking };
    penalties::list_changes(params, context, changes);
    match changes.len() - before {
        // What is raised is among the changes.
        0 => Ranking { keeps: false, ..ranking },
        changes => Ranking { draw: Some(draw_of(&ranking, params, context)), changes, ..ranking },
    }
}

/// Returns whether parameters may raise logits, and not only lower them.
fn raises(params: &SamplingParams) -> bool {
    penalties::raise(params) || params.logit_bias.values().any(|bias| *bias > 0.0)
}

/// Writes the tokens that parameters may give a larger logit, in ascending order. [`sample`] needs their logits, too, however
/// small they are.
pub fn raised_tokens(params: &SamplingParams, context: Context<'_>, tokens: &mut Vec<u32>) {
    tokens.clear();
    if !raises(params) {
        return;
    }
    tokens
        .extend(params.logit_bias.iter().filter(|(_, bias)| **bias > 0.0).map(|(token, _)| token));
    if penalties::raise(params) {
        tokens.extend(context.counts.tokens());
        tokens.sort_unstable();
        tokens.dedup();
    }
}

fn noise_of(params: &SamplingParams, context: Context<'_>) -> Noise {
    Noise::of(params.seed, context.choice, context.position as u64)
}

/// Draws the next token. `logits` are of the whole vocabulary or at least those that are [`needed`] and those of
/// [raised tokens](raised_tokens), and are overwritten. Log-probabilities need the whole vocabulary or the distribution.
///
/// With top-p, the token with the largest noise is drawn if the tokens with larger logits weigh less than `top_p` of all. The
/// first look finds that token; further ones find the most probable tokens, and a bound on the weight of all others.
///
/// # Errors
/// If a logit is NaN or +∞, or every logit is −∞.
///
/// # Panics
/// If log-probabilities are requested and neither the distribution nor all logits are known.
pub fn sample<C: LogitSet + ?Sized>(
    logits: &mut C,
    params: &SamplingParams,
    context: Context<'_>,
    scratch: &mut Scratch,
) -> Result<Sampled, SampleError> {
    let raw = match params.logprobs {
        None => None,
        Some(top) => {
            let (_, largest) = filters::largest(logits)?;
            let distribution = context.distribution.cloned().unwrap_or_else(|| {
                assert!(logits.is_whole(), "log-probabilities need all logits");
                Distribution::of(logits.entries(), largest, top)
            });
            Some((distribution, logits.to_owned()))
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
        let looks_first = params.top_p < 1.0 && params.top_k == 0 && !logits.is_whole();
        let (max, known) = (filters::largest(logits)?.1, context.known);
        let undecided = |first: u32| {
            let above = LOOKS.get(known.map_or(0, |known| known.looks)).map(|(within, close)| {
                Above { logit: max - within * temperature, close: close * temperature, temperature }
            });
            Ok(Sampled::Undecided { first, above })
        };
        let first = if params.has_filters() && (known.is_some() || !looks_first) {
            let Filtered { kept, lacks_some } =
                filters::candidates(logits, params, known.map(|known| known.rest), scratch)?;
            let logit = |kept: &Candidate| TokenLogit { id: kept.token, logit: kept.logit };
            let of_all = known.filter(|_| lacks_some).map(|known| known.first);
            let first = of_all.or_else(|| filters::first(kept.iter().map(logit), &noise));
            let is_certain = |first: u32| {
                let place = kept.binary_search_by_key(&first, |kept| kept.token);
                place.is_ok_and(|place| kept[place].is_certain)
            };
            if let Some(known) = known.filter(|_| !first.is_some_and(is_certain)) {
                return undecided(known.first);
            }
            first
        } else {
            filters::first(logits.entries(), &noise)
        };
        let first = first.ok_or(SampleError::NothingLeft)?;
        if looks_first && known.is_none() {
            return undecided(first);
        }
        first
    };
    let logprobs = raw.map(|(distribution, mut raw)| {
        let logit = raw.borrow_mut().logit_mut(token).copied();
        Logprobs::of(&distribution, logit.unwrap_or(f32::NEG_INFINITY))
    });
    Ok(Sampled::Drawn(Drawn { token, logprobs }))
}
