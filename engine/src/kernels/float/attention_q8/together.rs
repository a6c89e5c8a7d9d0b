//! Sequences that begin with the same blocks: [`together`](crate::kernels::float::together) for int8 keys and values.

use super::{
    AttentionTile, ByteDots, DEPTH, Parts, SEGMENT_BLOCKS, divide, pack_queries, score,
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
    let groups = tile.head_dim.div_ceil(DEPTH);
    // Of each part what its phases share, then the factors of its queries, which become the sums of their weights.
    let len = Parts::len(Q, most, groups);
    let stride = len + Q;
    if scratch.len() < parts * stride {
        scratch.resize(parts * stride, 0.0);
    }
    let shared = segments * SEGMENT_BLOCKS;
    // SAFETY: `check` proved that the blocks of each part are inside the slices, `scratch` has room for all parts, and the lengths of
    // `queries` and `out` are asserted; the caller has the ISA.
    unsafe {
        for part in 0..parts {
            let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
            let (of_part, factors) = scratch[part * stride..][..stride].split_at_mut(len);
            let mut of_part = Parts::cut_from(of_part, Q, blocks, groups);
            let queries = &queries[part * dim..][..dim];
            factors.copy_from_slice(&pack_queries::<D, Q>(&tile, queries, &mut of_part));
        }
        for segment in 0..=segments {
            for part in 0..parts {
                let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
                let first = segment * SEGMENT_BLOCKS;
                let range =
                    if first < shared { first..first + SEGMENT_BLOCKS } else { first..blocks };
                let (of_part, factors) = scratch[part * stride..][..stride].split_at_mut(len);
                let mut of_part = Parts::cut_from(of_part, Q, blocks, groups);
                let factors: [f32; Q] = std::array::from_fn(|q| factors[q]);
                // The first part brings shared keys into the cache.
                match part == 0 || segment == segments {
                    true => score::<D, Q, true>(&tile, &factors, blocks, range, &mut of_part),
                    false => score::<D, Q, false>(&tile, &factors, blocks, range, &mut of_part),
                }
            }
        }
        for part in 0..parts {
            let (tile, positions, blocks) = together.part::<i8, Q>(tile, positions, part);
            let (of_part, sums) = scratch[part * stride..][..stride].split_at_mut(len);
            let mut of_part = Parts::cut_from(of_part, Q, blocks, groups);
            sums.copy_from_slice(&weights::<D, Q>(&tile, &positions, blocks, &mut of_part));
        }
        out.fill(0.0);
        for segment in 0..=segments {
            for part in 0..parts {
                let (tile, _, blocks) = together.part::<i8, Q>(tile, positions, part);
                let all = blocks.div_ceil(SEGMENT_BLOCKS);
                let range = if segment < segments { segment..segment + 1 } else { segment..all };
                let of_part =
                    Parts::cut_from(&mut scratch[part * stride..][..len], Q, blocks, groups);
                let out = &mut out[part * padded..][..padded];
                // The last part asks for the next values: earlier, they would put shared ones out of the first cache.
                match part + 1 == parts || segment == segments {
                    true => weigh_values::<D, Q, true>(&tile, blocks, range, &of_part, out),
                    false => weigh_values::<D, Q, false>(&tile, blocks, range, &of_part, out),
                }
            }
        }
    }
    for (part, out) in out.chunks_exact_mut(padded).enumerate() {
        let sums = &scratch[(part + 1) * stride - Q..][..Q];
        divide(out, tile.padded_head_dim, sums);
    }
}
