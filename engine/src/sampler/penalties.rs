//! Changes of single logits before the distribution is computed: bias, penalties, masks.

use std::collections::BTreeMap;

use super::{LogitSet, SamplingParams};

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
        let mut logits = vec![2.0, -2.0, 1.0, 0.5];
        let mut counts = TokenCounts::new(params, prompt);
        output.iter().for_each(|token| counts.add(*token));
        add_bias(params, &mut logits[..]);
        counts.apply(params, &mut logits[..]);
        logits
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
