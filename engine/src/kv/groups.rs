//! Groups of layers that have KV blocks of their own, so that blocks behind a window are freed in the layers that have the window.
//!
//! A block holds the keys and values of 16 positions in one group of layers, and all blocks of a storage have the same size. Models
//! whose layers all attend to every position have one group. Otherwise the layers without a window are one group, and those with
//! it are groups of as many layers:
//!
//! ```text
//! positions   0 ─────────────────────────────────────► now
//! full        [0][1][2][3][4][5][6][7][8][9]
//! window 1                          [7][8][9]      the others are gone
//! window 2                          [7][8][9]
//! ```

use super::{BLOCK_TOKENS, BlockId, blocks_for};

/// The groups of a model's layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerGroups {
    /// Groups of layers with a window.
    pub windows: usize,
    /// Positions that a token attends to in these, with its own.
    pub window: usize,
    /// Positions that a step reads together, from a multiple of this number on; a multiple of [`BLOCK_TOKENS`].
    pub part: usize,
}

impl LayerGroups {
    /// One group of all layers, without windows.
    pub const ONE: Self = Self { windows: 0, window: 0, part: BLOCK_TOKENS };

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        1 + self.windows
    }

    /// Returns the first block that steps from this position on read in layers with a window; 0 without such layers.
    pub fn first_block(&self, position: usize) -> usize {
        if self.windows == 0 {
            return 0;
        }
        let first = (position + 1).saturating_sub(self.window);
        (first - first % self.part) / BLOCK_TOKENS
    }

    /// Returns the most blocks that a sequence has at once for this many tokens, if a step computes up to `rows` of them.
    pub fn blocks_for(&self, tokens: usize, rows: usize) -> usize {
        let blocks = blocks_for(tokens);
        blocks + self.windows * blocks.min(self.blocks_in_window(rows))
    }

    /// Returns the most tokens with at most so many blocks, as [`blocks_for`](Self::blocks_for) counts them.
    pub fn tokens_in(&self, blocks: usize, rows: usize) -> usize {
        let in_window = self.blocks_in_window(rows);
        let most = match blocks / self.count() {
            short if short < in_window => short,
            _ => blocks - self.windows * in_window,
        };
        most * BLOCK_TOKENS
    }

    /// Returns block tables of a sequence that alone uses the blocks from `first` on, as many as this for each group: those of the
    /// layers without a window, and those of the others.
    pub fn tables(&self, first: usize, blocks: usize) -> (Vec<BlockId>, Vec<Vec<BlockId>>) {
        let table = |group: usize| {
            let first = first + group * blocks;
            (first..first + blocks).map(|block| BlockId(block as u32)).collect()
        };
        (table(0), (1..self.count()).map(table).collect())
    }

    /// Returns the most blocks that a group with a window has at once: what a step reads and writes, and the block after that.
    fn blocks_in_window(&self, rows: usize) -> usize {
        blocks_for(self.window + self.part + rows) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: LayerGroups = LayerGroups { windows: 3, window: 24, part: 32 };

    #[test]
    fn blocks_are_read_from_the_part_with_the_first_position_of_the_window() {
        let first = |position| GROUPS.first_block(position);
        assert_eq!([0, 23, 54].map(first), [0, 0, 0], "the window of 54 begins at 31");
        assert_eq!([55, 56, 86, 87].map(first), [2, 2, 2, 4]);
        assert_eq!(LayerGroups::ONE.first_block(5), 0);
    }

    #[test]
    fn a_step_reads_and_writes_no_more_blocks_than_were_counted() {
        for rows in [1, 7, 16, 50] {
            let most = GROUPS.blocks_in_window(rows);
            for position in 0..500 {
                let used = blocks_for(position + rows) - GROUPS.first_block(position);
                assert!(used <= most, "{rows} rows from {position}: {used} above {most}");
            }
        }
    }

    #[test]
    fn tokens_and_blocks_agree() {
        for blocks in 4..200 {
            let tokens = GROUPS.tokens_in(blocks, 8);
            assert!(GROUPS.blocks_for(tokens, 8) <= blocks, "{tokens} tokens");
            assert!(GROUPS.blocks_for(tokens + 1, 8) > blocks, "more than {tokens} tokens");
        }
        assert_eq!(LayerGroups::ONE.tokens_in(5, 512), 80);
        assert_eq!(LayerGroups::ONE.blocks_for(81, 512), 6);
    }
}
