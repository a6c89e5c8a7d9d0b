//! Common to all backends: checks of chunks, requested positions, and the rotation of positions (RoPE).

use std::ops::Range;

use super::{Chunk, LogitsFor, StepError, rope_scaling};
use crate::{
    config::ModelConfig,
    kv::{BLOCK_TOKENS, BlockId, LayerGroups},
    math,
    sampling::{AllowedTokens, FirstQuestion},
};

/// Checks a step's chunks against a model and a pool of `block_count` KV blocks of some groups of layers. `written` is scratch.
pub(super) fn check(
    chunks: &[Chunk<'_>],
    config: &ModelConfig,
    (block_count, groups): (usize, LayerGroups),
    written: &mut Vec<u64>,
) -> Result<(), StepError> {
    for chunk in chunks {
        let end = chunk.position.checked_add(chunk.tokens.len());
        let fits = end.is_some_and(|end| {
            !chunk.tokens.is_empty()
                && chunk.logits.rows_min() <= chunk.tokens.len()
                && end <= config.context_length
                && chunk.windows.len() == groups.windows
                && tables(chunk, groups).all(|(blocks, _)| end <= blocks.len() * BLOCK_TOKENS)
        });
        let in_pool = |block: &BlockId| block.index() < block_count;
        if !fits
            || !tables(chunk, groups).all(|(blocks, first)| blocks[first..].iter().all(in_pool))
        {
            return Err(StepError::BadChunk {
                position: chunk.position,
                tokens: chunk.tokens.len(),
                blocks: chunk.blocks.len(),
            });
        }
        let vocab_size = config.vocab_size;
        if let Some(&token) = chunk.tokens.iter().find(|token| **token as usize >= vocab_size) {
            return Err(StepError::TokenOutOfRange { token, vocab_size });
        }
    }
    check_writes(chunks, (block_count, groups), written)
}

/// Checks that every chunk has a slot of its own for the state of its sequence and for each state that it keeps, and reads none that
/// another one writes. `used` is scratch.
pub(super) fn check_slots(
    chunks: &[Chunk<'_>],
    slots: usize,
    used: &mut Vec<u64>,
) -> Result<(), StepError> {
    used.clear();
    used.resize(slots.div_ceil(64), 0);
    let place = |slot: u32| (slot as usize / 64, 1 << (slot % 64));
    let mut take = |slot: u32, writes: bool| {
        let (word, bit) = place(slot);
        if slot as usize >= slots || used[word] & bit != 0 {
            return Err(StepError::BadSlot { slot, slots });
        }
        used[word] |= if writes { bit } else { 0 };
        Ok(())
    };
    for chunk in chunks {
        take(chunk.state.own, true)?;
        for &(after, slot) in chunk.state.saves {
            if after == 0 || after > chunk.tokens.len() {
                return Err(StepError::BadSlot { slot, slots });
            }
            take(slot, true)?;
        }
    }
    // A chunk may keep a state where it has read one.
    let of_others = chunks.iter().filter_map(|Chunk { state, .. }| {
        state.from.filter(|from| state.saves.iter().all(|(_, slot)| slot != from))
    });
    of_others.into_iter().try_for_each(|slot| take(slot, false))
}

/// Returns the block tables of a chunk, each with the first block that is read.
pub(crate) fn tables<'a>(
    chunk: &Chunk<'a>,
    groups: LayerGroups,
) -> impl Iterator<Item = (&'a [BlockId], usize)> + use<'a> {
    let first = groups.first_block(chunk.position);
    let windows = chunk.windows.iter().map(move |blocks| (&blocks[..], first));
    std::iter::once((chunk.blocks, 0)).chain(windows)
}

/// Rejects steps in which the order of chunks matters: backends run them in parallel.
fn check_writes(
    chunks: &[Chunk<'_>],
    (block_count, groups): (usize, LayerGroups),
    written: &mut Vec<u64>, // a bit for each block
) -> Result<(), StepError> {
    written.clear();
    written.resize(block_count.div_ceil(64), 0);
    let place = |block: BlockId| (block.0 as usize / 64, 1 << (block.0 % 64));
    for chunk in chunks {
        let end = chunk.position + chunk.tokens.len();
        let of_chunk = chunk.position / BLOCK_TOKENS..end.div_ceil(BLOCK_TOKENS);
        for &block in tables(chunk, groups).flat_map(|(blocks, _)| &blocks[of_chunk.clone()]) {
            let (word, bit) = place(block);
            if written[word] & bit != 0 {
                return Err(StepError::SharedBlock { block });
            }
            written[word] |= bit;
        }
    }
    let read = chunks.iter().flat_map(|chunk| {
        let before = chunk.position / BLOCK_TOKENS;
        tables(chunk, groups).flat_map(move |(blocks, first)| &blocks[first..before])
    });
    for &block in read {
        let (word, bit) = place(block);
        if written[word] & bit != 0 {
            return Err(StepError::SharedBlock { block });
        }
    }
    Ok(())
}

impl<'a> LogitsFor<'a> {
    /// Returns how many tokens a chunk must have.
    fn rows_min(self) -> usize {
        if let Self::Draws(draws) = self { draws.len() } else { 1 }
    }

    /// Returns what may be drawn from a row of a chunk with these tokens; `None` for every token.
    pub(super) fn allowed(self, row: usize, tokens: &[u32]) -> Option<&'a AllowedTokens> {
        let Self::Draws(draws) = self else { return None };
        let draw = &draws[row + draws.len() - tokens.len()];
        draw.allowed
    }

    /// Returns the rows of a chunk that logits are requested for, each with what is asked of it first.
    pub(super) fn wanted(
        self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = (usize, FirstQuestion<'a>)> + 'a {
        let last = rows.end;
        let first = match self {
            Self::Nothing => last,
            Self::Last | Self::Largest(_) => last - 1,
            Self::All => rows.start,
            Self::Draws(draws) => last - draws.len(),
        };
        (first..last).map(move |row| match self {
            Self::Largest(largest) => (row, FirstQuestion::Largest(largest)),
            Self::Draws(draws) => (row, draws[row - first].first_question()),
            Self::Nothing | Self::Last | Self::All => (row, FirstQuestion::All),
        })
    }
}

/// The rotation of positions (RoPE).
#[derive(Debug, Clone)]
pub(super) struct Rope {
    /// `theta^(−2j / rotary_dim)`, scaled. // (rotary_dim / 2)
    pub(super) frequencies: Vec<f32>,
    /// Factor of cosines and sines.
    factor: f32,
}

impl Rope {
    /// Returns the rotation of a model, with frequencies as the reference computes them: the power rounded to f32, then
    /// inverted; and scaled.
    pub fn from_config(config: &ModelConfig) -> Self {
        let (theta, dim) = (f64::from(config.rope_theta), config.rotary_dim());
        let power = |j| math::pow(theta, f64::from((2 * j) as f32 / dim as f32)) as f32;
        let powers: Vec<f32> = (0..dim / 2).map(power).collect();
        let (frequencies, factor) = rope_scaling::frequencies(&powers, config);
        Self { frequencies, factor }
    }

    /// Cosines, then sines, of a position's angles. // (2, rotary_dim / 2)
    pub fn rotation(&self, position: usize, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(self.frequencies.len());
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.frequencies) {
            let angle = position as f32 * frequency;
            let (s, c) = math::sin_cos(f64::from(angle));
            (*cos, *sin) = (c as f32 * self.factor, s as f32 * self.factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_that_use_a_written_block_are_refused() {
        let blocks = |ids: &[u32]| ids.iter().copied().map(BlockId).collect::<Vec<_>>();
        let check = |chunks: &[(usize, usize, &[u32])]| {
            let tables: Vec<_> = chunks.iter().map(|(.., ids)| blocks(ids)).collect();
            let chunks: Vec<Chunk<'_>> = chunks
                .iter()
                .zip(&tables)
                .map(|(&(position, tokens, _), blocks)| {
                    let tokens = &[1; 64][..tokens];
                    Chunk {
                        tokens,
                        position,
                        blocks,
                        logits: LogitsFor::Last,
                        state: 0.into(),
                        windows: &[],
                    }
                })
                .collect();
            match check_writes(&chunks, (100, LayerGroups::ONE), &mut vec![1; 3]) {
                Ok(()) => None,
                Err(StepError::SharedBlock { block }) => Some(block.0),
                Err(other) => panic!("{other}"),
            }
        };
        // A full prefix may be shared, and so may blocks beyond the last position of a chunk.
        assert_eq!(check(&[(16, 1, &[0, 1]), (16, 3, &[0, 2]), (32, 1, &[0, 99, 3])]), None);
        assert_eq!(check(&[(0, 1, &[4, 5]), (0, 16, &[5])]), None);
        assert_eq!(check(&[(20, 1, &[0, 1]), (21, 1, &[0, 1])]), Some(1), "two chunks in a block");
        assert_eq!(
            check(&[(15, 1, &[0, 1]), (16, 1, &[0, 1])]),
            Some(0),
            "two chunks, in neighbouring blocks"
        );
        assert_eq!(check(&[(16, 1, &[0, 1]), (15, 1, &[0, 1])]), Some(0), "in any order");
        assert_eq!(check(&[(0, 40, &[64, 65, 66]), (0, 1, &[66])]), Some(66));
    }
}
