//! A folder of blocks: reads, writes, the limit of bytes and the eviction that keeps it.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime},
};

use super::file;
use crate::kv::BlockHash;

/// Age at which a file that was not completed is deleted.
const INCOMPLETE_MAX: Duration = Duration::from_secs(3600);
/// Prefix of files that are being written.
const TEMPORARY: &str = "tmp-";
/// Extension of files of blocks.
const EXTENSION: &str = ".kv";
/// Digits of a hash that name the subfolder.
const FOLDER_DIGITS: usize = 2;
/// A block counts as unused for this much longer than the one before it in its chain: without the blocks before it
/// a block cannot be used, so the end of a chain is evicted first.
const LONGER_PER_BLOCK: Duration = Duration::from_millis(10);
/// Share of the limit that an eviction frees beyond what is needed, so that it is rare.
const SLACK: u64 = 16;

/// Returns the file of a block in a folder.
fn path_in(folder: &Path, hash: &BlockHash) -> PathBuf {
    let digits = hash.to_string();
    let (subfolder, name) = digits.split_at(FOLDER_DIGITS);
    folder.join(subfolder).join(format!("{name}{EXTENSION}"))
}

/// Returns the file of a block as it is in a folder, unchecked. `hash` has its 64 hexadecimal digits; `None` if it is
/// no hash, or if the folder does not have the block.
///
/// # Errors
/// If the file cannot be read.
pub fn read_file(folder: &Path, hash: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(hash) = BlockHash::from_digits(hash) else { return Ok(None) };
    match fs::read(path_in(folder, &hash)) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns which of these blocks a folder has, by their places among the names.
pub fn find_files(folder: &Path, hashes: &[String]) -> Vec<usize> {
    let has = |hash: &String| {
        BlockHash::from_digits(hash).is_some_and(|hash| path_in(folder, &hash).is_file())
    };
    (0..hashes.len()).filter(|at| has(&hashes[*at])).collect()
}

/// The folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the KV cache folder {path}: {source}", path = .path.display())]
pub struct FolderError {
    /// The folder, or what is in it.
    pub path: PathBuf,
    /// The reason.
    pub source: io::Error,
}

/// Bounds of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FolderLimits {
    /// Most bytes of all files.
    pub bytes_max: u64,
    /// Bytes of the file system that stay free.
    pub free_min: u64,
}

/// What a folder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FolderUse {
    /// Files of blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Result of checking every file of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Checked {
    /// Files that are as they were written.
    pub good: FolderUse,
    /// Damaged files, which were deleted.
    pub damaged: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    used: SystemTime,
}

/// A folder of blocks, for one thread. Other processes may use the same folder.
#[derive(Debug)]
pub struct BlockFolder {
    path: PathBuf,
    limits: FolderLimits,
    /// The files as far as they are known: what other processes write is found by the next scan.
    entries: HashMap<BlockHash, Entry>,
    bytes: u64,
    /// Files that were damaged, and deleted.
    damaged: u64,
}

impl BlockFolder {
    /// Opens a folder, which is created if it does not exist, and lists its files.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written.
    pub fn open(path: &Path, limits: FolderLimits) -> Result<Self, FolderError> {
        let failed = |source| FolderError { path: path.to_owned(), source };
        create(path).map_err(failed)?;
        let probe = temporary(path);
        fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe)).map_err(failed)?;
        let (path, entries) = (path.to_owned(), HashMap::new());
        let mut folder = Self { path, limits, entries, bytes: 0, damaged: 0 };
        folder.scan()?;
        Ok(folder)
    }

    /// Returns what the folder has, as of the last scan and this process's changes since.
    pub fn usage(&self) -> FolderUse {
        FolderUse { blocks: self.entries.len() as u64, bytes: self.bytes }
    }

    /// Returns how many files were damaged, and deleted when they were read.
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Lists the files, and deletes old incomplete ones.
    ///
    /// # Errors
    /// If the folder cannot be read; files that vanish meanwhile are no error.
    pub fn scan(&mut self) -> Result<(), FolderError> {
        let failed = |source| FolderError { path: self.path.clone(), source };
        let mut entries = HashMap::new();
        for folder in fs::read_dir(&self.path).map_err(failed)?.flatten() {
            let name = folder.file_name();
            let Some(name) = name.to_str() else { continue };
            if name.starts_with(TEMPORARY) {
                remove_if_old(&folder.path());
            } else if name.len() == FOLDER_DIGITS
                && let Ok(files) = fs::read_dir(folder.path())
            {
                entries.extend(files.flatten().filter_map(|file| listed(name, &file)));
            }
        }
        self.bytes = entries.values().map(|entry: &Entry| entry.bytes).sum();
        self.entries = entries;
        Ok(())
    }

    /// Returns whether the folder is known to have a block.
    pub fn contains(&self, hash: &BlockHash) -> bool {
        self.entries.contains_key(hash)
    }

    /// Returns whether there is a file of the block now, of this process or another one.
    pub fn has_file(&self, hash: &BlockHash) -> bool {
        self.contains(hash) || self.path_of(hash).is_file()
    }

    /// Reads a block with this many blocks before it in its chain. `None` unless every byte is as it was written; a
    /// damaged file is deleted.
    pub fn load(&mut self, hash: &BlockHash, depth: usize) -> Option<Vec<u8>> {
        self.load_into(hash, depth, Vec::new())
    }

    /// Reads a block as [`load`](Self::load) does, into the memory of an earlier content.
    pub(super) fn load_into(
        &mut self,
        hash: &BlockHash,
        depth: usize,
        memory: Vec<u8>,
    ) -> Option<Vec<u8>> {
        let path = self.path_of(hash);
        let Ok((head, content)) = file::read(&path, memory) else {
            self.forget(hash);
            return None;
        };
        if !file::is_intact(hash, &head, &content) {
            tracing::warn!(path = %path.display(), "damaged KV block deleted");
            let _ = fs::remove_file(&path);
            self.forget(hash);
            self.damaged += 1;
            return None;
        }
        let used = used_now(depth);
        set_used(&path, used);
        self.insert(*hash, Entry { bytes: (head.len() + content.len()) as u64, used });
        Some(content)
    }

    /// Writes a block with this many blocks before it in its chain, unless the folder has it. Evicts other blocks if there is no room: those for which `is_wanted`
    /// is false come first, the longest unused ones first. Returns false if there is no room.
    ///
    /// # Errors
    /// If the block cannot be written.
    pub fn store(
        &mut self,
        hash: &BlockHash,
        depth: usize,
        content: &[u8],
        is_wanted: impl Fn(&BlockHash) -> bool,
    ) -> Result<bool, FolderError> {
        let path = self.path_of(hash);
        if self.has_file(hash) {
            return Ok(true);
        }
        let bytes = (file::HEAD_BYTES + content.len()) as u64;
        if !self.make_room(bytes, is_wanted) {
            return Ok(false);
        }
        let temporary = temporary(&self.path);
        let used = used_now(depth);
        let written = fs::write(&temporary, [&file::head(hash, content)[..], content].concat())
            .and_then(|()| fs::create_dir_all(path.parent().unwrap_or(&self.path)))
            .and_then(|()| fs::rename(&temporary, &path));
        if let Err(source) = written {
            let _ = fs::remove_file(&temporary);
            return Err(FolderError { path, source });
        }
        set_used(&path, used);
        self.insert(*hash, Entry { bytes, used });
        Ok(true)
    }

    /// Deletes the longest unused blocks until the files have at most `bytes_max` bytes; returns what was deleted.
    pub fn prune(&mut self, bytes_max: u64) -> FolderUse {
        self.evict(self.bytes.saturating_sub(bytes_max), |_| false)
    }

    /// Reads every file and deletes the damaged ones.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn verify(&mut self) -> Result<Checked, FolderError> {
        self.scan()?;
        let mut checked = Checked::default();
        let hashes: Vec<BlockHash> = self.entries.keys().copied().collect();
        for hash in hashes {
            let path = self.path_of(&hash);
            match fs::read(&path) {
                Ok(bytes) if file::content(&hash, &bytes).is_some() => {
                    checked.good.blocks += 1;
                    checked.good.bytes += bytes.len() as u64;
                }
                Ok(_) => {
                    let _ = fs::remove_file(&path);
                    self.forget(&hash);
                    checked.damaged.push(path);
                }
                // Another process has deleted it.
                Err(_) => drop(self.forget(&hash)),
            }
        }
        Ok(checked)
    }

    /// Makes room for a file; returns false if that is not possible.
    fn make_room(&mut self, bytes: u64, is_wanted: impl Fn(&BlockHash) -> bool) -> bool {
        let FolderLimits { bytes_max, free_min } = self.limits;
        // A file system that does not say how much is free has no minimum.
        let free = fs4::available_space(&self.path).unwrap_or(u64::MAX);
        let over = (self.bytes + bytes).saturating_sub(bytes_max);
        let short = free_min.saturating_add(bytes).saturating_sub(free);
        let needed = over.max(short);
        if needed == 0 {
            return true;
        }
        if bytes > bytes_max || needed > self.bytes {
            return false;
        }
        self.evict(needed.saturating_add(bytes_max / SLACK).min(self.bytes), is_wanted).bytes
            >= needed
    }

    fn evict(&mut self, bytes: u64, is_wanted: impl Fn(&BlockHash) -> bool) -> FolderUse {
        let mut evicted = FolderUse::default();
        if bytes == 0 {
            return evicted;
        }
        let mut order: Vec<(bool, SystemTime, BlockHash)> =
            self.entries.iter().map(|(hash, entry)| (is_wanted(hash), entry.used, *hash)).collect();
        order.sort_unstable_by_key(|(wanted, used, _)| (*wanted, *used));
        for (_, _, hash) in order {
            if evicted.bytes >= bytes {
                break;
            }
            let _ = fs::remove_file(self.path_of(&hash));
            evicted.blocks += 1;
            evicted.bytes += self.forget(&hash);
        }
        evicted
    }

    fn path_of(&self, hash: &BlockHash) -> PathBuf {
        path_in(&self.path, hash)
    }

    fn insert(&mut self, hash: BlockHash, entry: Entry) {
        self.bytes += entry.bytes;
        if let Some(before) = self.entries.insert(hash, entry) {
            self.bytes -= before.bytes;
        }
    }

    /// Removes a block from the list; returns its bytes.
    fn forget(&mut self, hash: &BlockHash) -> u64 {
        let bytes = self.entries.remove(hash).map_or(0, |entry| entry.bytes);
        self.bytes -= bytes;
        bytes
    }
}

/// Creates a folder that only this user can read: blocks have what prompts say.
fn create(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// Returns the block of a file in a subfolder, with its size and last use; `None` for other files.
fn listed(folder: &str, file: &fs::DirEntry) -> Option<(BlockHash, Entry)> {
    let name = file.file_name();
    let rest = name.to_str()?.strip_suffix(EXTENSION)?;
    let hash = BlockHash::from_digits(&format!("{folder}{rest}"))?;
    let metadata = file.metadata().ok().filter(fs::Metadata::is_file)?;
    let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    Some((hash, Entry { bytes: metadata.len(), used }))
}

/// Returns the time of a use now of a block with this many blocks before it.
fn used_now(depth: usize) -> SystemTime {
    let older = LONGER_PER_BLOCK.saturating_mul(u32::try_from(depth).unwrap_or(u32::MAX));
    SystemTime::now().checked_sub(older).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Shows other processes, and this one after a restart, when the file was used.
fn set_used(path: &Path, used: SystemTime) {
    // Without it the file counts as unused since it was written.
    let _ = fs::File::open(path).and_then(|file| file.set_modified(used));
}

/// Returns a new path for a file that is being written.
fn temporary(folder: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{TEMPORARY}{}-{number}", std::process::id()))
}

fn remove_if_old(path: &Path) {
    let age = |path: &Path| fs::metadata(path).ok()?.modified().ok()?.elapsed().ok();
    if age(path).is_some_and(|age| age > INCOMPLETE_MAX) {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests;
