//! The tiers together: order, limits of what is read ahead, and damage.

use super::*;
use crate::kv::{BLOCK_TOKENS, disk::FolderUse};

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
    let next = |within| answers.recv_timeout(Duration::from_millis(within)).ok();
    let (first, second) = (next(5000).expect("room"), next(5000).expect("still room"));
    assert!(next(50).is_none(), "200 bytes were not taken");
    assert_eq!(first.take().0, [(hash(0), vec![7; 100])]);
    let third = next(5000).expect("one was taken");
    drop((second, third));
    assert_eq!(cache.stats().hits, 3);
}

fn hash(number: u32) -> BlockHash {
    BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS])
}

/// Returns the content of a block, if a tier has it.
fn read(tiers: &BlockTiers, number: u32) -> Option<Vec<u8>> {
    let (answer, answers) = mpsc::channel();
    assert!(tiers.fetch(Fetch { hashes: vec![hash(number)], depth: 0, answer }));
    let fetched = answers.recv_timeout(Duration::from_secs(5)).expect("an answer");
    fetched.take().0.pop().map(|(_, content)| content)
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
