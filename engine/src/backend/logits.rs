//! What a step computes: logits of the positions that were asked for.

use std::ops::Range;

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogit {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// Logits of some positions, in the order in which they were asked for. Kept from step to step: it
/// allocates only when a step is larger than any before.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    vocab_size: usize,
    positions: Vec<Place>,
    all: Vec<f32>, // (positions with all, vocab)
    largest: Vec<TokenLogit>,
}

/// Where a position's logits lie.
#[derive(Debug, Clone)]
enum Place {
    /// A row of `all`.
    All(usize),
    /// Entries of `largest`.
    Largest(Range<usize>),
}

/// Logits of one position.
#[derive(Debug, PartialEq)]
pub enum Position<'a> {
    /// Every token's. // (vocab,)
    All(&'a mut [f32]),
    /// Those that may be among the largest, by ascending token.
    Largest(&'a mut [TokenLogit]),
}

impl Logits {
    /// Forgets all positions.
    pub fn clear(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
        self.positions.clear();
        self.all.clear();
        self.largest.clear();
    }

    /// Adds positions with all logits, `(positions, vocab)`.
    ///
    /// # Panics
    /// If they are no whole positions.
    pub fn extend(&mut self, all: impl IntoIterator<Item = f32>) {
        let first = self.all.len() / self.vocab_size.max(1);
        self.all.extend(all);
        let end = self.all.len() / self.vocab_size.max(1);
        assert_eq!(self.all.len(), end * self.vocab_size, "whole positions");
        self.positions.extend((first..end).map(Place::All));
    }

    /// Says which positions come with all logits. Their logits are unspecified until they are written to
    /// [`Self::all_mut`]; those of the others come by [`Self::set_largest`].
    pub(crate) fn lay_out(&mut self, with_all: impl IntoIterator<Item = bool>) {
        let mut rows = 0;
        self.positions.extend(with_all.into_iter().map(|all| {
            rows += usize::from(all);
            if all { Place::All(rows - 1) } else { Place::Largest(0..0) }
        }));
        self.all.resize(rows * self.vocab_size, 0.0);
    }

    /// The positions with all logits. // (positions with all, vocab)
    pub(crate) fn all_mut(&mut self) -> &mut [f32] {
        &mut self.all
    }

    /// Gives the positions without all logits their largest: lists by ascending token, in the order of
    /// the positions.
    pub(crate) fn set_largest<'a>(&mut self, lists: impl IntoIterator<Item = &'a [TokenLogit]>) {
        let places = self.positions.iter_mut().filter_map(|place| match place {
            Place::All(_) => None,
            Place::Largest(range) => Some(range),
        });
        for (range, list) in places.zip(lists) {
            let start = self.largest.len();
            self.largest.extend_from_slice(list);
            *range = start..self.largest.len();
        }
    }

    /// Positions.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Whether no position was asked for.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// All logits of those positions that have all. // (positions with all, vocab)
    pub fn all(&self) -> &[f32] {
        &self.all
    }

    /// The logits of a position.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn position(&mut self, index: usize) -> Position<'_> {
        match self.positions[index].clone() {
            Place::All(row) => {
                Position::All(&mut self.all[row * self.vocab_size..(row + 1) * self.vocab_size])
            }
            Place::Largest(range) => Position::Largest(&mut self.largest[range]),
        }
    }
}

#[cfg(test)]
/// The largest logits and their equals, and what is no number, by ascending token.
pub(crate) fn largest(logits: &[f32], count: usize) -> Vec<TokenLogit> {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[count.clamp(1, sorted.len()) - 1];
    let all = logits.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit });
    all.filter(|choice| choice.logit.is_nan() || choice.logit >= least).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_keep_their_order_whatever_they_have() {
        let mut logits = Logits::default();
        for _ in 0..2 {
            logits.clear(2);
            logits.lay_out([false, true, false]);
            logits.all_mut().copy_from_slice(&[1.0, 2.0]);
            let entry = |id| TokenLogit { id, logit: id as f32 };
            logits.set_largest([&[entry(7)][..], &[entry(3), entry(5)][..]]);
            assert_eq!(logits.len(), 3);
            assert_eq!(logits.position(0), Position::Largest(&mut [entry(7)]));
            assert_eq!(logits.position(1), Position::All(&mut [1.0, 2.0]));
            assert_eq!(logits.position(2), Position::Largest(&mut [entry(3), entry(5)]));
        }
        logits.clear(2);
        assert!(logits.is_empty());
        logits.extend([4.0, 5.0, 6.0, 7.0]);
        assert_eq!(logits.position(1), Position::All(&mut [6.0, 7.0]));
    }
}
