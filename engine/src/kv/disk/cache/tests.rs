//! The tiers together: order, limits of what is read ahead, and damage.

use std::collections::HashMap;

use super::*;
use crate::kv::{
    BLOCK_TOKENS,
    disk::{FolderUse, file},
};

#[test]
fn reads_wait_until_earlier_ones_are_taken() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let hash = |number: u32| BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS]);
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    for number in 0..3 {
        folder.store(&hash(number), 0, &[7; 100], |_| false).expect("it is written");
    }
    let options = TierOptions::folder(place.path(), limits);
    let cache = BlockTiers::open_with(options, 150).expect("it can be used");
    let (answer, answers) = mpsc::channel();
    for number in 0..3 {
        let (hashes, answer) = (vec![hash(number)], answer.clone());
        assert!(cache.fetch(Fetch { hashes, depth: 0, answer }));
    }
    let next = |within| answers.recv_timeout(Duration::from_millis(within)).ok().map(contents);
    let (first, second) = (next(5000).expect("room"), next(5000).expect("still room"));
    assert!(next(50).is_none(), "200 bytes were not taken");
    assert_eq!(first.take().0, [(hash(0), vec![7; 100])]);
    let third = next(5000).expect("one was taken");
    drop((second, third));
    assert_eq!(cache.stats().hits, 3);
}

fn contents(answer: Answer) -> Fetched {
    match answer {
        Answer::Fetched(fetched) => fetched,
        Answer::Found(found) => panic!("{found:?} is the answer to a search"),
    }
}

fn hash(number: u32) -> BlockHash {
    BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS])
}

/// Returns the content of a block, if a tier has it.
fn read(tiers: &BlockTiers, number: u32) -> Option<Vec<u8>> {
    let (answer, answers) = mpsc::channel();
    assert!(tiers.fetch(Fetch { hashes: vec![hash(number)], depth: 0, answer }));
    let answer = answers.recv_timeout(Duration::from_secs(5)).expect("an answer");
    contents(answer).take().0.pop().map(|(_, content)| content)
}

#[test]
fn host_memory_keeps_blocks_without_a_folder() {
    let options = TierOptions { host_bytes: 250, ..TierOptions::default() };
    let tiers = BlockTiers::open(options).expect("a thread");
    for number in 0..3 {
        tiers.store(hash(number), 0, vec![number as u8; 100]);
    }
    assert_eq!(read(&tiers, 0), None, "there is room for two");
    assert_eq!(read(&tiers, 1), Some(vec![1; 100]));
    tiers.store(hash(3), 0, vec![3; 100]);
    assert_eq!((read(&tiers, 2), read(&tiers, 3)), (None, Some(vec![3; 100])));
    let stats = tiers.stats();
    assert_eq!((stats.hits, stats.host_hits, stats.misses, stats.host_bytes), (2, 2, 2, 200));
    assert_eq!((stats.written, stats.usage), (0, FolderUse::default()));
}

/// A worker with some files.
struct Elsewhere(HashMap<String, Vec<u8>>);

impl RemoteBlocks for Elsewhere {
    fn fetch(&mut self, hash: &str) -> Option<Vec<u8>> {
        self.0.get(hash).cloned()
    }

    fn find(&mut self, hashes: &[String]) -> Vec<usize> {
        (0..hashes.len()).filter(|at| self.0.contains_key(&hashes[*at])).collect()
    }
}

/// Returns the places of what a search for these names finds.
fn found(tiers: &BlockTiers, numbers: &[u32], most: usize) -> Vec<usize> {
    let (answer, answers) = mpsc::channel();
    let hashes = numbers.iter().map(|number| hash(*number)).collect();
    assert!(tiers.find(Find { hashes, most, answer }));
    match answers.recv_timeout(Duration::from_secs(5)).expect("an answer") {
        Answer::Found(found) => found.places,
        Answer::Fetched(_) => panic!("nothing was fetched"),
    }
}

#[test]
fn names_are_found_here_and_at_other_workers() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let elsewhere = [2, 4, 5].map(|number| (hash(number).to_string(), Vec::new()));
    let options = TierOptions {
        remote: Some(Box::new(Elsewhere(elsewhere.into()))),
        ..TierOptions::folder(place.path(), limits)
    };
    let tiers = BlockTiers::open(options).expect("an empty folder");
    for number in [3, 5] {
        tiers.store(hash(number), 0, vec![1; 100]);
    }
    let names = [1, 2, 3, 4, 5, 6];
    assert_eq!(found(&tiers, &names, usize::MAX), [1, 2, 3, 4]);
    assert_eq!(found(&tiers, &names, 1), [1], "another worker has one before the first here");
    assert_eq!(found(&tiers, &names[2..], 1), [0]);
    assert_eq!(found(&tiers, &[1, 6], 1), [0; 0]);
}

#[test]
fn blocks_of_other_workers_are_checked_and_kept() {
    let file = |number: u32| {
        let content = vec![number as u8; 100];
        [&file::head(&hash(number), &content)[..], &content].concat()
    };
    let mut damaged = file(2);
    damaged[120] ^= 1;
    let files = [(1, file(1)), (2, damaged), (3, file(1)), (4, file(4)[..90].to_vec())];
    let files = files.map(|(number, file)| (hash(number).to_string(), file));
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let options = TierOptions {
        remote: Some(Box::new(Elsewhere(files.into()))),
        host_bytes: 100,
        ..TierOptions::folder(place.path(), limits)
    };
    let tiers = BlockTiers::open(options).expect("an empty folder");
    assert_eq!(read(&tiers, 1), Some(vec![1; 100]));
    for wrong in [2, 3, 4, 5] {
        assert_eq!(read(&tiers, wrong), None, "{wrong}");
    }
    let stats = tiers.stats();
    assert_eq!((stats.remote_hits, stats.written, stats.usage.blocks), (1, 1, 1));
    // Its own tiers have it now.
    assert_eq!(read(&tiers, 1), Some(vec![1; 100]));
    assert_eq!(tiers.stats().host_hits, 1);
    tiers.store(hash(6), 0, vec![6; 100]);
    assert_eq!(read(&tiers, 1), Some(vec![1; 100]), "from the folder");
    assert_eq!((tiers.stats().host_hits, tiers.stats().remote_hits), (1, 1));
}

/// Returns the answer to a fetch of these blocks.
fn fetched(tiers: &BlockTiers, numbers: &[u32]) -> Fetched {
    let (answer, answers) = mpsc::channel();
    let hashes = numbers.iter().map(|number| hash(*number)).collect();
    assert!(tiers.fetch(Fetch { hashes, depth: 0, answer }));
    contents(answers.recv_timeout(Duration::from_secs(5)).expect("an answer"))
}

#[test]
fn answers_name_the_first_block_that_was_not_read() {
    let options = TierOptions { host_bytes: 200, ..TierOptions::default() };
    let tiers = BlockTiers::open_with(options, 1).expect("a thread");
    let block = |number: u32| (hash(number), vec![number as u8; 100]);
    for number in 0..2 {
        tiers.store(hash(number), 0, block(number).1);
    }
    assert_eq!(fetched(&tiers, &[0, 1]).take(), (vec![block(0), block(1)], None));
    assert_eq!(fetched(&tiers, &[0, 7, 1]).take(), (vec![block(0)], Some(hash(7))));
    let untaken = fetched(&tiers, &[0]);
    assert_eq!(fetched(&tiers, &[1, 0]).take(), (vec![], Some(hash(1))), "no room for a second");
    drop(untaken);
    assert_eq!(fetched(&tiers, &[1]).take(), (vec![block(1)], None));
}

#[test]
fn expected_blocks_are_evicted_last() {
    let options = TierOptions { host_bytes: 200, ..TierOptions::default() };
    let tiers = BlockTiers::open(options).expect("a thread");
    tiers.expect(vec![hash(0)], 1);
    tiers.expect(vec![hash(0), hash(1)], 1);
    tiers.expect(vec![hash(0), hash(1)], -1);
    for number in 0..3 {
        tiers.store(hash(number), 0, vec![number as u8; 100]);
    }
    assert_eq!([0, 1, 2].map(|number| read(&tiers, number).is_some()), [true, false, true]);
    tiers.expect(vec![hash(0)], -1);
    tiers.store(hash(3), 0, vec![3; 100]);
    assert_eq!([0, 2, 3].map(|number| read(&tiers, number).is_some()), [false, true, true]);
}

#[test]
fn few_blocks_wait_to_be_written() {
    let options = TierOptions { host_bytes: 100, ..TierOptions::default() };
    let tiers = BlockTiers::open_with(options, 1).expect("a thread");
    tiers.store(hash(0), 0, vec![0; 100]);
    // The thread waits until the first answer is taken.
    let untaken = fetched(&tiers, &[0]);
    let (answer, answers) = mpsc::channel();
    assert!(tiers.fetch(Fetch { hashes: vec![hash(0)], depth: 0, answer }));
    for number in 1..=4 {
        assert!(tiers.has_room(), "{number}");
        tiers.store(hash(number), 0, vec![1; WRITES_MAX as usize / 4]);
    }
    assert!(!tiers.has_room());
    drop(untaken);
    contents(answers.recv_timeout(Duration::from_secs(5)).expect("an answer")).take();
    fetched(&tiers, &[0]);
    assert!(tiers.has_room());
}

#[test]
fn searches_find_the_first_name_that_is_here() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let options = TierOptions { host_bytes: 100, ..TierOptions::folder(place.path(), limits) };
    let tiers = BlockTiers::open(options).expect("a thread");
    assert_eq!(found(&tiers, &[1, 2], 1), [0; 0]);
    tiers.store(hash(2), 0, vec![2; 100]);
    assert_eq!(found(&tiers, &[1, 2, 3], 1), [1]);
    // Another process writes one.
    let mut other = BlockFolder::open(place.path(), limits).expect("the same folder");
    other.store(&hash(1), 0, &[1; 100], |_| false).expect("it is written");
    assert_eq!(found(&tiers, &[3, 1, 2], 1), [1]);
    let stats = tiers.stats();
    assert_eq!((stats.hits, stats.misses), (0, 0), "only reads count");
}

#[test]
fn damaged_files_after_a_damaged_one_are_deleted_with_it() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    for number in 0..5 {
        folder.store(&hash(number), 0, &[7; 100], |_| false).expect("it is written");
    }
    for number in [1, 3] {
        let digits = hash(number).to_string();
        let path = place.path().join(&digits[..2]).join(format!("{}.kv", &digits[2..]));
        std::fs::write(path, b"x").expect("it can be written");
    }
    let tiers = BlockTiers::open(TierOptions::folder(place.path(), limits)).expect("its files");
    assert_eq!(fetched(&tiers, &[9, 3]).take(), (vec![], Some(hash(9))));
    assert_eq!((tiers.stats().damaged, tiers.stats().usage.blocks), (0, 5), "only a miss");
    assert_eq!(fetched(&tiers, &[0, 1, 2, 3, 4]).take().1, Some(hash(1)));
    assert_eq!(read(&tiers, 4), Some(vec![7; 100]));
    assert_eq!((tiers.stats().damaged, tiers.stats().usage.blocks), (2, 3));
}

#[test]
fn writes_pause_after_one_that_failed() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let tiers = BlockTiers::open(TierOptions::folder(place.path(), limits)).expect("it is empty");
    // A file in the place of its subfolder.
    std::fs::write(place.path().join(&hash(1).to_string()[..2]), b"x").expect("it can be written");
    for number in 1..3 {
        tiers.store(hash(number), 0, vec![1; 100]);
    }
    assert_eq!(read(&tiers, 2), None);
    let stats = tiers.stats();
    assert_eq!((stats.failed, stats.refused, stats.written), (1, 1, 0));
}

#[test]
fn folder_is_not_listed_at_every_request() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 20, free_min: 0 };
    let tiers = BlockTiers::open(TierOptions::folder(place.path(), limits)).expect("it is empty");
    let mut other = BlockFolder::open(place.path(), limits).expect("another process");
    other.store(&hash(1), 0, &[1; 100], |_| false).expect("it is written");
    for _ in 0..2 {
        assert_eq!(read(&tiers, 2), None);
    }
    assert_eq!(tiers.stats().usage.blocks, 0, "not known yet");
    assert_eq!(read(&tiers, 1), Some(vec![1; 100]));
    assert_eq!(tiers.stats().usage.blocks, 1);
}
