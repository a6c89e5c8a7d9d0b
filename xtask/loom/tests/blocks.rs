//! KV blocks that two engines share, under every interleaving that loom finds within the preemption bound: no block is
//! lost, freed twice or written by one engine while another one uses it.

#[expect(dead_code, reason = "each test program uses its part of it")]
mod cells;

use std::sync::{Arc, LazyLock};

use cells::{Cells, explore};
use loom::thread;
use tritmill_loom::kv::{BLOCK_TOKENS, BlockCache, BlockHash, BlockId, SharedCache, Writable};

static NAME: LazyLock<BlockHash> =
    LazyLock::new(|| BlockHash::root("class", b"").child(&[1; BLOCK_TOKENS]));

/// One storage: the bookkeeping, and a cell as the content of each block.
#[derive(Clone)]
struct Storage {
    cache: SharedCache,
    contents: Arc<Cells>,
}

impl Storage {
    fn new(blocks: usize) -> Self {
        let cache = SharedCache::new(BlockCache::new(blocks));
        Self { cache, contents: Arc::new(Cells::new(blocks)) }
    }

    /// Takes a fresh block and writes to it.
    fn fresh(&self, value: usize) -> Option<BlockId> {
        let block = self.cache.lock().allocate()?;
        self.contents.set(block.0 as usize, value);
        Some(block)
    }

    fn get(&self, block: BlockId) -> usize {
        self.contents.get(block.0 as usize)
    }

    /// Adds to a held block as a step does: makes it writable, copies under the lock, writes without it. Returns the
    /// block that is held afterwards; `None`, and no hold, if there is no block for a copy.
    fn add(&self, block: BlockId, value: usize) -> Option<BlockId> {
        let mut cache = self.cache.lock();
        let writable = match cache.make_writable(block) {
            Some(Writable::InPlace) => block,
            Some(Writable::Copied(copy)) => {
                self.contents.set(copy.0 as usize, self.get(block));
                copy
            }
            None => {
                cache.release(block);
                return None;
            }
        };
        drop(cache);
        self.contents.add(writable.0 as usize, value);
        Some(writable)
    }

    fn release(&self, block: BlockId) {
        self.cache.lock().release(block);
    }

    fn check_free(&self, blocks: usize) {
        let cache = self.cache.lock();
        assert_eq!((cache.held(), cache.available()), (0, blocks), "no block is lost");
    }
}

/// Runs one part on a thread of its own and the other on this one.
fn both(one: impl FnOnce() + 'static, other: impl FnOnce()) {
    let thread = thread::spawn(one);
    other();
    thread.join().expect("the thread did not panic");
}

#[test]
fn both_holders_of_a_block_write_to_copies() {
    explore(3, || {
        let storage = Storage::new(2);
        let block = storage.fresh(7).expect("two are free");
        storage.cache.lock().retain(block);
        let other = storage.clone();
        let write = move |storage: &Storage, value| {
            let own = storage.add(block, value).expect("one holder writes in place, one to a copy");
            assert_eq!(storage.get(own), 7 + value);
            storage.release(own);
        };
        both(move || write(&other, 10), || write(&storage, 100));
        storage.check_free(2);
    });
}

#[test]
fn holder_without_room_for_a_copy_gives_way_to_the_other() {
    explore(3, || {
        let storage = Storage::new(1);
        let block = storage.fresh(7).expect("one is free");
        storage.cache.lock().retain(block);
        let other = storage.clone();
        let write = move |storage: &Storage, value| {
            if let Some(own) = storage.add(block, value) {
                assert_eq!((own, storage.get(own)), (block, 7 + value));
                storage.release(own);
            }
        };
        both(move || write(&other, 10), || write(&storage, 100));
        storage.check_free(1);
    });
}

#[test]
fn original_is_copied_before_it_is_used_again() {
    explore(3, || {
        let storage = Storage::new(2);
        let block = storage.fresh(7).expect("two are free");
        storage.cache.lock().retain(block);
        let other = storage.clone();
        let reuse = move || {
            other.release(block);
            // The original, if the other engine has made its copy, or else the block that it would have taken.
            if let Some(fresh) = other.fresh(50) {
                assert_eq!(other.get(fresh), 50);
                other.release(fresh);
            }
        };
        both(reuse, || {
            if let Some(own) = storage.add(block, 1) {
                assert_eq!(storage.get(own), 8);
                storage.release(own);
            }
        });
        storage.check_free(2);
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn copy_without_the_lock_would_be_a_race() {
    explore(3, || {
        let storage = Storage::new(2);
        let block = storage.fresh(7).expect("two are free");
        storage.cache.lock().retain(block);
        let other = storage.clone();
        both(
            move || assert!(other.add(block, 10).is_some()),
            || {
                let writable = storage.cache.lock().make_writable(block);
                if let Some(Writable::Copied(copy)) = writable {
                    storage.contents.set(copy.0 as usize, storage.get(block));
                }
            },
        );
    });
}

#[test]
fn named_block_is_found_whole_or_evicted() {
    explore(3, || {
        let storage = Storage::new(2);
        let other = storage.clone();
        let compute = move || {
            let block = other.fresh(5).expect("each engine holds one of two");
            other.cache.lock().register(*NAME, block);
            assert_eq!(other.get(block), 5);
            other.release(block);
        };
        both(compute, || {
            for _ in 0..2 {
                let mut cache = storage.cache.lock();
                let hit = cache.peek(&NAME);
                hit.into_iter().for_each(|block| cache.retain(block));
                drop(cache);
                let block = match hit {
                    Some(block) => {
                        assert_eq!(storage.get(block), 5);
                        block
                    }
                    // May evict the named block.
                    None => storage.fresh(9).expect("each engine holds one of two"),
                };
                storage.release(block);
            }
        });
        storage.check_free(2);
    });
}

#[test]
fn sole_holder_of_a_named_block_takes_the_name_away_before_it_writes() {
    explore(3, || {
        let storage = Storage::new(2);
        let block = storage.fresh(5).expect("two are free");
        storage.cache.lock().register(*NAME, block);
        let other = storage.clone();
        let find = move || {
            let mut cache = other.cache.lock();
            let Some(hit) = cache.peek(&NAME) else { return };
            cache.retain(hit);
            drop(cache);
            assert_eq!(other.get(hit), 5);
            other.release(hit);
        };
        both(find, || {
            let own = storage.add(block, 1).expect("two are free");
            assert_eq!(storage.get(own), 6);
            storage.release(own);
        });
        storage.check_free(2);
    });
}

#[test]
fn engine_that_ends_releases_what_it_holds_once() {
    explore(3, || {
        let storage = Storage::new(3);
        let blocks = [7, 8].map(|value| storage.fresh(value).expect("three are free"));
        blocks.iter().for_each(|block| storage.cache.lock().retain(*block));
        let other = storage.clone();
        let end = move || other.cache.if_sound(|cache| cache.release_all(&mut blocks.to_vec()));
        both(end, || {
            let first = storage.add(blocks[0], 1).expect("one is free");
            assert_eq!((storage.get(first), storage.get(blocks[1])), (8, 8));
            storage.cache.lock().release_all(&mut vec![first, blocks[1]]);
        });
        storage.check_free(3);
    });
}
