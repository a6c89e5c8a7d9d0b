//! What a draw may ask of a row: the logits of one position.

use std::convert::Infallible;

use super::GumbelNoise;

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogit {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
}

/// The first question of a draw: the tokens with the largest logits, or with the largest sums of logit and noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// At least this many tokens, with all that equal the last of these.
    pub count: usize,
    /// How many of `count` are only because these tokens must not be drawn: a backend that leaves those out looks for fewer.
    pub refused: usize,
    /// Further tokens: those with a value at most this much below.
    pub within: f32,
    /// Added to the logits.
    pub noise: Option<GumbelNoise>,
    /// Whether other questions may follow, for which the row has to keep what it computed.
    pub others_follow: bool,
}

/// What a draw asks of a row first.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FirstQuestion<'a> {
    /// All logits.
    All,
    /// Some of the largest.
    Largest(Largest),
    /// Those of these tokens, in ascending order: nothing else may be drawn.
    Tokens(&'a [u32]),
}

impl Largest {
    /// The tokens with the `count` largest logits.
    pub const fn logits(count: usize) -> Self {
        Self { count, refused: 0, within: 0.0, noise: None, others_follow: false }
    }

    /// Returns the question to the tokens that may be drawn alone.
    #[must_use]
    pub const fn of_allowed(self) -> Self {
        Self { count: self.count - self.refused, refused: 0, ..self }
    }
}

/// Asks for the tokens with at least some logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The smallest logit.
    pub logit: f32,
    /// Bounds the logits that may be this much below more closely: at least 0.
    pub close: f32,
    /// The temperature of [`Remainder::weight`]: above 0. Without one, the weight is not bounded, which takes less time.
    pub temperature: Option<f32>,
}

impl Threshold {
    /// Returns the lowest logit that is bounded more closely.
    pub(crate) fn lowest(self) -> f32 {
        self.logit - self.close
    }
}

/// What is known of the tokens below a threshold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Remainder {
    /// All tokens with at least this logit were found.
    pub below: f32,
    /// At least the sum of `exp((logit − below) / temperature)` over the others; ∞ if it is not bounded.
    pub weight: f64,
}

/// The logits of one position. The definition is a slice with all of them; others compute what is asked for.
pub trait LogitsRow {
    /// Why a question was not answered.
    type Error;

    /// Returns whether [`all`](Self::all) takes no time, so that nothing else needs to be asked.
    fn is_whole(&self) -> bool;

    /// Returns whether the row has the logits of these tokens, in ascending order, as the answer to the [first
    /// question](FirstQuestion::Tokens).
    fn has_found(&self, tokens: &[u32]) -> bool;

    /// Writes at least the tokens that `wanted` asks for, and NaNs, to `found`, by ascending token. It is the question of the
    /// draw's [metadata](super::RowMetadata::largest), which the step has answered for all rows together.
    ///
    /// # Errors
    /// If the device fails; so do the others.
    fn largest(&mut self, wanted: &Largest, found: &mut Vec<TokenLogit>)
    -> Result<(), Self::Error>;

    /// Writes at least the tokens that have the logit of the threshold to `found`, by ascending token; returns what is known of the
    /// others. `None` if the tokens are so many that it is faster to ask for all logits.
    ///
    /// # Errors
    /// As [`largest`](Self::largest).
    fn at_least(
        &mut self,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, Self::Error>;

    /// Adds these tokens, in ascending order, with their logits to `found`.
    ///
    /// # Errors
    /// As [`largest`](Self::largest).
    fn logits_of(&mut self, tokens: &[u32], found: &mut Vec<TokenLogit>)
    -> Result<(), Self::Error>;

    /// Returns the logits of every token. A draw overwrites them. // (vocab,)
    ///
    /// # Errors
    /// As [`largest`](Self::largest).
    fn all(&mut self) -> Result<&mut [f32], Self::Error>;
}

/// All logits of a position. // (vocab,)
impl LogitsRow for [f32] {
    type Error = Infallible;

    fn is_whole(&self) -> bool {
        true
    }

    fn has_found(&self, _: &[u32]) -> bool {
        true
    }

    fn largest(&mut self, wanted: &Largest, found: &mut Vec<TokenLogit>) -> Result<(), Infallible> {
        let value = |choice: &TokenLogit| match &wanted.noise {
            None => f64::from(choice.logit),
            Some(noise) => noise.add_to(choice.id, choice.logit),
        };
        let mut sorted: Vec<f64> = every(self).map(|choice| value(&choice)).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let least = sorted[wanted.count.clamp(1, sorted.len()) - 1] - f64::from(wanted.within);
        let is_wanted = |choice: &TokenLogit| choice.logit.is_nan() || value(choice) >= least;
        found.clear();
        found.extend(every(self).filter(is_wanted));
        Ok(())
    }

    fn at_least(
        &mut self,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, Infallible> {
        let Threshold { logit: least, temperature, .. } = threshold;
        let weight = temperature.map_or(f64::INFINITY, |temperature| {
            let weight = |choice: TokenLogit| {
                ((f64::from(choice.logit) - f64::from(least)) / f64::from(temperature)).exp()
            };
            every(self).filter(|choice| choice.logit < least).map(weight).sum()
        });
        found.clear();
        found.extend(every(self).filter(|choice| choice.logit >= least));
        Ok(Some(Remainder { below: least, weight }))
    }

    fn logits_of(&mut self, tokens: &[u32], found: &mut Vec<TokenLogit>) -> Result<(), Infallible> {
        found.extend(tokens.iter().map(|&id| TokenLogit { id, logit: self[id as usize] }));
        Ok(())
    }

    fn all(&mut self) -> Result<&mut [f32], Infallible> {
        Ok(self)
    }
}

/// Returns the logits of every token.
pub(crate) fn every(logits: &[f32]) -> impl Iterator<Item = TokenLogit> + '_ {
    logits.iter().zip(0u32..).map(|(&logit, id)| TokenLogit { id, logit })
}
