//! The passes of a step, and the decodes that the device computes before they are asked for.
//!
//! While the host handles the tokens of one step, the device already computes the next: the draws of a pass leave their tokens
//! in device memory, where the next pass takes them, and the host uploads everything else. A later step takes the results of
//! a row only if it asks for exactly that row: token, position, blocks, ranking and changes of logits. No decodes are begun beside
//! sequences that need a pass in the next step anyway: those with drafts, and those with penalties, which depend on the drawn token. What is not taken is forgotten, and the keys and
//! values that it wrote lie behind the sequence's last position, where a later pass writes before it reads. So results are the same
//! as without.

use std::ops::Range;

use super::{
    args::IS_CARRIED,
    device::DeviceError,
    found::Lists,
    step::{CudaBackend, InFlight, undecided},
};
use crate::{
    backend::{Chunk, LogitChange, Logits, LogitsFor, Ranking},
    kv::{BLOCK_TOKENS, BlockId, blocks_for},
};

/// Share of rows not taken above which no decodes are begun.
const MISSES_MAX: f32 = 0.25;
/// Share of the last step in the average of misses.
const NEW: f32 = 0.2;

/// The decodes that may follow a step.
#[derive(Debug)]
pub struct Ahead {
    rows: Vec<Row>,
    /// Block tables, one after another.
    blocks: Vec<BlockId>,
    /// Changes of logits, one row's after another's.
    changes: Vec<LogitChange>,
    /// `None` if the device does not compute them.
    pass: Option<InFlight>,
    /// The half of the carried tokens for the draws of this pass.
    half: usize,
    /// Average share of rows that were not asked for.
    misses: f32,
    /// Rows that were taken since the start.
    pub taken: usize,
}

impl Default for Ahead {
    /// Nothing, and a share of misses that falls below the limit with the first decodes that follow others.
    fn default() -> Self {
        let (rows, blocks, changes) = (Vec::new(), Vec::new(), Vec::new());
        Self { rows, blocks, changes, pass: None, half: 0, misses: MISSES_MAX + 0.05, taken: 0 }
    }
}

/// A sequence's next decode.
#[derive(Debug)]
struct Row {
    /// Index of the chunk before it.
    chunk: usize,
    /// `None` if the chunk's token is not known.
    token: Option<u32>,
    position: usize,
    blocks: Range<usize>,
    ranking: Ranking,
    changes: Range<usize>,
}

impl Ahead {
    /// Finds the rows that chunks ask for.
    fn find(&self, chunks: &[Chunk<'_>]) -> Vec<Option<usize>> {
        let mut next = 0;
        let find = |chunk: &Chunk<'_>| {
            let (&[token], Some((ranking, changes))) = (chunk.tokens, chunk.logits.of_last())
            else {
                return None;
            };
            let is_it = |row: &Row| {
                row.position == chunk.position
                    && row.token == Some(token)
                    && row.ranking == ranking
                    && self.changes[row.changes.clone()] == *changes
                    && chunk.blocks.starts_with(&self.blocks[row.blocks.clone()])
            };
            // Sequences mostly keep their order.
            let (before, after) = self.rows.split_at(next);
            let found = after.iter().position(is_it).map(|place| next + place);
            let found = found.or_else(|| before.iter().position(is_it));
            next = found.map_or(next, |found| found + 1);
            found
        };
        chunks.iter().map(find).collect()
    }

    /// Returns whether the device computes the decodes.
    #[cfg(test)]
    pub fn is_begun(&self) -> bool {
        self.pass.is_some()
    }

    /// Returns the average share of misses, with those of a step that asked for so many of the rows.
    fn misses_with(&self, found: usize) -> f32 {
        if self.rows.is_empty() {
            return self.misses;
        }
        let of_step = 1.0 - found as f32 / self.rows.len() as f32;
        (1.0 - NEW) * self.misses + NEW * of_step
    }
}

impl CudaBackend {
    /// Runs a step.
    pub(super) fn run(
        &mut self,
        chunks: &[Chunk<'_>],
        logits: &mut Logits,
    ) -> Result<(), DeviceError> {
        logits.clear(self.shape.vocab);
        logits.lay_out(
            chunks.iter().flat_map(|chunk| self.screened(chunk).map(|screened| screened.is_none())),
        );
        self.state.candidates = 0;
        let before = std::mem::take(&mut self.state.ahead);
        let found = before.find(chunks);
        let found_count = found.iter().flatten().count();
        let misses = before.misses_with(found_count);
        let is_taken = |chunk: usize| before.pass.is_some() && found[chunk].is_some();
        let rest: Vec<usize> = (0..chunks.len()).filter(|chunk| !is_taken(*chunk)).collect();
        let of_rest: Vec<Chunk<'_>> = rest.iter().map(|chunk| chunks[*chunk]).collect();

        let mut lists = vec![Lists::new(); chunks.len()];
        let (carried_at, rows) = (self.half_at(before.half), before.rows.len());
        let mut carried = vec![None; chunks.len()];
        // A step without logits does not wait for its pass.
        let is_silent = rest.len() == chunks.len()
            && chunks.iter().all(|chunk| chunk.logits == LogitsFor::Nothing);
        let pass = match rest.is_empty() || is_silent {
            true => None,
            false => self.begin(&of_rest, carried_at + rows)?,
        };
        if pass.is_none() && !rest.is_empty() {
            let flat = self.run_all(&of_rest, logits.all_mut())?;
            self.spread(flat, &rest, chunks, &mut lists);
        }
        if pass.is_some() {
            // Tokens after drafts are carried, too, and not used.
            let mut place = carried_at + rows;
            for &chunk in &rest {
                let is_next = chunks[chunk].logits.of_last().is_some();
                carried[chunk] = is_next.then_some(place);
                place += self.screened(&chunks[chunk]).count();
            }
        }
        for (chunk, row) in found.iter().enumerate().filter(|(chunk, _)| is_taken(*chunk)) {
            carried[chunk] = row.map(|row| carried_at + row);
        }
        let (taken, half) = (before.taken + chunks.len() - rest.len(), 1 - before.half);
        let mut next =
            self.begin_ahead(chunks, &carried, Ahead { half, misses, ..Ahead::default() })?;
        next.taken = taken;

        if let Some(ahead) = before.pass.filter(|_| taken > before.taken) {
            let of_rows = self.finish(ahead)?;
            for (lists, row) in lists.iter_mut().zip(&found) {
                lists.extend(row.map(|row| of_rows[row].clone()));
            }
        }
        if let Some(pass) = pass {
            let flat = self.finish(pass)?;
            self.spread(flat, &rest, chunks, &mut lists);
        }
        for row in &mut next.rows {
            row.token =
                lists[row.chunk].first().and_then(|list| list.tokens.first()).map(|found| found.id);
        }
        self.decide(chunks, &mut lists)?;
        self.state.ahead = next;
        logits.set_largest(lists.iter().flatten().map(|list| list.tokens.as_slice()));
        logits.set_distributions(lists.into_iter().flatten().map(|list| list.distribution));
        let screened = chunks.iter().flat_map(|chunk| self.screened(chunk)).flatten();
        logits.set_drawn(screened.map(|ranking| ranking.draw.is_some()));
        Ok(())
    }

    /// Returns the index of the first token of one half of those that are carried.
    fn half_at(&self, half: usize) -> usize {
        half * 2 * self.limits.screened
    }

    /// Returns the ranking of each position of a chunk that needs logits, if the screen finds its tokens.
    fn screened(&self, chunk: &Chunk<'_>) -> impl Iterator<Item = Option<Ranking>> {
        let wanted = chunk.logits.wanted(0..chunk.tokens.len());
        wanted.map(|(_, ranking)| ranking.filter(|ranking| self.screens(ranking)))
    }

    /// Gives the lists of some chunks' positions to their chunks.
    fn spread(&self, flat: Lists, of: &[usize], chunks: &[Chunk<'_>], lists: &mut [Lists]) {
        let mut flat = flat.into_iter();
        for &index in of {
            let count = self.screened(&chunks[index]).flatten().count();
            lists[index].extend(flat.by_ref().take(count));
        }
    }

    /// Computes all logits of the chunks that their passes did not decide, after which later passes have overwritten their hidden
    /// rows, and lists the first tokens.
    fn decide(&mut self, chunks: &[Chunk<'_>], lists: &mut [Lists]) -> Result<(), DeviceError> {
        let is_open = |chunk: &usize| lists[*chunk].iter().any(|list| list.tokens.is_empty());
        let open: Vec<usize> = (0..chunks.len()).filter(is_open).collect();
        if open.is_empty() {
            return Ok(());
        }
        let again = |chunk: &usize| {
            let chunk = chunks[*chunk];
            let logits = match chunk.logits {
                LogitsFor::Each([_, _, ..], _) => LogitsFor::All,
                _ => LogitsFor::Last,
            };
            Chunk { logits, ..chunk }
        };
        let again: Vec<Chunk<'_>> = open.iter().map(again).collect();
        let rows_of = |chunk: &Chunk<'_>| chunk.logits.wanted(0..chunk.tokens.len()).count();
        let mut all = vec![0.0; again.iter().map(rows_of).sum::<usize>() * self.shape.vocab];
        self.run_all(&again, &mut all)?;
        let mut rows = all.chunks_exact(self.shape.vocab);
        for (index, again) in open.into_iter().zip(&again) {
            let (chunk, lists) = (&chunks[index], &mut lists[index]);
            let wanted = chunk.logits.wanted(0..chunk.tokens.len()).filter_map(|(_, r)| r);
            let count = rows_of(again);
            let of_wanted = rows.by_ref().take(count).skip(count - lists.len());
            for ((list, ranking), logits) in lists.iter_mut().zip(wanted).zip(of_wanted) {
                if list.tokens.is_empty() {
                    *list = undecided(logits, &ranking);
                }
            }
        }
        Ok(())
    }

    /// Starts the decodes after chunks whose tokens are carried, if they will probably be asked for. Tables of blocks tell which
    /// positions a sequence may write.
    fn begin_ahead(
        &mut self,
        chunks: &[Chunk<'_>],
        carried: &[Option<usize>],
        mut ahead: Ahead,
    ) -> Result<Ahead, DeviceError> {
        // If the next step has a pass for the decode of any sequence, that pass computes them all: two passes read all weights twice.
        let has_next = |(chunk, carried): (&Chunk<'_>, &Option<usize>)| match chunk.logits {
            LogitsFor::Nothing => true,
            logits => {
                let counts_token =
                    logits.of_last().is_some_and(|(ranking, _)| ranking.counts_token);
                carried.is_some() && !counts_token
            }
        };
        if !chunks.iter().zip(carried).all(has_next) {
            return Ok(ahead);
        }
        let most = self.limits.screened.min(self.limits.rows);
        let mut tokens = Vec::new();
        for (index, (chunk, carried)) in chunks.iter().zip(carried).enumerate() {
            let (Some(carried), Some((ranking, changes))) = (carried, chunk.logits.of_last())
            else {
                continue;
            };
            let position = chunk.position + chunk.tokens.len();
            let has_room = position < chunk.blocks.len() * BLOCK_TOKENS;
            if !has_room || position >= self.config.context_length || tokens.len() == most {
                continue;
            }
            tokens.push(IS_CARRIED | *carried as u32);
            let start = ahead.blocks.len();
            ahead.blocks.extend_from_slice(&chunk.blocks[..blocks_for(position + 1)]);
            let (blocks, ranking) = (start..ahead.blocks.len(), ranking.next());
            let start = ahead.changes.len();
            ahead.changes.extend_from_slice(changes);
            let changes = start..ahead.changes.len();
            ahead.rows.push(Row { chunk: index, token: None, position, blocks, ranking, changes });
        }
        if tokens.is_empty() || ahead.misses > MISSES_MAX || self.state.alone {
            return Ok(ahead);
        }
        let rows = ahead.rows.iter().zip(tokens.chunks(1));
        let decodes: Vec<Chunk<'_>> = rows
            .map(|(row, token)| Chunk {
                tokens: token,
                position: row.position,
                blocks: &ahead.blocks[row.blocks.clone()],
                logits: LogitsFor::Each(
                    std::slice::from_ref(&row.ranking),
                    &ahead.changes[row.changes.clone()],
                ),
            })
            .collect();
        ahead.pass = self.begin(&decodes, self.half_at(ahead.half))?;
        Ok(ahead)
    }
}
