//! Selects the tokens that can be drawn from the logits.
//!
//! With `p` the softmax of `logit / temperature`:
//!
//! * top-k keeps the tokens with a logit of at least the k-th largest;
//! * top-p keeps tokens in descending order until the sum of the kept ones reaches `top_p`;
//! * min-p drops tokens with `p < min_p · p_max`.
//!
//! Each filter works on the distribution that the previous one left. Equal logits are ordered by token
//! id, the lower first. No filter sorts the vocabulary: top-k selects, and top-p sorts only the
//! head of the distribution that it keeps. Sums run in one fixed order, in f64: over all candidates
//! by ascending token id, within top-p by descending probability.

use super::{Remainder, SampleError, SamplingParams, TokenLogit, logits::LogitSet};
use crate::math;

/// A token that can be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: u32,
    /// Its logit, before the temperature.
    pub logit: f32,
    /// Its probability relative to the most probable token's: `exp((logit − max) / temperature)`.
    pub weight: f64,
    /// Whether it can be drawn; otherwise that depends on logits that are not known.
    pub is_certain: bool,
}

/// Buffers as long as the vocabulary, reused from token to token.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    candidates: Vec<Candidate>,
    logits: Vec<f32>,
}

/// Factor between the bounds of a sum of weights, greater than all roundings.
const SUM_ROUNDING: f64 = 1e-9;
/// Tokens that top-p sorts first; each further round sorts eight times as many.
const HEAD: usize = 64;

/// Returns the largest logit and the lowest token with it.
///
/// # Errors
/// If a logit is NaN or +∞, or all are −∞.
pub fn largest<C: LogitSet + ?Sized>(logits: &C) -> Result<(u32, f32), SampleError> {
    let mut best = (0, f32::NEG_INFINITY);
    for TokenLogit { id, logit } in logits.entries() {
        if logit > best.1 {
            best = (id, logit);
        } else if logit.is_nan() {
            return Err(SampleError::NotFinite { token: id, logit });
        }
    }
    if best.1 == f32::INFINITY {
        return Err(SampleError::NotFinite { token: best.0, logit: best.1 });
    }
    if best.1 == f32::NEG_INFINITY { Err(SampleError::NothingLeft) } else { Ok(best) }
}

/// The tokens that can be drawn.
#[derive(Debug, Clone, Copy)]
pub struct Filtered<'a> {
    /// The tokens, by ascending id.
    pub kept: &'a [Candidate],
    /// Whether tokens that are not in the set may be drawn, too.
    pub lacks_some: bool,
}

/// Returns the tokens that can be drawn at a temperature above 0, with their weights. `rest` is what is known of tokens that
/// are not in `logits`, for a set that is not complete but for top-p needs to be.
///
/// # Errors
/// As [`largest`].
pub fn candidates<'a, C: LogitSet + ?Sized>(
    logits: &C,
    params: &SamplingParams,
    rest: Option<Remainder>,
    scratch: &'a mut Scratch,
) -> Result<Filtered<'a>, SampleError> {
    let (_, max) = largest(logits)?;
    let threshold = top_k_threshold(logits, params.top_k, &mut scratch.logits);
    let kept = &mut scratch.candidates;
    kept.clear();
    let temperature = f64::from(params.temperature);
    kept.extend(logits.entries().filter(|choice| choice.logit >= threshold).map(
        |TokenLogit { id, logit }| Candidate { token: id, logit, weight: 0.0, is_certain: true },
    ));
    for candidate in kept.iter_mut() {
        // Subtract before dividing: the difference is at most 0, so no temperature overflows it to +∞.
        let difference = f64::from(candidate.logit) - f64::from(max);
        candidate.weight = math::exp(difference / temperature);
    }
    let mut lacks_some = false;
    if params.top_p < 1.0 {
        let relative = |rest: Remainder| {
            let share = math::exp((f64::from(rest.below) - f64::from(max)) / temperature);
            // Without a bound, also where the share is 0.
            let weight = if rest.weight.is_finite() { rest.weight * share } else { rest.weight };
            Remainder { weight, ..rest }
        };
        lacks_some = !keep_top_p(kept, f64::from(params.top_p), rest.map(relative));
    }
    if params.min_p > 0.0 {
        // The largest weight is exp(0) = 1.
        kept.retain(|candidate| candidate.weight >= f64::from(params.min_p));
    }
    Ok(Filtered { kept, lacks_some })
}

/// Returns the k-th largest logit, or the smallest finite number if top-k keeps everything.
fn top_k_threshold<C: LogitSet + ?Sized>(logits: &C, k: usize, scratch: &mut Vec<f32>) -> f32 {
    if k == 0 || k >= logits.entry_count() {
        return f32::MIN;
    }
    scratch.clear();
    scratch.extend(logits.entries().map(|choice| choice.logit));
    let (_, threshold, _) = scratch.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    threshold.max(f32::MIN)
}

/// Keeps candidates in descending order until the sum of the kept ones reaches `top_p` of the total. The `rest`, with its
/// weight in units of theirs, belongs to the total: those that its exact weight decides about are kept, but not certain.
/// Returns false if tokens of the rest may be kept, too.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f64, rest: Option<Remainder>) -> bool {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let (certain, enough) = match rest {
        None => (top_p * total, top_p * total),
        Some(rest) => (
            top_p * total * (1.0 - SUM_ROUNDING),
            top_p * (total + rest.weight) * (1.0 + SUM_ROUNDING),
        ),
    };
    let descending =
        |a: &Candidate, b: &Candidate| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token));
    // The order is known down to where tokens of the rest may stand between the candidates.
    let is_ordered = |candidate: &Candidate| rest.is_none_or(|rest| candidate.logit >= rest.below);
    let (mut kept, mut sum, mut head, mut order_ends) = (0, 0.0, HEAD, false);
    while kept < candidates.len() && sum < enough && !order_ends {
        // Sort the next `head` candidates to the front of the rest.
        let left = &mut candidates[kept..];
        let count = head.min(left.len());
        if count < left.len() {
            left.select_nth_unstable_by(count, descending);
        }
        left[..count].sort_unstable_by(descending);
        for candidate in &mut left[..count] {
            order_ends = !is_ordered(candidate);
            if sum >= enough || order_ends {
                break;
            }
            candidate.is_certain = sum < certain;
            sum += candidate.weight;
            kept += 1;
        }
        head *= 8;
    }
    candidates.truncate(kept);
    candidates.sort_unstable_by_key(|candidate| candidate.token);
    sum >= enough || !order_ends && rest.is_none_or(|rest| rest.weight == 0.0)
}
