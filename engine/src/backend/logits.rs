//! The result of a step: logits of the requested positions.

use std::ops::Range;

#[cfg(test)]
use super::Ranking;
use super::Rest;

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogit {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// Logits of the requested positions, in order. Reused from step to step: it allocates only when a step
/// is larger than all before.
#[derive(Debug, Clone, Default)]
pub struct Logits {
    vocab_size: usize,
    positions: Vec<Place>,
    all: Vec<f32>, // (positions with all, vocab)
    largest: Vec<TokenLogit>,
    /// The tokens that were not found, for positions that ask for their weight.
    rests: Vec<Option<Rest>>, // (position)
    hidden: Vec<f32>, // (positions with a rest, hidden)
}

/// Location of a position's logits.
#[derive(Debug, Clone)]
enum Place {
    /// A row of `all`.
    All(usize),
    /// Entries of `largest`.
    Largest(Range<usize>),
}

/// Logits of one position.
#[derive(Debug, PartialEq)]
pub enum PositionLogits<'a> {
    /// Logits of every token. // (vocab,)
    All(&'a mut [f32]),
    /// Logits that can be among the largest, by ascending token.
    Largest(&'a mut [TokenLogit]),
}

impl Logits {
    /// Removes all positions.
    pub fn clear(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
        self.positions.clear();
        self.all.clear();
        self.largest.clear();
        self.rests.clear();
        self.hidden.clear();
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
            Place::All(_) => None,
            Place::Largest(range) => Some(range),
        });
        for (range, list) in places.zip(lists) {
            let start = self.largest.len();
            self.largest.extend_from_slice(list);
            *range = start..self.largest.len();
        }
    }

    /// Sets what is known of the tokens that were not found, for the positions of [`Self::set_largest`] in their order. Each
    /// position that has some also has its hidden row, of which all logits can be computed. // (positions, hidden)
    pub(crate) fn set_rests<'a>(
        &mut self,
        rests: impl IntoIterator<Item = (Option<Rest>, &'a [f32])>,
    ) {
        let mut rests = rests.into_iter();
        for place in &self.positions {
            let (rest, hidden) = match place {
                Place::All(_) => (None, &[][..]),
                Place::Largest(_) => rests.next().unwrap_or((None, &[])),
            };
            if rest.is_some() {
                self.hidden.extend_from_slice(hidden);
            }
            self.rests.push(rest);
        }
    }

    /// Returns what is known of the tokens of a position that were not found, if that was asked for.
    pub fn rest(&self, index: usize) -> Option<Rest> {
        self.rests.get(index).copied().flatten()
    }

    /// Returns the hidden row of a position with a [`rest`](Self::rest). // (hidden,)
    pub fn hidden(&self, index: usize) -> &[f32] {
        let with_rest = |rests: &[Option<Rest>]| rests.iter().flatten().count();
        let width = self.hidden.len() / with_rest(&self.rests).max(1);
        let place = with_rest(&self.rests[..index]);
        &self.hidden[place * width..(place + 1) * width]
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
        match self.positions[index].clone() {
            Place::All(row) => PositionLogits::All(
                &mut self.all[row * self.vocab_size..(row + 1) * self.vocab_size],
            ),
            Place::Largest(range) => PositionLogits::Largest(&mut self.largest[range]),
        }
    }
}

#[cfg(test)]
/// Returns the logits that a ranking asks for, and NaNs, by ascending token.
pub(crate) fn first(logits: &[f32], ranking: &Ranking) -> Vec<TokenLogit> {
    let value = |choice: &TokenLogit| match &ranking.noise {
        None => f64::from(choice.logit),
        Some(noise) => noise.add_to(choice.id, choice.logit),
    };
    let all = || logits.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit });
    let mut sorted: Vec<f64> = all().map(|choice| value(&choice)).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[ranking.count.clamp(1, sorted.len()) - 1] - f64::from(ranking.within);
    all().filter(|choice| choice.logit.is_nan() || value(&choice) >= least).collect()
}

#[cfg(test)]
/// Returns the exact weight of the tokens that [`first`] leaves out, if the ranking asks for it.
pub(crate) fn rest(logits: &[f32], ranking: &Ranking) -> Option<Rest> {
    let temperature = f64::from(ranking.weigh?);
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[ranking.count.clamp(1, sorted.len()) - 1] - ranking.within;
    let weight = |logit: &f32| ((f64::from(*logit) - f64::from(least)) / temperature).exp();
    let left_out = logits.iter().filter(|logit| f64::from(**logit) < f64::from(least));
    Some(Rest { below: least, weight: left_out.map(weight).sum() })
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
            assert_eq!(logits.position(0), PositionLogits::Largest(&mut [entry(7)]));
            assert_eq!(logits.position(1), PositionLogits::All(&mut [1.0, 2.0]));
            assert_eq!(logits.position(2), PositionLogits::Largest(&mut [entry(3), entry(5)]));
        }
        logits.clear(2);
        assert!(logits.is_empty());
        logits.extend([4.0, 5.0, 6.0, 7.0]);
        assert_eq!(logits.position(1), PositionLogits::All(&mut [6.0, 7.0]));
    }
}
