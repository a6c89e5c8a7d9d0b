//! Attention of several sequences that begin with the same blocks, as those of a batch with one system prompt do.
//!
//! Memory gives the shared blocks once: a segment of them at a time is multiplied with the queries of all sequences, while it is in
//! the cache, first its keys and then, when all weights are known, its values. Then each sequence has the blocks of its own. The order
//! of a query's sums stays, so its result is that of [`attention`](super::attention::attention), bit for bit.

use super::{
    AttentionTile, KvElement, POSITIONS_PART,
    attention::{divide, scores, softmax, weigh_values},
    lanes::{LANES, Lanes},
};
use crate::kv::BlockId;

/// Blocks of a segment.
pub(super) const SEGMENT_BLOCKS: usize = POSITIONS_PART / LANES;

/// Sequences that begin with the same blocks, each with as many queries.
#[derive(Debug, Clone, Copy)]
pub struct Together<'a> {
    /// The block table of each sequence, in the place of the tile's.
    pub tables: &'a [&'a [BlockId]],
    /// Leading segments, of [`POSITIONS_PART`] positions, that all of them have, and all queries attend to.
    pub segments: usize,
}

impl<'a> Together<'a> {
    /// Returns the number of parts of `Q` queries of one sequence.
    ///
    /// # Panics
    /// If the sequences have not each a multiple of `Q` queries behind the shared segments.
    pub(super) fn parts<const Q: usize>(&self, positions: &[usize]) -> usize {
        assert!(positions.len().is_multiple_of(Q * self.tables.len()));
        let shared = self.segments * SEGMENT_BLOCKS;
        assert!(positions.iter().all(|position| position / LANES >= shared));
        positions.len() / Q
    }

    /// Returns the tile, the positions and the number of blocks of a part.
    #[inline(always)]
    pub(super) fn part<E: KvElement, const Q: usize>(
        &self,
        tile: &AttentionTile<'a, E>,
        positions: &[usize],
        part: usize,
    ) -> (AttentionTile<'a, E>, [usize; Q], usize) {
        let of_table = positions.len() / Q / self.tables.len();
        let positions: [usize; Q] = std::array::from_fn(|q| positions[part * Q + q]);
        let last = positions.iter().fold(0, |a, &b| a.max(b));
        let tile = AttentionTile { blocks: self.tables[part / of_table], ..*tile };
        (tile, positions, last / LANES + 1)
    }

    /// Returns the most blocks of a part, after a check that all of them are inside the pool's slices.
    pub(super) fn check<E: KvElement, const Q: usize>(
        &self,
        tile: &AttentionTile<'a, E>,
        positions: &[usize],
    ) -> usize {
        let blocks = (0..self.parts::<Q>(positions)).map(|part| {
            let (tile, _, blocks) = self.part::<E, Q>(tile, positions, part);
            tile.check(blocks * LANES - 1);
            blocks
        });
        blocks.max().unwrap_or(0)
    }
}

/// Runs queries of several sequences, of each a multiple of `Q`. `queries` is `(queries, head_dim)`, by sequence, `positions` the last
/// visible position of each, and `out` is `(queries, padded_head_dim)`.
///
/// # Safety
/// The lanes' ISA must be available.
#[inline(always)]
pub unsafe fn attention<L: Lanes, E: KvElement, const Q: usize>(
    tile: &AttentionTile<'_, E>,
    together: &Together<'_>,
    queries: &[f32],
    positions: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let most = together.check::<E, Q>(tile, positions);
    let (parts, shared) = (together.parts::<Q>(positions), together.segments * SEGMENT_BLOCKS);
    let (dim, padded) = (Q * tile.head_dim, Q * tile.padded_head_dim);
    assert!(queries.len() == parts * dim && out.len() == parts * padded);
    // Of each part its scores, which become weights, and their sums.
    let stride = Q * most * LANES + Q;
    if scratch.len() < parts * stride {
        scratch.resize(parts * stride, 0.0);
    }
    // SAFETY: `check` proved that the blocks of each part are inside the slices, `scratch` has room for all parts, and the lengths of
    // `queries` and `out` are asserted; the caller has the ISA.
    unsafe {
        for first in (0..=shared).step_by(SEGMENT_BLOCKS) {
            for part in 0..parts {
                let (tile, _, blocks) = together.part::<E, Q>(tile, positions, part);
                let range =
                    if first < shared { first..first + SEGMENT_BLOCKS } else { first..blocks };
                let of_part = &mut scratch[part * stride..][..stride];
                let queries = &queries[part * dim..][..dim];
                scores::<L, E, Q>(&tile, queries, blocks * LANES, range, of_part);
            }
        }
        for part in 0..parts {
            let (tile, positions, blocks) = together.part::<E, Q>(tile, positions, part);
            let (weights, sums) = scratch[part * stride..][..stride].split_at_mut(stride - Q);
            let visible = positions.map(|position| tile.visible(position));
            sums.copy_from_slice(&softmax::<L, Q>(&visible, blocks * LANES, weights));
        }
        out.fill(0.0);
        for first in (0..=shared).step_by(SEGMENT_BLOCKS) {
            for part in 0..parts {
                let (tile, positions, blocks) = together.part::<E, Q>(tile, positions, part);
                let range =
                    if first < shared { first..first + SEGMENT_BLOCKS } else { first..blocks };
                let last = positions.iter().fold(0, |a, &b| a.max(b));
                let (weights, out) =
                    (&scratch[part * stride..], &mut out[part * padded..][..padded]);
                weigh_values::<L, E, Q>(&tile, last, blocks * LANES, range, weights, out);
            }
        }
    }
    for (part, out) in out.chunks_exact_mut(padded).enumerate() {
        let sums = &scratch[(part + 1) * stride - Q..][..Q];
        divide(out, tile.padded_head_dim, sums);
    }
}
