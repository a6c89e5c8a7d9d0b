//! Budgets, blocks and stalls at their exact bounds.

use super::*;

fn refused(plan: &Plan) -> Vec<(u64, u32)> {
    let stalls = |refusal: &Refusal| match refusal {
        Refusal::NoProgress { stalls } => *stalls,
        other @ Refusal::OutOfBlocks { .. } => panic!("{other:?}"),
    };
    plan.refused.iter().map(|(id, refusal)| (id.request, stalls(refusal))).collect()
}

/// Adds a sequence whose tokens begin with those of sequence 0, as [`add`] makes them.
fn add_with_prefix(scheduler: &mut Scheduler, id: SequenceId, shared: usize, length: usize) {
    let mut tokens = vec![id.request as u32; length];
    tokens[..shared].fill(0);
    scheduler.add(id, tokens, BlockHash::root("class", b""));
}

#[test]
fn sequences_without_work_are_refused_after_the_limit_of_stalls() {
    let mut scheduler = Scheduler::new(Limits { stall_limit: 3, ..limits() }, 40);
    add(&mut scheduler, normal(0), 5);
    add(&mut scheduler, normal(1), 100);
    step(&mut scheduler);
    let without_prefill = StepLimits { prefill: Some(0), ..StepLimits::default() };
    for _ in 0..3 {
        assert_eq!(spans(&step_within(&mut scheduler, without_prefill)).len(), 1, "a decode");
    }
    let plan = plan_within(&mut scheduler, without_prefill);
    assert_eq!(refused(&plan), [(1, 4)], "not the one that decodes");
}

#[test]
fn waiting_for_a_turn_is_no_stall_but_waiting_for_a_prefill_is() {
    let mut scheduler = Scheduler::new(Limits { stall_limit: 2, ..limits() }, 40);
    for request in 0..3 {
        add(&mut scheduler, normal(request), 5);
    }
    step(&mut scheduler);
    let one = StepLimits { prefill: Some(0), decodes: Some(1), ..StepLimits::default() };
    for _ in 0..9 {
        assert_eq!(step_within(&mut scheduler, one).chunks.len(), 1);
    }
    add(&mut scheduler, normal(9), 100);
    // Its first chunk is computed; then only decodes are.
    step(&mut scheduler);
    for _ in 0..2 {
        step_within(&mut scheduler, one);
    }
    assert_eq!(refused(&plan_within(&mut scheduler, one)), [(9, 3)]);
}

#[test]
fn tokens_of_a_preempted_sequence_return_to_the_budget() {
    let limits = Limits { max_sequences: 2, token_budget: 8, ..limits() };
    let mut scheduler = Scheduler::new(limits, 100);
    for request in 0..2 {
        add(&mut scheduler, normal(request), 4);
    }
    step(&mut scheduler);
    let high = id(Priority::High, 9);
    add(&mut scheduler, high, 20);
    let plan = step(&mut scheduler);
    assert_eq!(plan.preempted, [normal(1)]);
    // One decode and, of the highest priority, everything else.
    assert_eq!(spans(&plan), [(0, 4, 5, true), (9, 0, 7, false)]);
}

#[test]
fn a_sequence_waits_for_a_block_that_a_later_chunk_of_another_computes() {
    let mut scheduler = Scheduler::new(limits(), 40);
    add(&mut scheduler, normal(0), 96);
    assert_eq!(spans(&step(&mut scheduler)), [(0, 0, 32, false)]);
    add_with_prefix(&mut scheduler, normal(1), 64, 70);
    scheduler.limits.token_budget = 40;
    let plan = step(&mut scheduler);
    assert_eq!(spans(&plan), [(0, 32, 72, false)], "blocks 2 and 3 come with this step");
    let plan = step(&mut scheduler);
    assert_eq!(plan.admitted, [(normal(1), 64)]);
    // A sequence that decodes computes no block that others wait for.
    add_with_prefix(&mut scheduler, normal(2), 96, 100);
    assert_eq!(step(&mut scheduler).admitted, [(normal(2), 96)]);
}

/// A prompt with cached blocks is admitted with exactly the blocks that it needs besides them.
#[test]
fn admission_needs_the_missing_blocks_and_no_more() {
    // Sequence 0 holds 4 blocks (64 tokens); one running sequence may need one block for its growth.
    for (shared, length, needed) in [(32, 50, 2), (64, 66, 1), (64, 64, 1), (0, 17, 2)] {
        for missing in 0..2 {
            let total = 5 + needed + 1 - missing;
            let mut scheduler = Scheduler::new(Limits { token_budget: 64, ..limits() }, total);
            add(&mut scheduler, normal(0), 64);
            step(&mut scheduler);
            let before = scheduler.counters();
            add_with_prefix(&mut scheduler, normal(1), shared, length);
            let plan = plan(&mut scheduler);
            // The decode of the running sequence takes a block before the admission.
            let held = 5;
            let fits = total - held > needed;
            assert_eq!(!plan.admitted.is_empty(), fits, "{length} tokens in {total} blocks");
            if fits {
                let cached = shared.min(length - 1);
                assert_eq!(plan.admitted, [(normal(1), cached)]);
                let counters = scheduler.counters();
                let missed = counters.prefix_miss_tokens - before.prefix_miss_tokens;
                assert_eq!(missed, (length - cached) as u64);
            }
        }
    }
}

#[test]
fn a_deep_fork_runs_with_exactly_as_many_free_blocks_as_it_copies() {
    for (total, state) in [(6, State::Decoding), (5, State::Pending)] {
        let mut scheduler = Scheduler::new(Limits { prefix_cache: false, ..limits() }, total);
        add(&mut scheduler, normal(0), 20);
        step(&mut scheduler);
        add(&mut scheduler, normal(1), 10);
        step(&mut scheduler);
        assert_eq!(scheduler.cache().held(), 3);
        let child = normal(2);
        let mut copies = 0;
        scheduler.remove(normal(1));
        add(&mut scheduler, normal(3), 20);
        step(&mut scheduler);
        assert_eq!(scheduler.cache().held(), 4);
        scheduler.fork(normal(0), child, Fork::Deep, |_| copies += 1);
        assert_eq!(scheduler.state(child), Some(state), "{total} blocks");
        assert_eq!(copies, if state == State::Decoding { 2 } else { 0 });
    }
}

#[test]
fn the_block_after_a_decode_is_taken_early_only_if_there_are_enough() {
    for (total, tables) in [(8, [2, 2]), (2, [1, 2])] {
        let mut scheduler = Scheduler::new(Limits { block_ahead: true, ..limits() }, total);
        add(&mut scheduler, normal(0), 16);
        let blocks = |scheduler: &Scheduler| scheduler.sequences[&normal(0)].blocks.full().len();
        step(&mut scheduler);
        assert_eq!(blocks(&scheduler), tables[0], "of {total}");
        step(&mut scheduler);
        assert_eq!(blocks(&scheduler), tables[1], "of {total}");
    }
}

/// Drafts take blocks that stay after the drafts were dropped. A fork holds them, too, so no chunk of either may begin the position
/// after a full block in them.
#[test]
fn blocks_that_a_fork_holds_are_not_the_next_ones_of_a_chunk() {
    let mut scheduler = Scheduler::new(Limits { block_ahead: true, ..limits() }, 4);
    add(&mut scheduler, normal(0), 14);
    step(&mut scheduler);
    scheduler.for_drafts(|_, _, proposed| proposed.extend([1; 8]));
    step(&mut scheduler);
    assert_eq!(scheduler.sequences[&normal(0)].blocks.full().len(), 2);
    let child = SequenceId { choice: 1, ..normal(0) };
    scheduler.fork(normal(0), child, Fork::Shared, |_| {});
    scheduler.for_drafts(|_, _, proposed| proposed.clear());
    let plan = plan(&mut scheduler);
    let table = |planned| scheduler.chunk(planned).blocks;
    let tables: Vec<&[BlockId]> = plan.chunks.iter().map(table).collect();
    let ends: Vec<usize> = plan.chunks.iter().map(|planned| planned.end).collect();
    assert_eq!((ends, tables.len()), (vec![16, 16], 2));
    for table in &tables {
        let last = table.last().expect("a block");
        let holders = tables.iter().filter(|other| other.contains(last)).count();
        assert_eq!(holders, 1, "{tables:?}");
    }
}

#[test]
fn counts_of_sequences_are_by_state_and_priority() {
    let mut scheduler = Scheduler::new(limits(), 40);
    add(&mut scheduler, id(Priority::High, 0), 5);
    add(&mut scheduler, normal(1), 5);
    add(&mut scheduler, normal(2), 6);
    step(&mut scheduler);
    add(&mut scheduler, normal(3), 200);
    add(&mut scheduler, normal(4), 5);
    step(&mut scheduler);
    assert_eq!((scheduler.running(), scheduler.pending()), (4, 1));
    let decoding = |of_highest| scheduler.decoding(of_highest);
    assert_eq!((decoding(None), decoding(Some(true)), decoding(Some(false))), (3, 1, 2));
    assert!(scheduler.contains(normal(4)) && !scheduler.contains(normal(5)));
}
