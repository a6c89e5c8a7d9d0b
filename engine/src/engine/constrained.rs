//! A choice that a grammar describes: the tokens that may come next, and after drafts.

use std::{collections::VecDeque, time::Instant};

use tritmill_grammar::{Constraint, GrammarError};

use crate::sampling::AllowedTokens;

/// What a choice must match, and the tokens that may come next.
#[derive(Debug, Clone)]
pub(super) struct Constrained {
    pub constraint: Constraint,
    masks: Masks,
    /// Tokens that may follow, one after the other.
    ahead: VecDeque<Ahead>,
}

/// The tokens that may come at a position.
#[derive(Debug, Clone)]
pub(super) struct Masks {
    /// `None` if every token may come.
    allowed: Option<AllowedTokens>,
    /// The same without end tokens, before `min_tokens`; `None` if nothing else may come.
    before_end: Option<AllowedTokens>,
}

/// A token that may come, and what may come after it.
#[derive(Debug, Clone)]
struct Ahead {
    token: u32,
    /// The bits of the [constraint](Constraint::allowed).
    allowed: Vec<u32>,
    masks: Masks,
}

impl Masks {
    fn of(constraint: &Constraint, vocab_size: usize, end_tokens: &[u32]) -> Self {
        if constraint.allows_all() {
            let before_end = AllowedTokens::all_but(vocab_size, end_tokens.iter().copied());
            return Self { allowed: None, before_end: Some(before_end) };
        }
        let allowed = AllowedTokens::of_mask(constraint.allowed(), vocab_size);
        Self { before_end: allowed.without(vocab_size, end_tokens), allowed: Some(allowed) }
    }

    /// Returns what may be drawn. Before `min_tokens` the answer ends only if nothing else may come.
    pub fn allowed(&self, is_early: bool) -> Option<&AllowedTokens> {
        self.before_end.as_ref().filter(|_| is_early).or(self.allowed.as_ref())
    }

    /// Returns the token that must come, if it is the only one.
    fn forced(&self) -> Option<u32> {
        match self.allowed.as_ref()?.few()? {
            [token] => Some(*token),
            _ => None,
        }
    }
}

impl Constrained {
    pub fn new(constraint: Constraint, vocab_size: usize, end_tokens: &[u32]) -> Self {
        let masks = Masks::of(&constraint, vocab_size, end_tokens);
        Self { constraint, masks, ahead: VecDeque::new() }
    }

    /// Returns the tokens that may come next, after so many drafts.
    pub fn masks(&self, drafts: usize) -> &Masks {
        match drafts.checked_sub(1) {
            None => &self.masks,
            Some(last) => &self.ahead[last].masks,
        }
    }

    /// Takes what the constraint has found.
    pub fn find_masks(&mut self, vocab_size: usize, end_tokens: &[u32]) {
        self.masks = Masks::of(&self.constraint, vocab_size, end_tokens);
    }

    /// Takes the next token; what may follow is known if the token was expected, and otherwise found later. Returns whether the answer
    /// is complete.
    pub fn advance(&mut self, token: u32) -> Result<bool, GrammarError> {
        let expected = self.ahead.pop_front().filter(|ahead| ahead.token == token);
        self.constraint.advance(token)?;
        match expected {
            Some(Ahead { allowed, masks, .. }) if !self.constraint.has_ended() => {
                self.constraint.set_allowed(allowed);
                self.masks = masks;
            }
            _ => self.ahead.clear(),
        }
        Ok(self.constraint.has_ended())
    }

    /// Finds what may follow `proposed` tokens, as far as these may come, and tokens that must come, up to `most` tokens and as
    /// long as there is time. What is known already remains.
    pub fn look_ahead(
        &mut self,
        proposed: &[u32],
        most: usize,
        (vocab_size, end_tokens): (usize, &[u32]),
        until: Instant,
    ) {
        if !self.ahead.is_empty() {
            return;
        }
        let mut copy = None;
        let mut is_proposed = true;
        while self.ahead.len() < most && Instant::now() < until {
            let place = self.ahead.len();
            let next = proposed.get(place).copied().filter(|_| is_proposed);
            let token = self.masks(place).forced().or(next);
            let Some(token) = token.filter(|token| !end_tokens.contains(token)) else { break };
            is_proposed &= next == Some(token);
            let copy = copy.get_or_insert_with(|| self.constraint.look_ahead());
            // An error is one of the answer only if it gets there.
            let goes_on = copy.allows(token)
                && copy.advance(token).is_ok()
                && !copy.has_ended()
                && copy.find_allowed().is_ok();
            if !goes_on {
                break;
            }
            let masks = Masks::of(copy, vocab_size, end_tokens);
            self.ahead.push_back(Ahead { token, allowed: copy.allowed().to_vec(), masks });
        }
    }

    /// Replaces `proposed` by the tokens that may follow, up to `most`. Returns how many of the first ones are the same.
    pub fn write_ahead(&self, most: usize, proposed: &mut Vec<u32>) -> usize {
        let ahead = self.ahead.iter().take(most);
        let same =
            ahead.zip(proposed.iter()).take_while(|(ahead, token)| ahead.token == **token).count();
        proposed.clear();
        proposed.extend(self.ahead.iter().take(most).map(|ahead| ahead.token));
        same
    }
}
