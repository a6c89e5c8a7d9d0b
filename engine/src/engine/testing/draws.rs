//! Draws and distributions, as a device makes them that has changed logits by itself.

use crate::sampling::{
    Distribution, LogitChange, LogitsRow as _, RowMetadata, TokenLogit, gumbel, logit_changes,
    row::every, top_k_top_p,
};

/// What a device finds of a position.
pub struct OfPosition {
    /// The drawn token, or tokens with their logits; all of them if it does not decide.
    pub tokens: Vec<TokenLogit>,
    pub is_draw: bool,
    pub distribution: Option<Distribution>,
}

/// Finds what a draw needs, from the model's logits.
pub fn of_position(logits: &[f32], row: &RowMetadata<'_>) -> OfPosition {
    let mut changes = Vec::new();
    logit_changes::list(row, &mut changes);
    let is_filtered = row.params.temperature > 0.0 && row.params.has_filters();
    let is_draw = row.choices == 1 && (is_filtered || !changes.is_empty());
    let Ok((_, largest)) = top_k_top_p::largest(logits) else {
        let tokens = every(logits).collect();
        return OfPosition { tokens, is_draw, distribution: None };
    };
    let distribution =
        row.params.logprobs.map(|top| Distribution::from_logits(every(logits), largest, top));
    let mut tokens = Vec::new();
    if is_draw {
        // Some draws are left open, as by bounds that do not decide them.
        match drawn(logits, row, &changes).filter(|token| token % 5 > 0) {
            Some(id) => tokens.push(TokenLogit { id, logit: logits[id as usize] }),
            None => tokens.extend(every(logits)),
        }
    } else {
        let Ok(()) = logits.to_vec().largest(&row.largest(), &mut tokens);
    }
    OfPosition { tokens, is_draw, distribution }
}

/// Draws a token; `None` if none can be drawn.
fn drawn(logits: &[f32], row: &RowMetadata<'_>, changes: &[LogitChange]) -> Option<u32> {
    let mut changed = logits.to_vec();
    for change in changes {
        let logit = changed.get_mut(change.token as usize);
        logit.into_iter().for_each(|logit| *logit = change.apply(*logit));
    }
    if row.params.temperature == 0.0 {
        return top_k_top_p::largest(&changed[..]).ok().map(|(token, _)| token);
    }
    let mut scratch = top_k_top_p::Scratch::default();
    let kept = top_k_top_p::candidates(&changed[..], row.params, None, &mut scratch).ok()?.kept;
    let tokens = kept.iter().map(|kept| TokenLogit { id: kept.token, logit: kept.logit });
    gumbel::argmax(tokens, &row.noise())
}
