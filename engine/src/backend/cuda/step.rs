//! A step as passes: those that it needs, and the decodes that are begun [ahead](super::ahead).

use super::{
    ahead::{Ahead, MISSES_MAX, Row},
    args::IS_CARRIED,
    backend::CudaBackend,
    device::{Address, DeviceError, Part},
    draws::{Chunk, RowDraw, Rows},
    features::{Feature, FeatureReport},
    found::{Lists, undecided},
};
use crate::{
    backend::{self, Asynchronous, Backend, Logits, StepError, positions},
    kv::{BLOCK_TOKENS, BlockId, LayerGroups, blocks_for},
};

impl Backend for CudaBackend {
    fn vocab_size(&self) -> usize {
        self.shape.vocab
    }

    fn block_count(&self) -> usize {
        self.block_count
    }

    fn weight_bytes(&self) -> Option<usize> {
        Some(self.weights.step_bytes())
    }

    fn step_rows(&self) -> usize {
        self.limits.rows
    }

    fn numerics_class(&self) -> &str {
        &self.numerics_class
    }

    fn step(
        &mut self,
        chunks: &[backend::Chunk<'_>],
        logits: &mut Logits,
    ) -> Result<(), StepError> {
        let blocks = (self.block_count, LayerGroups::ONE);
        positions::check(chunks, &self.config, blocks, &mut self.state.written)?;
        self.run_step(chunks, logits).map_err(failure)
    }

    fn features(&self) -> Vec<FeatureReport> {
        self.device.features().report()
    }

    fn as_asynchronous(&mut self) -> Option<&mut dyn Asynchronous> {
        Some(self)
    }

    fn draws_tokens(&self) -> bool {
        self.weights.tables.head.finds()
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        let (bytes, from_at, to_at) = (self.block_bytes(), self.block_at(from), self.block_at(to));
        // The ranges of a copy must not overlap.
        if from == to { Ok(()) } else { self.device.copy(from_at, to_at, bytes).map_err(failure) }
    }

    fn block_bytes(&self) -> usize {
        self.shape.kv_block_bytes()
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        let (from, before) = (self.block_at(block), content.len());
        content.resize(before + self.block_bytes(), 0);
        self.device.read(&mut [Part { from, to: &mut content[before..] }]).map_err(failure)
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        assert_eq!(content.len(), self.block_bytes(), "the content of one block");
        self.device.write(self.block_at(block), content).map_err(failure)
    }
}

impl Asynchronous for CudaBackend {
    fn decodes_ahead(&self) -> bool {
        true
    }

    fn is_running(&mut self) -> bool {
        self.state.unread.is_some()
    }

    fn wait(&mut self) -> Result<(), StepError> {
        self.finish_unread().map_err(failure)
    }
}

fn failure(error: DeviceError) -> StepError {
    match error {
        DeviceError::Sticky { .. } | DeviceError::Lost { .. } => {
            StepError::DeviceLost(Box::new(error))
        }
        _ => StepError::Device(Box::new(error)),
    }
}

impl CudaBackend {
    /// Returns the address of a block's keys and values.
    fn block_at(&self, block: BlockId) -> Address {
        assert!((block.0 as usize) < self.block_count, "a block of this pool");
        self.kv_base + u64::from(block.0) * self.block_bytes() as u64
    }
}

impl CudaBackend {
    /// Runs a step.
    pub(super) fn run_step(
        &mut self,
        chunks: &[backend::Chunk<'_>],
        logits: &mut Logits,
    ) -> Result<(), DeviceError> {
        let mut draws = std::mem::take(&mut self.state.draws);
        draws.list(chunks);
        let ran = self.run(&draws.chunks(chunks), logits);
        self.state.draws = draws;
        ran
    }

    fn run(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), DeviceError> {
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
        let is_silent =
            rest.len() == chunks.len() && chunks.iter().all(|chunk| chunk.logits == Rows::Nothing);
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
        self.device.features_mut().count_many(Feature::Ahead, chunks.len() - rest.len());

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
        logits.set_drawn(screened.map(|draw| draw.filtered.is_some()));
        Ok(())
    }

    /// Returns the index of the first token of one half of those that are carried.
    fn half_at(&self, half: usize) -> usize {
        half * 2 * self.limits.screened
    }

    /// Returns the draw of each position of a chunk that needs logits, if the screen finds its tokens.
    fn screened(&self, chunk: &Chunk<'_>) -> impl Iterator<Item = Option<RowDraw>> {
        let wanted = chunk.logits.wanted(0..chunk.tokens.len());
        wanted.map(|(_, draw)| draw.filter(|draw| self.screens(draw)))
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
                Rows::Draws([_, _, ..], _) => Rows::All,
                _ => Rows::Last,
            };
            Chunk { logits, ..chunk }
        };
        let again: Vec<Chunk<'_>> = open.iter().map(again).collect();
        let rows_of = |chunk: &Chunk<'_>| chunk.logits.wanted(0..chunk.tokens.len()).count();
        let mut all = vec![0.0; again.iter().map(rows_of).sum::<usize>() * self.shape.vocab];
        self.run_all(&again, &mut all)?;
        let mut rows = all.chunks_exact_mut(self.shape.vocab);
        for (index, again) in open.into_iter().zip(&again) {
            let (chunk, lists) = (&chunks[index], &mut lists[index]);
            let wanted = chunk.logits.wanted(0..chunk.tokens.len()).filter_map(|(_, r)| r);
            let count = rows_of(again);
            let of_wanted = rows.by_ref().take(count).skip(count - lists.len());
            for ((list, draw), logits) in lists.iter_mut().zip(wanted).zip(of_wanted) {
                if list.tokens.is_empty() {
                    *list = undecided(logits, &draw);
                }
            }
        }
        Ok(())
    }

    /// Starts the decodes after chunks with carried tokens, if they will probably be asked for. Tables of blocks tell which
    /// positions a sequence may write.
    fn begin_ahead(
        &mut self,
        chunks: &[Chunk<'_>],
        carried: &[Option<usize>],
        mut ahead: Ahead,
    ) -> Result<Ahead, DeviceError> {
        // If the next step has a pass for the decode of any sequence, that pass computes them all: two passes read all weights twice.
        let has_next = |(chunk, carried): (&Chunk<'_>, &Option<usize>)| match chunk.logits {
            Rows::Nothing => true,
            logits => {
                let counts_token = logits.of_last().is_some_and(|(draw, _)| draw.counts_token);
                carried.is_some() && !counts_token
            }
        };
        if !chunks.iter().zip(carried).all(has_next) {
            return Ok(ahead);
        }
        let most = self.limits.screened.min(self.limits.rows);
        let mut tokens = Vec::new();
        for (index, (chunk, carried)) in chunks.iter().zip(carried).enumerate() {
            let (Some(carried), Some((draw, changes))) = (carried, chunk.logits.of_last()) else {
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
            let (blocks, draw) = (start..ahead.blocks.len(), Some(draw.next()));
            let start = ahead.changes.len();
            ahead.changes.extend_from_slice(changes);
            let changes = start..ahead.changes.len();
            ahead.rows.push(Row { chunk: index, token: None, position, blocks, draw, changes });
        }
        let may_begin = !self.state.alone && self.device.features().allows(Feature::Ahead);
        if tokens.is_empty() || ahead.misses > MISSES_MAX || !may_begin {
            return Ok(ahead);
        }
        let rows = ahead.rows.iter().zip(tokens.chunks(1));
        let decodes: Vec<Chunk<'_>> = rows
            .map(|(row, token)| Chunk {
                tokens: token,
                position: row.position,
                blocks: &ahead.blocks[row.blocks.clone()],
                logits: Rows::Draws(
                    std::slice::from_ref(&row.draw),
                    &ahead.changes[row.changes.clone()],
                ),
            })
            .collect();
        ahead.pass = self.begin(&decodes, self.half_at(ahead.half))?;
        Ok(ahead)
    }
}
