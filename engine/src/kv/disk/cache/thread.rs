//! The thread that reads and writes the blocks of the tiers.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::Receiver,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{BlockFolder, file, host::HostBlocks},
    Answer, Fetch, Fetched, Find, Found, NAMES_MAX, RemoteBlocks, Request, Shared, Staged,
};
use crate::kv::BlockHash;

/// Longest wait until what was read before is taken; what is read for an engine that has stopped is not taken.
const STAGED_WAIT: Duration = Duration::from_secs(1);
/// Time between two looks whether it was taken.
const STAGED_LOOK: Duration = Duration::from_millis(1);
/// Time of reads from other workers in one fetch.
const REMOTE_WITHIN: Duration = Duration::from_millis(500);
/// Time without writes after one failed.
const WRITES_PAUSED: Duration = Duration::from_secs(60);
/// Time between two scans for what other processes wrote or deleted.
const SCAN_EVERY: Duration = Duration::from_secs(60);

pub(super) struct Thread {
    host: HostBlocks,
    folder: Option<BlockFolder>,
    remote: Option<Box<dyn RemoteBlocks>>,
    /// End of the reads from other workers in this fetch.
    remote_until: Instant,
    /// Waiting requests that will use each block.
    expected: HashMap<BlockHash, i64>,
    shared: Shared,
    /// Bytes of blocks that were read and not taken yet.
    staged: Arc<AtomicU64>,
    staged_max: u64,
    /// End of a pause after a failed write.
    writes_from: Option<Instant>,
    scan_at: Instant,
}

impl Thread {
    pub(super) fn new(
        host: HostBlocks,
        folder: Option<BlockFolder>,
        remote: Option<Box<dyn RemoteBlocks>>,
        shared: Shared,
        staged_max: u64,
    ) -> Self {
        let thread = Self {
            host,
            folder,
            remote,
            remote_until: Instant::now(),
            expected: HashMap::new(),
            shared,
            staged: Arc::default(),
            staged_max,
            writes_from: None,
            scan_at: Instant::now() + SCAN_EVERY,
        };
        thread.publish();
        thread
    }

    /// Serves requests until all senders are gone.
    pub(super) fn start(mut self, inbox: Receiver<Request>) -> io::Result<()> {
        let builder = thread::Builder::new().name("kv-disk".to_owned());
        builder.spawn(move || self.run(&inbox)).map(drop)
    }

    fn run(&mut self, inbox: &Receiver<Request>) {
        while let Ok(request) = inbox.recv() {
            match request {
                Request::Fetch(fetch) => self.fetch(fetch),
                Request::Find(find) => self.find(find),
                Request::Store(hash, depth, content) => {
                    let bytes = content.len() as u64;
                    self.shared.waiting_writes.fetch_sub(bytes, Ordering::Relaxed);
                    self.store(hash, depth, &content);
                }
                Request::Expect(hashes, change) => self.expect(hashes, change),
            }
            if Instant::now() >= self.scan_at {
                if let Some(Err(error)) = self.folder.as_mut().map(BlockFolder::scan) {
                    tracing::warn!(%error, "the KV cache folder was not listed");
                }
                self.scan_at = Instant::now() + SCAN_EVERY;
            }
            self.publish();
        }
    }

    fn publish(&self) {
        let usage = self.folder.as_ref().map(BlockFolder::usage).unwrap_or_default();
        self.shared.counters.blocks.store(usage.blocks, Ordering::Relaxed);
        self.shared.counters.bytes.store(usage.bytes, Ordering::Relaxed);
        self.shared.counters.host_bytes.store(self.host.bytes(), Ordering::Relaxed);
        self.shared.counters.damaged.store(self.damaged(), Ordering::Relaxed);
    }

    /// Returns how many files were damaged.
    fn damaged(&self) -> u64 {
        self.folder.as_ref().map_or(0, BlockFolder::damaged)
    }

    /// Returns a block from the first tier that has it. The faster tiers have it from then on.
    fn load(&mut self, hash: &BlockHash, depth: usize) -> Option<Vec<u8>> {
        if let Some(content) = self.host.get(hash) {
            self.shared.counters.host_hits.fetch_add(1, Ordering::Relaxed);
            return Some(content);
        }
        let of_folder = self.folder.as_mut();
        let content =
            of_folder.and_then(|folder| folder.load_into(hash, depth, self.shared.spare.take()));
        let content = content.or_else(|| self.load_remote(hash, depth))?;
        self.host.insert(*hash, &content, self.expected.contains_key(hash));
        Some(content)
    }

    fn load_remote(&mut self, hash: &BlockHash, depth: usize) -> Option<Vec<u8>> {
        if Instant::now() >= self.remote_until {
            return None;
        }
        let file = self.remote.as_mut()?.fetch(&hash.to_string())?;
        let Some(content) = file::content(hash, &file) else {
            tracing::warn!(%hash, "another worker's KV block is damaged");
            return None;
        };
        self.shared.counters.remote_hits.fetch_add(1, Ordering::Relaxed);
        self.write(hash, depth, content);
        Some(content.to_vec())
    }

    fn fetch(&mut self, Fetch { hashes, depth, answer }: Fetch) {
        let Some(first) = hashes.first().copied() else { return };
        let has_room = self.wait_for_room();
        let (began, mut blocks) = (Instant::now(), Vec::with_capacity(hashes.len()));
        let (mut missing, damaged) = ((!has_room).then_some(first), self.damaged());
        self.remote_until = began + REMOTE_WITHIN;
        let mut chain = hashes.into_iter().zip(depth..);
        for (hash, depth) in chain.by_ref().take_while(|_| has_room) {
            let Some(content) = self.load(&hash, depth) else {
                self.shared.counters.misses.fetch_add(1, Ordering::Relaxed);
                missing = Some(hash);
                break;
            };
            self.shared.counters.hits.fetch_add(1, Ordering::Relaxed);
            blocks.push((hash, content));
        }
        if self.damaged() > damaged {
            // What damaged one may have damaged others: they are deleted now, and written again together.
            for (hash, depth) in chain {
                self.folder.as_mut().and_then(|folder| folder.load(&hash, depth));
            }
        }
        // The receiver of the answer may read the counts.
        self.publish();
        // The engine may be gone.
        let bytes = blocks.iter().map(|(_, content)| content.len() as u64).sum();
        let staged = Staged::new(bytes, &self.staged);
        let time = began.elapsed();
        let _ = answer.send(Answer::Fetched(Fetched { first, blocks, missing, time, staged }));
    }

    fn find(&mut self, Find { hashes, most, answer }: Find) {
        let Some(first) = hashes.first().copied() else { return };
        let has = |at: &usize| {
            let (hash, of_folder) = (&hashes[*at], self.folder.as_ref());
            self.host.contains(hash) || of_folder.is_some_and(|folder| folder.has_file(hash))
        };
        let mut places: Vec<usize> = (0..hashes.len()).filter(has).take(most).collect();
        if let Some(remote) = &mut self.remote {
            // Behind the last place that counts, more are of no use.
            let end = if places.len() < most { hashes.len() } else { places[most - 1] };
            let others = (0..end).filter(|at| places.binary_search(at).is_err());
            let others: Vec<usize> = others.take(NAMES_MAX).collect();
            let names: Vec<String> = others.iter().map(|at| hashes[*at].to_string()).collect();
            let found = if names.is_empty() { Vec::new() } else { remote.find(&names) };
            places.extend(found.into_iter().filter_map(|at| others.get(at)));
            places.sort_unstable();
            places.dedup();
            places.truncate(most);
        }
        // The engine may be gone.
        let _ = answer.send(Answer::Found(Found { first, places }));
    }

    /// Waits until what was read before is taken; false if that takes too long.
    fn wait_for_room(&self) -> bool {
        let began = Instant::now();
        while self.staged.load(Ordering::Relaxed) >= self.staged_max {
            if began.elapsed() >= STAGED_WAIT {
                return false;
            }
            thread::sleep(STAGED_LOOK);
        }
        true
    }

    fn store(&mut self, hash: BlockHash, depth: usize, content: &[u8]) {
        self.host.insert(hash, content, self.expected.contains_key(&hash));
        self.write(&hash, depth, content);
    }

    /// Writes a block to the folder, if there is one.
    fn write(&mut self, hash: &BlockHash, depth: usize, content: &[u8]) {
        let Some(folder) = &mut self.folder else { return };
        if self.writes_from.is_some_and(|from| Instant::now() < from) {
            self.shared.counters.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let expected = &self.expected;
        match folder.store(hash, depth, content, |hash| expected.contains_key(hash)) {
            Ok(true) => self.shared.counters.written.fetch_add(1, Ordering::Relaxed),
            Ok(false) => self.shared.counters.refused.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                tracing::warn!(%error, "KV blocks are not written for a minute");
                self.writes_from = Some(Instant::now() + WRITES_PAUSED);
                self.shared.counters.failed.fetch_add(1, Ordering::Relaxed)
            }
        };
    }

    fn expect(&mut self, hashes: Vec<BlockHash>, change: i64) {
        for hash in hashes {
            let count = self.expected.entry(hash).or_default();
            *count += change;
            let is_expected = *count > 0;
            if !is_expected {
                self.expected.remove(&hash);
            }
            self.host.set_expected(&hash, is_expected);
        }
    }
}
