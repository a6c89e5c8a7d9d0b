//! Logits that a token is drawn from.

use std::borrow::BorrowMut;

use crate::backend::TokenLogit;

/// Logits of one position: of every token, or of those that decide.
pub trait Choices: ToOwned<Owned: BorrowMut<Self>> {
    /// A token's logit, if it is there.
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32>;

    /// All that are there, by ascending token.
    fn each(&self) -> impl Iterator<Item = TokenLogit>;

    /// How many are there.
    fn count(&self) -> usize;
}

/// Of every token. // (vocab,)
impl Choices for [f32] {
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32> {
        self.get_mut(token as usize)
    }

    fn each(&self) -> impl Iterator<Item = TokenLogit> {
        self.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit })
    }

    fn count(&self) -> usize {
        self.len()
    }
}

/// By ascending token.
impl Choices for [TokenLogit] {
    fn logit_mut(&mut self, token: u32) -> Option<&mut f32> {
        let place = self.binary_search_by_key(&token, |choice| choice.id).ok()?;
        Some(&mut self[place].logit)
    }

    fn each(&self) -> impl Iterator<Item = TokenLogit> {
        self.iter().copied()
    }

    fn count(&self) -> usize {
        self.len()
    }
}
