//! Where a model's bytes live: a read-only memory mapping, or bytes that are part of the program.
//!
//! The one place outside the kernels with `unsafe`: mapping a file is sound only while nobody
//! truncates it, which no program can check. Model files are written once and then only read;
//! `tritmill` never opens one for writing in place (converters write a temporary file and rename).

use std::{fs::File, ops::Deref, path::Path};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::error::ModelError;

/// Read-only bytes of one file.
#[derive(Debug)]
pub enum Bytes {
    /// A mapped file.
    Mapped(Mmap),
    /// Bytes inside the program.
    Static(&'static [u8]),
    /// Bytes on the heap, for files handed over in memory.
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a file. An empty file is an empty slice (the system call would refuse it).
    ///
    /// # Errors
    /// What the operating system says, with the path.
    pub fn map(path: &Path) -> Result<Self, ModelError> {
        let wrap = |source| ModelError::io(path, source);
        let file = File::open(path).map_err(wrap)?;
        if file.metadata().map_err(wrap)?.len() == 0 {
            return Ok(Self::Static(&[]));
        }
        // SAFETY: the mapping is read-only and private to this value; the module documentation
        // states the one assumption, that the file is not truncated while it is open.
        let map = unsafe { Mmap::map(&file) }.map_err(wrap)?;
        // Tensors are read front to back; a kernel that ignores the hint loses nothing.
        let _ = map.advise(Advice::Sequential);
        Ok(Self::Mapped(map))
    }

    /// Tells the system that the pages are not needed for now; reading them again reads the file.
    pub fn release_pages(&self) {
        if let Self::Mapped(map) = self {
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
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
        }
    }
}
