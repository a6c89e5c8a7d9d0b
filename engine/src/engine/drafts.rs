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

/// Drafts that are less probable are not proposed.
const PROBABILITY_MIN: f64 = 0.02;
/// Most drafts of a sequence in a step.
pub(super) const MOST: usize = 64;
/// Most further rows of which the least probability that pays is looked for.
const ROWS_LOOKED_AT: usize = 64;
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

/// Why each draft of a choice is expected, and the probability that it and all before it are accepted.
pub(super) type Expected = Vec<(Reason, f64)>;

/// What is known of the drafts of one choice.
#[derive(Debug, Clone, Default)]
pub(super) struct ChoiceDrafts {
    chances: Chances,
    guide: Guide,
    /// Why the first draft is expected, also where it is not proposed.
    first: Option<Reason>,
    /// Of each proposed draft.
    proposed: Expected,
}

impl ChoiceDrafts {
    /// Takes what is known of the proposed drafts, for [`Drafts::record`]: the choice may end before they are counted.
    pub fn take_expected(&mut self) -> Expected {
        std::mem::take(&mut self.proposed)
    }

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
    /// Drafts that are less probable do not pay.
    probability_min: f64,
    /// The probabilities of all proposed drafts.
    probabilities: Vec<f64>,
    /// The smallest probability of a draft that is chosen, and how many that have it are still to be chosen.
    least: f64,
    least_left: usize,
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
        let Proposal { decodes: rows, probability_min, probabilities, time, .. } =
            &mut self.proposal;
        (*rows, *time) = (decodes, LOOK_AHEAD_TIME);
        probabilities.clear();
        probabilities.reserve(decodes * most);
        let now = self.times.time(decodes);
        // If so many drafts pay together, each has this probability on average.
        let average = |drafts: usize| {
            let (now, longer) = (now?, self.times.time(decodes + drafts)?);
            Some(MORE_TIME * (longer - now) / drafts as f64 * decodes as f64 / now)
        };
        let averages = (1..=ROWS_LOOKED_AT).filter_map(average);
        *probability_min = averages.fold(f64::INFINITY, f64::min).max(PROBABILITY_MIN);
    }

    /// Looks ahead in a grammar, until the time for that is over.
    pub fn look_ahead(&mut self, look: impl FnOnce(Instant)) {
        let began = Instant::now();
        look(began + self.proposal.time);
        self.proposal.time = self.proposal.time.saturating_sub(began.elapsed());
    }

    /// Appends up to `most` tokens that may follow the tokens of a choice, the first `prompt` of which are its prompt: none of
    /// `end_tokens`, which nothing follows.
    pub fn propose(
        &mut self,
        root: &BlockHash,
        choice: &mut ChoiceDrafts,
        (tokens, prompt): (&[u32], usize),
        (most, end_tokens): (usize, &[u32]),
        drafts: &mut Vec<u32>,
    ) {
        let ChoiceDrafts { chances, guide, first, proposed } = choice;
        proposed.clear();
        *first = None;
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
        let goes_on = |(token, _): &(u32, Reason)| !end_tokens.contains(token);
        let guided = guided.map(|(token, agreement)| (token, Reason::Guide(agreement)));
        let guided = guided.take_while(goes_on);
        let matched = found.into_iter().flat_map(|Found { following, matched, repeats }| {
            let most = if repeats { most } else { most.min(following.len()) };
            // Where a draft is accepted, the match before the next one is longer.
            let tokens = following.iter().copied().cycle().take(most);
            tokens.zip((matched..).map(Reason::Match))
        });
        let matched = matched.take_while(goes_on);

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
            first.get_or_insert(reason);
            all_accepted *= probability(reason);
            if all_accepted < self.proposal.probability_min {
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

    /// Decides how many drafts the step computes, once those of all choices are proposed: up to `most`.
    pub fn decide(&mut self, most: usize) {
        let Proposal { decodes, probabilities, least, least_left, .. } = &mut self.proposal;
        probabilities.sort_unstable_by(|a, b| b.total_cmp(a));
        (*least, *least_left) = (f64::INFINITY, 0);
        let Some(time) = self.times.time(*decodes) else { return };
        let (mut tokens, mut best) = (*decodes as f64, *decodes as f64 / time);
        let (mut newest, mut equal) = (f64::INFINITY, 0);
        for (at, probability) in probabilities.iter().enumerate().take(most) {
            tokens += probability;
            equal = if *probability == newest { equal + 1 } else { 1 };
            newest = *probability;
            let Some(longer) = self.times.time(*decodes + at + 1) else { return };
            let rate = tokens / (time + MORE_TIME * (longer - time).max(0.0));
            if rate > best {
                (best, *least, *least_left) = (rate, *probability, equal);
            }
        }
    }

    /// Keeps those of a choice's drafts that the step computes.
    pub fn keep_chosen(&mut self, choice: &mut ChoiceDrafts, drafts: &mut Vec<u32>) {
        let ChoiceDrafts { chances, first, proposed, .. } = choice;
        let Proposal { least, least_left, .. } = &mut self.proposal;
        let more = proposed.partition_point(|(_, probability)| probability > least);
        let least_too = proposed[more..].iter().take_while(|(_, p)| p == least).count();
        let least_too = least_too.min(*least_left);
        *least_left -= least_too;
        let chosen = more + least_too;
        if let Some(first) = first.filter(|_| chosen == 0) {
            self.acceptance.record_idle(chances, first);
        }
        proposed.truncate(chosen);
        drafts.truncate(chosen);
    }

    /// Records how many of a choice's drafts were computed and accepted, and whether the choice has ended: then it is not known
    /// whether the next draft was right.
    pub fn record(
        &mut self,
        choice: &mut ChoiceDrafts,
        mut expected: Expected,
        (computed, accepted): (usize, usize),
        has_ended: bool,
    ) {
        let reasons = expected.iter().take(computed).map(|(reason, _)| *reason);
        let decided = reasons.take(accepted + usize::from(!has_ended));
        self.acceptance.record(&mut choice.chances, decided, accepted);
        expected.clear();
        choice.proposed = expected;
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
