//! Blocks of layers with a window: freed behind it, and reused as far as they are needed.

use super::*;
use crate::kv::BlockTable;

const GROUPS: LayerGroups = LayerGroups { windows: 2, window: 20, part: 16 };

fn scheduler(blocks: usize) -> Scheduler {
    Scheduler::new(Limits { groups: GROUPS, ..limits() }, blocks)
}

#[test]
fn blocks_behind_the_window_are_freed_with_each_step() {
    let mut scheduler = scheduler(60);
    add(&mut scheduler, normal(0), 100);
    for computed in [32, 64, 96, 100, 101, 102] {
        step(&mut scheduler);
        let windows = blocks_for(computed) - GROUPS.first_block(computed);
        let held = blocks_for(computed) + 2 * windows;
        assert_eq!(scheduler.cache().held(), held, "after {computed} tokens");
    }
    assert_eq!(
        scheduler.cache().held(),
        7 + 2 * 2,
        "102 reads from 83 on, and so the block from 80"
    );
}

#[test]
fn sequence_runs_with_as_many_blocks_as_it_has_at_once() {
    let needed = GROUPS.blocks_for(200, 32);
    assert!(needed < 2 * blocks_for(200), "{needed} blocks");
    let mut enough = scheduler(needed);
    assert!(enough.capacity() >= 200 && enough.capacity() < 220);
    add(&mut enough, normal(0), 200);
    while step(&mut enough).chunks.iter().all(|chunk| !chunk.samples) {}
    // A step that computes 32 tokens behind 160 has 12 blocks, and four of each window.
    let mut too_few = scheduler(19);
    add(&mut too_few, normal(0), 200);
    let refused = loop {
        let plan = plan(&mut too_few);
        too_few.commit(&plan);
        if let [(_, refusal)] = plan.refused[..] {
            break refusal;
        }
    };
    assert_eq!(refused, Refusal::OutOfBlocks { needed, total: 19 });
}

#[test]
fn prompt_goes_on_where_the_blocks_that_it_reads_are_all_there() {
    let mut scheduler = scheduler(60);
    add(&mut scheduler, normal(0), 100);
    while step(&mut scheduler).chunks.iter().all(|chunk| !chunk.samples) {}
    let tokens = scheduler.tokens(normal(0))[..100].to_vec();
    scheduler.remove(normal(0));
    let root = BlockHash::root("class", b"");
    let chain = BlockHash::chain(root, &tokens);
    let cached = |scheduler: &Scheduler| {
        let cache = scheduler.cache();
        BlockTable::cached(&cache, GROUPS, &chain, 100)
    };
    assert_eq!(cached(&scheduler), 6);
    let forget = |scheduler: &Scheduler, block: usize, group: usize| {
        let mut cache = scheduler.cache();
        let block = cache.peek(&chain[block].of_group(group)).expect("it is cached");
        cache.forget(block);
    };
    // Position 96 reads from 64 on, and the one after block 3 from 32 on.
    forget(&scheduler, 3, 1);
    assert_eq!(cached(&scheduler), 6, "it is not read");
    forget(&scheduler, 4, 2);
    assert_eq!(cached(&scheduler), 3, "after block 3 or 4 one of these would be read");
    scheduler.add(normal(1), tokens, root);
    let plan = step(&mut scheduler);
    assert_eq!(plan.admitted, [(normal(1), 48)]);
    assert_eq!(spans(&plan), [(1, 48, 80, false)]);
}

#[test]
fn forks_share_the_blocks_that_are_left_or_copy_them() {
    let mut scheduler = scheduler(60);
    add(&mut scheduler, normal(0), 100);
    while step(&mut scheduler).chunks.iter().all(|chunk| !chunk.samples) {}
    let held = scheduler.cache().held();
    scheduler.fork(normal(0), normal(1), Fork::Shared, no_copies);
    assert_eq!(scheduler.cache().held(), held);
    let mut copies = 0;
    scheduler.fork(normal(0), normal(2), Fork::Deep, |_| copies += 1);
    assert_eq!((copies, scheduler.cache().held()), (held, 2 * held));
    for _ in 0..40 {
        step(&mut scheduler);
    }
    (0..3).for_each(|request| scheduler.remove(normal(request)));
    assert_eq!(scheduler.cache().held(), 0);
}
