//! Attention of a few query vectors over one sequence's KV blocks.
//!
//! A KV block is sixteen positions, the width of the lanes. Keys are stored transposed,
//! `(head_dim, 16)`, so that a vector register holds one element of sixteen positions and the score
//! of a position is a plain chain of multiply-adds over `head_dim`, in order. Values are stored
//! `(16, head_dim)`, and the output adds positions in order. A query's result is thus a function of
//! its own vector, its position and the keys and values before it: not of the other queries of the
//! tile, the chunk it came in, or the number of blocks behind its position.
//!
//! ```text
//! score[p]  = (Σ_d q[d]·K[d][p]) · scale             d ascending, p ≤ position
//! weight[p] = exp(score[p] − max score)
//! out[d]    = (Σ_p weight[p]·V[p][d]) / Σ_p weight[p]  p ascending; the divisor in lane order
//! ```

use super::lanes::{Element, LANES, Lanes};

/// One tile of queries that share a sequence and a KV head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionTile<'a, E> {
    /// Keys of the layer's pool: block `b` and this KV head at `b * block_stride + head_offset`.
    pub keys: &'a [E], // per block and head: (head_dim, 16)
    /// Values of the layer's pool, at the same offsets.
    pub values: &'a [E], // per block and head: (16, padded_head_dim)
    /// Elements from one block's keys to the next one's.
    pub key_block_stride: usize,
    /// Elements from one block's values to the next one's.
    pub value_block_stride: usize,
    /// Offset of this KV head in a block's keys.
    pub key_head_offset: usize,
    /// Offset of this KV head in a block's values.
    pub value_head_offset: usize,
    /// Block table of the sequence.
    pub blocks: &'a [crate::kv::BlockId],
    /// Elements per head.
    pub head_dim: usize,
    /// `head_dim` rounded up to whole lanes.
    pub padded_head_dim: usize,
    /// 1 / √head_dim.
    pub scale: f32,
}

impl<E> AttentionTile<'_, E> {
    /// Panics unless all blocks up to `position` are inside the pool's slices.
    fn check(&self, position: usize) {
        let count = position / LANES + 1;
        assert!(count <= self.blocks.len());
        assert!(
            self.padded_head_dim.is_multiple_of(LANES) && self.head_dim <= self.padded_head_dim
        );
        for block in &self.blocks[..count] {
            let key = block.0 as usize * self.key_block_stride + self.key_head_offset;
            assert!(key + self.head_dim * LANES <= self.keys.len());
            let value = block.0 as usize * self.value_block_stride + self.value_head_offset;
            assert!(value + self.padded_head_dim * LANES <= self.values.len());
        }
    }
}

/// Runs `Q` queries. `queries` is `(Q, head_dim)`, `positions` the last position each may see,
/// `scratch` is reused between calls, `out` is `(Q, padded_head_dim)`.
///
/// # Safety
/// The lanes' ISA must be available.
#[inline(always)]
pub unsafe fn attention<L: Lanes, E: Element, const Q: usize>(
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
    // SAFETY: `check` proved every block's keys and values to be inside the slices, and
    // `scratch` and `out` have just been sized; the caller has the ISA.
    unsafe {
        scores::<L, E, Q>(tile, queries, width, scratch);
        let sums = softmax::<L, Q>(positions, width, scratch);
        weigh_values::<L, E, Q>(tile, last, width, scratch, out);
        for (q, sum) in sums.into_iter().enumerate() {
            for v in &mut out[q * tile.padded_head_dim..][..tile.padded_head_dim] {
                *v /= sum;
            }
        }
    }
}

/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn scores<L: Lanes, E: Element, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    queries: &[f32],
    width: usize,
    scores: &mut [f32],
) {
    // SAFETY: as the caller's.
    unsafe {
        let scale = L::splat(tile.scale);
        for (index, block) in tile.blocks[..width / LANES].iter().enumerate() {
            let offset = block.0 as usize * tile.key_block_stride + tile.key_head_offset;
            let keys = tile.keys.as_ptr().add(offset);
            let mut sums = [L::splat(0.0); Q];
            for d in 0..tile.head_dim {
                let key = E::load::<L>(keys.add(d * LANES));
                for q in 0..Q {
                    let query = L::splat(*queries.get_unchecked(q * tile.head_dim + d));
                    sums[q] = query.mul_add(key, sums[q]);
                }
            }
            for q in 0..Q {
                sums[q].mul(scale).store(scores.as_mut_ptr().add(q * width + index * LANES));
            }
        }
    }
}

/// Turns scores into weights in place, zero beyond each query's position; returns their sums.
///
/// # Safety
/// As for [`attention`], after its checks.
#[inline(always)]
unsafe fn softmax<L: Lanes, const Q: usize>(
    positions: &[usize; Q],
    width: usize,
    scores: &mut [f32],
) -> [f32; Q] {
    let mut totals = [0f32; Q];
    // SAFETY: as the caller's.
    unsafe {
        for q in 0..Q {
            let row = scores.as_mut_ptr().add(q * width);
            let visible = positions[q] + 1;
            let minus_infinity = L::splat(f32::NEG_INFINITY);
            let mut largest = minus_infinity;
            for p in (0..visible).step_by(LANES) {
                let v = L::load(row.add(p)).first(visible - p, minus_infinity);
                largest = v.max(largest);
            }
            let largest = L::splat(largest.max_lane());
            let mut sum = L::splat(0.0);
            for p in (0..width).step_by(LANES) {
                let count = visible.saturating_sub(p);
                let weight = if count == 0 {
                    L::splat(0.0)
                } else {
                    L::load(row.add(p)).sub(largest).exp().first(count, L::splat(0.0))
                };
                weight.store(row.add(p));
                sum = sum.add(weight);
            }
            totals[q] = sum.sum();
        }
    }
    totals
}

/// # Safety
/// As for [`attention`], after its checks.
#[expect(clippy::needless_range_loop, reason = "constant bounds keep the sums in registers")]
#[inline(always)]
unsafe fn weigh_values<L: Lanes, E: Element, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    last: usize,
    width: usize,
    weights: &[f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    // SAFETY: as the caller's.
    unsafe {
        for (index, block) in tile.blocks[..width / LANES].iter().enumerate() {
            let offset = block.0 as usize * tile.value_block_stride + tile.value_head_offset;
            let values = tile.values.as_ptr().add(offset);
            let count = (last + 1 - index * LANES).min(LANES);
            for d in (0..tile.padded_head_dim).step_by(LANES) {
                let mut sums = [L::splat(0.0); Q];
                for q in 0..Q {
                    sums[q] = L::load(out.as_ptr().add(q * tile.padded_head_dim + d));
                }
                for p in 0..count {
                    let value = E::load::<L>(values.add(p * tile.padded_head_dim + d));
                    for q in 0..Q {
                        let weight = *weights.get_unchecked(q * width + index * LANES + p);
                        sums[q] = L::splat(weight).mul_add(value, sums[q]);
                    }
                }
                for q in 0..Q {
                    sums[q].store(out.as_mut_ptr().add(q * tile.padded_head_dim + d));
                }
            }
        }
    }
}
