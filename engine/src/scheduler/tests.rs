//! Plans of the scheduler, without an engine or a backend.

mod bounds;
mod windows;

use super::*;
use crate::kv::BlockId;

fn limits() -> Limits {
    Limits {
        recurrent: false,
        groups: LayerGroups::ONE,
        kept_states: 0,
        spare_states: 0,
        max_sequences: 4,
        token_budget: 32,
        prefix_cache: true,
        block_ahead: false,
        stall_limit: 100,
    }
}

fn id(priority: Priority, request: u64) -> SequenceId {
    SequenceId { priority, request, choice: 0 }
}

fn normal(request: u64) -> SequenceId {
    id(Priority::Normal, request)
}

/// Adds a sequence of `length` tokens that shares no prefix with other sequences.
fn add(scheduler: &mut Scheduler, id: SequenceId, length: usize) {
    let tokens = vec![id.request as u32; length];
    scheduler.add(id, tokens, BlockHash::root("class", b""));
}

fn no_copies(copy: ForkCopy) {
    panic!("{copy:?}");
}

fn plan(scheduler: &mut Scheduler) -> Plan {
    plan_within(scheduler, StepLimits::default())
}

fn plan_within(scheduler: &mut Scheduler, limits: StepLimits) -> Plan {
    let (mut plan, mut copies) = (Plan::default(), Vec::new());
    scheduler.plan(limits, &mut plan, |from, to| copies.push((from, to)));
    assert_eq!(plan.copies, copies);
    plan
}

/// Plans and commits a step, and appends a token to every sequence that samples.
fn step(scheduler: &mut Scheduler) -> Plan {
    step_within(scheduler, StepLimits::default())
}

fn step_within(scheduler: &mut Scheduler, limits: StepLimits) -> Plan {
    let plan = plan_within(scheduler, limits);
    assert_eq!(plan.refused, [], "nothing is refused here");
    scheduler.commit(&plan);
    for planned in plan.chunks.iter().filter(|planned| planned.samples) {
        scheduler.push_token(planned.id, 7);
    }
    scheduler.audit();
    plan
}

fn spans(plan: &Plan) -> Vec<(u64, usize, usize, bool)> {
    plan.chunks.iter().map(|c| (c.id.request, c.start, c.end, c.samples)).collect()
}

#[test]
fn sequence_goes_from_pending_through_prefilling_to_decoding() {
    let mut scheduler = Scheduler::new(limits(), 8);
    add(&mut scheduler, normal(0), 40);
    assert_eq!(scheduler.state(normal(0)), Some(State::Pending));
    assert_eq!(spans(&step(&mut scheduler)), [(0, 0, 32, false)]);
    assert_eq!(scheduler.state(normal(0)), Some(State::Prefilling));
    assert_eq!(spans(&step(&mut scheduler)), [(0, 32, 40, true)]);
    assert_eq!(scheduler.state(normal(0)), Some(State::Decoding));
    assert_eq!(spans(&step(&mut scheduler)), [(0, 40, 41, true)]);
    scheduler.remove(normal(0));
    assert_eq!((scheduler.state(normal(0)), scheduler.cache().held()), (None, 0));
}

#[test]
fn budget_goes_to_decodes_then_the_highest_priority_then_running_prefills() {
    let mut scheduler = Scheduler::new(limits(), 40);
    add(&mut scheduler, normal(0), 4);
    add(&mut scheduler, normal(1), 40);
    assert_eq!(spans(&step(&mut scheduler)), [(0, 0, 4, true), (1, 0, 28, false)]);
    add(&mut scheduler, id(Priority::High, 2), 30);
    // The highest priority leaves the running prefill a small part.
    let expected = [(0, 4, 5, true), (2, 0, 30, true), (1, 28, 29, false)];
    assert_eq!(spans(&step(&mut scheduler)), expected);
}

#[test]
fn running_sequences_do_not_exceed_the_limit() {
    let mut scheduler = Scheduler::new(limits(), 40);
    for request in 0..6 {
        add(&mut scheduler, normal(request), 2);
    }
    assert_eq!(step(&mut scheduler).chunks.len(), 4);
    scheduler.remove(normal(1));
    let requests: Vec<u64> = step(&mut scheduler).chunks.iter().map(|c| c.id.request).collect();
    assert_eq!(requests, [0, 2, 3, 4]);
}

#[test]
fn budget_below_the_sequence_limit_is_raised() {
    let limits = Limits { token_budget: 1, ..limits() };
    let mut scheduler = Scheduler::new(limits, 40);
    for request in 0..4 {
        add(&mut scheduler, normal(request), 1);
    }
    step(&mut scheduler);
    assert_eq!(step(&mut scheduler).chunks.len(), 4, "every sequence decodes");
}

#[test]
fn admission_does_not_preempt_and_keeps_the_order() {
    let mut scheduler = Scheduler::new(limits(), 4);
    add(&mut scheduler, normal(0), 32);
    step(&mut scheduler);
    add(&mut scheduler, id(Priority::High, 1), 32);
    add(&mut scheduler, id(Priority::High, 2), 1);
    let plan = step(&mut scheduler);
    assert_eq!(
        spans(&plan),
        [(0, 32, 33, true)],
        "the first pending sequence does not fit, so later ones wait too"
    );
    assert_eq!(plan.preempted, []);
}

#[test]
fn priorities_are_admitted_sixteen_to_four_to_one() {
    let limits = Limits { max_sequences: 1, ..limits() };
    let mut scheduler = Scheduler::new(limits, 4);
    for request in 0..90 {
        add(&mut scheduler, id(Priority::ALL[request as usize % 3], request), 1);
    }
    let mut admitted = [0; 3];
    for _ in 0..21 {
        let plan = step(&mut scheduler);
        let first = plan.chunks[0].id;
        admitted[first.priority as usize] += 1;
        scheduler.remove(first);
    }
    assert_eq!(admitted, [16, 4, 1]);
}

#[test]
fn preempted_sequence_is_admitted_next_with_its_tokens() {
    let limits = Limits { max_sequences: 2, ..limits() };
    let mut scheduler = Scheduler::new(limits, 4);
    for request in 0..2 {
        add(&mut scheduler, normal(request), 16);
    }
    add(&mut scheduler, normal(2), 1);
    let mut preempted = Vec::new();
    for _ in 0..40 {
        preempted.extend(step(&mut scheduler).preempted);
        if !preempted.is_empty() {
            break;
        }
    }
    assert_eq!(preempted, [normal(1)]);
    assert_eq!(scheduler.state(normal(1)), Some(State::Pending));
    scheduler.remove(normal(0));
    let plan = step(&mut scheduler);
    assert_eq!(plan.admitted[0].0, normal(1));
    // 16 of the prompt and 17 drawn. The growth of the other sequence has evicted the second of its
    // blocks; the first is still cached.
    assert_eq!(spans(&plan)[0], (1, 16, 33, true));
}

#[test]
fn cached_prefixes_are_evicted_before_any_preemption() {
    let mut scheduler = Scheduler::new(limits(), 4);
    add(&mut scheduler, normal(0), 32);
    step(&mut scheduler);
    scheduler.remove(normal(0));
    assert_eq!(scheduler.cache().cached(), 2);
    for request in [1, 2] {
        add(&mut scheduler, normal(request), 16);
    }
    for _ in 0..16 {
        assert_eq!(step(&mut scheduler).preempted, []);
    }
    let held = scheduler.cache().held();
    assert_eq!((scheduler.cache().cached(), held), (0, 4));
}

#[test]
fn forks_share_full_blocks_and_copy_the_one_they_write() {
    let mut scheduler = Scheduler::new(limits(), 8);
    add(&mut scheduler, normal(0), 20);
    let plan = plan(&mut scheduler);
    scheduler.commit(&plan);
    let children = [1, 2].map(|choice| SequenceId { choice, ..normal(0) });
    for child in children {
        scheduler.fork(normal(0), child, Fork::Shared, no_copies);
    }
    assert_eq!(scheduler.cache().held(), 2);
    for id in [normal(0), children[0], children[1]] {
        scheduler.push_token(id, 7);
    }
    scheduler.audit();
    let plan = step(&mut scheduler);
    assert_eq!(plan.copies.len(), 2, "the last holder writes in place");
    assert!(plan.copies.iter().all(|(from, _)| *from == BlockId(1)));
    assert_eq!(scheduler.cache().held(), 4);
    assert_eq!(scheduler.cache().references(BlockId(0)), 3);
}

#[test]
fn sequence_that_needs_more_than_all_blocks_is_refused() {
    let mut scheduler = Scheduler::new(limits(), 1);
    add(&mut scheduler, normal(0), 16);
    step(&mut scheduler);
    let plan = plan(&mut scheduler);
    assert_eq!(plan.refused, [(normal(0), Refusal::OutOfBlocks { needed: 2, total: 1 })]);
    assert_eq!(plan.chunks, []);
}

#[test]
fn equal_prompts_share_blocks() {
    let mut scheduler = Scheduler::new(limits(), 8);
    add(&mut scheduler, normal(0), 30);
    step(&mut scheduler);
    scheduler.add(normal(1), vec![0; 30], BlockHash::root("class", b""));
    let plan = step(&mut scheduler);
    assert_eq!(plan.admitted, [(normal(1), 16)]);
    assert_eq!(scheduler.cache().references(BlockId(0)), 2);
    assert_eq!(scheduler.counters().prefix_hit_tokens, 16);
}

#[test]
fn highest_priority_takes_the_place_of_others() {
    // Two sequences fill all blocks; the limit of sequences is another reason.
    for (blocks, max_sequences) in [(9, 4), (100, 2)] {
        let limits = Limits { max_sequences, token_budget: 64, ..limits() };
        let mut scheduler = Scheduler::new(limits, blocks);
        for request in 0..2 {
            add(&mut scheduler, normal(request), 60);
            step(&mut scheduler);
        }
        let high = id(Priority::High, 9);
        add(&mut scheduler, high, 20);
        let plan = step(&mut scheduler);
        assert_eq!(plan.preempted, [normal(1)], "the newest");
        assert!(plan.admitted.contains(&(high, 0)));
        assert!(spans(&plan).contains(&(9, 0, 20, true)));
        assert_eq!(scheduler.state(normal(0)), Some(State::Decoding));
        // Another one of the highest priority does not take the place of the first.
        add(&mut scheduler, id(Priority::High, 10), 100);
        for _ in 0..3 {
            assert!(!step(&mut scheduler).preempted.contains(&high));
        }
    }
}

#[test]
fn highest_priority_does_not_wait_for_long_prompts() {
    let limits = Limits { max_sequences: 8, token_budget: 64, ..limits() };
    let mut scheduler = Scheduler::new(limits, 100);
    add(&mut scheduler, normal(0), 1000);
    step(&mut scheduler);
    let high = id(Priority::High, 9);
    add(&mut scheduler, high, 200);
    let mut tokens = Vec::new();
    while scheduler.state(high) != Some(State::Decoding) {
        let plan = step(&mut scheduler);
        let of = |id| plan.chunks.iter().find(|c| c.id == id).map_or(0, |c| c.end - c.start);
        tokens.push((of(high), of(normal(0))));
    }
    assert_eq!(tokens, [(60, 4), (60, 4), (60, 4), (20, 4)], "both continue");
}

#[test]
fn prefix_is_computed_once_for_sequences_that_arrive_together() {
    let limits = Limits { token_budget: 128, ..limits() };
    let mut scheduler = Scheduler::new(limits, 40);
    let root = BlockHash::root("class", b"");
    let prompt = |end: u32| [vec![1; 36], vec![end; 9]].concat();
    for request in 0..3 {
        scheduler.add(normal(request), prompt(request as u32), root);
    }
    add(&mut scheduler, normal(3), 20);
    let first = [(0, 0, 45, true), (3, 0, 20, true)];
    assert_eq!(spans(&step(&mut scheduler)), first, "the second and the third wait");
    let second = [(0, 45, 46, true), (3, 20, 21, true), (1, 32, 45, true), (2, 32, 45, true)];
    assert_eq!(spans(&step(&mut scheduler)), second, "they have two blocks");
    assert_eq!(scheduler.counters().prefix_hit_tokens, 64);
}

#[test]
fn decodes_beyond_the_limit_take_turns() {
    let mut scheduler = Scheduler::new(Limits { max_sequences: 6, ..limits() }, 40);
    add(&mut scheduler, id(Priority::High, 0), 4);
    (1..6).for_each(|request| add(&mut scheduler, normal(request), 4));
    let few = StepLimits { prefill: Some(16), decodes: Some(2), ..StepLimits::default() };
    let mut decoded: Vec<Vec<u64>> = Vec::new();
    for _ in 0..7 {
        let plan = step_within(&mut scheduler, few);
        decoded.push(plan.chunks.iter().filter(|c| c.decodes).map(|c| c.id.request).collect());
    }
    let turns: [Vec<u64>; 5] =
        [vec![0, 1, 2], vec![0, 3, 4], vec![0, 5, 1], vec![0, 2, 3], vec![0, 4, 5]];
    assert_eq!(decoded[2..], turns);
}

#[test]
fn cached_blocks_of_waiting_sequences_are_kept_longer_than_newer_ones() {
    let mut scheduler = Scheduler::new(Limits { max_sequences: 1, ..limits() }, 6);
    let run = |scheduler: &mut Scheduler, id, length| {
        add(scheduler, id, length);
        while scheduler.state(id) != Some(State::Decoding) {
            step(scheduler);
        }
        scheduler.remove(id);
    };
    // Two blocks each stay cached; those of the first are older.
    run(&mut scheduler, normal(1), 33);
    run(&mut scheduler, normal(2), 33);
    let waiting = SequenceId { choice: 1, ..normal(1) };
    add(&mut scheduler, waiting, 33);
    // It needs all but the two blocks that the waiting one will use.
    run(&mut scheduler, id(Priority::High, 3), 50);
    assert_eq!(step(&mut scheduler).admitted, [(waiting, 32)]);
    scheduler.remove(waiting);
    scheduler.audit();
}
