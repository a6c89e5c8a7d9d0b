//! Sequences that begin with the same blocks: [`together`](crate::kernels::float::together) for int8 keys and values.

use super::{
    AttentionTile, ByteDots, DEPTH, Parts, SEGMENT_BLOCKS, Visible, divide, pack_queries, score,
    weigh_values, weights,
};
use crate::kernels::float::together::Together;

/// Runs queries of several sequences, of each a multiple of `Q`. `queries` is `(queries, head_dim)`, by sequence, `positions` the last
/// visible position of each, and `out` is `(queries, padded_head_dim)`.
///
/// # Safety
/// The ISA of the sums must be available.
#[inline(always)]
pub unsafe fn attention<D: ByteDots, const Q: usize>(
    tile: &AttentionTile<'_, i8>,
    together: &Together<'_>,
    queries: &[f32],
    positions: &[usize],
    scratch: &mut Vec<f32>,
    out: &mut [f32],
) {
    let most = together.check::<i8, Q>(tile, positions);
    let (parts, segments) = (together.parts::<Q>(positions), together.segments);
    let (dim, padded) = (Q * tile.head_dim, Q * tile.padded_head_dim);
    assert!(queries.len() == parts * dim && out.len() == parts * padded);
    let mut scratch = Scratch::new::<Q>(scratch, parts, most, tile.head_dim.div_ceil(DEPTH));
    // SAFETY: `check` proved that the blocks of each part are inside the slices, `scratch` has room for all parts, and the lengths of
    // `queries` and `out` are asserted; the caller has the ISA.
    unsafe {
        for part in 0..parts {
            let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
            let (mut of_part, factors) = scratch.part::<Q>(part, blocks);
            let queries = &queries[part * dim..][..dim];
            factors.copy_from_slice(&pack_queries::<D, Q>(&tile, queries, &mut of_part));
        }
        for segment in 0..=segments {
            for part in 0..parts {
                let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
                let end = if segment < segments { (segment + 1) * SEGMENT_BLOCKS } else { blocks };
                let range = segment * SEGMENT_BLOCKS..end;
                let (mut of_part, factors) = scratch.part::<Q>(part, blocks);
                let factors: [f32; Q] = std::array::from_fn(|q| factors[q]);
                // The first part brings shared keys into the cache.
                if part == 0 || segment == segments {
                    score::<D, Q, true>(&tile, &factors, blocks, range, &mut of_part);
                } else {
                    score::<D, Q, false>(&tile, &factors, blocks, range, &mut of_part);
                }
            }
        }
        for part in 0..parts {
            let (tile, positions, blocks) = together.part::<i8, Q>(tile, positions, part);
            let (mut of_part, sums) = scratch.part::<Q>(part, blocks);
            let visible = Visible::of(&tile, &positions);
            sums.copy_from_slice(&weights::<D, Q>(&tile, &visible, blocks, &mut of_part));
        }
        out.fill(0.0);
        for segment in 0..=segments {
            for (part, out) in out.chunks_exact_mut(padded).enumerate() {
                let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
                let all = blocks.div_ceil(SEGMENT_BLOCKS);
                let range = segment..if segment < segments { segment + 1 } else { all };
                let (of_part, _) = scratch.part::<Q>(part, blocks);
                // The last part asks for the next values: earlier, they would put shared ones out of the first cache.
                if part + 1 == parts || segment == segments {
                    weigh_values::<D, Q, true>(&tile, blocks, range, &of_part, out);
                } else {
                    weigh_values::<D, Q, false>(&tile, blocks, range, &of_part, out);
                }
            }
        }
    }
    for (part, out) in out.chunks_exact_mut(padded).enumerate() {
        let (_, sums) = scratch.part::<Q>(part, most);
        divide(out, tile.padded_head_dim, sums);
    }
}

/// What the phases of each part share, and a float for each of its queries: its factor, then the sum of its weights.
struct Scratch<'a> {
    floats: &'a mut [f32], // (part, stride)
    stride: usize,
    groups: usize,
}

impl<'a> Scratch<'a> {
    /// Makes room for parts of `Q` queries over up to `blocks` blocks.
    fn new<const Q: usize>(
        floats: &'a mut Vec<f32>,
        parts: usize,
        blocks: usize,
        groups: usize,
    ) -> Self {
        let stride = Parts::len(Q, blocks, groups) + Q;
        if floats.len() < parts * stride {
            floats.resize(parts * stride, 0.0);
        }
        Self { floats, stride, groups }
    }

    /// Returns those of a part with `blocks` blocks.
    #[inline(always)]
    fn part<const Q: usize>(&mut self, part: usize, blocks: usize) -> (Parts<'_>, &mut [f32]) {
        let of_part = &mut self.floats[part * self.stride..][..self.stride];
        let (of_part, of_queries) = of_part.split_at_mut(self.stride - Q);
        (Parts::cut_from(of_part, Q, blocks, self.groups), of_queries)
    }
}
