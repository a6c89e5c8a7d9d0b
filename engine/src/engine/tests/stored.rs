//! Blocks on disk: the same tokens, computed once, whatever happens to the files.

use std::{fs, path::Path};

use super::*;
use crate::{
    kv::{
        BLOCK_TOKENS, LayerGroups,
        disk::{BlockFolder, FolderLimits, TierOptions},
    },
    scheduler::Fork,
};

const LIMITS: FolderLimits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };

/// Returns an engine with the blocks of a folder, as after a restart.
fn start(folder: &Path, blocks: usize) -> Harness {
    start_with(config(), folder, blocks)
}

fn start_with(config: EngineConfig, folder: &Path, blocks: usize) -> Harness {
    let mut harness = Harness::new(EngineConfig { token_budget: 512, ..config }, blocks);
    harness.engine.use_disk(
        BlockTiers::open(TierOptions::folder(folder, LIMITS)).expect("the folder can be used"),
    );
    harness
}

/// Returns an engine with the blocks of a folder, of a model with layers that attend to 40 tokens.
fn start_with_windows(folder: &Path) -> Harness {
    let groups = LayerGroups { windows: 2, window: 40, part: BLOCK_TOKENS };
    let config = EngineConfig { token_budget: 512, ..config() };
    let mut harness = Harness::of(config, 60, groups, false);
    let tiers = BlockTiers::open(TierOptions::folder(folder, LIMITS));
    harness.engine.use_disk(tiers.expect("the folder can be used"));
    harness
}

/// Returns the file of a block or a state.
fn file_of(folder: &Path, name: &BlockHash) -> std::path::PathBuf {
    let digits = name.to_string();
    folder.join(&digits[..2]).join(format!("{}.kv", &digits[2..]))
}

/// Waits until the thread has written what it was given.
fn settle(harness: &Harness, blocks: u64) {
    let started = Instant::now();
    while harness.engine.disk_stats().expect("a disk").usage.blocks < blocks {
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", harness.engine.disk_stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the tokens computed in prefill chunks by the answer to a request.
fn answer(harness: &mut Harness, request: &Request) -> u64 {
    let before = harness.engine.stats().prefill_tokens;
    assert_eq!(harness.choices(request), expected(request));
    harness.engine.stats().prefill_tokens - before
}

#[test]
fn shared_prompt_is_not_computed_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start(folder.path(), 40);
    assert_eq!(answer(&mut first, &request(1, 100, 5)), 100);
    assert_eq!(first.engine.disk_stats().expect("a disk").usage.blocks, 0, "used once");
    assert_eq!(answer(&mut first, &request(1, 100, 7)), 4, "from the blocks in memory");
    settle(&first, 6);
    drop(first);
    let mut second = start(folder.path(), 40);
    assert_eq!(answer(&mut second, &request(1, 100, 9)), 4, "six blocks are read");
    let stats = second.engine.disk_stats().expect("a disk");
    assert_eq!((stats.hits, stats.misses, stats.written), (6, 0, 0));
    assert_eq!(second.engine.stats().tiers, Some(stats));
    assert_eq!(second.engine.stats().prefix_hit_tokens, 96);
    assert_eq!(answer(&mut second, &request(2, 50, 3)), 50, "another prompt");
}

#[test]
fn last_blocks_of_windows_are_read_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = || start_with_windows(folder.path());
    let mut first = start();
    assert_eq!(answer(&mut first, &request(1, 100, 5)), 100);
    assert_eq!(answer(&mut first, &request(1, 100, 7)), 4, "from the blocks in memory");
    // Six blocks, and the last three of each window.
    settle(&first, 12);
    drop(first);
    let mut second = start();
    assert_eq!(answer(&mut second, &request(1, 100, 9)), 4);
    let stats = second.engine.disk_stats().expect("a disk");
    assert_eq!((stats.hits, stats.misses, stats.written), (12, 0, 0));
    assert_eq!(answer(&mut second, &request(2, 50, 3)), 50, "another prompt");
    drop(second);
    // Without a block of a window the others are of no use.
    let chain = BlockHash::chain(BlockHash::root("hash", &[]), &request(1, 96, 1).prompt);
    fs::remove_file(file_of(folder.path(), &chain[4].of_group(2))).expect("it is there");
    let mut third = start();
    assert_eq!(answer(&mut third, &request(1, 100, 9)), 100);
    assert_eq!(answer(&mut third, &request(1, 100, 2)), 4, "computed again");
}

#[test]
fn prompt_between_two_kept_prefixes_goes_on_after_the_shorter_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start_with_windows(folder.path());
    assert_eq!(answer(&mut first, &request(1, 180, 5)), 180);
    assert_eq!(answer(&mut first, &request(1, 180, 7)), 4);
    assert_eq!(answer(&mut first, &request(1, 60, 5)), 12);
    // Eleven blocks, of each window the last three, and the first three.
    settle(&first, 11 + 2 * (3 + 3));
    drop(first);
    let mut second = start_with_windows(folder.path());
    let mut between = request(1, 130, 5);
    between.prompt.extend(request(2, 30, 1).prompt);
    assert_eq!(answer(&mut second, &between), 160 - 48);
    assert_eq!(answer(&mut second, &request(1, 180, 9)), 4);
    // Nothing behind the shorter prefix was read for the first of them, which computed five blocks of the longer one.
    let stats = second.engine.disk_stats().expect("a disk");
    assert_eq!((stats.hits, stats.misses), (3 + 6 + 3 + 6, 0));
}

#[test]
fn state_after_a_shared_prompt_is_read_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = || start_with(recurrent(), folder.path(), 60);
    let mut first = start();
    assert_eq!(answer(&mut first, &request(1, 100, 5)), 100);
    assert_eq!(answer(&mut first, &request(1, 100, 7)), 4, "from the state in memory");
    settle(&first, 7);
    drop(first);
    let mut second = start();
    // It goes on after the last state before its end; of the blocks behind it none is read.
    let requests: Vec<Request> = (3..9).map(|tokens| request(1, 100 + tokens, tokens)).collect();
    let ids: Vec<RequestId> = requests.iter().map(|request| second.submit(request)).collect();
    second.run();
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(second.output(*id).choices, expected(request));
        assert_eq!(second.output(*id).cached_tokens, 96);
    }
    let stats = second.engine.disk_stats().expect("a disk");
    assert_eq!((stats.hits, stats.misses), (7, 0), "six blocks and a state are read once");
    assert_eq!(answer(&mut second, &request(2, 50, 3)), 50, "another prompt");
    drop(second);
    // Blocks without a state are of no use.
    let root = BlockHash::root("hash", &[]);
    let chain = BlockHash::chain(root, &request(1, 96, 1).prompt);
    fs::remove_file(file_of(folder.path(), &chain[5].of_state())).expect("the state is there");
    let mut third = start();
    assert_eq!(answer(&mut third, &request(1, 100, 9)), 100);
    assert_eq!(third.engine.disk_stats().expect("a disk").hits, 0);
    assert_eq!(answer(&mut third, &request(1, 100, 5)), 4);
    settle(&third, 7);
}

#[test]
fn state_of_another_size_is_computed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start_with(recurrent(), folder.path(), 60);
    answer(&mut first, &request(1, 100, 1));
    answer(&mut first, &request(1, 100, 2));
    settle(&first, 7);
    drop(first);
    let chain = BlockHash::chain(BlockHash::root("hash", &[]), &request(1, 96, 1).prompt);
    let name = chain[5].of_state();
    fs::remove_file(file_of(folder.path(), &name)).expect("the state is there");
    let mut files = BlockFolder::open(folder.path(), LIMITS).expect("the folder can be used");
    files.store(&name, 5, b"too short", |_| false).expect("it is written");
    let mut second = start_with(recurrent(), folder.path(), 60);
    assert_eq!(answer(&mut second, &request(1, 120, 3)), 120);
}

#[test]
fn prompts_that_arrive_together_wait_for_one_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start(folder.path(), 40);
    answer(&mut first, &request(1, 100, 1));
    answer(&mut first, &request(1, 100, 2));
    settle(&first, 6);
    let mut second = start(folder.path(), 100);
    let requests: Vec<Request> = (3..9).map(|tokens| request(1, 100, tokens)).collect();
    let ids: Vec<RequestId> = requests.iter().map(|request| second.submit(request)).collect();
    second.run();
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(second.output(*id).choices, expected(request));
    }
    assert_eq!(second.engine.disk_stats().expect("a disk").hits, 6);
    assert_eq!(second.engine.stats().prefill_tokens, 6 * 4);
}

#[test]
fn long_prompt_is_read_in_parts_and_few_blocks_suffice() {
    let folder = tempfile::tempdir().expect("a folder");
    let long = |tokens| request(3, 190, tokens);
    let mut first = start(folder.path(), 40);
    answer(&mut first, &long(1));
    answer(&mut first, &long(2));
    settle(&first, 11);
    // As many blocks as the sequence needs.
    let mut second = start(folder.path(), 13);
    answer(&mut second, &request(9, 150, 3));
    assert_eq!(answer(&mut second, &long(5)), 190 - 176);
}

#[test]
fn cancelled_and_late_requests_end_while_their_blocks_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start(folder.path(), 40);
    answer(&mut first, &request(1, 100, 1));
    answer(&mut first, &request(1, 100, 2));
    settle(&first, 6);
    let mut second = start(folder.path(), 40);
    let cancelled = second.submit(&request(1, 100, 3));
    second.engine.cancel(cancelled);
    let late = Request { deadline: Some(second.now), ..request(1, 100, 4) };
    let late = second.submit(&late);
    let other = second.submit(&request(1, 100, 5));
    second.run();
    let reason = |id| second.output(id).choices[0].finish_reason;
    assert_eq!(
        (reason(cancelled), reason(late)),
        (FinishReason::Cancelled, FinishReason::Deadline)
    );
    assert_eq!(second.output(other).choices, expected(&request(1, 100, 5)));
}

#[test]
fn forks_wait_for_the_same_blocks_and_share_the_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start(folder.path(), 40);
    answer(&mut first, &request(1, 100, 1));
    answer(&mut first, &request(1, 100, 2));
    settle(&first, 6);
    for kind in [Fork::Shared, Fork::Deep] {
        let mut second = start(folder.path(), 40);
        let id = second.submit(&request(1, 100, 3));
        let forked = second.engine.fork_request(id, kind).expect("there is room");
        let mut fork = second.fork(kind);
        for harness in [&mut second, &mut fork] {
            harness.run_beside_others();
            for id in [id, forked] {
                assert_eq!(harness.output(id).choices, expected(&request(1, 100, 3)));
            }
            let computed = harness.engine.stats().prefill_tokens;
            assert_eq!(computed, 2 * 4, "{kind:?}: the rest is on disk or in memory");
        }
    }
}

#[test]
fn blocks_of_another_size_are_computed() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut files = BlockFolder::open(folder.path(), LIMITS).expect("the folder can be used");
    let root = BlockHash::root("hash", &[]);
    let hash = root.child(&request(1, 16, 1).prompt);
    files.store(&hash, 0, b"too short", |_| false).expect("it is written");
    let mut harness = start(folder.path(), 40);
    assert_eq!(answer(&mut harness, &request(1, 40, 3)), 40);
}

#[test]
fn tokens_are_the_same_whatever_happens_to_the_files() {
    spoil_files(config(), 4 * 7);
}

#[test]
fn tokens_are_the_same_whatever_happens_to_states() {
    spoil_files(recurrent(), 4 * 8);
}

/// Changes and deletes files between restarts; prompts that are used twice have so many.
fn spoil_files(config: EngineConfig, count: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut first = start_with(config, folder.path(), 60);
    for tokens in 1..3 {
        for kind in 0..4 {
            answer(&mut first, &request(kind, 120, tokens));
        }
    }
    settle(&first, count);
    drop(first);
    let files = |folder: &Path| -> Vec<std::path::PathBuf> {
        let folders = fs::read_dir(folder).expect("it can be read").flatten();
        let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten());
        files.flatten().map(|file| file.path()).collect()
    };
    let mut state = 1u64;
    let mut random = move |limit: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    for round in 0..60 {
        let all = files(folder.path());
        for _ in 0..4 {
            let (one, other) = (&all[random(all.len())], &all[random(all.len())]);
            let Ok(mut bytes) = fs::read(one) else { continue };
            if bytes.is_empty() {
                continue;
            }
            match random(5) {
                0 => bytes.truncate(random(bytes.len())),
                1 => {
                    let at = random(bytes.len());
                    bytes[at] ^= 1;
                }
                2 => bytes = fs::read(other).unwrap_or_default(),
                3 => bytes.clear(),
                _ => {
                    drop(fs::remove_file(one));
                    continue;
                }
            }
            fs::write(one, bytes).expect("it can be written");
        }
        let mut harness = start_with(config, folder.path(), 60);
        let requests: Vec<Request> = (0..8).map(|at| request(at % 4, 120, 2 + round % 5)).collect();
        let ids: Vec<RequestId> = requests.iter().map(|r| harness.submit(r)).collect();
        harness.run();
        for (id, request) in ids.iter().zip(&requests) {
            assert_eq!(harness.output(*id).choices, expected(request), "round {round}");
        }
        // A later use of each prompt writes again what was deleted.
        for kind in 0..4 {
            answer(&mut harness, &request(kind, 120, 2));
        }
        settle(&harness, count);
    }
}
