//! The blocks of a sequence: a table for each [group of layers](LayerGroups).

use super::{BlockCache, BlockHash, BlockId, LayerGroups, Writable};

/// The blocks of a sequence. In each table block `i` holds positions `16 i .. 16 i + 16`.
#[derive(Debug, Clone, Default)]
pub struct BlockTable {
    /// Of the layers without a window.
    full: Vec<BlockId>,
    /// Of the layers with a window: those that are no longer read are [`BlockId::GONE`].
    windows: Vec<Vec<BlockId>>, // (group)
    /// Leading blocks of the windows that are gone.
    gone: usize,
}

impl BlockTable {
    /// Returns the table of a sequence without blocks.
    pub fn new(groups: LayerGroups) -> Self {
        Self { full: Vec::new(), windows: vec![Vec::new(); groups.windows], gone: 0 }
    }

    /// Returns how many of the leading blocks with these hashes a sequence of this many tokens can go on after. It has at least one
    /// token to compute.
    pub fn cached(
        cache: &BlockCache,
        groups: LayerGroups,
        hashes: &[BlockHash],
        tokens: usize,
    ) -> usize {
        let has = |hash: &BlockHash| cache.peek(hash).is_some();
        let full = hashes.iter().take_while(|hash| has(hash)).count();
        let (mut blocks, mut run) = (0, 0);
        for (index, hash) in hashes[..full].iter().enumerate() {
            let is_whole = (1..groups.count()).all(|group| has(&hash.of_group(group)));
            run = if is_whole { run + 1 } else { 0 };
            if run + first_needed(groups, index + 1, tokens) > index {
                blocks = index + 1;
            }
        }
        blocks
    }

    /// Returns a table of the leading blocks with these hashes, all of which are [cached](Self::cached), for a sequence of this many
    /// tokens. It is not yet a holder of them.
    pub fn of_cached(
        cache: &BlockCache,
        groups: LayerGroups,
        hashes: &[BlockHash],
        tokens: usize,
    ) -> Self {
        let gone = match hashes.len() {
            0 => 0,
            count => first_needed(groups, count, tokens),
        };
        let block = |hash: &BlockHash| cache.peek(hash).unwrap_or(BlockId::GONE);
        let of_group = |group: usize| {
            let before = std::iter::repeat_n(BlockId::GONE, gone);
            before.chain(hashes[gone..].iter().map(|hash| block(&hash.of_group(group)))).collect()
        };
        let full = hashes.iter().map(block).collect();
        Self { full, windows: (1..groups.count()).map(of_group).collect(), gone }
    }

    /// Returns the blocks of the layers without a window.
    pub fn full(&self) -> &[BlockId] {
        &self.full
    }

    /// Returns the blocks of the layers with a window. // (group)
    pub fn windows(&self) -> &[Vec<BlockId>] {
        &self.windows
    }

    /// Returns every block, once for each table that it is in.
    pub fn held(&self) -> impl Iterator<Item = BlockId> {
        let of_windows = self.windows.iter().flat_map(|blocks| blocks.iter().skip(self.gone));
        self.full.iter().chain(of_windows).copied()
    }

    /// Returns the full blocks from `first` on with the names of their contents: their number in the sequence, name, block. `hashes`
    /// are those of all leading full blocks.
    pub fn named(
        &self,
        hashes: &[BlockHash],
        first: usize,
    ) -> impl Iterator<Item = (usize, BlockHash, BlockId)> {
        let of_full = hashes.iter().zip(&self.full).enumerate().skip(first);
        let of_full = of_full.map(|(index, (hash, block))| (index, *hash, *block));
        let of_windows = self.windows.iter().zip(1..).flat_map(move |(blocks, group)| {
            let named = hashes.iter().zip(blocks).enumerate().skip(self.gone.max(first));
            named.map(move |(index, (hash, block))| (index, hash.of_group(group), *block))
        });
        of_full.chain(of_windows)
    }

    /// Makes room in the tables for this many blocks in all.
    pub fn reserve(&mut self, blocks: usize) {
        for table in std::iter::once(&mut self.full).chain(&mut self.windows) {
            table.reserve_exact(blocks.saturating_sub(table.len()));
        }
    }

    /// Makes block `index` writable in every table, and adds the copies that have to be made before. False if there are too few
    /// blocks; what was taken stays, for another try.
    pub fn take(
        &mut self,
        index: usize,
        cache: &mut BlockCache,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> bool {
        std::iter::once(&mut self.full).chain(&mut self.windows).all(|table| {
            let Some(block) = table.get_mut(index) else {
                let fresh = cache.allocate();
                table.extend(fresh);
                return fresh.is_some();
            };
            match cache.make_writable(*block) {
                None => return false,
                Some(Writable::InPlace) => {}
                Some(Writable::Copied(copy)) => {
                    copies.push((*block, copy));
                    *block = copy;
                }
            }
            true
        })
    }

    /// Releases the blocks of the windows before block `first`.
    pub fn release_before(&mut self, first: usize, cache: &mut BlockCache) {
        for index in self.gone..first {
            for table in &mut self.windows {
                cache.release(std::mem::replace(&mut table[index], BlockId::GONE));
            }
        }
        self.gone = self.gone.max(first);
    }

    /// Releases all blocks, the last ones first (see [`PrefixCache`](super::PrefixCache)).
    pub fn release_all(&mut self, cache: &mut BlockCache) {
        let longest = self.windows.iter().map(Vec::len).fold(self.full.len(), usize::max);
        for index in (0..longest).rev() {
            let windows = self.windows.iter().filter(|_| index >= self.gone);
            for table in windows.chain([&self.full]) {
                table.get(index).into_iter().for_each(|block| cache.release(*block));
            }
        }
        self.full.clear();
        self.windows.iter_mut().for_each(Vec::clear);
        self.gone = 0;
    }

    /// Returns a table of other blocks, and adds the copies that give them the contents of these. `None` if there are too few blocks.
    pub fn copied(
        &self,
        cache: &mut BlockCache,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Option<Self> {
        if self.held().count() > cache.available() {
            return None;
        }
        let mut copy = self.clone();
        let of_windows =
            copy.windows.iter_mut().flat_map(|blocks| blocks.iter_mut().skip(self.gone));
        for block in copy.full.iter_mut().chain(of_windows) {
            let to = cache.allocate()?;
            copies.push((*block, to));
            *block = to;
        }
        Some(copy)
    }
}

/// Returns the first block that is read in layers with a window after so many leading blocks of this many tokens, of which the last is
/// always computed.
fn first_needed(groups: LayerGroups, blocks: usize, tokens: usize) -> usize {
    groups.first_block((blocks * super::BLOCK_TOKENS).min(tokens - 1)).min(blocks)
}
