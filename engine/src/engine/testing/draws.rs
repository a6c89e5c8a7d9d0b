//! Draws and distributions, as a device makes them that has changed logits by itself.

use super::*;
use crate::{
    backend::{Distribution, LogitChange, Ranking, TokenDraw},
    sampler::filters,
};

/// What a device finds of a position.
pub struct OfPosition {
    /// The drawn token, or tokens with their logits; all of them if it does not decide.
    pub tokens: Vec<TokenLogit>,
    pub is_draw: bool,
    pub distribution: Option<Distribution>,
}

/// Finds what a ranking asks for, from the model's logits.
pub fn of_position(logits: &[f32], ranking: &Ranking, changes: &[LogitChange]) -> OfPosition {
    let is_draw = ranking.draw.is_some();
    let Ok((_, largest)) = filters::largest(logits) else {
        let tokens = of_logits::every(logits).collect();
        return OfPosition { tokens, is_draw, distribution: None };
    };
    let distribution =
        ranking.report.map(|top| Distribution::of(of_logits::every(logits), largest, top));
    let tokens = match &ranking.draw {
        None => of_logits::first(logits, ranking),
        // Some draws are left open, as by bounds that do not decide them.
        Some(draw) => match drawn(logits, draw, changes).filter(|token| token % 5 > 0) {
            Some(token) => vec![TokenLogit { id: token, logit: logits[token as usize] }],
            None => of_logits::every(logits).collect(),
        },
    };
    OfPosition { tokens, is_draw, distribution }
}

/// Draws a token; `None` if none can be drawn.
fn drawn(logits: &[f32], draw: &TokenDraw, changes: &[LogitChange]) -> Option<u32> {
    let mut changed = logits.to_vec();
    for change in changes {
        let logit = changed.get_mut(change.token as usize);
        logit.into_iter().for_each(|logit| *logit = change.apply(*logit));
    }
    let TokenDraw { noise, top_k, top_p, min_p } = *draw;
    let temperature = noise.temperature;
    if temperature == 0.0 {
        return filters::largest(&changed[..]).ok().map(|(token, _)| token);
    }
    let params = SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::default() };
    let mut scratch = Scratch::default();
    let kept = filters::candidates(&changed[..], &params, None, &mut scratch).ok()?.kept;
    let tokens = kept.iter().map(|kept| TokenLogit { id: kept.token, logit: kept.logit });
    filters::first(tokens, &noise)
}
