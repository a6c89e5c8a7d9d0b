//! The tokens with at least some logit, found from the first estimates that a search has left.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError},
};

use super::{
    copies::{SCREEN_SHARE, Screen},
    estimates::{Estimates, ScreenInput},
    split_rows,
    state::{FoundAtLeast, ScreenState},
};
use crate::{
    backend::{ScreenedRow, cpu::buffers::with_scratch, cpu::pool::Pool},
    math,
    sampling::{Remainder, Threshold},
};

/// Head rows of a task.
const TASK_ROWS: usize = 1536;
/// How many rows ahead one is asked for.
const ROWS_AHEAD: usize = 2;
/// Factor greater than the roundings of a sum of weights.
const WEIGHT_ROUND_UP: f64 = 1.0 + 1e-9;

impl Screen {
    /// Computes the logits of the tokens that can have at least the threshold's logit, and stores them in [`ScreenState::found`].
    /// Returns what is known of the others. `None` if they are more than a share of the vocabulary; then nothing is found.
    ///
    /// `input` has one row, of which `kept` is kept.
    pub fn at_least(
        &self,
        input: &ScreenInput<'_>,
        kept: ScreenedRow<'_>,
        threshold: Threshold,
        pool: &mut Pool,
        state: &mut ScreenState,
    ) -> Option<Remainder> {
        let (vocab, width) = (self.scales.len(), input.xs.len());
        split_rows(input, width, pool, &mut state.digits);
        let found = state.at_least.get_mut().unwrap_or_else(PoisonError::into_inner);
        found.tokens.clear();
        (found.far, found.close) = (0.0, 0.0);
        // Enough for all results, so that most steps allocate nothing.
        found.tokens.reserve(vocab / SCREEN_SHARE + TASK_ROWS);
        let look = Look {
            estimates: Estimates { screen: self, input, digits: &state.digits },
            kept,
            threshold,
            found: &state.at_least,
        };
        pool.run(vocab.div_ceil(TASK_ROWS), &|task| {
            look.at(task * TASK_ROWS..((task + 1) * TASK_ROWS).min(vocab));
        });
        let found = state.at_least.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (far, close, mut tokens) = (found.far, found.close, std::mem::take(&mut found.tokens));
        let are_few = tokens.len() * SCREEN_SHARE <= vocab;
        state.clear();
        if are_few {
            tokens.sort_unstable();
            state.push_list(tokens.iter().copied());
        }
        state.at_least = Mutex::new(FoundAtLeast { tokens, ..FoundAtLeast::default() });
        if !are_few {
            return None;
        }
        self.compute_found(input, pool, state);
        let Threshold { logit, temperature, .. } = threshold;
        let weight = temperature.map_or(f64::INFINITY, |temperature| {
            let lowest = f64::from(threshold.lowest());
            let share = math::exp((lowest - f64::from(logit)) / f64::from(temperature));
            (far * share + close) * WEIGHT_ROUND_UP
        });
        Some(Remainder { below: logit, weight })
    }
}

/// One look at all tokens, in parallel.
struct Look<'a> {
    estimates: Estimates<'a>,
    kept: ScreenedRow<'a>,
    threshold: Threshold,
    found: &'a Mutex<FoundAtLeast>,
}

impl Look<'_> {
    /// Adds the tokens of a range that can have the logit, and the weight of the others.
    fn at(&self, range: Range<usize>) {
        let Self { estimates, kept, threshold, found } = self;
        let Threshold { logit, temperature, .. } = *threshold;
        let (screen, kernels) = (estimates.screen, estimates.input.kernels);
        let so_far = found.lock().unwrap_or_else(PoisonError::into_inner).tokens.len();
        if so_far * SCREEN_SHARE > screen.scales.len() {
            // All logits are faster than so many.
            return;
        }
        let six = screen.six.as_ref().filter(|_| kept.from_six);
        let bounds = estimates.first_bounds(six, 0, range.clone());
        let (lowest, first) = (threshold.lowest(), &kept.estimates[range.clone()]);
        let far = temperature.map_or(0.0, |t| kernels.weigh_below(&bounds, lowest, t, first));
        with_scratch(|scratch| {
            let (positions, uppers) = (&mut scratch.positions, &mut scratch.floats);
            positions.clear();
            positions.reserve(range.len());
            kernels.select_candidates(&bounds, None, lowest, first, positions);
            uppers.clear();
            uppers.reserve(range.len());
            // Keeps the positions that can have the logit, NaN included.
            let mut count = 0;
            for at in 0..positions.len() {
                if let Some(next) = positions.get(at + ROWS_AHEAD) {
                    screen.prefetch(range.start + next);
                }
                let token = range.start + positions[at];
                let known = six.is_none().then(|| first[positions[at]]);
                let (_, estimate, bound) = estimates.refined(0, token, known);
                let upper = estimate + bound;
                if upper < logit {
                    uppers.push(upper);
                } else {
                    positions[count] = positions[at];
                    count += 1;
                }
            }
            positions.truncate(count);
            let close = temperature.map_or(0.0, |t| kernels.weigh_values(uppers, logit, t));
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            found.tokens.extend(positions.iter().map(|position| (range.start + position) as u32));
            found.far += f64::from(far);
            found.close += f64::from(close);
        });
    }
}
