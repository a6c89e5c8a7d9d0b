//! [`HashBackend`]: a backend without arithmetic, with blocks.

use super::*;
use crate::{
    backend::{
        Asynchronous, Chunk, CopyError, Logits, LogitsFor, Recurrent, ScreenedRow, Screening,
        SlotSets, StateSlots, StepError, positions::tables, slot_sets::SetsOf,
    },
    kv::{BLOCK_TOKENS, BlockId, LayerGroups},
    sampling::{
        FirstQuestion, Largest, LogitsRow as _, Remainder, RowMetadata, Threshold, TokenLogit,
    },
};

/// What a position needs.
enum Wanted<'a> {
    /// All logits.
    All,
    Largest(Largest),
    /// The logits of these tokens.
    Tokens(&'a [u32]),
    /// What a device finds.
    Draw(&'a RowMetadata<'a>),
}

type Slot = Option<(u32, usize)>; // token, position

pub struct HashBackend {
    blocks: Vec<[Slot; BLOCK_TOKENS]>,
    /// Groups of layers with a window have blocks with the same contents.
    groups: LayerGroups,
    control: Arc<Mutex<Control>>,
    /// Whether it is like a GPU: each step begins the decodes of the next one, which write a slot behind the sequence, and
    /// tokens are drawn here.
    ahead: bool,
    /// Tokens before each slot's state, if there are recurrent layers.
    states: Option<SetsOf<Vec<Vec<u32>>>>,
}

impl HashBackend {
    pub fn new(block_count: usize, control: Arc<Mutex<Control>>, ahead: bool) -> Self {
        let (blocks, groups) = (vec![[None; BLOCK_TOKENS]; block_count], LayerGroups::ONE);
        Self { blocks, groups, control, ahead, states: None }
    }

    /// Gives the backend groups of layers.
    pub fn with_groups(self, groups: LayerGroups) -> Self {
        Self { groups, ..self }
    }

    /// Gives the backend recurrent layers, with so many slots for states.
    pub fn with_states(mut self, slots: usize) -> Self {
        self.states = Some(SetsOf::new(vec![Vec::new(); slots]));
        self
    }

    /// Checks that a chunk begins with the state of its sequence, and keeps its states.
    fn run_states(&mut self, chunks: &[Chunk<'_>], fails: bool) {
        let Some(states) = &mut self.states else { return };
        let mut written = Vec::new();
        let before: Vec<Vec<u32>> = chunks
            .iter()
            .map(|chunk| match chunk.position {
                0 => Vec::new(),
                _ => states[chunk.state.from.unwrap_or(chunk.state.own) as usize].clone(),
            })
            .collect();
        for (chunk, before) in chunks.iter().zip(before) {
            assert_eq!(before.len(), chunk.position, "the state of another position");
            let after = |count: usize| match fails {
                true => vec![u32::MAX],
                false => [&before, &chunk.tokens[..count]].concat(),
            };
            let own = (chunk.tokens.len(), chunk.state.own);
            for &(count, slot) in chunk.state.saves.iter().chain([&own]) {
                states[slot as usize] = after(count);
                written.push(slot);
            }
        }
        for StateSlots { from, saves, .. } in chunks.iter().map(|chunk| chunk.state) {
            // A chunk may keep a state where it has read one.
            let read = from.filter(|from| saves.iter().all(|(_, slot)| slot != from));
            assert!(
                read.is_none_or(|slot| !written.contains(&slot)),
                "a state is read and written"
            );
        }
        written.sort_unstable();
        assert!(written.windows(2).all(|pair| pair[0] != pair[1]), "a state is written twice");
    }

    /// Reads the tokens at `0..=last` from the blocks of `chunk`.
    fn read(&self, chunk: &Chunk<'_>, last: usize) -> Vec<u32> {
        let token = |blocks: &[BlockId], position: usize| {
            let block = blocks[position / BLOCK_TOKENS];
            let slot = self.blocks[block.index()][position % BLOCK_TOKENS];
            let (token, stored) = slot.expect("every earlier position was computed");
            assert_eq!(stored, position, "block {block:?} holds other positions");
            token
        };
        let tokens: Vec<u32> = (0..=last).map(|position| token(chunk.blocks, position)).collect();
        for (blocks, first) in tables(chunk, self.groups) {
            for (position, expected) in tokens.iter().enumerate().skip(first * BLOCK_TOKENS) {
                assert_eq!(token(blocks, position), *expected, "position {position}");
            }
        }
        tokens
    }

    /// Writes a slot of a chunk's sequence in every table.
    fn write(&mut self, chunk: &Chunk<'_>, position: usize, slot: (u32, usize)) {
        for (blocks, _) in tables(chunk, self.groups) {
            let block = blocks[position / BLOCK_TOKENS].index();
            self.blocks[block][position % BLOCK_TOKENS] = Some(slot);
        }
    }

    /// Returns the position after a chunk if its next decode may be begun.
    fn ahead_of(chunk: &Chunk<'_>) -> Option<usize> {
        let next = chunk.position + chunk.tokens.len();
        let has_room = next < chunk.blocks.len() * BLOCK_TOKENS;
        let is_drawn = match chunk.logits {
            LogitsFor::Largest(_) => true,
            LogitsFor::Draws(&[row]) => !row.needs_all(true),
            LogitsFor::Nothing | LogitsFor::Last | LogitsFor::All | LogitsFor::Draws(_) => false,
        };
        (has_room && is_drawn).then_some(next)
    }

    /// Returns what each position of a chunk needs that logits are requested for.
    fn wanted<'a>(&self, chunk: &Chunk<'a>) -> Vec<Wanted<'a>> {
        let of_draw = |row: &'a RowMetadata<'a>| match row {
            row if self.ahead && !row.needs_all(true) => Wanted::Draw(row),
            row => match row.first_question() {
                FirstQuestion::All => Wanted::All,
                FirstQuestion::Largest(largest) => Wanted::Largest(largest),
                FirstQuestion::Tokens(tokens) => Wanted::Tokens(tokens),
            },
        };
        match chunk.logits {
            LogitsFor::Nothing => vec![],
            LogitsFor::Last | LogitsFor::All => vec![Wanted::All],
            LogitsFor::Largest(largest) => vec![Wanted::Largest(largest)],
            LogitsFor::Draws(rows) => rows.iter().map(of_draw).collect(),
        }
    }

    /// Checks that a block written by a chunk is in no other table of the step.
    fn check_writes(&self, chunks: &[Chunk<'_>]) {
        for chunk in chunks {
            let last = chunk.position + chunk.tokens.len() - 1;
            let last = Self::ahead_of(chunk).filter(|_| self.ahead).unwrap_or(last) / BLOCK_TOKENS;
            let of_chunk = chunk.position / BLOCK_TOKENS..=last;
            for written in
                tables(chunk, self.groups).flat_map(|(blocks, _)| &blocks[of_chunk.clone()])
            {
                let tables = chunks.iter().flat_map(|other| tables(other, self.groups));
                let readers = tables.filter(|(blocks, _)| blocks.contains(written));
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

    fn layer_groups(&self) -> LayerGroups {
        self.groups
    }

    fn numerics_class(&self) -> &str {
        "hash"
    }

    fn as_screening(&mut self) -> Option<&mut dyn Screening> {
        Some(self)
    }

    fn as_asynchronous(&mut self) -> Option<&mut dyn Asynchronous> {
        Some(self)
    }

    fn as_recurrent(&mut self) -> Option<&mut dyn Recurrent> {
        if self.states.is_some() { Some(self) } else { None }
    }

    fn draws_tokens(&self) -> bool {
        self.ahead
    }

    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        assert!(!chunks.is_empty() && chunks.iter().all(|chunk| !chunk.tokens.is_empty()));
        self.check_writes(chunks);
        let fails = std::mem::take(&mut self.control.lock().expect("no panic holds it").fail_next);
        self.run_states(chunks, fails);
        for chunk in chunks {
            for (offset, token) in chunk.tokens.iter().enumerate() {
                let position = chunk.position + offset;
                let slot = (*token, if fails { usize::MAX } else { position });
                self.write(chunk, position, slot);
            }
        }
        for (chunk, next) in chunks.iter().filter_map(|c| Some((c, Self::ahead_of(c)?))) {
            if self.ahead {
                self.write(chunk, next, (0, usize::MAX));
            }
        }
        if fails {
            return Err(StepError::Device("requested by the test".into()));
        }
        logits.clear(VOCAB);
        let is_whole = |wanted: Wanted<'_>| matches!(wanted, Wanted::All);
        let all_wanted = chunks.iter().flat_map(|chunk| self.wanted(chunk));
        logits.lay_out(all_wanted.map(is_whole));
        let (mut all, mut found, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in chunks {
            let wanted = self.wanted(chunk);
            let first = chunk.position + chunk.tokens.len() - wanted.len();
            for (position, wanted) in (first..).zip(wanted) {
                let tokens = self.read(chunk, position);
                if let Some(states) = &self.states {
                    assert!(states[chunk.state.own as usize].starts_with(&tokens), "another state");
                }
                let row = logits_after(&tokens);
                match wanted {
                    Wanted::All => all.extend(row),
                    Wanted::Largest(largest) => {
                        let mut tokens = Vec::new();
                        let Ok(()) = row.clone().largest(&largest, &mut tokens);
                        let (is_draw, distribution) = (false, None);
                        found.push(draws::OfPosition { tokens, is_draw, distribution });
                        kept.push((largest.others_follow, row));
                    }
                    Wanted::Tokens(wanted) => {
                        let mut tokens = Vec::new();
                        let Ok(()) = row.clone().logits_of(wanted, &mut tokens);
                        let (is_draw, distribution) = (false, None);
                        found.push(draws::OfPosition { tokens, is_draw, distribution });
                        kept.push((false, row));
                    }
                    Wanted::Draw(draw) => {
                        found.push(draws::of_position(&row, draw));
                        kept.push((draw.choices > 1 && draw.largest().others_follow, row));
                    }
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

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.blocks[to.index()] = self.blocks[from.index()];
        let mut control = self.control.lock().expect("no panic holds it");
        control.copies += 1;
        if std::mem::take(&mut control.fail_copy) {
            return Err(StepError::Device("requested by the test".into()));
        }
        Ok(())
    }

    fn with_copies(
        &mut self,
        blocks: &[BlockId],
        slots: &[u32],
    ) -> Result<Box<dyn Backend>, CopyError> {
        let mut copy = vec![[None; BLOCK_TOKENS]; self.blocks.len()];
        for block in blocks {
            copy[block.index()] = self.blocks[block.index()];
        }
        let states = self.states.as_ref().map(|states| SetsOf::new(copied(states, slots)));
        let control = self.control.clone();
        Ok(Box::new(Self { blocks: copy, control, states, ..*self }))
    }
}

/// Returns as many slots, of which these have the same states.
fn copied(states: &[Vec<u32>], slots: &[u32]) -> Vec<Vec<u32>> {
    let mut copy = vec![Vec::new(); states.len()];
    for slot in slots {
        copy[*slot as usize].clone_from(&states[*slot as usize]);
    }
    copy
}

impl SlotSets for HashBackend {
    fn fork_set(&mut self, slots: &[u32]) -> u32 {
        let states = self.states.as_mut().expect("there are recurrent layers");
        let copy = copied(states, slots);
        states.add(copy)
    }

    fn use_set(&mut self, set: u32) {
        self.states.as_mut().expect("there are recurrent layers").select(set);
    }

    fn drop_set(&mut self, set: u32) {
        self.states.as_mut().expect("there are recurrent layers").remove(set);
    }
}

impl Recurrent for HashBackend {
    fn as_slot_sets(&mut self) -> Option<&mut dyn SlotSets> {
        Some(self)
    }

    fn state_bytes(&self) -> usize {
        4 * (CONTEXT + 1)
    }

    fn copy_state(&mut self, from: u32, to: u32) -> Result<(), StepError> {
        let states = self.states.as_mut().expect("there are recurrent layers");
        states[to as usize] = states[from as usize].clone();
        let mut control = self.control.lock().expect("no panic holds it");
        match std::mem::take(&mut control.fail_copy) {
            true => Err(StepError::Device("requested by the test".into())),
            false => Ok(()),
        }
    }

    fn read_state(&mut self, slot: u32, content: &mut Vec<u8>) -> Result<(), StepError> {
        let state = &self.states.as_ref().expect("there are recurrent layers")[slot as usize];
        let start = content.len();
        content.extend((state.len() as u32).to_le_bytes());
        state.iter().for_each(|token| content.extend(token.to_le_bytes()));
        content.resize(start + self.state_bytes(), 0);
        Ok(())
    }

    fn write_state(&mut self, slot: u32, content: &[u8]) -> Result<(), StepError> {
        let mut words = content
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        let length = words.next().expect("a length") as usize;
        let states = self.states.as_mut().expect("there are recurrent layers");
        states[slot as usize] = words.take(length).collect();
        Ok(())
    }
}

impl Screening for HashBackend {
    fn at_least(
        &mut self,
        row: ScreenedRow<'_>,
        threshold: Threshold,
        found: &mut Vec<TokenLogit>,
    ) -> Result<Option<Remainder>, StepError> {
        let Ok(remainder) = row.hidden.to_vec().at_least(threshold, found);
        // A bound that is not close, so that some draws are undecided: after the last threshold, a tenth of the largest weight.
        let loose = |Remainder { below, weight }| Remainder { below, weight: weight * 2.0 + 4e4 };
        Ok(remainder.map(loose))
    }

    fn logits_of(
        &mut self,
        row: ScreenedRow<'_>,
        tokens: &[u32],
        found: &mut Vec<TokenLogit>,
    ) -> Result<(), StepError> {
        let Ok(()) = row.hidden.to_vec().logits_of(tokens, found);
        Ok(())
    }

    fn all(&mut self, row: ScreenedRow<'_>, logits: &mut Vec<f32>) -> Result<(), StepError> {
        logits.clear();
        logits.extend_from_slice(row.hidden);
        Ok(())
    }
}

impl Asynchronous for HashBackend {
    fn decodes_ahead(&self) -> bool {
        self.ahead
    }

    fn is_running(&mut self) -> bool {
        self.control.lock().expect("no panic holds it").is_running
    }

    fn wait(&mut self) -> Result<(), StepError> {
        Ok(())
    }
}
