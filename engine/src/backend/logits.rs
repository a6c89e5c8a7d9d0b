//! The result of a step: logits of the requested positions.

use std::ops::Range;

use crate::sampling::{Distribution, TokenLogit};

/// Logits of the requested positions, in order. Reused from step to step: it allocates only when a step
/// is larger than all before.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    vocab_size: usize,
    positions: Vec<Place>,
    all: Vec<f32>, // (positions with all, vocab)
    largest: Vec<TokenLogit>,
    kept_rows: Vec<Option<usize>>, // (positions)
    kept: ScreenedRows,
    distributions: Vec<Option<Distribution>>, // (positions), if any
}

/// What a screen keeps of positions of which [more is asked](crate::sampling::Largest::others_follow).
#[derive(Debug, Clone, Default)]
pub struct ScreenedRows {
    /// Hidden rows, after the norm. // (positions, hidden)
    pub(crate) hidden: Vec<f32>,
    /// First estimates of the logits. // (positions, vocab)
    pub(crate) estimates: Vec<f32>,
    /// Whether the estimates are from six bits and both digits; otherwise from the whole int8 and the first digit.
    pub(crate) from_six: bool,
}

/// What a screen keeps of one position.
#[derive(Debug, Clone, Copy)]
pub struct ScreenedRow<'a> {
    /// The hidden row, after the norm. // (hidden,)
    pub(crate) hidden: &'a [f32],
    /// First estimates of the logits. // (vocab,)
    pub(crate) estimates: &'a [f32],
    /// Whether the estimates are from six bits and both digits; otherwise from the whole int8 and the first digit.
    pub(crate) from_six: bool,
}

/// Location of a position's logits.
#[derive(Debug, Clone)]
enum Place {
    /// A row of `all`.
    All(usize),
    /// Entries of `largest`.
    Largest(Range<usize>),
    /// A token.
    Drawn(TokenLogit),
}

/// Logits of one position.
#[derive(Debug, PartialEq)]
pub enum PositionLogits<'a> {
    /// Logits of every token. // (vocab,)
    All(&'a mut [f32]),
    /// Logits that can be among the largest, by ascending token.
    Largest(&'a [TokenLogit]),
    /// The token that the backend has drawn.
    Drawn(TokenLogit),
}

impl Logits {
    /// Removes all positions.
    pub fn clear(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
        self.positions.clear();
        self.all.clear();
        self.largest.clear();
        self.kept_rows.clear();
        self.distributions.clear();
        let ScreenedRows { hidden, estimates, .. } = &mut self.kept;
        hidden.clear();
        estimates.clear();
    }

    /// Adds positions with all logits, `(positions, vocab)`.
    ///
    /// # Panics
    /// If the length is not a multiple of the vocabulary size.
    pub fn extend(&mut self, all: impl IntoIterator<Item = f32>) {
        let first = self.all.len() / self.vocab_size.max(1);
        self.all.extend(all);
        let end = self.all.len() / self.vocab_size.max(1);
        assert_eq!(self.all.len(), end * self.vocab_size, "whole positions");
        self.positions.extend((first..end).map(Place::All));
    }

    /// Adds positions, each with all logits or with the largest. The caller writes the former to
    /// [`Self::all_mut`] (unspecified until then), and sets the latter with [`Self::set_largest`].
    pub(crate) fn lay_out(&mut self, with_all: impl IntoIterator<Item = bool>) {
        let mut rows = 0;
        self.positions.extend(with_all.into_iter().map(|all| {
            rows += usize::from(all);
            if all { Place::All(rows - 1) } else { Place::Largest(0..0) }
        }));
        self.all.resize(rows * self.vocab_size, 0.0);
    }

    /// Returns the logits of the positions with all logits, to write. // (positions with all, vocab)
    pub(crate) fn all_mut(&mut self) -> &mut [f32] {
        &mut self.all
    }

    /// Sets the logits of the positions with the largest only: lists by ascending token, in the order of the
    /// positions.
    pub(crate) fn set_largest<'a>(&mut self, lists: impl IntoIterator<Item = &'a [TokenLogit]>) {
        let places = self.positions.iter_mut().filter_map(|place| match place {
            Place::Largest(range) => Some(range),
            Place::All(_) | Place::Drawn(_) => None,
        });
        for (range, list) in places.zip(lists) {
            let start = self.largest.len();
            self.largest.extend_from_slice(list);
            *range = start..self.largest.len();
        }
    }

    /// Sets the distributions of the positions of [`Self::set_largest`], in their order.
    pub(crate) fn set_distributions(
        &mut self,
        distributions: impl IntoIterator<Item = Option<Distribution>>,
    ) {
        let mut distributions = distributions.into_iter();
        self.distributions.extend(self.positions.iter().map(|place| match place {
            Place::Largest(_) => distributions.next().flatten(),
            Place::All(_) | Place::Drawn(_) => None,
        }));
    }

    /// Of the positions of [`Self::set_largest`], makes those for draws what the backend has drawn, and those with a list of the
    /// whole vocabulary, because the backend did not decide, positions with all logits. `are_draws` says which of them are for
    /// draws, in their order; the lists of these are a token or the whole vocabulary.
    pub(crate) fn set_drawn(&mut self, are_draws: impl IntoIterator<Item = bool>) {
        let Self { positions, all, largest, vocab_size, .. } = self;
        let places = positions.iter_mut().filter(|place| matches!(place, Place::Largest(_)));
        for (place, is_draw) in places.zip(are_draws) {
            let Place::Largest(range) = place.clone() else { continue };
            let list = &largest[range];
            if list.len() == *vocab_size {
                all.extend(list.iter().map(|token| token.logit));
                *place = Place::All(all.len() / list.len() - 1);
            } else if is_draw {
                let [drawn] = list else { panic!("a token or all of them, not {}", list.len()) };
                *place = Place::Drawn(*drawn);
            }
        }
    }

    /// Returns what is kept of the positions of [`Self::set_largest`], to write. `keeps` says which of them are kept, in their
    /// order.
    pub(crate) fn keep(&mut self, keeps: impl IntoIterator<Item = bool>) -> &mut ScreenedRows {
        let (mut keeps, mut rows) = (keeps.into_iter(), 0..);
        self.kept_rows.extend(self.positions.iter().map(|place| match place {
            Place::Largest(_) if keeps.next() == Some(true) => rows.next(),
            _ => None,
        }));
        &mut self.kept
    }

    /// Takes the distribution of a position, if the backend has reported it.
    pub fn take_distribution(&mut self, index: usize) -> Option<Distribution> {
        self.distributions.get_mut(index).and_then(Option::take)
    }

    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    /// Returns whether there are no positions.
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Returns the logits of the positions with all logits. // (positions with all, vocab)
    pub fn all(&self) -> &[f32] {
        &self.all
    }

    /// Returns the logits of a position.
    ///
    /// # Panics
    /// If `index` is not below [`Self::len`].
    pub fn position(&mut self, index: usize) -> PositionLogits<'_> {
        self.row(index).0
    }

    /// Returns the logits of a position, and what is kept of it if it asked for that and has not all logits.
    ///
    /// # Panics
    /// If `index` is not below [`Self::len`].
    pub(crate) fn row(&mut self, index: usize) -> (PositionLogits<'_>, Option<ScreenedRow<'_>>) {
        let Self { vocab_size, positions, all, largest, kept_rows, kept, .. } = self;
        let logits = match positions[index].clone() {
            Place::All(row) => {
                PositionLogits::All(&mut all[row * *vocab_size..(row + 1) * *vocab_size])
            }
            Place::Largest(range) => PositionLogits::Largest(&largest[range]),
            Place::Drawn(drawn) => PositionLogits::Drawn(drawn),
        };
        let count = kept_rows.iter().flatten().count();
        let row = kept_rows.get(index).copied().flatten();
        (logits, row.map(|row| kept.row(row, count)))
    }
}

impl ScreenedRows {
    /// Returns one of so many rows.
    fn row(&self, row: usize, count: usize) -> ScreenedRow<'_> {
        let of = |values: &[f32]| -> Range<usize> {
            let width = values.len() / count;
            row * width..(row + 1) * width
        };
        let Self { hidden, estimates, from_six } = self;
        let (hidden, estimates) = (&hidden[of(hidden)], &estimates[of(estimates)]);
        ScreenedRow { hidden, estimates, from_six: *from_six }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_with_all_and_with_largest_logits_keep_their_order() {
        let mut logits = Logits::default();
        for _ in 0..2 {
            logits.clear(2);
            logits.lay_out([false, true, false]);
            logits.all_mut().copy_from_slice(&[1.0, 2.0]);
            let entry = |id| TokenLogit { id, logit: id as f32 };
            logits.set_largest([&[entry(7)][..], &[entry(3), entry(5)][..]]);
            assert_eq!(logits.len(), 3);
            assert_eq!(logits.position(0), PositionLogits::Largest(&[entry(7)]));
            assert_eq!(logits.position(1), PositionLogits::All(&mut [1.0, 2.0]));
            assert_eq!(logits.position(2), PositionLogits::Largest(&[entry(3), entry(5)]));
        }
        let entry = |id| TokenLogit { id, logit: id as f32 };
        logits.clear(2);
        logits.lay_out([false, true, false, false, false]);
        let both = [entry(0), entry(1)];
        logits.set_largest([&[entry(1)][..], &both, &[entry(1)], &both]);
        logits.set_drawn([true, true, false, false]);
        assert_eq!(logits.position(0), PositionLogits::Drawn(entry(1)));
        assert_eq!(logits.position(2), PositionLogits::All(&mut [0.0, 1.0]));
        assert_eq!(logits.position(3), PositionLogits::Largest(&[entry(1)]));
        assert_eq!(logits.position(4), PositionLogits::All(&mut [0.0, 1.0]));
        logits.clear(2);
        assert!(logits.is_empty());
        logits.extend([4.0, 5.0, 6.0, 7.0]);
        assert_eq!(logits.position(1), PositionLogits::All(&mut [6.0, 7.0]));
    }
}
