//! What the draws of a step need besides logits, by row.

use std::borrow::Cow;

use super::{
    AllowedTokens, FirstQuestion, GumbelNoise, Largest, SamplingParams, TokenCounts, penalties,
};
use crate::math;

/// Factor greater than the roundings of a distance between logits, to f32 included.
const ROUND_UP: f64 = 1.0 + 1e-5;

/// What the draws of a step need, in the order of its rows with a draw. Kept between steps for its memory.
#[derive(Debug, Default)]
pub struct SamplingMetadata<'a> {
    /// One for each draw.
    pub rows: Vec<RowMetadata<'a>>,
}

impl SamplingMetadata<'_> {
    /// Returns an empty list in the memory of this one, for rows that borrow from elsewhere.
    pub fn emptied<'to>(mut self) -> SamplingMetadata<'to> {
        self.rows.clear();
        // The standard library collects a list's own elements in its memory.
        let none = |_| -> RowMetadata<'to> { unreachable!("the list is empty") };
        SamplingMetadata { rows: self.rows.into_iter().map(none).collect() }
    }
}

/// Everything besides the logits that a draw depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowMetadata<'a> {
    /// The request's parameters, with the seed.
    pub params: &'a SamplingParams,
    /// Tokens of the sequence that penalties count.
    pub counts: &'a TokenCounts,
    /// Drafts before this draw, which penalties count, too.
    pub drafts: &'a [u32],
    /// What may be drawn; `None` for every token.
    pub allowed: Option<&'a AllowedTokens>,
    /// Index of the choice in the request.
    pub choice: u32,
    /// Position of the drawn token, from the start of the prompt.
    pub position: usize,
    /// Number of choices that are drawn from this row: those that start at the end of a prompt, else 1.
    pub choices: u32,
}

impl<'a> RowMetadata<'a> {
    /// Returns the noise of the draw.
    pub fn noise(&self) -> GumbelNoise {
        let SamplingParams { seed, temperature, .. } = *self.params;
        GumbelNoise::new(seed, self.choice, self.position as u64, temperature)
    }

    /// Returns the counts with those of the drafts.
    pub fn counts(&self) -> Cow<'a, TokenCounts> {
        if self.drafts.is_empty() || !self.counts.counts_output() {
            return Cow::Borrowed(self.counts);
        }
        let mut counts = self.counts.clone();
        self.drafts.iter().for_each(|draft| counts.add(*draft));
        Cow::Owned(counts)
    }

    /// Returns the tokens of which the draw needs the logits at first, to draw the same token as from all.
    ///
    /// Greedy needs the largest, top-k the k largest, min-p those within a distance from the largest, and a draw without
    /// filters the largest with its noise. For top-p, too, that is the first question. If allowed tokens, bias and penalties change
    /// m logits, at most m others move up, so m more are enough, together with those that may
    /// [rise](Self::list_raised).
    pub fn largest(&self) -> Largest {
        let params = self.params;
        let largest = match *params {
            SamplingParams { temperature: 0.0, .. } => Largest::logits(1),
            SamplingParams { top_k: 1.., .. } => Largest::logits(params.top_k),
            SamplingParams { top_p: ..1.0, .. } | SamplingParams { min_p: 0.0, .. } => {
                let (noise, others_follow) = (Some(self.noise()), params.top_p < 1.0);
                Largest { noise, others_follow, ..Largest::logits(1) }
            }
            SamplingParams { min_p, temperature, .. } => {
                let within = -math::ln(f64::from(min_p)) * f64::from(temperature) * ROUND_UP;
                Largest { within: within as f32, ..Largest::logits(1) }
            }
        };
        let refused = self.allowed.map_or(0, AllowedTokens::refused_count);
        let count = largest.count.saturating_add(self.changed_max());
        let others_follow = largest.others_follow || self.raises();
        Largest { count, refused, others_follow, ..largest }
    }

    /// Returns what the draw asks for first of a backend that does not report distributions.
    pub fn first_question(&self) -> FirstQuestion<'a> {
        match self.few_allowed() {
            _ if self.needs_all(false) => FirstQuestion::All,
            Some(tokens) => FirstQuestion::Tokens(tokens),
            None => FirstQuestion::Largest(self.largest()),
        }
    }

    /// Returns the tokens that may be drawn, if they are few.
    pub fn few_allowed(&self) -> Option<&'a [u32]> {
        self.allowed.and_then(AllowedTokens::few)
    }

    /// Returns how many logits change at most.
    pub(crate) fn changed_max(&self) -> usize {
        let refused = self.allowed.map_or(0, AllowedTokens::refused_count);
        let drafts = if self.counts.counts_output() { self.drafts.len() } else { 0 };
        refused + self.params.logit_bias.len() + self.counts.distinct() + drafts
    }

    /// Returns whether the draw needs all logits, whatever they are: for log-probabilities, unless the backend `reports` the
    /// distribution, and for several choices with a noise of their own.
    pub fn needs_all(&self, reports: bool) -> bool {
        let for_logprobs = self.params.logprobs.is_some() && !reports;
        for_logprobs || self.choices > 1 && self.largest().noise.is_some()
    }

    /// Returns whether parameters may raise logits, and not only lower them.
    fn raises(&self) -> bool {
        penalties::raise(self.params) || self.params.logit_bias.values().any(|bias| *bias > 0.0)
    }

    /// Writes the tokens that parameters may give a larger logit, in ascending order. The draw needs their logits, too, however
    /// small they are.
    pub fn list_raised(&self, tokens: &mut Vec<u32>) {
        tokens.clear();
        if !self.raises() {
            return;
        }
        let raised = self.params.logit_bias.iter().filter(|(_, bias)| **bias > 0.0);
        tokens.extend(raised.map(|(token, _)| token));
        if penalties::raise(self.params) {
            tokens.extend(self.counts().tokens());
            tokens.sort_unstable();
            tokens.dedup();
        }
    }
}
