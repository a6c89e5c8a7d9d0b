//! Storage of a model file: a read-only memory mapping, or bytes in memory.
//!
//! Mapping a file needs `unsafe`: it is sound only while the file is not truncated, which a program
//! cannot check. Model files are written once and then only read; `tritmill` never writes to one in
//! place (converters write a temporary file and rename it).

use std::{fs::File, ops::Deref, path::Path};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::error::ModelError;

/// Read-only bytes of one file.
#[derive(Debug)]
pub enum Bytes {
    /// A mapped file.
    Mapped(Mmap),
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
        if file.metadata().map_err(wrap)?.len() == 0 {
            return Ok(Self::Static(&[]));
        }
        // SAFETY: the mapping is read-only and private to this value; the module documentation
        // states the one assumption, that the file is not truncated while it is open.
        let map = unsafe { Mmap::map(&file) }.map_err(wrap)?;
        // Tensors are read front to back. The hint only affects speed.
        let _ = map.advise(Advice::Sequential);
        Ok(Self::Mapped(map))
    }

    /// Lets the system drop the pages from memory; a later access reads them from the file again.
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
