//! Penalties of tokens that a sequence has: repetition, presence and frequency.

use std::collections::BTreeMap;

use super::{SamplingParams, logits::LogitSet};

/// Counts of a sequence's tokens for penalties. Empty if no penalty is on.
#[derive(Debug, Clone, Default, PartialEq)]
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

    /// Returns each token with its number of occurrences in the output.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.counts.iter().map(|(token, generated)| (*token, *generated))
    }

    /// Returns whether the repetition penalty is on.
    pub(super) fn counts_prompt(&self) -> bool {
        self.counts_prompt
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

/// Returns whether penalties may raise logits.
pub fn raise(params: &SamplingParams) -> bool {
    params.repetition_penalty < 1.0
        || params.presence_penalty < 0.0
        || params.frequency_penalty < 0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{AllowedTokens, LogitChange, RowMetadata, logit_bias, logit_changes};

    fn penalised(params: &SamplingParams, prompt: &[u32], output: &[u32]) -> Vec<f32> {
        changed(&[2.0, -2.0, 1.0, 0.5], params, prompt, output, &[])
    }

    /// Changes logits, one processor after another. The listed changes are the same, to the bit.
    fn changed(
        before: &[f32],
        params: &SamplingParams,
        prompt: &[u32],
        output: &[u32],
        refused: &[u32],
    ) -> Vec<f32> {
        let mut counts = TokenCounts::new(params, prompt);
        // The last one is a draft.
        let (drafts, output) = output.split_at(output.len().min(1));
        output.iter().for_each(|token| counts.add(*token));
        let allowed = AllowedTokens::all_but(before.len(), refused.iter().copied());
        let row = RowMetadata {
            params,
            counts: &counts,
            drafts,
            allowed: Some(&allowed),
            choice: 0,
            position: 9,
            choices: 1,
        };
        let mut logits = before.to_vec();
        logits[..].refuse(&allowed);
        logit_bias::apply(params, &mut logits[..]);
        row.counts().apply(params, &mut logits[..]);

        let mut changes = vec![LogitChange::none(u32::MAX)];
        logit_changes::list(&row, &mut changes);
        assert_eq!(changes.remove(0).token, u32::MAX, "those of others stay");
        assert!(changes.is_sorted_by(|a, b| a.token < b.token));
        assert!(changes.len() <= row.changed_max());
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
        fn listed_changes_are_those_of_the_processors(
            logits in proptest::collection::vec(-20.0f32..20.0, 8),
            (repetition, presence, frequency) in (0.3f32..2.0, -2.0f32..2.0, -2.0f32..2.0),
            on in proptest::collection::vec(proptest::bool::ANY, 3),
            bias in proptest::collection::btree_map(0u32..10, -100.0f32..100.0, 0..4),
            prompt in proptest::collection::vec(0u32..10, 0..5),
            output in proptest::collection::vec(0u32..10, 0..9),
            refused in proptest::collection::vec(0u32..10, 0..3),
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
            changed(&logits, &params, &prompt, &output, &refused);
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
