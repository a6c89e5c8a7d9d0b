//! The logits that a token is drawn from.

use std::borrow::BorrowMut;

use super::{
    AllowedTokens,
    row::{TokenLogit, every},
};

/// Logits of one position: of every token, or of the tokens that can be drawn.
pub trait LogitSet: ToOwned<Owned: BorrowMut<Self>> {
    /// Returns the logit of a token, if the set has it.
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32>;

    /// Sets the logits of tokens that must not be drawn to −∞.
    fn refuse(&mut self, allowed: &AllowedTokens);

    /// All tokens of the set with their logits, by ascending token.
    fn entries(&self) -> impl Iterator<Item = TokenLogit>;

    /// Returns the number of tokens in the set.
    fn entry_count(&self) -> usize;

    /// Returns whether the set has every token.
    fn is_whole(&self) -> bool;
}

/// Logits of every token. // (vocab,)
impl LogitSet for [f32] {
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32> {
        self.get_mut(token as usize)
    }

    fn refuse(&mut self, allowed: &AllowedTokens) {
        for (logits, word) in self.chunks_mut(u32::BITS as usize).zip(allowed.words()) {
            match *word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    let refused =
                        logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                    refused.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }

    fn entries(&self) -> impl Iterator<Item = TokenLogit> {
        every(self)
    }

    fn entry_count(&self) -> usize {
        self.len()
    }

    fn is_whole(&self) -> bool {
        true
    }
}

/// Logits of some tokens, by ascending token.
impl LogitSet for [TokenLogit] {
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32> {
        let place = self.binary_search_by_key(&token, |choice| choice.id).ok()?;
        Some(&mut self[place].logit)
    }

    fn refuse(&mut self, allowed: &AllowedTokens) {
        for TokenLogit { logit, .. } in self.iter_mut().filter(|c| !allowed.contains(c.id)) {
            *logit = f32::NEG_INFINITY;
        }
    }

    fn entries(&self) -> impl Iterator<Item = TokenLogit> {
        self.iter().copied()
    }

    fn entry_count(&self) -> usize {
        self.len()
    }

    fn is_whole(&self) -> bool {
        false
    }
}

/// Logits of the tokens that may be drawn, by ascending token. All others have the logit −∞, with which they change no draw.
#[derive(Debug, Clone)]
pub struct FewLogits(pub Vec<TokenLogit>);

impl LogitSet for FewLogits {
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32> {
        self.0[..].logit_mut(token)
    }

    fn refuse(&mut self, allowed: &AllowedTokens) {
        self.0[..].refuse(allowed);
    }

    fn entries(&self) -> impl Iterator<Item = TokenLogit> {
        self.0.iter().copied()
    }

    fn entry_count(&self) -> usize {
        self.0.len()
    }

    fn is_whole(&self) -> bool {
        true
    }
}
