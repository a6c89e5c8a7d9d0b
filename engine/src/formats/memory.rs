//! Zeroed bytes aligned to 64: small buffers on the heap, large ones in huge pages.
//!
//! A step reads every packed weight once, so page walks slow it down noticeably; 2 MiB pages avoid
//! them. Matrix sizes are not multiples of such pages, so matrices lie one after another in large
//! chunks, which start at a huge page.
//!
//! Of a large file of which steps read little, parts may stay where they are ([`MappedFile`]).

use std::{
    fmt,
    fs::File,
    io,
    ops::{Deref, DerefMut, Range},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use bytemuck::{Pod, Zeroable};
use memmap2::{Mmap, MmapMut, UncheckedAdvice};

/// Smallest buffer that is placed in a chunk.
const CHUNKED_BYTES_MIN: usize = 128 << 10;
const HUGE_PAGE: usize = 2 << 20;
/// A multiple of the size of small pages on every supported machine.
const PAGE: usize = 64 << 10;
/// Size of a chunk that several matrices share. Pages that are never written take no memory.
const CHUNK_BYTES: usize = 64 << 20;

/// A cache line.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

/// A mapping that starts at a huge page; freed with the last of its parts.
struct Chunk {
    map: MmapMut,
    data: *mut u8,
    len: usize,
}

// SAFETY: `data` points into the chunk's own mapping; each part of it is handed out once.
unsafe impl Send for Chunk {}
// SAFETY: as for `Send`: only the owner of a part reads or writes it.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize) -> Option<Self> {
        let mut map = MmapMut::map_anon(len.checked_add(HUGE_PAGE)?).ok()?;
        #[cfg(target_os = "linux")]
        // The result only affects speed: a kernel without huge pages returns an error.
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        let data = map[start..].as_mut_ptr();
        Some(Self { map, data, len })
    }
}

/// The current chunk, and its used bytes.
static CHUNK: Mutex<Option<(Weak<Chunk>, usize)>> = Mutex::new(None);

/// Returns an exclusive part of the current chunk if it has room, else of a new one.
fn part_of_chunk(len: usize) -> Option<(Arc<Chunk>, Range<usize>)> {
    if len > CHUNK_BYTES / 2 {
        let chunk = Chunk::new(len.next_multiple_of(HUGE_PAGE))?;
        return Some((Arc::new(chunk), 0..len));
    }
    let mut current = CHUNK.lock().unwrap_or_else(PoisonError::into_inner);
    // Freed parts are not reused, because they are no longer zero.
    let usable = current.as_ref().and_then(|(chunk, used)| {
        let chunk = chunk.upgrade()?;
        (chunk.len - used >= len).then_some((chunk, *used))
    });
    let (chunk, used) = match usable {
        Some(usable) => usable,
        None => (Arc::new(Chunk::new(CHUNK_BYTES)?), 0),
    };
    *current = Some((Arc::downgrade(&chunk), used + len));
    Some((chunk, used..used + len))
}

/// A buffer that is aligned to 64 bytes. // (len,)
pub(crate) enum AlignedBytes {
    /// Cache lines from the allocator.
    Heap(Vec<Line>),
    /// An exclusive part of a mapping.
    Chunked(Part),
    /// A part of a file, which is only read.
    Mapped(Arc<Mmap>, Range<usize>),
}

/// A file of which parts are buffers. Their pages are read when they are used, and the system may drop them again.
pub(crate) struct MappedFile(Arc<Mmap>);

impl MappedFile {
    /// Maps a file that is replaced as a whole and never written in place, as packed files are.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn open(file: &File) -> io::Result<Self> {
        // SAFETY: the mapping is read-only; programs replace the file by renaming another one, so that what is mapped
        // is neither changed nor truncated.
        Ok(Self(Arc::new(unsafe { Mmap::map(file) }?)))
    }

    /// Returns a part of the file; `None` if it is not in the file, or not of whole cache lines.
    pub fn part(&self, range: Range<usize>) -> Option<AlignedBytes> {
        let is_aligned = range.start.is_multiple_of(64) && range.end.is_multiple_of(64);
        (is_aligned && self.0.get(range.clone()).is_some())
            .then(|| AlignedBytes::Mapped(Arc::clone(&self.0), range))
    }
}

#[cfg(target_os = "linux")]
impl MappedFile {
    /// Returns how many bytes of a part of the file the system has in memory, in whole pages; `None` if it does not say. It says
    /// that it has all to those who may not write to the file.
    pub fn resident_bytes(&self, range: Range<usize>) -> Option<usize> {
        // SAFETY: the call only returns a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        let start = range.start / page * page;
        let part = self.0.get(start..range.end)?;
        let mut pages = vec![0u8; part.len().div_ceil(page)];
        let first = part.as_ptr().cast_mut().cast();
        // SAFETY: the part is mapped, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(first, part.len(), pages.as_mut_ptr()) };
        let resident = pages.iter().filter(|page| **page & 1 == 1).count() * page;
        (result == 0).then_some(resident.min(range.len()))
    }
}

#[cfg(not(target_os = "linux"))]
impl MappedFile {
    /// Returns `None`: the system does not say what it has in memory.
    pub fn resident_bytes(&self, _: Range<usize>) -> Option<usize> {
        None
    }
}

/// See [`AlignedBytes::Chunked`].
pub(crate) struct Part {
    chunk: Arc<Chunk>,
    range: Range<usize>,
}

impl Drop for Part {
    /// Gives the part's pages back to the system, if other parts keep the chunk.
    fn drop(&mut self) {
        let whole = self.range.start.next_multiple_of(PAGE)..self.range.end / PAGE * PAGE;
        if whole.is_empty() || Arc::strong_count(&self.chunk) == 1 {
            return;
        }
        let begin = self.chunk.data.addr() - self.chunk.map.as_ptr().addr();
        let (offset, len) = (begin + whole.start, whole.len());
        // SAFETY: these bytes belong to this part alone, which is not used again, and are not handed out again.
        let freed = unsafe {
            self.chunk.map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, len)
        };
        if let Err(error) = freed {
            tracing::debug!(%error, "memory of weights is kept until its neighbours are freed");
        }
    }
}

impl AlignedBytes {
    /// `len` zero bytes; `len` is a multiple of 64.
    pub fn zeroed(len: usize) -> Self {
        assert_eq!(len % 64, 0, "packed bytes come in whole lines");
        let part = if len < CHUNKED_BYTES_MIN { None } else { part_of_chunk(len) };
        match part {
            Some((chunk, range)) => Self::Chunked(Part { chunk, range }),
            None => Self::Heap(vec![Line::zeroed(); len / 64]),
        }
    }
}

impl AlignedBytes {
    /// Replaces a shorter buffer by one of at least `len` zero bytes. It grows by powers of two, so that a buffer
    /// that serves steps of all sizes is rarely replaced.
    pub fn grow(&mut self, len: usize) {
        if self.len() < len {
            *self = Self::zeroed(len.next_power_of_two().max(64));
        }
    }
}

impl Default for AlignedBytes {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice(lines),
            // SAFETY: the range is inside the chunk, which lives as long as this part, and belongs to
            // no other part.
            Self::Chunked(Part { chunk, range }) => unsafe {
                std::slice::from_raw_parts(chunk.data.add(range.start), range.len())
            },
            Self::Mapped(file, range) => &file[range.clone()],
        }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice_mut(lines),
            // SAFETY: as in `deref`; `&mut self` is the only access to these bytes.
            Self::Chunked(Part { chunk, range }) => unsafe {
                std::slice::from_raw_parts_mut(chunk.data.add(range.start), range.len())
            },
            Self::Mapped(..) => unreachable!("what is packed is not changed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_part_gives_its_pages_back_and_keeps_its_neighbours() {
        let filled = || {
            let mut bytes = AlignedBytes::zeroed(CHUNKED_BYTES_MIN + 64);
            bytes.fill(7);
            bytes
        };
        // Two parts after one another may lie in two chunks.
        let (before, freed, after) = loop {
            let three = (filled(), filled(), filled());
            let at = |bytes: &AlignedBytes| bytes.as_ptr().addr();
            if at(&three.1) == at(&three.0) + three.0.len()
                && at(&three.2) == at(&three.1) + three.1.len()
            {
                break three;
            }
        };
        let inside = freed[PAGE..].as_ptr();
        drop(freed);
        // SAFETY: the page is in a chunk that the neighbours keep, and belongs to no part.
        assert_eq!(unsafe { inside.read_volatile() }, 0);
        assert!(before.iter().chain(&*after).all(|&byte| byte == 7));
    }

    #[test]
    fn parts_of_a_file_are_its_bytes_and_end_with_it() {
        let mut file = tempfile::tempfile().expect("a file");
        let bytes: Vec<u8> = (0..200u8).collect();
        io::Write::write_all(&mut file, &bytes).expect("written");
        let mapped = MappedFile::open(&file).expect("mapped");
        let part = mapped.part(64..192).expect("inside");
        assert_eq!((&part[..], part.as_ptr().addr() % 64), (&bytes[64..192], 0));
        for range in [64..256, 63..128, 64..200, 256..256] {
            assert!(mapped.part(range.clone()).is_none(), "{range:?}");
        }
        if cfg!(target_os = "linux") {
            assert_eq!(mapped.resident_bytes(64..192), Some(128), "they were just written");
        }
        assert_eq!(mapped.resident_bytes(64..256), None);
        drop((mapped, file));
        assert_eq!(part[..], bytes[64..192]);
    }

    #[test]
    fn buffers_are_zeroed_aligned_and_disjoint() {
        let sizes = [0, 64, CHUNKED_BYTES_MIN - 64, CHUNKED_BYTES_MIN, HUGE_PAGE + 64, CHUNK_BYTES];
        let mut all: Vec<AlignedBytes> = Vec::new();
        for (round, len) in sizes.into_iter().cycle().take(40).enumerate() {
            let mut bytes = AlignedBytes::zeroed(len);
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % 64), (len, 0));
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes.fill(round as u8 + 1);
            all.push(bytes);
            if round % 7 == 6 {
                all.remove(0);
            }
        }
        for bytes in &all {
            assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        }
    }
}
