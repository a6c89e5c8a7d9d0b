//! Attention of a few query vectors over one sequence's KV blocks.
//!
//! A KV block is sixteen positions, the width of the lanes. Keys are stored transposed,
//! `(head_dim, 16)`, so that a vector register holds one element of sixteen positions and the score
//! of a position is a chain of multiply-adds over `head_dim`, in order. Values are stored
//! `(16, head_dim)`, and the output adds positions in order. So a query's result depends on its own
//! vector, its position and the keys and values up to it, and not on the other queries of the tile,
//! its chunk, or the number of blocks after its position.
//!
//! ```text
//! score[p]  = (Σ_d q[d]·K[d][p]) · scale             d ascending, position − window < p ≤ position
//! weight[p] = exp(score[p] − max score)
//! out[d]    = (Σ_p weight[p]·V[p][d]) / Σ_p weight[p]  p ascending; the divisor in lane order
//! ```
//!
//! Sequences that begin with the same blocks attend together: [`super::together`]. Int8 keys and values are multiplied as integers:
//! [`super::attention_q8`].

use std::{marker::PhantomData, ops::Range};

use super::{
    KvElement,
    lanes::{LANES, Lanes},
};

/// A slice that other threads may write to at the same time, except for the elements that are read
/// here.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a, T> {
    data: *const T,
    len: usize,
    borrow: PhantomData<&'a [T]>,
}

impl<'a, T> From<&'a [T]> for Stored<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self { data: slice.as_ptr(), len: slice.len(), borrow: PhantomData }
    }
}

impl<T> Stored<'_, T> {
    /// Returns the slice of `len` elements at `data`.
    ///
    /// # Safety
    /// The elements are allocated for the lifetime, and none is written while it is read.
    pub unsafe fn shared(data: *const T, len: usize) -> Self {
        Self { data, len, borrow: PhantomData }
    }
}

/// One tile of queries that share a sequence and a KV head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionTile<'a, E> {
    /// Keys of the layer's pool: block `b` and this KV head at `b * block_stride + head_offset`.
    pub keys: Stored<'a, E>, // per block and head: (head_dim / A, 16, A) with A = E::ADJACENT
    /// Values of the layer's pool, at the same offsets.
    pub values: Stored<'a, E>, // per block and head: (16 / A, padded_head_dim, A)
    /// Elements from one block's keys to the next one's.
    pub key_block_stride: usize,
    /// Elements from one block's values to the next one's.
    pub value_block_stride: usize,
    /// Offset of this KV head in a block's keys.
    pub key_head_offset: usize,
    /// Offset of this KV head in a block's values.
    pub value_head_offset: usize,
    /// Scales of keys of the layer's pool: block `b` and this KV head at
    /// `b * scale_block_stride + scale_head_offset`. Empty for unscaled types.
    pub key_scales: Stored<'a, f32>, // per block and head: (16)
    /// Scales of values of the layer's pool, at the same offsets.
    pub value_scales: Stored<'a, f32>, // per block and head: (16)
    /// Elements from one block's scales to the next one's.
    pub scale_block_stride: usize,
    /// Offset of this KV head in a block's scales.
    pub scale_head_offset: usize,
    /// Block table of the sequence.
    pub blocks: &'a [crate::kv::BlockId],
    /// Elements per head.
    pub head_dim: usize,
    /// `head_dim` rounded up to whole lanes.
    pub padded_head_dim: usize,
    /// 1 / √head_dim.
    pub scale: f32,
    /// Newest positions that a query attends to, with its own; all with [`usize::MAX`].
    pub window: usize,
}

impl<E: KvElement> AttentionTile<'_, E> {
    /// Returns the positions that a query attends to.
    #[inline(always)]
    pub(super) fn visible(&self, position: usize) -> Range<usize> {
        (position + 1).saturating_sub(self.window)..position + 1
    }

    /// Returns the keys of a block of the table.
    ///
    /// # Safety
    /// [`Self::check`] has checked the block.
    #[inline(always)]
    pub(super) unsafe fn keys_at(&self, index: usize) -> *const E {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let block = self.blocks.get_unchecked(index).0 as usize;
            self.keys.data.add(block * self.key_block_stride + self.key_head_offset)
        }
    }

    /// Returns the values of a block of the table.
    ///
    /// # Safety
    /// [`Self::check`] has checked the block.
    #[inline(always)]
    pub(super) unsafe fn values_at(&self, index: usize) -> *const E {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let block = self.blocks.get_unchecked(index).0 as usize;
            self.values.data.add(block * self.value_block_stride + self.value_head_offset)
        }
    }

    /// Returns the scales of a block of the table, from one of the tile's two arrays of scales. // (16)
    ///
    /// # Safety
    /// [`Self::check`] has checked the block, and elements have scales.
    #[inline(always)]
    pub(super) unsafe fn scales_at(&self, scales: Stored<'_, f32>, index: usize) -> *const f32 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let block = self.blocks.get_unchecked(index).0 as usize;
            scales.data.add(block * self.scale_block_stride + self.scale_head_offset)
        }
    }

    /// Panics unless all blocks up to `position` are inside the pool's slices.
    pub(super) fn check(&self, position: usize) {
        let count = position / LANES + 1;
        assert!(count <= self.blocks.len());
        assert!(
            self.padded_head_dim.is_multiple_of(LANES) && self.head_dim <= self.padded_head_dim
        );
        for block in &self.blocks[..count] {
            let key = block.0 as usize * self.key_block_stride + self.key_head_offset;
            assert!(key + self.head_dim.next_multiple_of(E::ADJACENT) * LANES <= self.keys.len);
            let value = block.0 as usize * self.value_block_stride + self.value_head_offset;
            assert!(value + self.padded_head_dim * LANES <= self.values.len);
            if E::SCALED {
                let end =
                    block.0 as usize * self.scale_block_stride + self.scale_head_offset + LANES;
                assert!(end <= self.key_scales.len && end <= self.value_scales.len);
            }
        }
    }
}

/// Runs `Q` queries. `queries` is `(Q, head_dim)`, `positions` the last visible position of each,
/// `scratch` is reused between calls, `out` is `(Q, padded_head_dim)`.
///
/// # Safety
/// The lanes' ISA must be available.
#[inline(always)]
pub unsafe fn attention<L: Lanes, E: KvElement, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    queries: &[f32],
    positions: &[usize; Q],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let last = positions.iter().fold(0, |a, &b| a.max(b));
    tile.check(last);
    assert!(queries.len() == Q * tile.head_dim && out.len() == Q * tile.padded_head_dim);
    let width = (last / LANES + 1) * LANES;
    scratch.clear();
    scratch.resize(Q * width, 0.0);
    // SAFETY: `check` proved that every block's keys and values are inside the slices, `scratch` was
    // just resized and the length of `out` asserted; the caller has the ISA.
    unsafe {
        let blocks = 0..width / LANES;
        scores::<L, E, Q>(tile, queries, width, blocks.clone(), scratch);
        let visible = positions.map(|position| tile.visible(position));
        let sums = softmax::<L, Q>(&visible, width, scratch);
        out.fill(0.0);
        weigh_values::<L, E, Q>(tile, last, width, blocks, scratch, out);
        divide(out, tile.padded_head_dim, &sums);
    }
}

/// Divides the output of each query by the sum of its weights.
pub(super) fn divide(out: &mut [f32], padded_head_dim: usize, sums: &[f32]) {
    for (out, sum) in out.chunks_exact_mut(padded_head_dim).zip(sums) {
        out.iter_mut().for_each(|v| *v /= sum);
    }
}

/// Computes the scores of some blocks.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, E: KvElement, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    queries: &[f32],
    width: usize,
    blocks: Range<usize>,
    scores: &mut [f32],
) {
    let mut index = blocks.start;
    while index < blocks.end {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if 2 * Q <= L::SUMS && index + 2 <= blocks.end {
                scores_of::<L, E, Q, 2>(tile, queries, width, index, scores);
                index += 2;
            } else {
                scores_of::<L, E, Q, 1>(tile, queries, width, index, scores);
                index += 1;
            }
        }
    }
}

/// Computes the scores of `B` blocks. Prefetches the keys of the next ones: blocks are pages apart, so the
/// hardware prefetcher does not follow.
///
/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn scores_of<L: Lanes, E: KvElement, const Q: usize, const B: usize>(
    tile: &AttentionTile<'_, E>,
    queries: &[f32],
    width: usize,
    index: usize,
    scores: &mut [f32],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let last = width / LANES - 1;
        let at = |index: usize| tile.keys_at(index.min(last));
        let keys: [_; B] = std::array::from_fn(|b| at(index + b));
        let ahead: [_; B] = std::array::from_fn(|b| at(index + B + b));
        let mut sums = [[L::splat(0.0); Q]; B];
        for d in 0..tile.head_dim {
            let mut key = [L::splat(0.0); B];
            for b in 0..B {
                L::prefetch(ahead[b].add(d * LANES));
                key[b] = E::load::<L>(keys[b].add(d * LANES));
            }
            for q in 0..Q {
                let query = L::splat(*queries.get_unchecked(q * tile.head_dim + d));
                for b in 0..B {
                    sums[b][q] = query.mul_add(key[b], sums[b][q]);
                }
            }
        }
        for b in 0..B {
            let scale = L::splat(tile.scale);
            for q in 0..Q {
                let to = scores.as_mut_ptr().add(q * width + (index + b) * LANES);
                sums[b][q].mul(scale).store(to);
            }
        }
    }
}

/// Turns scores into weights in place, with zeros where a query does not attend; returns their sums.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
pub(super) unsafe fn softmax<L: Lanes, const Q: usize>(
    visible: &[Range<usize>; Q],
    width: usize,
    scores: &mut [f32],
) -> [f32; Q] {
    let mut totals = [0f32; Q];
    // SAFETY: guaranteed by the caller.
    unsafe {
        for q in 0..Q {
            let row = scores.as_mut_ptr().add(q * width);
            let Range { start, end } = visible[q];
            let minus_infinity = L::splat(f32::NEG_INFINITY);
            let mut largest = minus_infinity;
            for p in (0..end).step_by(LANES) {
                let mut v = L::load(row.add(p)).first(end - p, minus_infinity);
                if p < start {
                    v = minus_infinity.first(start - p, v);
                }
                largest = v.max(largest);
            }
            let largest = L::splat(largest.max_lane());
            let mut sum = L::splat(0.0);
            for p in (0..width).step_by(LANES) {
                let count = end.saturating_sub(p);
                let mut weight = if count == 0 {
                    L::splat(0.0)
                } else {
                    L::load(row.add(p)).sub(largest).exp().first(count, L::splat(0.0))
                };
                if p < start {
                    weight = L::splat(0.0).first(start - p, weight);
                }
                sum = sum.add(weight);
                weight.store(row.add(p));
            }
            totals[q] = sum.sum();
        }
    }
    totals
}

/// Adds the weighted values of some blocks.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
pub(super) unsafe fn weigh_values<L: Lanes, E: KvElement, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    last: usize,
    width: usize,
    blocks: Range<usize>,
    weights: &[f32],
    out: &mut [f32],
) {
    let padded = tile.padded_head_dim;
    // SAFETY: guaranteed by the caller.
    unsafe {
        for index in blocks {
            let values = tile.values_at(index);
            let ahead = tile.values_at((index + 1).min(width / LANES - 1));
            let count = (last + 1 - index * LANES).min(LANES);
            let weights = weights.as_ptr().add(index * LANES);
            let mut d = 0;
            while d < padded {
                let (from, next, to) = (values.add(d), ahead.add(d), out.as_mut_ptr().add(d));
                if 2 * Q <= L::SUMS && d + 2 * LANES <= padded {
                    weigh::<L, E, Q, 2>(from, next, padded, count, weights, width, to);
                    d += 2 * LANES;
                } else {
                    weigh::<L, E, Q, 1>(from, next, padded, count, weights, width, to);
                    d += LANES;
                }
            }
        }
    }
}

/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn weigh<L: Lanes, E: KvElement, const Q: usize, const D: usize>(
    values: *const E,
    ahead: *const E,
    padded: usize,
    count: usize,
    weights: *const f32,
    width: usize,
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[L::splat(0.0); Q]; D];
        for d in 0..D {
            for q in 0..Q {
                sums[d][q] = L::load(out.add(q * padded + d * LANES));
            }
        }
        for p in 0..count {
            let mut value = [L::splat(0.0); D];
            for d in 0..D {
                L::prefetch(ahead.add(p * padded + d * LANES));
                value[d] = E::load::<L>(values.add(p * padded + d * LANES));
            }
            for q in 0..Q {
                let weight = L::splat(*weights.add(q * width + p));
                for d in 0..D {
                    sums[d][q] = weight.mul_add(value[d], sums[d][q]);
                }
            }
        }
        for d in 0..D {
            for q in 0..Q {
                sums[d][q].store(out.add(q * padded + d * LANES));
            }
        }
    }
}
