//! Zeroed bytes at a multiple of 64: heap for small matrices, huge pages for large ones.
//!
//! A step reads every packed weight once, so its page walks cost as much as its cache misses
//! allow; 2 MiB pages take them away.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;

/// From here on a mapping of its own: one huge page.
const MAPPED_BYTES_MIN: usize = 2 << 20;

/// A cache line.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [u8; 64]);

/// A buffer of bytes that starts at a multiple of 64. // (len,)
pub(crate) enum AlignedBytes {
    /// Whole lines from the allocator.
    Heap(Vec<Line>),
    /// An anonymous mapping, page-aligned.
    Mapped(MmapMut),
}

impl AlignedBytes {
    /// `len` zero bytes; `len` is a multiple of 64.
    pub fn zeroed(len: usize) -> Self {
        assert_eq!(len % 64, 0, "packed bytes come in whole lines");
        if len >= MAPPED_BYTES_MIN
            && let Ok(map) = MmapMut::map_anon(len)
        {
            #[cfg(target_os = "linux")]
            // Only speed depends on the answer: a kernel without huge pages refuses.
            let _ = map.advise(memmap2::Advice::HugePage);
            return Self::Mapped(map);
        }
        Self::Heap(vec![Line::zeroed(); len / 64])
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice(lines),
            Self::Mapped(map) => map,
        }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Self::Mapped(map) => map,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zero_and_aligned_at_every_size() {
        for len in [0, 64, 4096, MAPPED_BYTES_MIN - 64, MAPPED_BYTES_MIN, MAPPED_BYTES_MIN + 64] {
            let bytes = AlignedBytes::zeroed(len);
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % 64), (len, 0));
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
    }
}
