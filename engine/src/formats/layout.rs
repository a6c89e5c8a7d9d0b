//! The common part of the packings: tiles of output rows, cut into blocks along the inputs.
//!
//! A tile holds [`TILE_ROWS`] output rows. A block of a tile holds [`Layout::BLOCK_COLS`]
//! consecutive inputs of those rows in 64 bytes of indices, four bytes a row. A kernel multiplies four
//! unsigned codes (`trit + 1`) by four activations in each 32-bit lane, so a vector of 16 lanes holds
//! the tile's 16 sums without additions across lanes. Each format defines how a byte holds several
//! codes.

use std::ops::Range;

/// Output rows of a tile.
pub const TILE_ROWS: usize = 16;

/// Largest [`Layout::BLOCK_COLS`] of all formats.
pub(crate) const BLOCK_COLS_MAX: usize = 24;

/// A packing of one tile.
pub(crate) trait Layout {
    /// Inputs of a block; a multiple of 4.
    const BLOCK_COLS: usize;

    /// Input of the block for each position of a block's activations. Position `4 g + i` is multiplied
    /// by byte `i` of the lanes of the kernel's code vector `g`.
    const ORDER: &'static [u8];

    /// Returns the number of bytes of a tile of `blocks` blocks; a multiple of 64.
    fn tile_bytes(blocks: usize) -> usize {
        64 * blocks
    }

    /// Packs `trits` (one row's part of a block, `BLOCK_COLS` values in −1..=1) into a zeroed tile.
    fn set(tile: &mut [u8], place: Place, trits: &[i8]);

    /// Unpacks the trits that [`Layout::set`] packed, into the first `BLOCK_COLS` elements.
    fn get(tile: &[u8], place: Place) -> [i8; BLOCK_COLS_MAX];
}

/// One row's part of one block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// Block of the tile.
    pub block: usize,
    /// Row of the tile.
    pub row: usize,
}

impl Place {
    /// Returns the offset of the place's four index bytes in a tile that consists of 64-byte blocks.
    pub fn byte(self) -> usize {
        64 * self.block + 4 * self.row
    }
}

/// How the inputs of a row are cut: groups of whole blocks; without scales of groups, the row is one group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub cols: usize,
    /// Inputs of a group.
    pub group: usize,
    /// Blocks of a group.
    pub blocks: usize,
}

impl Cut {
    /// Cuts rows of `cols` inputs.
    pub fn for_layout<L: Layout>(cols: usize, group: Option<usize>) -> Self {
        let group = group.unwrap_or(cols);
        Self { cols, group, blocks: group.div_ceil(L::BLOCK_COLS) }
    }

    /// Returns the number of blocks of a row.
    pub fn row_blocks(self) -> usize {
        self.cols / self.group * self.blocks
    }

    /// Returns each block of a row with the range of its inputs.
    pub fn blocks<L: Layout>(self) -> impl Iterator<Item = (usize, Range<usize>)> {
        (0..self.row_blocks()).map(move |block| {
            let (group, within) = (block / self.blocks, block % self.blocks);
            let end = (group + 1) * self.group;
            let start = (group * self.group + within * L::BLOCK_COLS).min(end);
            (block, start..(start + L::BLOCK_COLS).min(end))
        })
    }
}

/// Evaluates `$body` with `$layout` as the layout type of `$format`.
macro_rules! with_layout {
    ($format:expr, $layout:ident => $body:expr) => {
        match $format {
            $crate::formats::Format::I2S => {
                type $layout = $crate::formats::i2_s::I2S;
                $body
            }
            $crate::formats::Format::Tl1 => {
                type $layout = $crate::formats::tl1::Tl1;
                $body
            }
            $crate::formats::Format::Tl2 => {
                type $layout = $crate::formats::tl2::Tl2;
                $body
            }
        }
    };
}
pub(crate) use with_layout;
