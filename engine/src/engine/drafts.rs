//! Drafts: tokens that may follow, computed together with the newest token of a sequence. Where the next token, drawn as
//! always, is the draft, the logits after it are known as well, and a step yields several tokens of the sequence.
//! Answers never change: every token is drawn from the same logits, which are equal to the bit for any chunks.
//!
//! Drafts are what followed the newest tokens when they occurred before: in the prompt and the answer (prompt lookup), or
//! in an earlier answer to the same tenant ([`answers`]), since lines of a batch have the same form.
//!
//! A row of a step costs time. A draft is worth it if
//!
//! ```text
//! probability of a new token > time of a row · new tokens of the step ÷ time of the step
//! ```
//!
//! that is, if it does not lower the tokens per second. Times are measured by the number of rows ([`times`]), and
//! probabilities for each request and each length of a match ([`acceptance`]).

mod acceptance;
mod answers;
mod times;

use acceptance::Acceptance;
pub(super) use acceptance::Chances;
use answers::Answers;
use times::StepTimes;

use std::time::{Duration, Instant};

use crate::kv::BlockHash;

/// Longest match of the newest tokens that is looked for.
const MATCH_MAX: usize = 8;
/// Shortest match that drafts follow from.
const MATCH_MIN: usize = 2;

/// Time of a step for what grammars allow after drafts. Most take some microseconds.
const LOOK_AHEAD_TIME: Duration = Duration::from_millis(1);

/// Tokens at the end of a prompt that are kept with its answer, so that the first tokens of answers are found.
pub(super) const PROMPT_TOKENS: usize = answers::KEY;

/// Tokens that may follow, and how many of the newest tokens occurred before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found<'a> {
    following: &'a [u32],
    matched: usize,
    /// Whether `following` ends with the newest token, and would follow itself.
    repeats: bool,
}

/// Finds drafts, and learns when they are worth their rows. For one engine.
#[derive(Debug, Clone, Default)]
pub(super) struct Drafts {
    answers: Answers,
    acceptance: Acceptance,
    times: StepTimes,
    /// Rows of the step that is proposed.
    rows: usize,
    /// Tokens that it is expected to yield, prefill included.
    yields: f64,
    /// What is left in the step of the time to look ahead in grammars.
    time: Duration,
}

impl Drafts {
    /// Starts a step in which this many sequences decode.
    pub fn begin(&mut self, decodes: usize) {
        (self.rows, self.yields) = (decodes, decodes as f64);
        self.time = LOOK_AHEAD_TIME;
    }

    /// Looks ahead in a grammar, until the time for that is over.
    pub fn look_ahead(&mut self, look: impl FnOnce(Instant)) {
        let began = Instant::now();
        look(began + self.time);
        self.time = self.time.saturating_sub(began.elapsed());
    }

    /// Appends up to `most` tokens that may follow `tokens`. Returns the length of the match that they follow from.
    pub fn propose(
        &mut self,
        root: &BlockHash,
        chances: &Chances,
        tokens: &[u32],
        most: usize,
        drafts: &mut Vec<u32>,
    ) -> usize {
        let own = last_match(tokens);
        let others = self.answers.following(root, tokens);
        let longer = |a: &Found<'_>, b: &Found<'_>| b.matched > a.matched;
        let found = match (own, others) {
            (Some(own), Some(others)) if longer(&own, &others) => Some(others),
            (own, others) => own.or(others),
        };
        let Some(Found { following, matched, repeats }) = found else { return 0 };
        let each = self.acceptance.probability(matched, chances);
        let mut probability = each;
        let most = if repeats { most } else { most.min(following.len()) };
        for token in following.iter().cycle().take(most) {
            let Some(share) = self.times.share_of_row(self.rows) else { break };
            if probability <= share * self.yields {
                break;
            }
            drafts.push(*token);
            self.rows += 1;
            self.yields += probability;
            probability *= each;
        }
        matched
    }

    /// Records how many of a request's drafts were proposed, after a match of this length, and accepted.
    pub fn record(
        &mut self,
        chances: &mut Chances,
        matched: usize,
        proposed: usize,
        accepted: usize,
    ) {
        self.acceptance.record(chances, matched, proposed, accepted);
    }

    /// Records the time of a step with this many rows, all of them decodes.
    pub fn record_time(&mut self, rows: usize, seconds: f64) {
        self.times.record(rows, seconds);
    }

    /// Keeps an answer, with the last tokens of its prompt, for later ones with the same root.
    pub fn keep(&mut self, root: &BlockHash, tokens: &[u32]) {
        self.answers.keep(root, tokens);
    }
}

/// Returns what follows the longest earlier occurrence of the newest tokens, the latest of equal ones.
fn last_match(tokens: &[u32]) -> Option<Found<'_>> {
    let (newest, before) = tokens.split_last()?;
    let mut best: Option<(usize, usize)> = None; // length, place after
    for (at, _) in before.iter().enumerate().rev().filter(|(_, token)| *token == newest) {
        let matched = match_length(&tokens[..=at], tokens);
        if best.is_none_or(|(length, _)| matched > length) {
            best = Some((matched, at + 1));
        }
        if matched == MATCH_MAX {
            break;
        }
    }
    let (matched, at) = best.filter(|(length, _)| *length >= MATCH_MIN)?;
    Some(Found { following: &tokens[at..], matched, repeats: true })
}

/// Returns how many tokens at the ends of two lists are equal, at most [`MATCH_MAX`].
fn match_length(a: &[u32], b: &[u32]) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev()).take(MATCH_MAX);
    pairs.take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
