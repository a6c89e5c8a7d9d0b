//! Filling a step: decodes, running prefills, admissions, and the blocks each of them needs.

use super::{Priority, Scheduler, SequenceId, State};
use crate::kv::{BLOCK_TOKENS, BlockId, Writable, blocks_for};

/// Admissions each priority gets per round while all have sequences in line.
const WEIGHTS: [u32; 3] = [16, 4, 1]; // (priority)

/// One sequence's part of a step: the tokens at `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Whose tokens.
    pub id: SequenceId,
    /// First position.
    pub start: usize,
    /// Position after the last.
    pub end: usize,
    /// Whether these are the sequence's last tokens, so that the next one is sampled.
    pub samples: bool,
    /// Whether this is a decode (otherwise a prefill chunk).
    pub decodes: bool,
}

/// Why a sequence cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It needs more blocks than there are, though it had them all to itself.
    OutOfBlocks {
        /// Blocks its tokens take.
        needed: usize,
        /// Blocks in the pool.
        total: usize,
    },
    /// It got no new token for too long.
    NoProgress {
        /// Steps without work, and preemptions, since its newest token.
        stalls: u32,
    },
}

/// What to do in one step.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Chunks to run, at most one a sequence.
    pub chunks: Vec<Planned>,
    /// Block copies to make before, in order: from, to.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Sequences sent back to Pending.
    pub preempted: Vec<SequenceId>,
    /// Sequences the caller must remove.
    pub refused: Vec<(SequenceId, Refusal)>,
    /// Admitted sequences, with the tokens the prefix cache spared them.
    pub admitted: Vec<(SequenceId, usize)>,
}

impl Scheduler {
    /// Decides the next step. The plan must be committed, or its sequences removed, before the
    /// next call.
    pub fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        let mut budget = self.limits.token_budget;
        let in_line: Vec<SequenceId> = self.running.iter().copied().collect();
        for state in [State::Decoding, State::Prefilling] {
            for id in &in_line {
                if budget > 0 && self.state(*id) == Some(state) {
                    self.schedule(*id, &mut budget, &mut plan);
                }
            }
        }
        while budget > 0
            && self.running.len() < self.limits.max_sequences
            && let Some(id) = self.next_in_line()
        {
            let Some(spared) = self.admit(id) else { break };
            plan.admitted.push((id, spared));
            self.schedule(id, &mut budget, &mut plan);
        }
        self.count_stalls(&mut plan);
        plan
    }

    /// Adds the sequence's next tokens to the plan, as many as the budget has, once their blocks
    /// are its own.
    fn schedule(&mut self, id: SequenceId, budget: &mut usize, plan: &mut Plan) {
        let sequence = &self.sequences[&id];
        let (start, length) = (sequence.computed, sequence.tokens.len());
        let end = length.min(start.saturating_add(*budget));
        let decodes = sequence.state == State::Decoding;
        for index in start / BLOCK_TOKENS..blocks_for(end) {
            while !self.take_block(id, index, plan) {
                // Give the budget of a victim back: its chunk does not run.
                match self.make_room(id, plan) {
                    Room::Made(tokens) => *budget += tokens,
                    Room::Gone => return,
                }
            }
        }
        *budget -= end - start;
        plan.chunks.push(Planned { id, start, end, samples: end == length, decodes });
    }

    /// Makes block `index` of a sequence's table its own to write to. False if there is none.
    fn take_block(&mut self, id: SequenceId, index: usize, plan: &mut Plan) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let Some(block) = sequence.blocks.get_mut(index) else {
            let Some(fresh) = self.cache.allocate() else { return false };
            sequence.blocks.push(fresh);
            return true;
        };
        match self.cache.make_writable(*block) {
            None => return false,
            Some(Writable::InPlace) => {}
            Some(Writable::Copied(copy)) => {
                plan.copies.push((*block, copy));
                *block = copy;
            }
        }
        true
    }

    /// Preempts the last in line so that `id` can have a block.
    fn make_room(&mut self, id: SequenceId, plan: &mut Plan) -> Room {
        let victim = self.running.last().copied().unwrap_or(id);
        if victim == id && self.running.len() <= 1 {
            let needed = blocks_for(self.sequences[&id].tokens.len());
            let refusal = Refusal::OutOfBlocks { needed, total: self.cache.total() };
            plan.refused.push((id, refusal));
            return Room::Gone;
        }
        self.preempt(victim);
        plan.preempted.push(victim);
        let mut tokens = 0;
        plan.chunks.retain(|planned| {
            let keep = planned.id != victim;
            if !keep {
                tokens += planned.end - planned.start;
            }
            keep
        });
        if victim == id { Room::Gone } else { Room::Made(tokens) }
    }

    /// The sequence to admit next: by weight between priorities, by arrival within one.
    fn next_in_line(&mut self) -> Option<SequenceId> {
        let heads = Priority::ALL.map(|priority| {
            let first = SequenceId { priority, request: 0, choice: 0 };
            let head = self.waiting.range(first..).next().copied();
            head.filter(|id| id.priority == priority)
        });
        let due = |credits: &[u32; 3]| {
            heads.iter().zip(credits).find_map(|(head, credit)| head.filter(|_| *credit > 0))
        };
        due(&self.credits).or_else(|| {
            self.credits = WEIGHTS;
            due(&self.credits)
        })
    }

    /// Moves a pending sequence to the running ones if blocks for all its tokens can be had, and
    /// returns the tokens that cached blocks spare it. At least the last token is always computed,
    /// since its logits are needed.
    fn admit(&mut self, id: SequenceId) -> Option<usize> {
        let sequence = self.sequences.get_mut(&id)?;
        let length = sequence.tokens.len();
        let mut hits = Vec::new();
        if self.limits.prefix_cache {
            let names = sequence.name_blocks(length / BLOCK_TOKENS);
            hits.extend(names.iter().map_while(|name| self.cache.peek(name)));
        }
        let idle_hits = hits.iter().filter(|hit| self.cache.references(**hit) == 0).count();
        // A fully cached prompt writes to its last block, which takes a copy if others hold it.
        let copies = usize::from(hits.len() * BLOCK_TOKENS == length);
        // Every running sequence takes a block each 16 steps: leave those of the next step.
        let growth = self.running.len().div_ceil(BLOCK_TOKENS);
        let needed = blocks_for(length) - hits.len() + copies + growth;
        if !self.running.is_empty() && needed > self.cache.available() - idle_hits {
            return None;
        }
        for hit in &hits {
            self.cache.retain(*hit);
        }
        let spared = (hits.len() * BLOCK_TOKENS).min(length - 1);
        sequence.blocks = hits;
        sequence.computed = spared;
        sequence.state = State::Prefilling;
        self.waiting.remove(&id);
        self.running.insert(id);
        self.counters.prefix_hit_tokens += spared as u64;
        self.counters.prefix_miss_tokens += (length - spared) as u64;
        let credit = &mut self.credits[id.priority as usize];
        *credit = credit.saturating_sub(1);
        Some(spared)
    }

    /// Counts a step without work for the running sequences that got none, and refuses sequences
    /// that have stood still for too long.
    fn count_stalls(&mut self, plan: &mut Plan) {
        if self.running.len() > plan.chunks.len() {
            for id in &self.running {
                let works = plan.chunks.iter().any(|planned| planned.id == *id);
                if let Some(sequence) = self.sequences.get_mut(id).filter(|_| !works) {
                    sequence.stalls += 1;
                }
            }
        }
        let suspects = self.running.iter().chain(&plan.preempted);
        for id in suspects {
            let stalls = self.sequences[id].stalls;
            if stalls > self.limits.stall_limit {
                plan.refused.push((*id, Refusal::NoProgress { stalls }));
            }
        }
    }
}

/// What came of making room.
enum Room {
    /// Somebody else went; this many planned tokens will not run.
    Made(usize),
    /// The sequence itself cannot run in this step.
    Gone,
}
