//! Drafts: tokens that may follow, computed together with the newest token of a sequence. Where the next token, drawn as
//! always, is the draft, the logits after it are known as well, and a step yields several tokens of the sequence.
//! Answers never change: every token is drawn from the same logits, which are equal to the bit for any chunks.
//!
//! Drafts are what followed the newest tokens when they occurred before: in the prompt and the answer (prompt lookup), or
//! in an earlier answer to the same tenant ([`answers`]), since lines of a batch have the same form; or what an earlier answer has
//! in the same place, after tokens that differ ([`guide`]).
//!
//! A row of a step costs time. Of all that may follow, a step computes as many of the most probable drafts as give the most
//!
//! ```text
//! expected tokens of the step ÷ expected time of the step
//! ```
//!
//! Times are measured by the number of rows ([`times`]), and probabilities for each request and each reason to expect a draft
//! ([`acceptance`]).

mod acceptance;
mod answers;
mod guide;
mod times;

use acceptance::{Acceptance, Chances, Reason};
use answers::Answers;
use guide::Guide;
use times::StepTimes;

use std::time::{Duration, Instant};

use crate::kv::BlockHash;

/// Longest match of the newest tokens that is looked for.
const MATCH_MAX: usize = 8;
/// Shortest match that drafts follow from.
const MATCH_MIN: usize = 2;

/// Drafts that are less probable are not looked at.
const PROBABILITY_MIN: f64 = 0.02;
/// What the time of further rows counts: the best of many expected rates is often one that is expected too high.
const MORE_TIME: f64 = 1.05;

/// Time of a step for what grammars allow after drafts. Most take some microseconds.
const LOOK_AHEAD_TIME: Duration = Duration::from_millis(1);

/// Tokens that may follow, and how many of the newest tokens occurred before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found<'a> {
    following: &'a [u32],
    matched: usize,
    /// Whether `following` ends with the newest token, and would follow itself.
    repeats: bool,
}

/// What is known of the drafts of one choice.
#[derive(Debug, Clone, Default)]
pub(super) struct ChoiceDrafts {
    chances: Chances,
    guide: Guide,
    /// Of each proposed draft: why it is expected, and the probability that it and all before it are accepted.
    proposed: Vec<(Reason, f64)>,
}

impl ChoiceDrafts {
    /// Forgets all but the first proposed drafts: others are computed in place of the rest.
    pub fn keep_first(&mut self, drafts: usize) {
        self.proposed.truncate(drafts);
    }
}

/// The step that is proposed.
#[derive(Debug, Clone, Default)]
struct Proposal {
    /// Sequences that decode.
    decodes: usize,
    /// The probabilities of all proposed drafts.
    probabilities: Vec<f64>,
    /// Drafts that are still to be chosen, and the smallest probability among them.
    left: usize,
    least: f64,
    /// What is left of the time to look ahead in grammars.
    time: Duration,
}

/// Finds drafts, and learns when they are worth their rows. For one engine.
#[derive(Debug, Clone, Default)]
pub(super) struct Drafts {
    answers: Answers,
    acceptance: Acceptance,
    times: StepTimes,
    proposal: Proposal,
}

impl Drafts {
    /// Starts a step in which this many sequences decode, each with up to `most` drafts.
    pub fn begin(&mut self, decodes: usize, most: usize) {
        let Proposal { decodes: rows, probabilities, time, .. } = &mut self.proposal;
        (*rows, *time) = (decodes, LOOK_AHEAD_TIME);
        probabilities.clear();
        probabilities.reserve(decodes * most);
    }

    /// Looks ahead in a grammar, until the time for that is over.
    pub fn look_ahead(&mut self, look: impl FnOnce(Instant)) {
        let began = Instant::now();
        look(began + self.proposal.time);
        self.proposal.time = self.proposal.time.saturating_sub(began.elapsed());
    }

    /// Appends up to `most` tokens that may follow the tokens of a choice, the first `prompt` of which are its prompt.
    pub fn propose(
        &mut self,
        root: &BlockHash,
        choice: &mut ChoiceDrafts,
        (tokens, prompt): (&[u32], usize),
        most: usize,
        drafts: &mut Vec<u32>,
    ) {
        let ChoiceDrafts { chances, guide, proposed } = choice;
        proposed.clear();
        if most == 0 {
            return;
        }
        // Once, so that later steps allocate nothing.
        proposed.reserve(most);
        drafts.reserve(most);
        let own = last_match(tokens);
        let others = self.answers.following(root, tokens);
        let longer = |a: &Found<'_>, b: &Found<'_>| b.matched > a.matched;
        let found = match (own, others) {
            (Some(own), Some(others)) if longer(&own, &others) => Some(others),
            (own, others) => own.or(others),
        };
        let (prompt, answer) = tokens.split_at(prompt.min(tokens.len()));
        guide.follow(answer, || self.answers.guide(root, prompt));
        let guided = guide.following().take(most);
        let guided = guided.map(|(token, agreement)| (token, Reason::Guide(agreement)));
        let matched = found.into_iter().flat_map(|Found { following, matched, repeats }| {
            let most = if repeats { most } else { most.min(following.len()) };
            // Where a draft is accepted, the match before the next one is longer.
            let tokens = following.iter().copied().cycle().take(most);
            tokens.zip((matched..).map(Reason::Match))
        });

        let probability = |reason| self.acceptance.probability(reason, *chances);
        let expected = |drafts: &mut dyn Iterator<Item = (u32, Reason)>| {
            let mut all_accepted = 1.0;
            let accepted = |(_, reason)| {
                all_accepted *= probability(reason);
                all_accepted
            };
            drafts.map(accepted).sum::<f64>()
        };
        let mut all_accepted = 1.0;
        let mut draft = |(token, reason): (u32, Reason)| {
            all_accepted *= probability(reason);
            if all_accepted < PROBABILITY_MIN {
                return false;
            }
            drafts.push(token);
            proposed.push((reason, all_accepted));
            true
        };
        match expected(&mut guided.clone()) > expected(&mut matched.clone()) {
            true => guided.into_iter().all(&mut draft),
            false => matched.into_iter().all(&mut draft),
        };
        self.proposal.probabilities.extend(proposed.iter().map(|(_, probability)| *probability));
    }

    /// Decides how many drafts the step computes, once those of all choices are proposed.
    pub fn decide(&mut self) {
        let Proposal { decodes, probabilities, left, least, .. } = &mut self.proposal;
        probabilities.sort_unstable_by(|a, b| b.total_cmp(a));
        (*left, *least) = (0, f64::INFINITY);
        let Some(time) = self.times.time(*decodes) else { return };
        let (mut tokens, mut best) = (*decodes as f64, *decodes as f64 / time);
        for (at, probability) in probabilities.iter().enumerate() {
            tokens += probability;
            let Some(longer) = self.times.time(*decodes + at + 1) else { return };
            let rate = tokens / (time + MORE_TIME * (longer - time).max(0.0));
            if rate > best {
                (best, *left, *least) = (rate, at + 1, *probability);
            }
        }
    }

    /// Keeps those of a choice's drafts that the step computes.
    pub fn keep_chosen(&mut self, choice: &mut ChoiceDrafts, drafts: &mut Vec<u32>) {
        let ChoiceDrafts { chances, proposed, .. } = choice;
        let Proposal { left, least, .. } = &mut self.proposal;
        let chosen = proposed.iter().take_while(|(_, probability)| *probability >= *least).count();
        // More may have the smallest probability than there are.
        let chosen = chosen.min(*left);
        *left -= chosen;
        if !proposed.is_empty() && chosen == 0 {
            chances.record_idle();
        }
        proposed.truncate(chosen);
        drafts.truncate(chosen);
    }

    /// Records how many of a choice's drafts were computed and accepted.
    pub fn record(&mut self, choice: &mut ChoiceDrafts, computed: usize, accepted: usize) {
        let ChoiceDrafts { chances, proposed, .. } = choice;
        let reasons = proposed.iter().take(computed).map(|(reason, _)| *reason);
        self.acceptance.record(chances, reasons, accepted);
    }

    /// Records the time of a step with this many rows, all of them decodes.
    pub fn record_time(&mut self, rows: usize, seconds: f64) {
        self.times.record(rows, seconds);
    }

    /// Keeps an answer, the tokens after the first `prompt` ones, for later ones with the same root.
    pub fn keep(
        &mut self,
        root: &BlockHash,
        choice: &ChoiceDrafts,
        (tokens, prompt): (&[u32], usize),
    ) {
        self.answers.keep(root, tokens, prompt, &choice.guide);
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
