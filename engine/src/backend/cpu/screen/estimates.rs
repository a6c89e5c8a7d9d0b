//! Estimates of logits with bounds on their errors: see [the module](super).

use std::ops::Range;

use super::{
    copies::{ROUND_UP, Screen, SixBitCopy},
    search::Search,
};
use crate::{
    backend::cpu::{buffers::Scratch, head::Head},
    kernels::{
        Isa,
        float::FloatKernels,
        screen::{self, Bounds, DigitRow, Digits, Products, RangeNoise},
    },
    sampling::{AllowedTokens, GumbelNoise, Largest},
};

/// More than the relative rounding of noise to f32, and of its sum with a logit.
const NOISE_ROUNDING: f32 = 1e-6;

/// Returns the error bound of an f32 dot product of `len` elements, relative to the norms: 16 running sums
/// of fused multiply-adds and a tree of four additions, each with half an ulp of error. The bound is
/// doubled for safety, and includes the rounding of scales and bounds to f32.
fn rounding(len: usize) -> f64 {
    (len.div_ceil(16) + 32) as f64 * f64::from(f32::EPSILON)
}

/// Hidden rows to find tokens for, and the head.
pub struct ScreenInput<'a> {
    pub head: &'a Head,
    pub kernels: &'a FloatKernels,
    pub isa: Isa,
    /// The hidden rows, after the norm: those of `questions`, then those of `given`. // (rows, hidden)
    pub xs: &'a [f32],
    /// The tokens to find for each of the first rows.
    pub questions: &'a [Largest],
    /// The tokens of which the other rows need the logits, in ascending order.
    pub given: &'a [&'a [u32]],
    /// What may be found for some of the rows, in ascending order; every token for the others.
    pub allowed: &'a [(usize, &'a AllowedTokens)],
}

impl ScreenInput<'_> {
    /// Returns the length of a hidden row.
    pub fn width(&self) -> usize {
        self.xs.len() / (self.questions.len() + self.given.len())
    }
}

/// Estimates logits and bounds their errors.
pub(super) struct Estimates<'a> {
    pub screen: &'a Screen,
    pub input: &'a ScreenInput<'a>,
    pub digits: &'a Digits,
}

impl<'a> Estimates<'a> {
    /// Factors of a head row's error and norm in the bound of its logit. `error` is the norm of the part
    /// of the hidden row that the digits do not represent.
    fn factors(&self, row: &DigitRow, error: f64) -> (f32, f32) {
        let rounding = rounding(self.screen.stride) * row.norm;
        ((row.norm + rounding) as f32 * ROUND_UP, (error + rounding) as f32 * ROUND_UP)
    }

    /// Estimates a range of the vocabulary for all rows. Tokens that this does not rule out are estimated
    /// again, more exactly. Each row's search receives the tokens that can be among those asked for.
    /// `keep` gets all first estimates of each row.
    pub fn estimate_range(
        &self,
        range: Range<usize>,
        searches: &[Search],
        keep: impl Fn(usize, &[f32]),
        scratch: &mut Scratch,
    ) {
        let Self { screen, input, .. } = *self;
        let (n, count) = (input.questions.len(), range.len());
        let Scratch { sums: dots, floats: estimates, positions, candidates, .. } = scratch;
        let six = screen.six(input.isa, n);
        // Six bits are multiplied by both digits of one row.
        dots.resize(count * n.max(2), 0);
        if six.is_none() {
            let head_rows = screen.rows(range.clone());
            screen::dots(input.isa, head_rows, self.digits, &mut dots[..count * n]);
        }
        estimates.resize(count, 0.0);
        for (row, (question, search)) in input.questions.iter().zip(searches).enumerate() {
            let bounds = match six {
                Some(six) => self.estimate_six(six, row, range.clone(), dots, estimates),
                None => self.estimate_first(row, range.clone(), dots, estimates),
            };
            let (threshold, noise) = (search.threshold(), question.noise);
            let of_range = noise.map(|noise| RangeNoise::new(noise, range.start));
            let of_range = of_range.as_ref();
            keep(row, estimates);
            positions.clear();
            positions.reserve(count);
            input.kernels.select_candidates(&bounds, of_range, threshold, estimates, positions);
            if let Ok(place) = input.allowed.binary_search_by_key(&row, |(row, _)| *row) {
                let (_, allowed) = input.allowed[place];
                positions.retain(|j| allowed.contains((range.start + j) as u32));
            }
            candidates.clear();
            candidates.reserve(count);
            let refined = positions.iter().map(|&j| {
                let token = range.start + j;
                let refined = self.refined(row, token, six.is_none().then(|| estimates[j]));
                noise.map_or(refined, |noise| with_noise(&noise, refined))
            });
            candidates.extend(refined.filter(|(_, estimate, bound)| {
                let is_below = estimate + bound < threshold;
                // Not `>=`: a NaN stays a candidate.
                !is_below
            }));
            if !candidates.is_empty() {
                search.add(candidates.drain(..));
            }
        }
    }

    /// Returns the error bounds of a row's first estimates: of six bits, or of the first digit.
    pub fn first_bounds(
        &self,
        six: Option<&'a SixBitCopy>,
        row: usize,
        range: Range<usize>,
    ) -> Bounds<'a> {
        let digit_row = &self.digits.rows()[row];
        let (row_stats, error) = match six {
            Some(six) => (&six.row_stats, digit_row.error),
            None => (&self.screen.row_stats, digit_row.first_error),
        };
        row_stats.bounds(range, self.factors(digit_row, error))
    }

    /// Estimates a row's logits from the products of its first digits; returns the bounds of the errors. `dots` has those of
    /// all rows. // (row, range)
    pub fn estimate_first(
        &self,
        row: usize,
        range: Range<usize>,
        dots: &[i32],
        out: &mut [f32],
    ) -> Bounds<'a> {
        let Self { screen, digits, input } = *self;
        let count = range.len();
        let first = &dots[row * count..(row + 1) * count];
        let (scales, sums) = (&screen.scales[range.clone()], &screen.row_stats.sums[range.clone()]);
        input.kernels.estimate(&Products { first, second: None, digits, row, scales, sums }, out);
        self.first_bounds(None, row, range)
    }

    /// Estimates a row's logits from the products of both digits and the six-bit copy; returns the bounds of the errors.
    /// `dots` is scratch.
    pub fn estimate_six(
        &self,
        six: &'a SixBitCopy,
        row: usize,
        range: Range<usize>,
        dots: &mut [i32],
        out: &mut [f32],
    ) -> Bounds<'a> {
        let Self { screen, digits, input } = *self;
        let count = range.len();
        let (first, second) = dots[..2 * count].split_at_mut(count);
        let head_rows = six.rows(range.clone(), screen.stride);
        screen::six_dots(input.isa, head_rows, digits, row, [&mut *first, &mut *second]);
        let (scales, sums) = (&screen.scales[range.clone()], &six.row_stats.sums[range.clone()]);
        let products = Products { first, second: Some(second), digits, row, scales, sums };
        input.kernels.estimate(&products, out);
        self.first_bounds(Some(six), row, range)
    }

    /// Returns the token, its logit estimated with both digits and the whole int8, and the error bound of the estimate. `first` is
    /// the estimate with the first digit, if it is known.
    pub fn refined(&self, row: usize, token: usize, first: Option<f32>) -> (usize, f32, f32) {
        let Self { screen, digits, input } = *self;
        let head_row = screen.rows(token..token + 1);
        let (scale, sum) = (screen.scales[token], screen.row_stats.sums[token]);
        let estimate = match first {
            Some(first) => {
                let second = screen::second_dot(input.isa, head_row, digits, row);
                screen::with_second(digits, row, first, second, (scale, sum))
            }
            None => {
                let [first, second] = screen::both_dots(input.isa, head_row, digits, row);
                let (first, second) = (&[first], Some(&[second][..]));
                let (scales, sums) = (&[scale], &[sum]);
                let mut out = [0.0];
                input
                    .kernels
                    .estimate(&Products { first, second, digits, row, scales, sums }, &mut out);
                out[0]
            }
        };
        let digit_row = &digits.rows()[row];
        let factors = self.factors(digit_row, digit_row.error);
        (token, estimate, screen.row_stats.bounds(token..token + 1, factors).at(0))
    }
}

/// Adds its noise to a token's estimate, and the roundings of that to the bound.
fn with_noise(
    noise: &GumbelNoise,
    (token, estimate, bound): (usize, f32, f32),
) -> (usize, f32, f32) {
    let added = noise.add_to(token as u32, 0.0) as f32;
    (token, estimate + added, bound + added.abs() * NOISE_ROUNDING)
}
