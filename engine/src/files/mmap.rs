//! Storage of a model file: a read-only memory mapping, or bytes in memory.
//!
//! Mapping a file needs `unsafe`: it is sound only while the file is not truncated, which a program
//! cannot check. Model files are written once and then only read; `tritmill` never writes to one in
//! place (converters write a temporary file and rename it).

use std::{
    fs::{File, Metadata},
    ops::Deref,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::error::{ModelError, Problem};

/// The state of a file, which changes with every write to it: the system sets the time of change, and programs
/// cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    /// Bytes.
    pub len: u64,
    /// Number in the file system.
    pub inode: u64,
    /// Seconds and nanoseconds of the last write.
    pub modified: (i64, i64),
    /// Seconds and nanoseconds of the last change of content or metadata.
    pub changed: (i64, i64),
}

impl From<&Metadata> for FileState {
    fn from(metadata: &Metadata) -> Self {
        Self {
            len: metadata.len(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file that was mapped, and its state at that time.
#[derive(Debug)]
pub struct Source {
    /// Path.
    pub path: PathBuf,
    /// State when it was mapped.
    pub state: FileState,
}

/// Refuses a file that stands for another one: what Git has of a large file that was not fetched.
///
/// # Errors
/// [`ModelError::Malformed`] with the remedy.
pub(crate) fn check_content(path: &Path, bytes: &[u8]) -> Result<(), ModelError> {
    if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let problem =
            "a Git LFS pointer and not the file itself: run `git lfs pull` in its repository";
        return Err(ModelError::malformed(&file, 0, Problem::Other(problem)));
    }
    Ok(())
}

/// Read-only bytes of one file.
#[derive(Debug)]
pub enum Bytes {
    /// A mapped file.
    Mapped(Mmap, Source),
    /// Bytes embedded in the program.
    Static(&'static [u8]),
    /// Bytes on the heap.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a file. An empty file becomes an empty slice, because the system call fails for it.
    ///
    /// # Errors
    /// [`ModelError::Io`] with the path.
    pub fn map(path: &Path) -> Result<Self, ModelError> {
        let wrap = |source| ModelError::io(path, source);
        let file = File::open(path).map_err(wrap)?;
        let state = FileState::from(&file.metadata().map_err(wrap)?);
        if state.len == 0 {
            return Ok(Self::Static(&[]));
        }
        // SAFETY: the mapping is read-only and private to this value; the module documentation
        // states the one assumption, that the file is not truncated while it is open.
        let map = unsafe { Mmap::map(&file) }.map_err(wrap)?;
        // Tensors are read front to back. The hint only affects speed.
        let _ = map.advise(Advice::Sequential);
        check_content(path, &map)?;
        Ok(Self::Mapped(map, Source { path: path.to_owned(), state }))
    }

    /// Returns the mapped file, if there is one.
    pub fn source(&self) -> Option<&Source> {
        match self {
            Self::Mapped(_, source) => Some(source),
            Self::Static(_) | Self::Owned(_) => None,
        }
    }

    /// Lets the system drop the pages from memory; a later access reads them from the file again.
    pub fn release_pages(&self) {
        if let Self::Mapped(map, _) = self {
            // SAFETY: `DontNeed` on a read-only mapping of a file drops clean pages; the next
            // access reads the same bytes from the file, so no reference observes a change.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map, _) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}
