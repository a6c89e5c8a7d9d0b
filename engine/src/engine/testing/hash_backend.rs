//! [`HashBackend`]: a backend without arithmetic, with blocks.

use super::*;
use crate::{
    backend::{Above, Chunk, CopyError, KeptRow, Logits, LogitsFor, Ranking, Rest, StepError},
    kv::BlockId,
};

type Slot = Option<(u32, usize)>; // token, position

pub struct HashBackend {
    blocks: Vec<[Slot; BLOCK_TOKENS]>,
    control: Arc<Mutex<Control>>,
    /// Whether it is like a GPU: each step begins the decodes of the next one, which write a slot behind the sequence, and
    /// tokens are drawn here.
    ahead: bool,
}

impl HashBackend {
    pub fn new(block_count: usize, control: Arc<Mutex<Control>>, ahead: bool) -> Self {
        Self { blocks: vec![[None; BLOCK_TOKENS]; block_count], control, ahead }
    }

    /// Reads the tokens at `0..=last` from the blocks of `chunk`.
    fn read(&self, chunk: &Chunk<'_>, last: usize) -> Vec<u32> {
        let token = |position: usize| {
            let block = chunk.blocks[position / BLOCK_TOKENS];
            let slot = self.blocks[block.index()][position % BLOCK_TOKENS];
            let (token, stored) = slot.expect("every earlier position was computed");
            assert_eq!(stored, position, "block {block:?} holds other positions");
            token
        };
        (0..=last).map(token).collect()
    }

    /// Returns the position after a chunk if its next decode may be begun.
    fn ahead_of(chunk: &Chunk<'_>) -> Option<usize> {
        let next = chunk.position + chunk.tokens.len();
        let has_room = next < chunk.blocks.len() * BLOCK_TOKENS;
        (has_room && chunk.logits.of_last().is_some()).then_some(next)
    }

    /// Checks that a block written by a chunk is in no other table of the step.
    fn check_writes(&self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            let last = chunk.position + chunk.tokens.len() - 1;
            let last = Self::ahead_of(chunk).filter(|_| self.ahead).unwrap_or(last) / BLOCK_TOKENS;
            for written in &chunk.blocks[chunk.position / BLOCK_TOKENS..=last] {
                let readers = chunks.iter().filter(|other| other.blocks.contains(written));
                assert_eq!(readers.count(), 1, "{written:?} is written while others read it");
            }
        }
    }
}

impl Backend for HashBackend {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn block_count(&self) -> usize {
        self.blocks.len()
    }

    fn numerics_class(&self) -> &str {
        "hash"
    }

    fn decodes_ahead(&self) -> bool {
        self.ahead
    }

    fn draws(&self) -> bool {
        self.ahead
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        assert!(!chunks.is_empty() && chunks.iter().all(|chunk| !chunk.tokens.is_empty()));
        self.check_writes(chunks);
        let fails = std::mem::take(&mut self.control.lock().expect("no panic holds it").fail_next);
        for chunk in chunks {
            for (offset, token) in chunk.tokens.iter().enumerate() {
                let position = chunk.position + offset;
                let block = chunk.blocks[position / BLOCK_TOKENS].index();
                let slot = (*token, if fails { usize::MAX } else { position });
                self.blocks[block][position % BLOCK_TOKENS] = Some(slot);
            }
        }
        for (chunk, next) in chunks.iter().filter_map(|c| Some((c, Self::ahead_of(c)?))) {
            if self.ahead {
                let block = chunk.blocks[next / BLOCK_TOKENS].index();
                self.blocks[block][next % BLOCK_TOKENS] = Some((0, usize::MAX));
            }
        }
        if fails {
            return Err(StepError::Device("requested by the test".into()));
        }
        logits.clear(VOCAB);
        let wanted = || chunks.iter().filter(|chunk| chunk.logits != LogitsFor::Nothing);
        let rankings = |chunk: &Chunk<'_>| match chunk.logits {
            LogitsFor::Largest(ranking) => vec![Some(ranking)],
            LogitsFor::Each(rankings, _) => rankings.iter().copied().map(Some).collect(),
            _ => vec![None],
        };
        logits.lay_out(wanted().flat_map(rankings).map(|ranking| ranking.is_none()));
        let (mut all, mut found, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in wanted() {
            let rankings = rankings(chunk);
            let first = chunk.position + chunk.tokens.len() - rankings.len();
            let mut changes = chunk.logits.changes();
            assert!(self.ahead || changes.is_empty(), "this backend does not change logits");
            for (position, ranking) in (first..).zip(rankings) {
                let row = logits_after(&self.read(chunk, position));
                match ranking {
                    Some(ranking) => {
                        let (of_draw, rest) = changes.split_at(ranking.changes);
                        changes = rest;
                        let ranking = match self.ahead {
                            true => ranking,
                            false => Ranking { draw: None, ..ranking },
                        };
                        found.push(draws::of_position(&row, &ranking, of_draw));
                        kept.push((ranking.keeps, row));
                    }
                    None => all.extend(row),
                }
            }
        }
        logits.all_mut().copy_from_slice(&all);
        logits.set_largest(found.iter().map(|found| &found.tokens[..]));
        logits.set_distributions(found.iter().map(|found| found.distribution.clone()));
        // Hidden rows are the logits themselves.
        let of_kept = logits.keep(kept.iter().map(|(keeps, _)| *keeps));
        of_kept.hidden.extend(kept.iter().filter(|(keeps, _)| *keeps).flat_map(|(_, row)| row));
        if self.ahead {
            logits.set_drawn(found.iter().map(|found| found.is_draw));
        }
        Ok(())
    }

    fn tokens_above(
        &mut self,
        kept: KeptRow<'_>,
        above: Above,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Rest>, StepError> {
        let (tokens, rest) = of_logits::above(kept.hidden, above);
        found.clear();
        found.extend(tokens);
        // A bound that is not close, so that some draws are undecided: after the last look, a tenth of the largest weight.
        Ok(Some(Rest { weight: rest.weight * 2.0 + 4e4, ..rest }))
    }

    fn all_logits(&mut self, kept: KeptRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        logits.extend_from_slice(kept.hidden);
        Ok(())
    }

    fn token_logits(
        &mut self,
        kept: KeptRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        let logit = |id: &u32| TokenLogit { id: *id, logit: kept.hidden[*id as usize] };
        found.extend(tokens.iter().map(logit));
        Ok(())
    }

    fn block_bytes(&self) -> usize {
        12 * BLOCK_TOKENS
    }

    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        for slot in self.blocks[block.index()] {
            let (token, position) = slot.expect("only full blocks are read");
            content.extend(token.to_le_bytes());
            content.extend((position as u64).to_le_bytes());
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        for (slot, bytes) in self.blocks[block.index()].iter_mut().zip(content.chunks_exact(12)) {
            let (token, position) = bytes.split_at(4);
            let token = u32::from_le_bytes(token.try_into().expect("four bytes"));
            let position = u64::from_le_bytes(position.try_into().expect("eight bytes"));
            *slot = Some((token, position as usize));
        }
        Ok(())
    }

    fn is_running(&self) -> bool {
        self.control.lock().expect("no panic holds it").is_running
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.blocks[to.index()] = self.blocks[from.index()];
        let mut control = self.control.lock().expect("no panic holds it");
        control.copies += 1;
        if std::mem::take(&mut control.fail_copy) {
            return Err(StepError::Device("requested by the test".into()));
        }
        Ok(())
    }

    fn with_copies(&mut self, blocks: &[BlockId]) -> Result<Box<dyn Backend>, CopyError> {
        let mut copy = vec![[None; BLOCK_TOKENS]; self.blocks.len()];
        for block in blocks {
            copy[block.index()] = self.blocks[block.index()];
        }
        Ok(Box::new(Self { blocks: copy, control: self.control.clone(), ..*self }))
    }
}
