//! One answer while it is generated.

use std::fmt;

use llguidance::Matcher;

use crate::GrammarError;

/// The state of an answer: what may come next.
pub struct Constraint {
    matcher: Matcher,
    /// A bit for each token: bit `token % 32` of word `token / 32`. // (vocab / 32, rounded up)
    allowed: Vec<u32>,
    ended: bool,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            allowed: self.allowed.clone(),
            ended: self.ended,
        }
    }
}

impl Constraint {
    /// Begins an answer.
    pub(crate) fn begin(matcher: Matcher) -> Result<Self, GrammarError> {
        let mut constraint = Self { matcher, allowed: Vec::new(), ended: false };
        constraint.find_allowed()?;
        Ok(constraint)
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

    /// Takes the next token of the answer.
    ///
    /// # Errors
    /// The token is not allowed, or finding what may follow takes too much work.
    pub fn advance(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(|error| GrammarError::of_library(&error))?;
        self.find_allowed()
    }

    fn find_allowed(&mut self) -> Result<(), GrammarError> {
        self.ended = self.matcher.is_stopped();
        if let Some(error) = self.matcher.get_error() {
            return Err(GrammarError::of_library(&error));
        }
        if self.ended {
            return Ok(());
        }
        let mask = self.matcher.compute_mask();
        let mask = mask.map_err(|error| GrammarError::of_library(&error))?;
        self.ended = self.matcher.is_stopped();
        if !self.ended && mask.is_zero() {
            return Err(GrammarError("no token of the model can follow".to_owned()));
        }
        self.allowed.clear();
        self.allowed.extend_from_slice(mask.as_slice());
        Ok(())
    }
}
