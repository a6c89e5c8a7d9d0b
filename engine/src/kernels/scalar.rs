//! The reference of the ternary product, written for clarity instead of speed.
//!
//! It reads weights by `Layout::get` and activations by `Layout::ORDER`, and sums trit × activation in
//! int32. The other paths sum `(trit + 1) × activation` and subtract the row's sum. Both are exact,
//! so the results are equal.

use super::product::{GroupProduct, Product};
use crate::formats::{
    TILE_ROWS,
    layout::{Layout, Place, with_layout},
};

/// Runs the product.
pub(super) fn gemm(product: Product<'_>) {
    with_layout!(product.format, L => gemm_as::<L>(product));
}

fn gemm_as<L: Layout>(product: Product<'_>) {
    let Product { tiles, tile_bytes, blocks, x, x_stride, y, .. } = product;
    let y_stride = tiles.len() / tile_bytes * TILE_ROWS;
    y.fill(0);
    for (tile_index, tile) in tiles.chunks_exact(tile_bytes).enumerate() {
        for row in 0..TILE_ROWS {
            for block in 0..blocks {
                let trits = L::get(tile, Place { block, row });
                for (x, y) in x.chunks_exact(x_stride).zip(y.chunks_exact_mut(y_stride)) {
                    let x = &x[block * L::BLOCK_COLS..(block + 1) * L::BLOCK_COLS];
                    y[tile_index * TILE_ROWS + row] += dot::<L>(&trits, x);
                }
            }
        }
    }
}

/// Runs the product with scales of groups.
pub(super) fn gemm_groups(product: GroupProduct<'_>) {
    with_layout!(product.format, L => gemm_groups_as::<L>(product));
}

fn gemm_groups_as<L: Layout>(product: GroupProduct<'_>) {
    let GroupProduct { tiles, tile_bytes, groups, group_blocks, tile_scales, .. } = product;
    let GroupProduct { digits, digit_bytes, x, x_stride, row_scales, y, .. } = product;
    let y_stride = tiles.len() / tile_bytes * TILE_ROWS;
    y.fill(0.0);
    for (tile_index, tile) in tiles.chunks_exact(tile_bytes).enumerate() {
        for group in 0..groups {
            for row in 0..TILE_ROWS {
                let trits: Vec<_> = (group * group_blocks..(group + 1) * group_blocks)
                    .map(|block| L::get(tile, Place { block, row }))
                    .collect();
                let weight_scale = tile_scales[(tile_index * groups + group) * TILE_ROWS + row];
                let rows = x.chunks_exact(x_stride).zip(y.chunks_exact_mut(y_stride));
                for (i, (x, y)) in rows.enumerate() {
                    let x = &x[group * digits * digit_bytes..][..digits * digit_bytes];
                    let sum = x.chunks_exact(digit_bytes).fold(0, |high, digit| {
                        let blocks = trits.iter().zip(digit.chunks_exact(L::BLOCK_COLS));
                        256 * high + blocks.map(|(trits, x)| dot::<L>(trits, x)).sum::<i32>()
                    });
                    let scale = weight_scale.to_f32() * row_scales[i * groups + group];
                    let y = &mut y[tile_index * TILE_ROWS + row];
                    *y = (sum as f32).mul_add(scale, *y);
                }
            }
        }
    }
}

/// Returns the dot product of a block.
fn dot<L: Layout>(trits: &[i8], x: &[i8]) -> i32 {
    L::ORDER.iter().zip(x).map(|(&k, &q)| i32::from(trits[usize::from(k)]) * i32::from(q)).sum()
}
