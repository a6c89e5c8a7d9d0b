//! The reference of the ternary product, written for clarity instead of speed.
//!
//! It reads weights by `Layout::get` and activations by `Layout::ORDER`, and sums trit × activation in
//! int32. The other paths sum `(trit + 1) × activation` and subtract the row's sum. Both are exact,
//! so the results are equal.

use super::gemm::Product;
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

/// Returns the dot product of a block.
fn dot<L: Layout>(trits: &[i8], x: &[i8]) -> i32 {
    L::ORDER.iter().zip(x).map(|(&k, &q)| i32::from(trits[usize::from(k)]) * i32::from(q)).sum()
}
