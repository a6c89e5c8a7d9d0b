//! Limits, eviction and damage.

use std::collections::HashSet;

use super::*;
use crate::kv::BLOCK_TOKENS;

const ROOMY: FolderLimits = FolderLimits { bytes_max: 1 << 30, free_min: 0 };
/// Bytes of a file in these tests.
const FILE: u64 = 1000;

fn hash(number: u32) -> BlockHash {
    BlockHash::root("class", b"").child(&[number; BLOCK_TOKENS])
}

fn content(number: u32) -> Vec<u8> {
    number.to_le_bytes().repeat((FILE as usize - file::HEAD_BYTES) / 4)
}

fn store(folder: &mut BlockFolder, number: u32) -> bool {
    folder.store(&hash(number), 0, &content(number), |_| false).expect("it can be written")
}

fn has(folder: &BlockFolder, number: u32) -> bool {
    folder.path_of(&hash(number)).is_file()
}

#[test]
fn blocks_outlive_the_process_and_are_shared() {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().join("new/kv");
    let mut one = BlockFolder::open(&path, ROOMY).expect("it is created");
    let mut other = BlockFolder::open(&path, ROOMY).expect("two processes");
    assert!(store(&mut one, 1) && store(&mut one, 1));
    assert_eq!(one.usage(), FolderUse { blocks: 1, bytes: FILE });
    assert_eq!(other.load(&hash(1), 0), Some(content(1)), "written after its scan");
    assert_eq!(other.load(&hash(2), 0), None);
    let mut later = BlockFolder::open(&path, ROOMY).expect("again");
    assert!(later.contains(&hash(1)));
    assert_eq!(later.load(&hash(1), 0), Some(content(1)));
    assert_eq!(later.usage(), one.usage());
    fs::remove_file(later.path_of(&hash(1))).expect("another process evicts");
    assert_eq!(later.load(&hash(1), 0), None);
    assert_eq!(later.usage(), FolderUse::default());
}

#[test]
fn longest_unused_blocks_are_evicted_unless_they_are_wanted() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 4 * FILE, free_min: 0 };
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    for number in 0..4 {
        assert!(store(&mut folder, number));
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(folder.load(&hash(0), 0).is_some());
    let wanted = HashSet::from([hash(1)]);
    let stored = folder.store(&hash(4), 0, &content(4), |hash| wanted.contains(hash));
    assert!(stored.expect("there is room"));
    let left: Vec<u32> = (0..5).filter(|number| has(&folder, *number)).collect();
    assert_eq!(left, [0, 1, 4], "a sixteenth of the limit, at least one file more");
    assert!(folder.usage().bytes <= 4 * FILE);
    let reopened = BlockFolder::open(place.path(), limits).expect("again");
    assert_eq!(reopened.usage(), folder.usage());
    assert_eq!(folder.prune(FILE).blocks, 2);
    assert_eq!(folder.usage(), FolderUse { blocks: 1, bytes: FILE });
    let big = vec![0; 5 * FILE as usize];
    assert!(!folder.store(&hash(9), 0, &big, |_| false).expect("no error"), "over the limit");
    assert_eq!(folder.usage().blocks, 1, "nothing was evicted for it");
}

#[test]
fn files_of_other_processes_are_not_written_again() {
    let place = tempfile::tempdir().expect("a folder");
    let mut one = BlockFolder::open(place.path(), ROOMY).expect("it is empty");
    let mut other = BlockFolder::open(place.path(), ROOMY).expect("two processes");
    assert!(store(&mut one, 1) && store(&mut other, 1));
    assert_eq!(other.usage(), FolderUse::default(), "not known yet");
    other.scan().expect("it can be read");
    assert_eq!(other.usage(), FolderUse { blocks: 1, bytes: FILE });
}

#[test]
fn files_are_read_by_the_digits_of_their_hash() {
    let place = tempfile::tempdir().expect("a folder");
    let mut folder = BlockFolder::open(place.path(), ROOMY).expect("it is empty");
    store(&mut folder, 1);
    let read = |digits: &str| read_file(place.path(), digits);
    let digits = hash(1).to_string();
    let file = [&file::head(&hash(1), &content(1))[..], &content(1)].concat();
    assert_eq!(read(&digits).expect("it can be read"), Some(file));
    assert_eq!(read(&digits[1..]).expect("no error"), None, "no hash");
    assert_eq!(read(&hash(2).to_string()).expect("no error"), None);
    fs::create_dir_all(folder.path_of(&hash(3))).expect("it can be created");
    read(&hash(3).to_string()).expect_err("a folder in its place");
}

#[test]
fn block_as_large_as_the_limit_takes_the_place_of_all_others() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 2 * FILE, free_min: 0 };
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    assert!(store(&mut folder, 0) && store(&mut folder, 1));
    let large = vec![1; 2 * FILE as usize - file::HEAD_BYTES];
    assert!(folder.store(&hash(2), 0, &large, |_| false).expect("it can be written"));
    assert_eq!(folder.usage(), FolderUse { blocks: 1, bytes: 2 * FILE });
}

#[test]
fn end_of_a_chain_is_evicted_before_its_begin() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 4 * FILE, free_min: 0 };
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    for number in 0..4 {
        // So deep that the order of the writes does not matter, however slow they are.
        let depth = 1000 * number as usize;
        folder.store(&hash(number), depth, &content(number), |_| false).expect("it is written");
    }
    folder.prune(2 * FILE);
    assert!(has(&folder, 0) && has(&folder, 1));
    let mut reopened = BlockFolder::open(place.path(), limits).expect("again");
    reopened.prune(FILE);
    assert!(has(&reopened, 0), "also after a restart");
}

#[test]
fn free_space_is_left() {
    let place = tempfile::tempdir().expect("a folder");
    let limits = FolderLimits { bytes_max: 1 << 40, free_min: u64::MAX / 2 };
    let mut folder = BlockFolder::open(place.path(), limits).expect("it is empty");
    assert!(!store(&mut folder, 1));
    assert_eq!(folder.usage().blocks, 0);
    let mut before = BlockFolder::open(place.path(), ROOMY).expect("without a minimum");
    assert!(store(&mut before, 2) && store(&mut before, 3));
    let mut folder = BlockFolder::open(place.path(), limits).expect("again");
    assert!(!store(&mut folder, 1), "all of it is not enough");
    assert_eq!(folder.usage().blocks, 2, "nothing was evicted for it");
}

#[test]
fn old_incomplete_files_are_deleted_and_foreign_ones_are_left() {
    let place = tempfile::tempdir().expect("a folder");
    let at = |name: &str| place.path().join(name);
    for name in ["tmp-1-1", "tmp-1-2", "notes.txt"] {
        fs::write(at(name), b"x").expect("it can be written");
    }
    fs::create_dir(at("ab")).expect("a subfolder");
    fs::write(at("ab/notes.kv"), b"x").expect("it can be written");
    let old = SystemTime::now() - 2 * INCOMPLETE_MAX;
    set_used(&at("tmp-1-1"), old);
    set_used(&at("notes.txt"), old);
    let folder = BlockFolder::open(place.path(), ROOMY).expect("they do not disturb");
    assert_eq!(folder.usage().blocks, 0);
    let left = ["tmp-1-1", "tmp-1-2", "notes.txt", "ab/notes.kv"].map(|name| at(name).exists());
    assert_eq!(left, [false, true, true, true]);
}

#[test]
fn unusable_folders_and_places_are_errors() {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().join("file");
    fs::write(&path, b"x").expect("it can be written");
    let error = BlockFolder::open(&path, ROOMY).expect_err("a file is no folder").to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
    let mut folder = BlockFolder::open(place.path(), ROOMY).expect("it can be used");
    let blocked = folder.path_of(&hash(1));
    fs::write(blocked.parent().expect("a subfolder"), b"x").expect("it can be written");
    folder.store(&hash(1), 0, &content(1), |_| false).expect_err("its subfolder is a file");
    assert_eq!(folder.usage().blocks, 0);
    assert_eq!(fs::read_dir(place.path()).expect("a folder").count(), 2, "nothing is left behind");
}

/// Ten thousand faults of every kind in the files: a wrong content is never returned.
#[test]
fn damaged_files_are_misses_never_wrong_hits() {
    const BLOCKS: u32 = 20;
    let place = tempfile::tempdir().expect("a folder");
    let mut folder = BlockFolder::open(place.path(), ROOMY).expect("it is empty");
    let mut random = random_numbers(7);
    let (mut faults, mut hits) = (0, 0);
    while faults < 10_000 {
        let (number, other) = (random(BLOCKS), random(BLOCKS));
        store(&mut folder, number);
        store(&mut folder, other);
        let (path, other_path) = (folder.path_of(&hash(number)), folder.path_of(&hash(other)));
        let bytes = fs::read(&path).expect("it was stored");
        let at = random(bytes.len() as u32) as usize;
        let mut changed = bytes.clone();
        match random(8) {
            0 => changed.truncate(at),
            1 => changed[at] ^= 1 << random(8),
            2 => changed.extend([0; 3]),
            3 => changed[at..].fill(0),
            4 => changed = fs::read(&other_path).expect("it was stored"),
            5 => changed = b"something else".to_vec(),
            6 => {
                // Torn between two versions: the head of one, the content of another.
                let other = fs::read(&other_path).expect("it was stored");
                changed[at..].copy_from_slice(&other[at..]);
            }
            _ => changed.clear(),
        }
        fs::write(&path, &changed).expect("it can be written");
        faults += 1;
        let is_same = changed == bytes;
        let found = folder.load(&hash(number), 0);
        assert_eq!(found, is_same.then(|| content(number)), "fault {faults}");
        assert_eq!(path.exists(), is_same, "a damaged file is deleted");
        hits += u32::from(is_same);
        if let Some(found) = folder.load(&hash(other), 0) {
            assert_eq!(found, content(other));
        }
    }
    assert!(hits < 2000, "most faults changed something: {hits}");
    store(&mut folder, 1);
    store(&mut folder, 2);
    fs::write(folder.path_of(&hash(1)), b"x").expect("it can be written");
    let checked = folder.verify().expect("it can be read");
    assert_eq!(checked.damaged, [folder.path_of(&hash(1))]);
    assert_eq!(checked.good, folder.usage());
}

/// Returns a generator of numbers below a limit (xorshift).
fn random_numbers(seed: u64) -> impl FnMut(u32) -> u32 {
    let mut state = seed;
    move |limit| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 33) % u64::from(limit)) as u32
    }
}
