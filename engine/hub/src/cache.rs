//! [`Cache`]: the folders of one repository, as the hub's own tools lay them out.
//!
//! ```text
//! .locks/models--ORG--NAME/HASH.lock         held while the blob is written
//! models--ORG--NAME/blobs/HASH               the content of a file
//!                   blobs/HASH.incomplete    as much of it as has arrived
//!                   refs/REVISION            the commit that a branch or tag meant last
//!                   snapshots/COMMIT/FILE    link to the blob
//! ```

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use hf_hub::{Repo, RepoType};
use serde::Deserialize;

use crate::{
    choice::{Choice, INDEX, RemoteFile, choose},
    digest::Digest,
    error::PullError,
    reference::{Reference, is_commit},
};

/// Deepest folder of a snapshot that is looked into.
const DEPTH_MAX: usize = 4;
/// Largest shard index read, in bytes.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// The part of the cache that belongs to one repository.
#[derive(Debug)]
pub(crate) struct Cache {
    repository: hf_hub::CacheRepo,
    folder: PathBuf,
    locks: PathBuf,
    revision: String,
}

/// A blob that this process alone may write, while it lives.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// A model that is completely in the cache.
#[derive(Debug)]
pub(crate) struct Found {
    pub commit: String,
    pub choice: Choice,
}

impl Cache {
    /// Returns the folders of a repository. They may not exist.
    pub fn new(root: &Path, reference: &Reference) -> Self {
        let revision = reference.revision().to_owned();
        let repo = Repo::with_revision(reference.repository(), RepoType::Model, revision.clone());
        let name = repo.folder_name();
        Self {
            folder: root.join(&name),
            locks: root.join(".locks").join(&name),
            repository: hf_hub::Cache::new(root.to_owned()).repo(repo),
            revision,
        }
    }

    /// Returns the folder of the blobs.
    pub fn blobs(&self) -> PathBuf {
        self.folder.join("blobs")
    }

    /// Returns the path of a blob.
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// Returns the folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.repository.pointer_path(commit)
    }

    /// Returns the path of a file of the choice, or of its folder.
    pub fn path(&self, commit: &str, choice: &Choice) -> PathBuf {
        match choice {
            Choice::Gguf(file, _) => self.snapshot(commit).join(&file.name),
            Choice::Folder(_) => self.snapshot(commit),
        }
    }

    /// Waits for the lock of a blob. Calls `wait` if another process has it.
    pub fn lock(&self, digest: &Digest, wait: impl FnOnce()) -> Result<Lock, PullError> {
        make_folder(&self.locks)?;
        let path = self.locks.join(format!("{}.lock", digest.hex()));
        let failed = |source| PullError::Cache { path: path.clone(), source };
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                wait();
                file.lock().map_err(failed)?;
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        Ok(Lock { _file: file })
    }

    /// Makes a file of a commit's snapshot a link to its blob.
    pub fn link(&self, commit: &str, file: &str, digest: &Digest) -> Result<(), PullError> {
        let link = self.snapshot(commit).join(file);
        let blob = self.blob(digest);
        let folder = link.parent().unwrap_or(&self.folder);
        make_folder(folder)?;
        if same_file(&link, &blob) {
            return Ok(());
        }
        // Relative, so that the cache can be moved: out of snapshots/COMMIT and the folders of the file.
        let ups = "../".repeat(2 + file.matches('/').count());
        let target = format!("{ups}blobs/{}", digest.hex());
        replace(&link, |temporary| make_link(&target, &blob, temporary))
    }

    /// Records the commit that the revision means.
    pub fn set_commit(&self, commit: &str) -> Result<(), PullError> {
        if self.revision == commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(&self.revision);
        make_folder(path.parent().unwrap_or(&self.folder))?;
        replace(&path, |temporary| fs::write(temporary, commit))
    }

    /// Returns the commit that the revision meant last.
    fn commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let text = fs::read_to_string(self.folder.join("refs").join(&self.revision)).ok()?;
        Some(text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Looks for the model without the network: the revision's last commit, if all files of the model are there.
    pub fn find(&self, reference: &Reference) -> Option<Found> {
        let commit = self.commit()?;
        let snapshot = self.snapshot(&commit);
        let mut files = Vec::new();
        list(&snapshot, "", DEPTH_MAX, &mut files);
        files.sort_by(|a: &RemoteFile, b| a.name.cmp(&b.name));
        let choice = choose(&files, reference).ok()?;
        let has_shards = |files: &[RemoteFile]| {
            let present = |shard: &String| files.iter().any(|file| file.name == *shard);
            !files.iter().any(|file| file.name == INDEX)
                || shards(&snapshot.join(INDEX)).is_some_and(|all| all.iter().all(present))
        };
        match &choice {
            Choice::Folder(files) if !has_shards(files) => None,
            _ => Some(Found { commit, choice }),
        }
    }
}

/// Adds the files below a folder that have their blobs.
fn list(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<RemoteFile>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match fs::metadata(entry.path()) {
            Ok(found) if found.is_file() => {
                files.push(RemoteFile { name, size: Some(found.len()), digest: None });
            }
            Ok(_) if depth > 0 => list(&entry.path(), &format!("{name}/"), depth - 1, files),
            _ => {}
        }
    }
}

/// Returns the files that a shard index names.
fn shards(index: &Path) -> Option<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::HashMap<String, String>,
    }
    if fs::metadata(index).ok()?.len() > INDEX_BYTES_MAX {
        return None;
    }
    let index: Index = serde_json::from_slice(&fs::read(index).ok()?).ok()?;
    Some(index.weight_map.into_values().collect())
}

pub(crate) fn make_folder(folder: &Path) -> Result<(), PullError> {
    fs::create_dir_all(folder).map_err(PullError::cache(folder))
}

/// Puts what `make` makes at `path`, at once: other processes see the old or the new.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), PullError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Threads of this process may make the same file, too.
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(".{name}.{}.{number}", process::id()));
    // Left by a process of this number that died.
    let _ = fs::remove_file(&temporary);
    let made = make(&temporary).and_then(|()| fs::rename(&temporary, path));
    made.map_err(PullError::cache(path))
}

fn same_file(link: &Path, blob: &Path) -> bool {
    match (fs::canonicalize(link), fs::canonicalize(blob)) {
        (Ok(link), Ok(blob)) => link == blob,
        _ => false,
    }
}

#[cfg(unix)]
fn make_link(target: &str, _blob: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Links need a privilege elsewhere: a second name does as well.
#[cfg(not(unix))]
fn make_link(_target: &str, blob: &Path, link: &Path) -> io::Result<()> {
    fs::hard_link(blob, link).or_else(|_| fs::copy(blob, link).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789012345678901234567890123456789";

    fn put(cache: &Cache, name: &str, content: &str) {
        let mut hasher = Digest::parse(&"0".repeat(64)).expect("a hash").hasher(0);
        hasher.update(content.as_bytes());
        let digest = hasher.finish();
        make_folder(&cache.blobs()).expect("a folder");
        fs::write(cache.blob(&digest), content).expect("a file");
        cache.link(COMMIT, name, &digest).expect("a link");
    }

    #[test]
    fn hf_hub_finds_what_is_linked() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let reference: Reference = "o/n@refs/pr/1".parse().expect("a reference");
        let cache = Cache::new(root.path(), &reference);
        put(&cache, "a/b.gguf", "weights");
        cache.set_commit(COMMIT).expect("a file");
        let path = cache.repository.get("a/b.gguf").expect("hf-hub finds it");
        assert_eq!(fs::read_to_string(path).expect("it is there"), "weights");
        let found = cache.find(&reference).expect("it is complete");
        assert_eq!(cache.path(COMMIT, &found.choice), cache.snapshot(COMMIT).join("a/b.gguf"));
    }

    #[test]
    fn folder_is_found_when_every_shard_is_there() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let reference: Reference = "o/n".parse().expect("a reference");
        let cache = Cache::new(root.path(), &reference);
        cache.set_commit(COMMIT).expect("a file");
        put(&cache, "config.json", "{}");
        let index = r#"{"weight_map": {"x": "1.safetensors", "y": "2.safetensors"}}"#;
        put(&cache, INDEX, index);
        put(&cache, "1.safetensors", "one");
        assert!(cache.find(&reference).is_none(), "a shard is missing");
        put(&cache, "2.safetensors", "two");
        let found = cache.find(&reference).expect("it is complete");
        assert_eq!(found.commit, COMMIT);
        fs::remove_dir_all(cache.blobs()).expect("they exist");
        assert!(cache.find(&reference).is_none(), "links lead nowhere");
    }
}
