//! Filling a step: decodes, running prefills, admissions, and the blocks that each needs.

use std::ops::Range;

use super::{
    Plan, PlannedChunk, Priority, Refusal, Scheduler, Sequence, SequenceId, State, StepLimits,
};
use crate::kv::{BLOCK_TOKENS, BlockCache, BlockId, BlockTable, blocks_for};

/// Admissions of each priority per round while all have pending sequences.
const WEIGHTS: [u32; 3] = [16, 4, 1]; // (priority)

/// The part of a step's tokens, one in so many, that other prompts have while one of the highest priority is computed.
const OTHERS_SHARE: usize = 16;

/// Pending sequences that are passed over in a step at most.
const POSTPONED_MAX: usize = 64;

/// A plan in the making, with the blocks of the storage.
struct Filling<'a> {
    cache: &'a mut BlockCache,
    plan: &'a mut Plan,
    /// Tokens that the step has room for.
    budget: usize,
}

impl Scheduler {
    /// Plans the next step into `plan` within these limits. The caller must commit the plan, or remove its sequences,
    /// before the next call.
    ///
    /// `copy` copies a block, from and to. It is called while no other engine can change blocks (see
    /// [`kv::shared`](crate::kv)).
    pub fn plan(
        &mut self,
        limits: StepLimits,
        plan: &mut Plan,
        mut copy: impl FnMut(BlockId, BlockId),
    ) {
        plan.clear();
        self.computing.clear();
        self.keeping.clear();
        self.states.begin_step();
        for id in &self.running {
            if let Some(sequence) = self.sequences.get_mut(id) {
                self.spare_slots.extend(sequence.settle_trial());
                self.keeping.extend(sequence.hashes_to_keep());
            }
        }
        let (most, budget) = (limits.decodes.unwrap_or(usize::MAX), self.budget(limits));
        let shared = self.cache.clone();
        let mut cache = shared.lock();
        let mut filling = Filling { cache: &mut cache, plan, budget };
        let mut running = std::mem::take(&mut self.order);
        running.clear();
        running.extend(&self.running);
        self.fill(&running, most, &mut filling);
        self.order = running;
        self.count_stalls(limits.decodes.is_some(), plan);
        plan.copies.iter().for_each(|(from, to)| copy(*from, *to));
    }

    /// Returns the most rows of a step with these limits.
    pub fn budget(&self, limits: StepLimits) -> usize {
        let (most, budget) = (limits.decodes.unwrap_or(usize::MAX), self.limits.token_budget);
        if limits.prefill.is_none() && limits.rows.is_none() {
            return budget;
        }
        let decodes = self.decoding(Some(true)) + self.decoding(Some(false)).min(most);
        let with_prefill = limits.prefill.map(|prefill| decodes.saturating_add(prefill));
        let of_rows = limits.rows.map(|rows| rows.max(decodes.saturating_add(rows / 2)));
        budget.min(with_prefill.unwrap_or(budget)).min(of_rows.unwrap_or(budget))
    }

    /// Fills a step; `running` are the running sequences, in order of service. Of those that are not of the highest
    /// priority at most `most` decode.
    fn fill(&mut self, running: &[SequenceId], most: usize, filling: &mut Filling<'_>) {
        let highest = running.partition_point(|id| id.priority == Priority::High);
        let (high, others) = running.split_at(highest);
        self.schedule_all(high, State::Decoding, filling);
        self.schedule_in_turns(others, most, filling);
        let other = others.iter().find(|id| self.state(**id) == Some(State::Prefilling));
        let left = other.and_then(|id| self.sequences.get(id)).map_or(0, Sequence::left);
        let kept = left.min((filling.budget / OTHERS_SHARE).max(1)).min(filling.budget);
        filling.budget -= kept;
        let decodes = filling.plan.chunks.len();
        self.schedule_all(high, State::Prefilling, filling);
        self.admit_pending(Some(Priority::High), filling);
        // A first token of the highest priority does not wait for other prompts.
        let has_high = filling.plan.chunks.len() > decodes;
        filling.budget = if has_high { kept } else { filling.budget + kept };
        self.schedule_all(others, State::Prefilling, filling);
        self.admit_pending(None, filling);
    }

    /// Adds the next tokens of running sequences in a state, while there is budget.
    fn schedule_all(&mut self, running: &[SequenceId], state: State, filling: &mut Filling<'_>) {
        for id in running {
            if filling.budget > 0 && self.state(*id) == Some(state) {
                self.schedule(*id, filling);
            }
        }
    }

    /// Adds the next tokens of up to `most` decoding sequences, in turns from step to step.
    fn schedule_in_turns(
        &mut self,
        running: &[SequenceId],
        most: usize,
        filling: &mut Filling<'_>,
    ) {
        if most >= running.len() {
            return self.schedule_all(running, State::Decoding, filling);
        }
        let next = self.decoded_last.map_or(0, |last| running.partition_point(|id| *id <= last));
        let mut left = most;
        for id in running[next..].iter().chain(&running[..next]) {
            if left > 0 && filling.budget > 0 && self.state(*id) == Some(State::Decoding) {
                self.schedule(*id, filling);
                self.decoded_last = Some(*id);
                left -= 1;
            }
        }
    }

    /// Admits pending sequences while there is budget, as long as the next one has this priority, if one is given. One
    /// of the highest priority takes the place of others.
    fn admit_pending(&mut self, only: Option<Priority>, filling: &mut Filling<'_>) {
        let mut postponed = Vec::new();
        while filling.budget > 0
            && postponed.len() < POSTPONED_MAX
            && let Some(id) = self.next_pending()
            && only.is_none_or(|only| id.priority == only)
        {
            if self.is_computing_prefix_of(id, filling.cache) {
                self.pending.remove(&id);
                postponed.push(id);
                continue;
            }
            let Some(cached_tokens) = self.admit_instead(id, filling) else { break };
            filling.plan.admitted.push((id, cached_tokens));
            self.schedule(id, filling);
        }
        self.pending.extend(postponed);
    }

    /// Returns whether this step computes the next block of a pending sequence for another one, or a running sequence is about to keep a
    /// state that it could begin with. The sequence waits for it, unless it is of the highest priority.
    fn is_computing_prefix_of(&mut self, id: SequenceId, cache: &BlockCache) -> bool {
        if (self.computing.is_empty() && self.keeping.is_empty()) || id.priority == Priority::High {
            return false;
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        let (length, groups) = (sequence.tokens.len(), self.limits.groups);
        let cached = BlockTable::cached(cache, groups, sequence.full_blocks(), length);
        let found = self.with_state(id, cached);
        let sequence = &self.sequences[&id];
        // The state behind the last token's block is too late.
        let usable = ((sequence.tokens.len() - 1) / BLOCK_TOKENS).min(sequence.hashes.len());
        let mut ahead = sequence.hashes[found.min(usable)..usable].iter();
        let next = sequence.hashes.get(found);
        next.is_some_and(|next| self.computing.contains(next))
            || ahead.any(|hash| self.keeping.contains(hash))
    }

    /// Returns how many of a sequence's leading cached blocks it can go on after: with recurrent layers those up to a kept state, and
    /// not the last token.
    fn with_state(&self, id: SequenceId, cached: usize) -> usize {
        if !self.limits.recurrent {
            return cached;
        }
        let sequence = &self.sequences[&id];
        let last = cached.min((sequence.tokens.len() - 1) / BLOCK_TOKENS);
        self.blocks_with_state(&sequence.hashes[..last])
    }

    /// Admits a sequence, in the place of others if it is of the highest priority. Returns the number of its cached
    /// tokens.
    fn admit_instead(&mut self, id: SequenceId, filling: &mut Filling<'_>) -> Option<usize> {
        loop {
            let has_place = self.running.len() < self.limits.max_sequences;
            let admitted = has_place.then(|| self.admit(id, filling.cache)).flatten();
            if admitted.is_some() {
                return admitted;
            }
            let victim = self.victim_for(id)?;
            self.preempt_planned(victim, filling);
        }
    }

    /// Returns the sequence that makes room for a pending one of the highest priority. One of another priority always stays.
    fn victim_for(&self, id: SequenceId) -> Option<SequenceId> {
        let mut others = self.running.iter().rev().filter(|id| id.priority != Priority::High);
        let (newest, rest) = (others.next()?, others.next());
        (id.priority == Priority::High && rest.is_some()).then_some(*newest)
    }

    /// Preempts a sequence. Its planned tokens will not run and return to the budget.
    fn preempt_planned(&mut self, victim: SequenceId, filling: &mut Filling<'_>) {
        let Filling { cache, plan, budget } = filling;
        self.preempt(victim, cache);
        plan.preempted.push(victim);
        let hashes = self.sequences.get(&victim).map_or(&[][..], |victim| &victim.hashes);
        plan.chunks.retain(|planned| {
            let keep = planned.id != victim;
            if !keep {
                *budget += planned.end - planned.start;
                for hash in hashes.iter().take(planned.end / BLOCK_TOKENS) {
                    self.computing.remove(hash);
                }
            }
            keep
        });
    }

    /// Adds the sequence's next tokens to the plan, up to the budget, and takes the blocks to write them to.
    fn schedule(&mut self, id: SequenceId, filling: &mut Filling<'_>) {
        let sequence = &self.sequences[&id];
        let (start, length) = (sequence.computed, sequence.tokens.len());
        let end = length.min(start.saturating_add(filling.budget));
        let decodes = sequence.state == State::Decoding;
        for index in start / BLOCK_TOKENS..blocks_for(end) {
            while !self.take_block(id, index, filling) {
                if !self.preempt_for(id, filling) {
                    return;
                }
            }
        }
        let has_spare = !self.limits.recurrent || !self.spare_slots.is_empty();
        let may_draft = decodes && end == length && has_spare;
        let drafts = if may_draft { self.add_drafts(id, filling) } else { 0 };
        let (end, length) = (end + drafts, length + drafts);
        filling.budget -= end - start;
        if self.limits.prefix_cache && !decodes {
            let hashes = &self.sequences[&id].hashes;
            let blocks = start / BLOCK_TOKENS..(end / BLOCK_TOKENS).min(hashes.len());
            self.computing.extend(hashes.get(blocks).into_iter().flatten().copied());
        }
        if drafts > 0 && self.limits.recurrent {
            let sequence = self.sequences.get_mut(&id);
            if let (Some(sequence), Some(slot)) = (sequence, self.spare_slots.pop()) {
                sequence.try_drafts(slot, (start, end));
            }
        } else {
            self.keep_states(id, start..end, filling.cache);
        }
        let samples = end == length;
        let ends_block = samples && self.limits.block_ahead && end.is_multiple_of(BLOCK_TOKENS);
        let spares_one = filling.cache.available() > self.running.len();
        let has_next = ends_block && spares_one && self.take_block(id, end / BLOCK_TOKENS, filling);
        filling.plan.chunks.push(PlannedChunk {
            id,
            start,
            end,
            samples,
            decodes,
            drafts,
            has_next,
        });
    }

    /// Reserves slots for the states that a sequence is to keep within these positions.
    fn keep_states(&mut self, id: SequenceId, positions: Range<usize>, cache: &BlockCache) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let states = &mut self.states;
        let saves = &mut sequence.saves;
        sequence.keep_after.retain(|kept| {
            let is_within = positions.start < kept.position && kept.position <= positions.end;
            if is_within {
                let slot = states.reserve(!kept.is_shared, |hash| cache.is_expected(hash));
                saves.extend(slot.map(|slot| (kept.position - positions.start, slot)));
            }
            !is_within
        });
    }

    /// Appends proposed drafts to a decoding sequence, as many as budget and free blocks allow; returns their number.
    fn add_drafts(&mut self, id: SequenceId, filling: &mut Filling<'_>) -> usize {
        let sequence = &self.sequences[&id];
        let length = sequence.tokens.len();
        let mut most = sequence.proposed.len().min(filling.budget.saturating_sub(sequence.left()));
        for index in blocks_for(length)..blocks_for(length + most) {
            if !self.take_block(id, index, filling) {
                most = index * BLOCK_TOKENS - length;
                break;
            }
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return 0 };
        sequence.add_drafts(most);
        sequence.drafts
    }

    /// Makes block `index` of a sequence's tables writable for it. False if there are too few blocks.
    fn take_block(&mut self, id: SequenceId, index: usize, filling: &mut Filling<'_>) -> bool {
        let Filling { cache, plan, .. } = filling;
        let sequence = self.sequences.get_mut(&id);
        sequence.is_some_and(|sequence| sequence.blocks.take(index, cache, &mut plan.copies))
    }

    /// Preempts the last running sequence so that `id` can have a block. False if `id` itself was preempted or refused,
    /// and cannot run in this step. The only running sequence is preempted if other engines of the storage hold the
    /// blocks that it needs.
    fn preempt_for(&mut self, id: SequenceId, filling: &mut Filling<'_>) -> bool {
        let victim = self.running.last().copied().unwrap_or(id);
        if victim == id && self.running.len() <= 1 {
            let needed = self.blocks_needed(self.sequences[&id].tokens.len());
            let total = filling.cache.total();
            if needed > total {
                filling.plan.refused.push((id, Refusal::OutOfBlocks { needed, total }));
                return false;
            }
        }
        self.preempt_planned(victim, filling);
        victim != id
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

    /// Returns the most blocks that a sequence of so many tokens has at once.
    fn blocks_needed(&self, tokens: usize) -> usize {
        self.limits.groups.blocks_for(tokens, self.limits.token_budget)
    }

    /// Makes a pending sequence run if blocks for all its tokens are available, and returns the number of
    /// its tokens that cached blocks hold. The last token is always computed, since its logits are needed. While no
    /// sequence holds blocks, the next one runs in any case.
    fn admit(&mut self, id: SequenceId, cache: &mut BlockCache) -> Option<usize> {
        let sequence = self.sequences.get_mut(&id)?;
        let (length, groups) = (sequence.tokens.len(), self.limits.groups);
        let cached = match self.limits.prefix_cache {
            true => BlockTable::cached(cache, groups, sequence.full_blocks(), length),
            false => 0,
        };
        let found = self.with_state(id, cached);
        let needed = self.blocks_needed(length);
        let sequence = self.sequences.get_mut(&id)?;
        let hits = BlockTable::of_cached(cache, groups, &sequence.hashes[..found], length);
        let idle_hits = hits.held().filter(|hit| cache.references(*hit) == 0).count();
        // A fully cached prompt writes to its last block, and needs a copy of the block if it has other
        // holders.
        let copies = usize::from(found * BLOCK_TOKENS == length);
        // Every running sequence takes a block every 16 steps: leave enough for the next step.
        let growth = self.running.len().div_ceil(BLOCK_TOKENS);
        let needed =
            needed.saturating_sub(hits.held().count()) + groups.count() * (copies + growth);
        if cache.held() > 0 && needed > cache.available() - idle_hits {
            return None;
        }
        hits.held().for_each(|hit| cache.retain(hit));
        let cached_tokens = (found * BLOCK_TOKENS).min(length - 1);
        sequence.unexpect(cache);
        sequence.blocks = hits;
        (sequence.computed, sequence.named) = (cached_tokens, cached_tokens / BLOCK_TOKENS);
        sequence.state = State::Prefilling;
        sequence.slot = self.free_slots.pop();
        if self.limits.kept_states > 0 {
            let hash = found.checked_sub(1).map(|last| sequence.hashes[last]);
            sequence.begins_with = hash.and_then(|hash| self.states.get(&hash));
            let expected = sequence.hashes.iter().take_while(|hash| cache.is_expected(hash));
            let shared = cached.max(expected.count());
            sequence.keep_states(found, shared);
            self.keeping.extend(sequence.hashes_to_keep());
        }
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
    /// With `in_turns` decoding sequences wait for their turn, which is no stall.
    fn count_stalls(&mut self, in_turns: bool, plan: &mut Plan) {
        if self.running.len() > plan.chunks.len() {
            for id in &self.running {
                let has_work = plan.chunks.iter().any(|planned| planned.id == *id);
                if let Some(sequence) = self.sequences.get_mut(id).filter(|_| !has_work)
                    && !(in_turns && sequence.state == State::Decoding)
                {
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
