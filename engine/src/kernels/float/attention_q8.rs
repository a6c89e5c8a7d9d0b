//! [`attention`](super::attention) over int8 keys and values, with exact integer products.
//!
//! A query is narrowed to int8 by a scale of its own, as keys are. Weights become integers of fifteen bits, by a
//! scale for each segment of 128 positions.
//!
//! ```text
//! score[p]  = f32(Σ_d query[d]·K[d][p]) · (key_scale[p] · (scale · query_scale))
//! weight[p] = exp(score[p] − max score)                        position − window < p ≤ position
//! factor[p] = weight[p] · value_scale[p]
//! largest_s = max(10⁻³⁰, max factor[p])                        p in segment s
//! w[p]      = round(factor[p] · (32767 / largest_s))           half to even
//! sum_s[d]  = f32(Σ_p w[p]·V[p][d])
//! out[d]    = (Σ_s sum_s[d] · (largest_s / 32767)) / Σ_p weight[p]   s ascending, fused; the divisor in lane order
//! ```
//!
//! The inner sums are exact, so no tile, ISA or backend changes them: up to 127 · 127 · `head_dim` and
//! 32767 · 127 · 128. Four dimensions of a key are adjacent, `(head_dim / 4, 16, 4)`, and four positions of the values,
//! `(4, padded_head_dim, 4)`, as the products of bytes read them.

mod isas;
#[cfg(test)]
mod tests;
mod together;

use std::ops::Range;

use super::{
    AttentionTile,
    attention::divide,
    byte_dots::{ByteDots, DEPTH, WEIGHT_MAX, WEIGHTS_BYTES},
    lanes::{LANES, Lanes},
    ops,
};

pub use isas::*;

/// Positions whose weights have one scale.
pub(super) const SEGMENT: usize = 128;
const SEGMENT_BLOCKS: usize = SEGMENT / LANES;
/// Least largest factor of a segment.
const FACTOR_MIN: f32 = 1e-30;
/// Elements of a query narrowed at a time.
const NARROW: usize = 64;

/// What each query attends to.
struct Visible<const Q: usize> {
    positions: [Range<usize>; Q],
    /// The blocks that all of them attend to as a whole.
    whole: Range<usize>,
}

impl<const Q: usize> Visible<Q> {
    fn of(tile: &AttentionTile<'_, i8>, positions: &[usize; Q]) -> Self {
        let positions = positions.map(|position| tile.visible(position));
        let start =
            positions.iter().map(|visible| visible.start.div_ceil(LANES)).fold(0, usize::max);
        let end = positions.iter().map(|visible| visible.end / LANES).fold(usize::MAX, usize::min);
        Self { positions, whole: start..end }
    }

    /// Sets the lanes of a block that query `q` does not attend to.
    ///
    /// # Safety
    /// The lanes' ISA must be available.
    #[inline(always)]
    unsafe fn within<L: Lanes>(&self, q: usize, block: usize, lanes: L, others: f32) -> L {
        let Range { start, end } = self.positions[q];
        let before = |end: usize| end.saturating_sub(block * LANES);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let others = L::splat(others);
            others.first(before(start), lanes.first(before(end), others))
        }
    }
}

/// Results of one phase of a tile that the next phase reads.
struct Parts<'a> {
    scores: &'a mut [f32],  // (Q, positions); then the factors
    units: &'a mut [f32],   // (segments, Q): largest factor / 32767
    sums: &'a mut [i32],    // (Q): of the narrowed elements of each query
    packed: &'a mut [u64],  // (head_dim / 4, Q)
    weights: &'a mut [u64], // (blocks, Q, WEIGHTS_BYTES)
}

impl<'a> Parts<'a> {
    /// Returns the floats that hold the parts.
    fn len(queries: usize, blocks: usize, groups: usize) -> usize {
        let (scores, units, packed, weights) = Self::lens(queries, blocks, groups);
        // An odd float at the start may put the integers off their alignment.
        scores + units + queries + 2 * (packed + weights) + 1
    }

    /// Returns the elements of the scores, units, packed queries and weights.
    fn lens(queries: usize, blocks: usize, groups: usize) -> (usize, usize, usize, usize) {
        let (scores, units) = (queries * blocks * LANES, queries * blocks.div_ceil(SEGMENT_BLOCKS));
        (scores, units, queries * groups, queries * blocks * WEIGHTS_BYTES / 8)
    }

    /// Cuts the parts of `queries` queries over `blocks` blocks from `scratch`.
    fn cut_from(scratch: &'a mut [f32], queries: usize, blocks: usize, groups: usize) -> Self {
        let (scores, units, packed, weights) = Self::lens(queries, blocks, groups);
        let (scores, rest) = scratch.split_at_mut(scores);
        let (units, rest) = rest.split_at_mut(units);
        let (sums, rest) = rest.split_at_mut(queries);
        let (_, integers, _) = bytemuck::pod_align_to_mut::<f32, u64>(rest);
        let (packed, rest) = integers.split_at_mut(packed);
        let (sums, weights) = (bytemuck::cast_slice_mut(sums), &mut rest[..weights]);
        Self { scores, units, sums, packed, weights }
    }
}

/// Runs `Q` queries. `queries` is `(Q, head_dim)`, `positions` the last visible position of each, `scratch` is
/// reused between calls, `out` is `(Q, padded_head_dim)`.
///
/// # Safety
/// The ISA of the sums must be available.
#[inline(always)]
pub unsafe fn attention<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    queries: &[f32],
    positions: &[usize; Q],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let last = positions.iter().fold(0, |a, &b| a.max(b));
    tile.check(last);
    assert!(queries.len() == Q * tile.head_dim && out.len() == Q * tile.padded_head_dim);
    let (blocks, groups) = (last / LANES + 1, tile.head_dim.div_ceil(DEPTH));
    let len = Parts::len(Q, blocks, groups);
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    let mut parts = Parts::cut_from(scratch, Q, blocks, groups);
    // SAFETY: `check` proved that every block's keys, values and scales are inside the slices, `parts` has room for
    // all blocks, and the length of `out` is asserted; the caller has the ISA.
    unsafe {
        let factors = pack_queries::<D, Q>(tile, queries, &mut parts);
        score::<D, Q, true>(tile, &factors, blocks, 0..blocks, &mut parts);
        let visible = Visible::of(tile, positions);
        let sums = weights::<D, Q>(tile, &visible, blocks, &mut parts);
        out.fill(0.0);
        let segments = 0..blocks.div_ceil(SEGMENT_BLOCKS);
        weigh_values::<D, Q, true>(tile, blocks, segments, &parts, out);
        divide(out, tile.padded_head_dim, &sums);
    }
}

/// Narrows, adds up and packs the queries; returns what multiplies the products of each, besides the scales of keys.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn pack_queries<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    queries: &[f32],
    parts: &mut Parts<'_>,
) -> [f32; Q] {
    let mut factors = [0f32; Q];
    parts.sums.fill(0);
    for (q, query) in queries.chunks_exact(tile.head_dim).enumerate() {
        // SAFETY: guaranteed by the caller.
        let scale = unsafe { ops::int8_scale::<D::Floats>(query) };
        factors[q] = tile.scale * scale;
        let mut narrow = [0i8; NARROW];
        for (part, elements) in query.chunks(NARROW).enumerate() {
            let narrow = &mut narrow[..elements.len().next_multiple_of(DEPTH)];
            narrow.fill(0);
            // SAFETY: guaranteed by the caller.
            unsafe {
                ops::narrow_int8::<D::Floats>(elements, scale, &mut narrow[..elements.len()])
            };
            parts.sums[q] += narrow.iter().map(|&element| i32::from(element)).sum::<i32>();
            for (group, elements) in narrow.as_chunks::<DEPTH>().0.iter().enumerate() {
                parts.packed[(part * NARROW / DEPTH + group) * Q + q] = D::pack(*elements);
            }
        }
    }
    factors
}

/// Computes the scores of some of a tile's blocks; with `FETCH`, keys are prefetched.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn score<D: ByteDots, const Q: usize, const FETCH: bool>(
    tile: &AttentionTile<'_, i8>,
    factors: &[f32; Q],
    blocks: usize,
    range: Range<usize>,
    parts: &mut Parts<'_>,
) {
    let (of, mut q) = ((blocks, &range), 0);
    while q < Q {
        // SAFETY: guaranteed by the caller.
        q += unsafe {
            match Q - q {
                8.. if D::SUMS >= 16 => score_of::<D, Q, 8, 2, FETCH>(tile, factors, q, of, parts),
                8.. if D::SUMS >= 8 => score_of::<D, Q, 8, 1, FETCH>(tile, factors, q, of, parts),
                4.. if D::SUMS >= 16 => score_of::<D, Q, 4, 4, FETCH>(tile, factors, q, of, parts),
                4.. if D::SUMS >= 8 => score_of::<D, Q, 4, 2, FETCH>(tile, factors, q, of, parts),
                4.. if D::SUMS >= 4 => score_of::<D, Q, 4, 1, FETCH>(tile, factors, q, of, parts),
                2.. => score_of::<D, Q, 2, 1, FETCH>(tile, factors, q, of, parts),
                _ if D::SUMS >= 16 => score_of::<D, Q, 1, 4, FETCH>(tile, factors, q, of, parts),
                _ => score_of::<D, Q, 1, 2, FETCH>(tile, factors, q, of, parts),
            }
        };
    }
}

/// Computes the scores of `P` queries from query `q` on, `B` blocks at a time, in some of a tile's blocks; returns `P`.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn score_of<
    D: ByteDots,
    const Q: usize,
    const P: usize,
    const B: usize,
    const FETCH: bool,
>(
    tile: &AttentionTile<'_, i8>,
    factors: &[f32; Q],
    q: usize,
    (blocks, range): (usize, &Range<usize>),
    parts: &mut Parts<'_>,
) -> usize {
    let mut index = range.start;
    while index < range.end {
        // SAFETY: guaranteed by the caller.
        index += unsafe {
            if index + B <= range.end {
                score_blocks::<D, Q, P, B, FETCH>(tile, factors, q, index, blocks, parts)
            } else {
                score_blocks::<D, Q, P, 1, FETCH>(tile, factors, q, index, blocks, parts)
            }
        };
    }
    P
}

/// Computes the scores of `P` queries from query `q` on in `B` blocks from block `index` on; returns `B`. With
/// `FETCH`, prefetches the next keys.
///
/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn score_blocks<
    D: ByteDots,
    const Q: usize,
    const P: usize,
    const B: usize,
    const FETCH: bool,
>(
    tile: &AttentionTile<'_, i8>,
    factors: &[f32; Q],
    q: usize,
    index: usize,
    blocks: usize,
    parts: &mut Parts<'_>,
) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let at = |index: usize| tile.keys_at(index.min(blocks - 1));
        let keys: [_; B] = std::array::from_fn(|b| at(index + b));
        let ahead: [_; B] = std::array::from_fn(|b| at(index + B + b));
        let mut sums = [[D::zero(); P]; B];
        for i in 0..P {
            let start = D::start(parts.sums[q + i]);
            for b in 0..B {
                sums[b][i] = start;
            }
        }
        let mut packed = parts.packed.as_ptr().add(q);
        for group in 0..parts.packed.len() / Q {
            for b in 0..B {
                let at = group * DEPTH * LANES;
                if FETCH {
                    D::Floats::prefetch(ahead[b].add(at));
                }
                let keys = D::load_keys(keys[b].add(at));
                for i in 0..P {
                    sums[b][i] = sums[b][i].add(*packed.add(i), keys);
                }
            }
            packed = packed.add(Q);
        }
        for b in 0..B {
            let of = |index: usize| tile.scales_at(tile.key_scales, index.min(blocks - 1));
            if FETCH {
                D::Floats::prefetch(of(index + B + b));
            }
            let scales = D::Floats::load(of(index + b));
            for i in 0..P {
                let factor = scales.mul(D::Floats::splat(factors[q + i]));
                let to = ((q + i) * blocks + index + b) * LANES;
                sums[b][i].to_floats().mul(factor).store(parts.scores.as_mut_ptr().add(to));
            }
        }
    }
    B
}

/// Turns scores into integer weights and their units; returns the sums of the weights before.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn weights<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    visible: &Visible<Q>,
    blocks: usize,
    parts: &mut Parts<'_>,
) -> [f32; Q] {
    let (mut totals, mut q) = ([0f32; Q], 0);
    while q < Q {
        // SAFETY: guaranteed by the caller.
        q += unsafe {
            match Q - q {
                4.. => weights_of::<D, Q, 4>(tile, visible, (blocks, q), parts, &mut totals),
                _ => weights_of::<D, Q, 1>(tile, visible, (blocks, q), parts, &mut totals),
            }
        };
    }
    totals
}

/// Runs [`weights`] for `P` queries from query `q` on; returns `P`.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn weights_of<D: ByteDots, const Q: usize, const P: usize>(
    tile: &AttentionTile<'_, i8>,
    visible: &Visible<Q>,
    (blocks, q): (usize, usize),
    parts: &mut Parts<'_>,
    totals: &mut [f32; Q],
) -> usize {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let row = parts.scores.as_mut_ptr();
        let rows: [_; P] = std::array::from_fn(|i| row.add((q + i) * blocks * LANES));
        let mut largest = [D::Floats::splat(f32::NEG_INFINITY); P];
        for block in 0..blocks {
            let is_whole = visible.whole.contains(&block);
            for i in 0..P {
                let mut score = D::Floats::load(rows[i].add(block * LANES));
                if !is_whole {
                    score = visible.within(q + i, block, score, f32::NEG_INFINITY);
                }
                largest[i] = score.max(largest[i]);
            }
        }
        for largest in &mut largest {
            *largest = D::Floats::splat(largest.max_lane());
        }
        let zero = D::Floats::splat(0.0);
        let mut sums = [zero; P];
        for segment in 0..blocks.div_ceil(SEGMENT_BLOCKS) {
            let of_segment = segment * SEGMENT_BLOCKS..((segment + 1) * SEGMENT_BLOCKS).min(blocks);
            let mut most = [D::Floats::splat(FACTOR_MIN); P];
            for block in of_segment.clone() {
                let is_whole = visible.whole.contains(&block);
                let scales = D::Floats::load(tile.scales_at(tile.value_scales, block));
                for i in 0..P {
                    let at = rows[i].add(block * LANES);
                    let mut weight = D::Floats::load(at).sub(largest[i]).exp();
                    let mut factor = weight.mul(scales);
                    if !is_whole {
                        weight = visible.within(q + i, block, weight, 0.0);
                        // What was never stored may have any scale.
                        factor = visible.within(q + i, block, factor, 0.0);
                    }
                    sums[i] = sums[i].add(weight);
                    most[i] = factor.max(most[i]);
                    factor.store(at);
                }
            }
            let mut inverses = [zero; P];
            for i in 0..P {
                let most = most[i].max_lane();
                parts.units[segment * Q + q + i] = most / WEIGHT_MAX;
                inverses[i] = D::Floats::splat(WEIGHT_MAX / most);
            }
            for block in of_segment {
                for i in 0..P {
                    let factor = D::Floats::load(rows[i].add(block * LANES));
                    let to = parts.weights.as_mut_ptr().cast::<u8>();
                    let to = to.add((block * Q + q + i) * WEIGHTS_BYTES);
                    D::store_weights(factor.mul(inverses[i]).round(), to);
                }
            }
        }
        for i in 0..P {
            totals[q + i] = sums[i].sum();
        }
    }
    P
}

/// Adds the weighted values of some segments; with `FETCH`, values are prefetched.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn weigh_values<D: ByteDots, const Q: usize, const FETCH: bool>(
    tile: &AttentionTile<'_, i8>,
    blocks: usize,
    segments: Range<usize>,
    parts: &Parts<'_>,
    out: &mut [f32],
) {
    let padded = tile.padded_head_dim;
    for segment in segments {
        let mut d = 0;
        while d < padded {
            let wide = D::WEIGHTED >= 8 && d + 2 * LANES <= padded;
            let mut q = 0;
            while q < Q {
                // SAFETY: guaranteed by the caller.
                q += unsafe {
                    match Q - q {
                        4.. if wide => {
                            weigh::<D, Q, 4, 2, FETCH>(tile, blocks, segment, q, d, parts, out)
                        }
                        4.. if D::WEIGHTED >= 4 => {
                            weigh::<D, Q, 4, 1, FETCH>(tile, blocks, segment, q, d, parts, out)
                        }
                        2.. if !wide => {
                            weigh::<D, Q, 2, 1, FETCH>(tile, blocks, segment, q, d, parts, out)
                        }
                        _ if wide => {
                            weigh::<D, Q, 1, 2, FETCH>(tile, blocks, segment, q, d, parts, out)
                        }
                        _ => weigh::<D, Q, 1, 1, FETCH>(tile, blocks, segment, q, d, parts, out),
                    }
                };
            }
            d += if wide { 2 * LANES } else { LANES };
        }
    }
}

/// Adds a segment to `V` vectors of the outputs, from element `d` on, of `P` queries from query `q` on; returns `P`.
/// With `FETCH`, the first query's call prefetches the values of the next segment.
///
/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn weigh<D: ByteDots, const Q: usize, const P: usize, const V: usize, const FETCH: bool>(
    tile: &AttentionTile<'_, i8>,
    blocks: usize,
    segment: usize,
    q: usize,
    d: usize,
    parts: &Parts<'_>,
    out: &mut [f32],
) -> usize {
    let padded = tile.padded_head_dim;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[D::zero_weighted(); P]; V];
        let first = segment * SEGMENT_BLOCKS;
        for block in first..(first + SEGMENT_BLOCKS).min(blocks) {
            let values = tile.values_at(block);
            let ahead = tile.values_at((block + SEGMENT_BLOCKS).min(blocks - 1));
            let weights = parts.weights.as_ptr().cast::<u8>().add((block * Q + q) * WEIGHTS_BYTES);
            for group in 0..LANES / DEPTH {
                for v in 0..V {
                    let at = (group * padded + d + v * LANES) * DEPTH;
                    if FETCH && q == 0 {
                        D::Floats::prefetch(ahead.add(at));
                    }
                    let bytes = D::load(values.add(at));
                    for i in 0..P {
                        let weights = weights.add(i * WEIGHTS_BYTES);
                        sums[v][i] = D::weigh(sums[v][i], weights, group, bytes);
                    }
                }
            }
        }
        for i in 0..P {
            let unit = D::Floats::splat(parts.units[segment * Q + q + i]);
            for v in 0..V {
                let to = out.as_mut_ptr().add((q + i) * padded + d + v * LANES);
                let sum = D::weighted_floats(sums[v][i]);
                sum.mul_add(unit, D::Floats::load(to)).store(to);
            }
        }
    }
    P
}
