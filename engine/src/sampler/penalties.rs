//! Changes of single logits before the distribution is computed: bias, penalties, masks.

use std::collections::BTreeMap;

use super::{Context, LogitSet, SamplingParams};
use crate::backend::LogitChange;

/// Counts of a sequence's tokens for penalties. Empty if no penalty is on.
#[derive(Debug, Clone, Default)]
pub struct TokenCounts {
    /// Occurrences of each token in the output; 0 for a token that occurs only in the prompt.
    counts: BTreeMap<u32, u32>,
    counts_prompt: bool,
    counts_output: bool,
}

impl TokenCounts {
    /// Makes the counts of a sequence that starts with `prompt`.
    pub fn new(params: &SamplingParams, prompt: &[u32]) -> Self {
        let counts_prompt = params.repetition_penalty != 1.0;
        let counts_output =
            counts_prompt || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        let mut counts = BTreeMap::new();
        if counts_prompt {
            counts.extend(prompt.iter().map(|token| (*token, 0)));
        }
        Self { counts, counts_prompt, counts_output }
    }

    /// Returns the number of different tokens.
    pub fn distinct(&self) -> usize {
        self.counts.len()
    }

    /// Returns the different tokens, in ascending order.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        self.counts.keys().copied()
    }

    /// Returns whether penalties depend on generated tokens.
    pub fn counts_output(&self) -> bool {
        self.counts_output
    }

    /// Counts a generated token.
    pub fn add(&mut self, token: u32) {
        if self.counts_output {
            *self.counts.entry(token).or_default() += 1;
        }
    }

    /// Applies the penalties: repetition (prompt and output), then presence and frequency (output
    /// only, as OpenAI defines them).
    pub fn apply<C: LogitSet + ?Sized>(&self, params: &SamplingParams, logits: &mut C) {
        for (token, generated) in &self.counts {
            let Some(logit) = logits.logit_mut(*token) else { continue };
            if self.counts_prompt {
                let penalty = params.repetition_penalty;
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
            if *generated > 0 {
                let count = *generated as f32;
                *logit -= params.presence_penalty + params.frequency_penalty * count;
            }
        }
    }
}

/// Adds what masks, bias and penalties change together, by ascending token: the same arithmetic as theirs.
pub fn list_changes(params: &SamplingParams, context: Context<'_>, changes: &mut Vec<LogitChange>) {
    let start = changes.len();
    let TokenCounts { counts, counts_prompt, .. } = context.counts;
    let penalty = if *counts_prompt { params.repetition_penalty } else { 1.0 };
    let mut biased = params.logit_bias.iter().map(|(token, bias)| (*token, *bias)).peekable();
    for (&token, &generated) in counts {
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
    for &token in context.masked {
        let masked = LogitChange { bias: f32::NEG_INFINITY, ..LogitChange::none(token) };
        match changes[start..].binary_search_by_key(&token, |change| change.token) {
            Ok(place) => changes[start + place].bias = masked.bias,
            Err(place) => changes.insert(start + place, masked),
        }
    }
}

/// Returns whether penalties may raise logits.
pub fn raise(params: &SamplingParams) -> bool {
    params.repetition_penalty < 1.0
        || params.presence_penalty < 0.0
        || params.frequency_penalty < 0.0
}

/// Adds the logit bias.
pub fn add_bias<C: LogitSet + ?Sized>(params: &SamplingParams, logits: &mut C) {
    for (token, bias) in &params.logit_bias {
        if let Some(logit) = logits.logit_mut(*token) {
            *logit += bias;
        }
    }
}

/// Sets the logits of tokens to −∞.
pub fn mask<C: LogitSet + ?Sized>(tokens: impl IntoIterator<Item = u32>, logits: &mut C) {
    for token in tokens {
        if let Some(logit) = logits.logit_mut(token) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn penalised(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<f32> {
        changed(&[2.0, -2.0, 1.0, 0.5], params, prompt, output, &[])
    }

    /// Changes logits, one step after another. The listed changes are the same, to the bit.
    fn changed(
        before: &[f32],
        params: &SamplingParams,
        prompt: &[u32],
        output: &[u32],
        masked: &[u32],
    ) -> Vec<f32> {
        let mut counts = TokenCounts::new(params, prompt);
        output.iter().for_each(|token| counts.add(*token));
        let mut logits = before.to_vec();
        mask(masked.iter().copied(), &mut logits[..]);
        add_bias(params, &mut logits[..]);
        counts.apply(params, &mut logits[..]);

        let (known, distribution) = (None, None);
        let context =
            Context { counts: &counts, masked, choice: 0, position: 9, known, distribution };
        let mut changes = vec![LogitChange::none(u32::MAX)];
        list_changes(params, context, &mut changes);
        assert_eq!(changes.remove(0).token, u32::MAX, "those of others stay");
        assert!(changes.is_sorted_by(|a, b| a.token < b.token));
        let mut listed = before.to_vec();
        for change in &changes {
            if let Some(logit) = listed.get_mut(change.token as usize) {
                *logit = change.apply(*logit);
            }
        }
        let bits = |logits: &[f32]| -> Vec<u32> { logits.iter().map(|l| l.to_bits()).collect() };
        assert_eq!(bits(&listed), bits(&logits), "{params:?}");
        logits
    }

    proptest::proptest! {
        #[test]
        fn listed_changes_are_those_of_the_steps(
            logits in proptest::collection::vec(-20.0f32..20.0, 8),
            (repetition, presence, frequency) in (0.3f32..2.0, -2.0f32..2.0, -2.0f32..2.0),
            on in proptest::collection::vec(proptest::bool::ANY, 3),
            bias in proptest::collection::btree_map(0u32..10, -100.0f32..100.0, 0..4),
            prompt in proptest::collection::vec(0u32..10, 0..5),
            output in proptest::collection::vec(0u32..10, 0..9),
            masked in proptest::collection::vec(0u32..10, 0..3),
        ) {
            let params = SamplingParams {
                repetition_penalty: if on[0] { repetition } else { 1.0 },
                presence_penalty: if on[1] { presence } else { 0.0 },
                frequency_penalty: if on[2] { frequency } else { 0.0 },
                logit_bias: bias,
                ..Default::default()
            };
            let mut logits = logits;
            logits[..2].copy_from_slice(&[0.0, -0.0]);
            changed(&logits, &params, &prompt, &output, &masked);
        }
    }

    #[test]
    fn repetition_penalty_applies_once_to_prompt_and_output() {
        let params = SamplingParams { repetition_penalty: 2.0, ..Default::default() };
        assert_eq!(penalised(&params, &[0, 0], &[1, 1]), [1.0, -4.0, 1.0, 0.5]);
    }

    #[test]
    fn presence_and_frequency_penalties_apply_to_output_only() {
        let params =
            SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..Default::default() };
        assert_eq!(penalised(&params, &[0, 3], &[1, 1, 2]), [2.0, -3.0, 0.25, 0.5]);
    }

    #[test]
    fn bias_is_added_before_penalties() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            logit_bias: BTreeMap::from([(1, 6.0), (9, 1.0)]),
            ..Default::default()
        };
        assert_eq!(penalised(&params, &[1], &[]), [2.0, 2.0, 1.0, 0.5]);
    }

    #[test]
    fn logits_do_not_change_without_penalties() {
        let params = SamplingParams::default();
        assert_eq!(penalised(&params, &[0], &[1]), [2.0, -2.0, 1.0, 0.5]);
    }
}
