//! A row that computes only what it is asked for, as a screen does.

use super::*;

/// A row that has all logits and gives few.
pub struct Listed {
    logits: Vec<f32>,
    /// Factor of the weight of remainders, which are upper bounds: at least 1.
    looseness: f64,
    /// Number of thresholds that were asked for.
    pub thresholds: usize,
    /// Whether all logits were asked for.
    pub took_all: bool,
}

impl Listed {
    pub fn new(logits: &[f32], looseness: f64) -> Self {
        Self { logits: logits.to_vec(), looseness, thresholds: 0, took_all: false }
    }
}

impl LogitsRow for Listed {
    type Error = Infallible;

    fn is_whole(&self) -> bool {
        false
    }

    fn has_found(&self, _: &[u32]) -> bool {
        true
    }

    fn largest(&mut self, wanted: &Largest, found: &mut Vec<TokenLogit>) -> Result<(), Infallible> {
        self.logits.largest(wanted, found)
    }

    fn at_least(
        &mut self,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, Infallible> {
        self.thresholds += 1;
        let Remainder { below, weight } =
            self.logits.at_least(threshold, found)?.expect("a slice always answers");
        Ok(Some(Remainder { below, weight: weight * self.looseness }))
    }

    fn logits_of(&mut self, tokens: &[u32], found: &mut Vec<TokenLogit>) -> Result<(), Infallible> {
        let is_there = |token: &&u32| (**token as usize) < self.logits.len();
        let tokens: Vec<u32> = tokens.iter().filter(is_there).copied().collect();
        self.logits.logits_of(&tokens, found)
    }

    fn all(&mut self) -> Result<&mut [f32], Infallible> {
        self.took_all = true;
        Ok(&mut self.logits)
    }
}

/// Draws from few logits; returns the token, if these decide it, and the number of thresholds that were asked for.
pub fn draw(params: &SamplingParams, logits: &[f32], position: usize) -> (Option<u32>, usize) {
    let (counts, mut row) = (NO_COUNTS(), Listed::new(logits, 1.0));
    let drawn =
        sample(&mut row, &metadata(params, &counts, position), None, &mut Scratch::default());
    let token = drawn.expect("the logits are finite").token;
    ((!row.took_all).then_some(token), row.thresholds)
}
