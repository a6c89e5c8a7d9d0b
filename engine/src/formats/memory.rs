//! Zeroed bytes at a multiple of 64: heap for little, huge pages for much.
//!
//! A step reads every packed weight once, so its page walks cost as much as its cache misses
//! allow; 2 MiB pages take them away. Matrices are no multiple of such pages, so they lie one after
//! another in large chunks, each of which begins at one.

use std::{
    ops::{Deref, DerefMut, Range},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;

/// From here on bytes lie in a chunk.
const CHUNKED_BYTES_MIN: usize = 128 << 10;
const HUGE_PAGE: usize = 2 << 20;
/// A chunk that several matrices share. Pages that were never written take no memory.
const CHUNK_BYTES: usize = 64 << 20;

/// A cache line.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

/// A mapping that begins at a huge page. It is freed with the last of its parts.
struct Chunk {
    _map: MmapMut,
    data: *mut u8,
    len: usize,
}

// SAFETY: `data` points into the chunk's own mapping; parts of it are handed out once each.
unsafe impl Send for Chunk {}
// SAFETY: as for `Send`: nothing is read or written but through those parts.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn new(len: usize) -> Option<Self> {
        let mut map = MmapMut::map_anon(len.checked_add(HUGE_PAGE)?).ok()?;
        #[cfg(target_os = "linux")]
        // Only speed depends on the answer: a kernel without huge pages refuses.
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        let data = map[start..].as_mut_ptr();
        Some(Self { _map: map, data, len })
    }
}

/// The chunk in use, and how much of it is.
static CHUNK: Mutex<Option<(Weak<Chunk>, usize)>> = Mutex::new(None);

/// A part of a chunk that nobody else has: of the one in use if there is room, else of a new one.
fn part_of_chunk(len: usize) -> Option<(Arc<Chunk>, Range<usize>)> {
    if len > CHUNK_BYTES / 2 {
        let chunk = Chunk::new(len.next_multiple_of(HUGE_PAGE))?;
        return Some((Arc::new(chunk), 0..len));
    }
    let mut current = CHUNK.lock().unwrap_or_else(PoisonError::into_inner);
    // What was freed in a chunk is not used again: it is no longer zero.
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

/// A buffer of bytes that starts at a multiple of 64. // (len,)
pub(crate) enum AlignedBytes {
    /// Whole lines from the allocator.
    Heap(Vec<Line>),
    /// Part of a mapping; no other value has a byte of it.
    Chunked(Part),
}

/// See [`AlignedBytes::Chunked`].
pub(crate) struct Part {
    chunk: Arc<Chunk>,
    range: Range<usize>,
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

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice(lines),
            // SAFETY: the range is inside the chunk, which lives as long as this part, and of no other.
            Self::Chunked(Part { chunk, range }) => unsafe {
                std::slice::from_raw_parts(chunk.data.add(range.start), range.len())
            },
        }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice_mut(lines),
            // SAFETY: as in `deref`; `&mut self` is the only way to these bytes.
            Self::Chunked(Part { chunk, range }) => unsafe {
                std::slice::from_raw_parts_mut(chunk.data.add(range.start), range.len())
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zero_aligned_and_nobody_elses() {
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
