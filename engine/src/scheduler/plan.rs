//! Filling a step: decodes, running prefills, admissions, and the blocks that each needs.

use super::{Priority, Scheduler, Sequence, SequenceId, State};
use crate::kv::{BLOCK_TOKENS, BlockId, Writable, blocks_for};

/// Admissions of each priority per round while all have pending sequences.
const WEIGHTS: [u32; 3] = [16, 4, 1]; // (priority)

/// Pending sequences that are passed over in a step at most.
const POSTPONED_MAX: usize = 64;

/// One sequence's part of a step: the tokens at `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedChunk {
    /// The sequence.
    pub id: SequenceId,
    /// First position.
    pub start: usize,
    /// Position after the last.
    pub end: usize,
    /// Whether the chunk ends with the sequence's last token, so that the next one is sampled.
    pub samples: bool,
    /// Whether this is a decode (otherwise a prefill chunk).
    pub decodes: bool,
}

/// The reason a sequence cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It needs more blocks than the pool has.
    OutOfBlocks {
        /// Blocks that its tokens take.
        needed: usize,
        /// Blocks in the pool.
        total: usize,
    },
    /// It got no new token within the stall limit.
    NoProgress {
        /// Steps without work, and preemptions, since its newest token.
        stalls: u32,
    },
}

/// The work of one step.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Chunks to run, at most one per sequence.
    pub chunks: Vec<PlannedChunk>,
    /// Block copies to make before the step, in order: from, to.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Sequences that became pending again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that the caller must remove.
    pub refused: Vec<(SequenceId, Refusal)>,
    /// Admitted sequences, and the number of their tokens found in the prefix cache.
    pub admitted: Vec<(SequenceId, usize)>,
}

impl Scheduler {
    /// Plans the next step, with at most `prefill_max` tokens in prefill chunks if that is given. The caller must
    /// commit the plan, or remove its sequences, before the next call.
    pub fn plan(&mut self, prefill_max: Option<usize>) -> Plan {
        let mut plan = Plan::default();
        self.computing.clear();
        let budget = self.limits.token_budget;
        let mut budget =
            prefill_max.map_or(budget, |most| budget.min(self.decoding().saturating_add(most)));
        let running: Vec<SequenceId> = self.running.iter().copied().collect();
        self.schedule_all(&running, State::Decoding, &mut budget, &mut plan);
        let highest = running.partition_point(|id| id.priority == Priority::High);
        let (high, others) = running.split_at(highest);
        let other = others.iter().find(|id| self.state(**id) == Some(State::Prefilling));
        let left = other.and_then(|id| self.sequences.get(id)).map_or(0, Sequence::left);
        let kept = left.min(BLOCK_TOKENS).min(budget);
        budget -= kept;
        let decodes = plan.chunks.len();
        self.schedule_all(high, State::Prefilling, &mut budget, &mut plan);
        self.admit_pending(Some(Priority::High), &mut budget, &mut plan);
        // A first token of the highest priority does not wait for other prompts.
        budget = if plan.chunks.len() > decodes { kept } else { budget + kept };
        self.schedule_all(others, State::Prefilling, &mut budget, &mut plan);
        self.admit_pending(None, &mut budget, &mut plan);
        self.count_stalls(&mut plan);
        plan
    }

    /// Adds the next tokens of running sequences in a state, while there is budget.
    fn schedule_all(
        &mut self,
        running: &[SequenceId],
        state: State,
        budget: &mut usize,
        plan: &mut Plan,
    ) {
        for id in running {
            if *budget > 0 && self.state(*id) == Some(state) {
                self.schedule(*id, budget, plan);
            }
        }
    }

    /// Admits pending sequences while there is budget, as long as the next one has this priority, if one is given. One
    /// of the highest priority takes the place of others.
    fn admit_pending(&mut self, only: Option<Priority>, budget: &mut usize, plan: &mut Plan) {
        let mut postponed = Vec::new();
        while *budget > 0
            && postponed.len() < POSTPONED_MAX
            && let Some(id) = self.next_pending()
            && only.is_none_or(|only| id.priority == only)
        {
            if self.is_computing_prefix_of(id) {
                self.pending.remove(&id);
                postponed.push(id);
                continue;
            }
            let Some(cached_tokens) = self.admit_instead(id, budget, plan) else { break };
            plan.admitted.push((id, cached_tokens));
            self.schedule(id, budget, plan);
        }
        self.pending.extend(postponed);
    }

    /// Returns whether this step computes the next block of a pending sequence for another one. The sequence waits for
    /// it, unless it is of the highest priority.
    fn is_computing_prefix_of(&mut self, id: SequenceId) -> bool {
        if self.computing.is_empty() || id.priority == Priority::High {
            return false;
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let blocks = sequence.tokens.len() / BLOCK_TOKENS;
        let mut hashes = sequence.hash_blocks(blocks).iter();
        hashes
            .find(|hash| self.cache.peek(hash).is_none())
            .is_some_and(|n| self.computing.contains(n))
    }

    /// Admits a sequence, in the place of others if it is of the highest priority. Returns the number of its cached
    /// tokens.
    fn admit_instead(
        &mut self,
        id: SequenceId,
        budget: &mut usize,
        plan: &mut Plan,
    ) -> Option<usize> {
        loop {
            let has_place = self.running.len() < self.limits.max_sequences;
            if let Some(cached_tokens) = has_place.then(|| self.admit(id)).flatten() {
                return Some(cached_tokens);
            }
            let victim = self.victim_for(id)?;
            *budget += self.preempt_planned(victim, plan);
        }
    }

    /// Returns the sequence that makes room for a pending one of the highest priority. One sequence of another priority
    /// always stays, so that these end, too.
    fn victim_for(&self, id: SequenceId) -> Option<SequenceId> {
        let mut others = self.running.iter().rev().filter(|id| id.priority != Priority::High);
        let (newest, rest) = (others.next()?, others.next());
        (id.priority == Priority::High && rest.is_some()).then_some(*newest)
    }

    /// Preempts a sequence. Returns how many of its planned tokens will not run.
    fn preempt_planned(&mut self, victim: SequenceId, plan: &mut Plan) -> usize {
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
        tokens
    }

    /// Adds the sequence's next tokens to the plan, up to the budget, and takes the blocks to write them to.
    fn schedule(&mut self, id: SequenceId, budget: &mut usize, plan: &mut Plan) {
        let sequence = &self.sequences[&id];
        let (start, length) = (sequence.computed, sequence.tokens.len());
        let end = length.min(start.saturating_add(*budget));
        let decodes = sequence.state == State::Decoding;
        for index in start / BLOCK_TOKENS..blocks_for(end) {
            while !self.take_block(id, index, plan) {
                // The chunk of a preempted sequence does not run: return its tokens to the budget.
                let Some(tokens) = self.preempt_for(id, plan) else { return };
                *budget += tokens;
            }
        }
        *budget -= end - start;
        if self.limits.prefix_cache && !decodes {
            let hashes = &self.sequences[&id].hashes;
            let blocks = start / BLOCK_TOKENS..(end / BLOCK_TOKENS).min(hashes.len());
            self.computing.extend(hashes.get(blocks).into_iter().flatten().copied());
        }
        plan.chunks.push(PlannedChunk { id, start, end, samples: end == length, decodes });
    }

    /// Makes block `index` of a sequence's table writable for it. False if no block is available.
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

    /// Preempts the last running sequence so that `id` can have a block. Returns how many of its planned
    /// tokens will not run; `None` if `id` itself was preempted or refused, and cannot run in this step.
    fn preempt_for(&mut self, id: SequenceId, plan: &mut Plan) -> Option<usize> {
        let victim = self.running.last().copied().unwrap_or(id);
        if victim == id && self.running.len() <= 1 {
            let needed = blocks_for(self.sequences[&id].tokens.len());
            let refusal = Refusal::OutOfBlocks { needed, total: self.cache.total() };
            plan.refused.push((id, refusal));
            return None;
        }
        let tokens = self.preempt_planned(victim, plan);
        (victim != id).then_some(tokens)
    }

    /// Returns the sequence to admit next: by weight between priorities, by arrival within a priority.
    fn next_pending(&mut self) -> Option<SequenceId> {
        let heads = Priority::ALL.map(|priority| {
            let first = SequenceId { priority, request: 0, choice: 0 };
            let head = self.pending.range(first..).next().copied();
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

    /// Makes a pending sequence run if blocks for all its tokens are available, and returns the number of
    /// its tokens that cached blocks hold. The last token is always computed, since its logits are needed.
    fn admit(&mut self, id: SequenceId) -> Option<usize> {
        let sequence = self.sequences.get_mut(&id)?;
        let length = sequence.tokens.len();
        let mut hits = Vec::new();
        if self.limits.prefix_cache {
            let hashes = sequence.hash_blocks(length / BLOCK_TOKENS);
            hits.extend(hashes.iter().map_while(|hash| self.cache.peek(hash)));
        }
        let idle_hits = hits.iter().filter(|hit| self.cache.references(**hit) == 0).count();
        // A fully cached prompt writes to its last block, and needs a copy of the block if it has other
        // holders.
        let copies = usize::from(hits.len() * BLOCK_TOKENS == length);
        // Every running sequence takes a block every 16 steps: leave enough for the next step.
        let growth = self.running.len().div_ceil(BLOCK_TOKENS);
        let needed = blocks_for(length) - hits.len() + copies + growth;
        if !self.running.is_empty() && needed > self.cache.available() - idle_hits {
            return None;
        }
        for hit in &hits {
            self.cache.retain(*hit);
        }
        let cached_tokens = (hits.len() * BLOCK_TOKENS).min(length - 1);
        sequence.blocks = hits;
        sequence.computed = cached_tokens;
        sequence.state = State::Prefilling;
        self.pending.remove(&id);
        self.running.insert(id);
        self.counters.prefix_hit_tokens += cached_tokens as u64;
        self.counters.prefix_miss_tokens += (length - cached_tokens) as u64;
        let credit = &mut self.credits[id.priority as usize];
        *credit = credit.saturating_sub(1);
        Some(cached_tokens)
    }

    /// Adds a step without work to each running sequence without a chunk in the plan, and refuses sequences
    /// beyond the stall limit.
    fn count_stalls(&mut self, plan: &mut Plan) {
        if self.running.len() > plan.chunks.len() {
            for id in &self.running {
                let has_work = plan.chunks.iter().any(|planned| planned.id == *id);
                if let Some(sequence) = self.sequences.get_mut(id).filter(|_| !has_work) {
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
