//! The common loops of the vector paths; each ISA defines its vectors ([`Vectors`](vectors::Vectors)).
//!
//! A vector has one 32-bit lane for each of a tile's 16 output rows. Weights come as unsigned codes
//! `trit + 1`, four inputs a lane; four activations of a row are broadcast to all lanes; each lane adds
//! a dot product of four. Nothing is added across lanes, and `Σ code · q − Σ q = Σ trit · q`.
//!
//! ```text
//! for each tile
//!   for each group of R activation rows
//!     for each chunk of blocks          (as long as the accumulators cannot overflow)
//!       for each block, for each part of it
//!         expand the codes              (once for R rows)
//!         for each code vector and row: broadcast 4 activations, accumulate
//! ```
//!
//! Weights are read in memory order. A multiply-add reads 1/4 (`i2_s`, `tl1`) or 5/24 (`tl2`) bytes of
//! weights, divided by R.

pub mod blocks;
pub mod many;
pub mod peak;
pub mod vectors;

/// Defines the loops with the features enabled, where the names that they use are in scope.
macro_rules! enabled {
    ($vectors:ty, $features:literal, $block:ident, $expand:ident, $peak:ident $(, $many:ident)?) => {
        #[target_feature(enable = $features)]
        unsafe fn $block<
            E: Expand<$vectors>,
            const R: usize,
            const A: usize,
            const TILES: usize,
        >(
            work: Work,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { block_rows::<$vectors, E, R, A, TILES>(work) }
        }

        #[target_feature(enable = $features)]
        unsafe fn $expand<E: Expand<$vectors>>(
            tile: Tile,
            blocks: Range<usize>,
            ahead: usize,
            codes: &mut Codes<$vectors>,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { many::expand::<$vectors, E>(tile, blocks, ahead, codes) }
        }

        #[target_feature(enable = $features)]
        unsafe fn $peak(rounds: usize) {
            // SAFETY: guaranteed by the caller.
            unsafe { peak::accumulate_all::<$vectors>(rounds) }
        }

        $(#[target_feature(enable = $features)]
        unsafe fn $many<const R: usize, const TILES: usize>(many: Many<$vectors>) {
            // SAFETY: guaranteed by the caller.
            unsafe { many::rows_by_tiles::<$vectors, R, TILES>(many) }
        })?
    };
}

pub(super) use enabled;
