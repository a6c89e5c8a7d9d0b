//! [`PackedMatrix`]: a ternary matrix in the layout of its format, as the kernels read it.
//!
//! Rows are cut into tiles (see [`super::layout`]); a tile's bytes are contiguous and aligned to 64. The
//! last tile and the last block of a row are padded with zero trits, so that kernels only see whole
//! tiles and blocks. If groups of inputs have scales, each group is padded to whole blocks, and the scales lie apart,
//! sixteen for each tile and group.

use std::{fmt, ops::Range};

use half::f16;
use rayon::prelude::*;

use super::{
    Format, GroupScales, TILE_ROWS, TernaryMatrix,
    layout::{Cut, Layout, Place, with_layout},
    memory::AlignedBytes,
};

/// Largest number of inputs of a matrix. It keeps every int32 sum of a kernel far from overflow, for
/// any scaling of the codes: at most 128 · 192 · 2^16 < 2^31 in a lane.
pub const COLS_MAX: usize = 1 << 18;

/// One packed ternary matrix. Immutable; share it by `Arc`.
pub struct PackedMatrix {
    format: Format,
    rows: usize,
    cols: usize,
    blocks: usize,
    tile_bytes: usize,
    bytes: AlignedBytes, // (tile, tile_bytes)
    groups: Option<PackedGroups>,
}

/// Groups of inputs with their scales.
struct PackedGroups {
    /// Inputs of a group.
    size: usize,
    scales: AlignedBytes, // (tile, group, TILE_ROWS) of f16, zero-padded to whole cache lines
}

/// A matrix cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The matrix has no rows or no columns.
    #[error("a matrix of {rows} x {cols} is empty")]
    Empty {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
    },
    /// The matrix has more columns than the kernels support.
    #[error("{cols} columns exceed the limit of {COLS_MAX}")]
    TooWide {
        /// Input features.
        cols: usize,
    },
    /// The number of trits is not rows × columns.
    #[error("{found} trits for a matrix of {rows} x {cols}")]
    WrongLength {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
        /// Trits given.
        found: usize,
    },
    /// A value is not −1, 0 or 1.
    #[error("value {value} at row {row}, column {col} is not a trit")]
    NotATrit {
        /// Row of the value.
        row: usize,
        /// Column of the value.
        col: usize,
        /// The value.
        value: i8,
    },
}

/// Returns the index of the first value that is not a trit.
fn first_invalid(trits: &[i8]) -> Option<usize> {
    const CHUNK: usize = 1 << 16;
    let is_invalid = |trit: &i8| !(-1..=1).contains(trit);
    // Without an early exit inside a chunk, the loop is vectorized.
    let has_one = |chunk: &[i8]| chunk.iter().fold(false, |found, trit| found | is_invalid(trit));
    let chunk = trits.par_chunks(CHUNK).position_first(has_one)?;
    trits[chunk * CHUNK..].iter().position(is_invalid).map(|at| chunk * CHUNK + at)
}

impl PackedMatrix {
    /// Packs `trits`, `(rows, cols)` row-major, on rayon's threads.
    ///
    /// # Errors
    /// If the shape is empty, too wide or does not match `trits`, or a value is not a trit.
    pub fn pack(format: Format, rows: usize, cols: usize, trits: &[i8]) -> Result<Self, PackError> {
        Self::pack_cut(format, (rows, cols), None, trits)
    }

    fn pack_cut(
        format: Format,
        (rows, cols): (usize, usize),
        group: Option<usize>,
        trits: &[i8],
    ) -> Result<Self, PackError> {
        if rows == 0 || cols == 0 {
            return Err(PackError::Empty { rows, cols });
        }
        if cols > COLS_MAX {
            return Err(PackError::TooWide { cols });
        }
        if rows.checked_mul(cols) != Some(trits.len()) {
            return Err(PackError::WrongLength { rows, cols, found: trits.len() });
        }
        if let Some(at) = first_invalid(trits) {
            return Err(PackError::NotATrit { row: at / cols, col: at % cols, value: trits[at] });
        }
        Ok(with_layout!(format, L => {
            Self::pack_as::<L>(format, rows, Cut::for_layout::<L>(cols, group), trits)
        }))
    }

    /// Packs a matrix with its scales of groups, if it has them.
    ///
    /// # Errors
    /// As [`Self::pack`].
    ///
    /// # Panics
    /// If the number of scales does not match the shape, which readers of files check.
    pub fn pack_matrix(format: Format, matrix: &TernaryMatrix) -> Result<Self, PackError> {
        let TernaryMatrix { rows, cols, ref trits, ref groups, .. } = *matrix;
        let group = groups.as_ref().map(|groups| groups.size);
        let mut packed = Self::pack_cut(format, (rows, cols), group, trits)?;
        packed.groups = groups.as_ref().map(|groups| PackedGroups::pack(rows, cols, groups));
        Ok(packed)
    }

    /// Returns the size in bytes of a packed matrix of this shape, with the scales of groups of this size.
    pub(crate) fn size_for(
        format: Format,
        rows: usize,
        cols: usize,
        group: Option<usize>,
    ) -> usize {
        let tiles = rows.div_ceil(TILE_ROWS);
        let scales = group.map_or(0, |group| PackedGroups::size_for(rows, cols / group));
        with_layout!(format, L => {
            tiles * L::tile_bytes(Cut::for_layout::<L>(cols, group).row_blocks()) + scales
        })
    }

    fn pack_as<L: Layout>(format: Format, rows: usize, cut: Cut, trits: &[i8]) -> Self {
        let (cols, blocks) = (cut.cols, cut.row_blocks());
        let tile_bytes = L::tile_bytes(blocks);
        let mut bytes = AlignedBytes::zeroed(rows.div_ceil(TILE_ROWS) * tile_bytes);
        bytes
            .par_chunks_exact_mut(tile_bytes)
            .zip(trits.par_chunks(TILE_ROWS * cols))
            .for_each(|(tile, trits)| pack_tile::<L>(tile, cut, trits));
        Self { format, rows, cols, blocks, tile_bytes, bytes, groups: None }
    }

    /// Returns the buffers that hold the matrix: the tiles, and the scales of groups if there are any.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &AlignedBytes> {
        [&self.bytes].into_iter().chain(self.groups.as_ref().map(|groups| &groups.scales))
    }

    /// Makes a matrix of [`Self::buffers`] of one of this shape; `read` returns the next buffer, of a length in bytes.
    ///
    /// # Errors
    /// As `read`.
    pub(crate) fn from_buffers<E>(
        format: Format,
        (rows, cols): (usize, usize),
        group: Option<usize>,
        mut read: impl FnMut(usize) -> Result<AlignedBytes, E>,
    ) -> Result<Self, E> {
        let (blocks, tile_bytes) = with_layout!(format, L => {
            let blocks = Cut::for_layout::<L>(cols, group).row_blocks();
            (blocks, L::tile_bytes(blocks))
        });
        let bytes = read(rows.div_ceil(TILE_ROWS) * tile_bytes)?;
        let of_size = |size| {
            let scales = read(PackedGroups::size_for(rows, cols / size))?;
            Ok(PackedGroups { size, scales })
        };
        let groups = group.map(of_size).transpose()?;
        Ok(Self { format, rows, cols, blocks, tile_bytes, bytes, groups })
    }

    /// Returns the trits, `(rows, cols)` row-major.
    pub fn unpack(&self) -> Vec<i8> {
        let mut trits = vec![0; self.rows * self.cols];
        with_layout!(self.format, L => self
        .bytes
        .par_chunks_exact(self.tile_bytes)
        .zip(trits.par_chunks_mut(TILE_ROWS * self.cols))
        .for_each(|(tile, trits)| {
            unpack_tile::<L>(tile, Cut::for_layout::<L>(self.cols, self.group()), trits);
        }));
        trits
    }

    /// Returns the packing.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the number of output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the number of bytes of packed weights and scales with padding, all of which a product reads.
    pub fn size_bytes(&self) -> usize {
        self.bytes.len() + self.groups.as_ref().map_or(0, |groups| groups.scales.len())
    }

    /// Returns the number of inputs of a group, if groups have scales.
    pub fn group(&self) -> Option<usize> {
        self.groups.as_ref().map(|groups| groups.size)
    }

    /// Returns the scales of the groups of a range of tiles, if there are any. // (tile, group, TILE_ROWS)
    pub(crate) fn group_scales(&self, tiles: Range<usize>) -> Option<&[f16]> {
        let groups = self.groups.as_ref()?;
        let of_tile = self.cols / groups.size * TILE_ROWS;
        let scales: &[f16] = bytemuck::cast_slice(&groups.scales);
        Some(&scales[tiles.start * of_tile..tiles.end * of_tile])
    }

    /// Returns the number of tiles of [`TILE_ROWS`] output rows; the last may be partial.
    pub fn tile_count(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// Returns the number of blocks of a tile.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of bytes of one tile.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.tile_bytes
    }

    /// Returns the bytes of a range of tiles.
    pub(crate) fn tiles(&self, tiles: Range<usize>) -> &[u8] {
        &self.bytes[tiles.start * self.tile_bytes..tiles.end * self.tile_bytes]
    }
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix({} {}x{})", self.format, self.rows, self.cols)
    }
}

impl PackedGroups {
    /// Returns the size in bytes of the scales of `count` groups a row.
    fn size_for(rows: usize, count: usize) -> usize {
        let scales = rows.div_ceil(TILE_ROWS) * count * TILE_ROWS;
        (scales * size_of::<f16>()).next_multiple_of(64)
    }

    fn pack(rows: usize, cols: usize, groups: &GroupScales) -> Self {
        let count = cols / groups.size;
        assert!(cols.is_multiple_of(groups.size) && groups.scales.len() == rows * count);
        let mut bytes = AlignedBytes::zeroed(Self::size_for(rows, count));
        let packed: &mut [f16] = bytemuck::cast_slice_mut(&mut bytes);
        for (row, scales) in groups.scales.chunks_exact(count).enumerate() {
            let (tile, lane) = (row / TILE_ROWS, row % TILE_ROWS);
            for (group, scale) in scales.iter().enumerate() {
                packed[(tile * count + group) * TILE_ROWS + lane] = *scale;
            }
        }
        Self { size: groups.size, scales: bytes }
    }
}

fn pack_tile<L: Layout>(tile: &mut [u8], cut: Cut, trits: &[i8]) {
    let zeros = [0; super::layout::BLOCK_COLS_MAX];
    for row in 0..TILE_ROWS {
        let trits = trits.get(row * cut.cols..(row + 1) * cut.cols).unwrap_or(&[]);
        for (block, inputs) in cut.blocks::<L>() {
            let trits = trits.get(inputs).unwrap_or(&[]);
            let mut padded = zeros;
            padded[..trits.len()].copy_from_slice(trits);
            L::set(tile, Place { block, row }, &padded[..L::BLOCK_COLS]);
        }
    }
}

fn unpack_tile<L: Layout>(tile: &[u8], cut: Cut, trits: &mut [i8]) {
    for (row, trits) in trits.chunks_exact_mut(cut.cols).enumerate() {
        for (block, inputs) in cut.blocks::<L>() {
            let found = L::get(tile, Place { block, row });
            let trits = &mut trits[inputs];
            trits.copy_from_slice(&found[..trits.len()]);
        }
    }
}

#[cfg(test)]
mod tests;
