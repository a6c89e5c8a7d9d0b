//! One answer while it is generated.

use std::{collections::VecDeque, fmt};

use llguidance::Matcher;

use crate::GrammarError;

/// The state of an answer: what may come next.
pub struct Constraint {
    /// What must come in the answer before the grammar applies.
    before: Before,
    matcher: Matcher,
    /// A bit for each token: bit `token % 32` of word `token / 32`. // (vocab / 32, rounded up)
    allowed: Vec<u32>,
    /// Whether `allowed` is of an earlier token.
    is_stale: bool,
    ended: bool,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("ended", &self.ended).finish_non_exhaustive()
    }
}

/// Texts that must come, one after the other, before a grammar applies. Until then any text may come.
#[derive(Clone, Default)]
struct Before {
    texts: VecDeque<Vec<u8>>,
    /// End of the answer, shorter than the first of the texts.
    tail: Vec<u8>,
}

impl Before {
    /// Takes bytes of the answer. Returns those behind the last text, once it has come.
    fn take(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.tail.extend_from_slice(bytes);
        while let Some(text) = self.texts.front() {
            let found = self.tail.windows(text.len()).position(|window| window == text);
            let Some(at) = found else {
                let surplus = self.tail.len().saturating_sub(text.len() - 1);
                self.tail.drain(..surplus);
                return None;
            };
            self.tail.drain(..at + text.len());
            self.texts.pop_front();
        }
        Some(std::mem::take(&mut self.tail))
    }
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Self {
            before: self.before.clone(),
            matcher: self.matcher.deep_clone(),
            allowed: self.allowed.clone(),
            is_stale: self.is_stale,
            ended: self.ended,
        }
    }
}

impl Constraint {
    /// Begins an answer.
    pub(crate) fn begin(matcher: Matcher) -> Result<Self, GrammarError> {
        let before = Before::default();
        let (allowed, is_stale, ended) = (Vec::new(), true, false);
        let mut constraint = Self { before, matcher, allowed, is_stale, ended };
        constraint.find_allowed()?;
        Ok(constraint)
    }

    /// Lets any text come until each of `texts` has come, one after the other; the answer may end before. What follows the last one
    /// must match the grammar.
    #[must_use]
    pub fn after(mut self, texts: &[&str]) -> Self {
        self.before.texts = texts
            .iter()
            .filter(|text| !text.is_empty())
            .map(|text| text.as_bytes().to_vec())
            .collect();
        self
    }

    /// Returns whether any token may come next.
    pub fn allows_all(&self) -> bool {
        !self.before.texts.is_empty()
    }

    /// Returns a copy that tells what may follow tokens that may come, before one of them does. It shares memory with this one, and is
    /// for the same thread.
    #[must_use]
    pub fn look_ahead(&self) -> Self {
        let Self { before, matcher, allowed, is_stale, ended } = self;
        let (before, matcher, allowed) = (before.clone(), matcher.clone(), allowed.clone());
        Self { before, matcher, allowed, is_stale: *is_stale, ended: *ended }
    }

    /// Takes the tokens that may come next from [`allowed`](Self::allowed) of a copy that has taken the same tokens.
    pub fn set_allowed(&mut self, allowed: Vec<u32>) {
        self.allowed = allowed;
        self.is_stale = false;
    }

    /// Returns whether a token may come next, once that is [found](Self::find_allowed).
    pub fn allows(&self, token: u32) -> bool {
        let (word, bit) = (token / u32::BITS, token % u32::BITS);
        let word = self.allowed.get(word as usize);
        self.allows_all() || word.is_some_and(|word| word >> bit & 1 == 1)
    }

    /// Returns the tokens that may come next, end tokens among them where the answer may end: bit `token % 32` of word
    /// `token / 32`. // (vocab / 32, rounded up)
    pub fn allowed(&self) -> &[u32] {
        &self.allowed
    }

    /// Returns whether the answer is complete, and nothing may follow.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes the next token of the answer. What may follow is found by [`find_allowed`](Self::find_allowed).
    ///
    /// # Errors
    /// The token is not allowed.
    pub fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        if !self.allows_all() {
            self.matcher.consume_token(token).map_err(|error| GrammarError::of_library(&error))?;
            return self.consumed();
        }
        let tokens = self.matcher.tok_env().map_err(|error| GrammarError::of_library(&error))?;
        let last = self.before.texts.back().cloned();
        let Some(begin) = self.before.take(tokens.tok_trie().token(token)) else { return Ok(()) };
        // A token may end behind the text. What the grammar refuses is text like any other.
        let begin = tokens.tok_trie().greedy_tokenize(&begin);
        let of_library = |error| GrammarError::of_library(&error);
        if self.matcher.validate_tokens(&begin).map_err(of_library)? < begin.len() {
            self.before.texts.extend(last);
            return Ok(());
        }
        self.matcher.consume_tokens(&begin).map_err(of_library)?;
        self.consumed()
    }

    /// Sees whether the answer is complete.
    fn consumed(&mut self) -> Result<(), GrammarError> {
        self.ended = self.matcher.is_stopped();
        self.is_stale = !self.ended;
        self.matcher.get_error().map_or(Ok(()), |error| Err(GrammarError::of_library(&error)))
    }

    /// Returns whether the tokens that may come next are still to be found.
    pub fn is_stale(&self) -> bool {
        self.is_stale && !self.allows_all()
    }

    /// Finds the tokens that may come next, after [`advance`](Self::advance). It takes some microseconds to a millisecond.
    ///
    /// # Errors
    /// It takes too much work, or no token of the model can follow.
    pub fn find_allowed(&mut self) -> Result<(), GrammarError> {
        if !self.is_stale() {
            return Ok(());
        }
        let mask = self.matcher.compute_mask_or_eos();
        let mask = mask.map_err(|error| GrammarError::of_library(&error))?;
        if mask.is_zero() {
            return Err(GrammarError("no token of the model can follow".to_owned()));
        }
        self.allowed.clear();
        self.allowed.extend_from_slice(mask.as_slice());
        self.is_stale = false;
        Ok(())
    }
}
