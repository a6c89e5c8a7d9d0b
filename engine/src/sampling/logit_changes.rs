//! What allowed tokens, bias and penalties do to single logits, as one change of each token: for a backend that draws.

use super::RowMetadata;

/// A change of a token's logit: a bias, and then penalties.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    /// The token.
    pub token: u32,
    /// Added first. −∞ for a token that must not be drawn, and −0, which changes no logit, for none.
    pub bias: f32,
    /// Then logits below 0 are multiplied by it, and others are divided by it. 1 for none.
    pub penalty: f32,
    /// Subtracted last. 0 for none.
    pub less: f32,
}

impl LogitChange {
    /// The change of a token that changes nothing.
    pub const fn none(token: u32) -> Self {
        Self { token, bias: -0.0, penalty: 1.0, less: 0.0 }
    }

    /// Returns the changed logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = logit + self.bias;
        let logit = if logit < 0.0 { logit * self.penalty } else { logit / self.penalty };
        logit - self.less
    }
}

/// Adds what allowed tokens, bias and penalties change together, by ascending token: the same arithmetic as theirs, one after
/// another.
pub fn list(row: &RowMetadata<'_>, changes: &mut Vec<LogitChange>) {
    let (start, params, counts) = (changes.len(), row.params, row.counts());
    let penalty = if counts.counts_prompt() { params.repetition_penalty } else { 1.0 };
    let mut biased = params.logit_bias.iter().map(|(token, bias)| (*token, *bias)).peekable();
    for (token, generated) in counts.iter() {
        while let Some((token, bias)) = biased.next_if(|(other, _)| *other < token) {
            changes.push(LogitChange { bias, ..LogitChange::none(token) });
        }
        let bias = biased.next_if(|(other, _)| *other == token);
        let of_output = params.presence_penalty + params.frequency_penalty * generated as f32;
        changes.push(LogitChange {
            token,
            bias: bias.map_or(-0.0, |(_, bias)| bias),
            penalty,
            less: if generated > 0 { of_output } else { 0.0 },
        });
    }
    changes.extend(biased.map(|(token, bias)| LogitChange { bias, ..LogitChange::none(token) }));
    for token in row.allowed.into_iter().flat_map(|allowed| allowed.refused()) {
        let refused = LogitChange { bias: f32::NEG_INFINITY, ..LogitChange::none(token) };
        match changes[start..].binary_search_by_key(&token, |change| change.token) {
            Ok(place) => changes[start + place].bias = refused.bias,
            Err(place) => changes.insert(start + place, refused),
        }
    }
}
