//! The layout of a packed file.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 to 7 | `TMPACKED` |
//! | 8 to 15 | length of the index, little-endian |
//! | 16 to 47 | BLAKE3 of the index and the hashes |
//! | then | the index, as JSON, with spaces up to the hashes |
//! | then | a BLAKE3 hash of every piece |
//! | then, at a multiple of 64 bytes | the sections one after another, each padded with zeros to a multiple of 64 bytes |
//!
//! A piece is a mebibyte of a section, or what is left of it. Sections are read in the order in which they were written,
//! their pieces on rayon's threads. They are written before all else, so that a model can be packed one layer at a time.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _};

use bytemuck::Pod;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{
    files::ModelError,
    formats::{
        Scale,
        memory::{AlignedBytes, MappedFile},
    },
};

const MAGIC: &[u8; 8] = b"TMPACKED";
/// Bytes before the index.
const PREAMBLE_BYTES: usize = 48;
const PIECE_BYTES: usize = 1 << 20;
/// Longest index: some 100 bytes for each matrix.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Most sections of a head with its copies.
const HEAD_SECTIONS_MAX: usize = 16;
/// Most bytes of an index without scales and lengths, of the scale of a linear in it, and of a length.
const KEYS_JSON_MAX: usize = 1024;
const SCALE_JSON_MAX: usize = 64;
const LEN_JSON_MAX: usize = 24;

/// Packed weights cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Damaged {
    /// The file cannot be read, or is too short.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file does not begin as a packed file, or its index does not have the hash that it states.
    #[error("the index is damaged")]
    Index,
    /// The sections are not those of this model.
    #[error("the sections are those of another model")]
    OtherShape,
    /// A piece does not have its hash.
    #[error("the bytes at offset {offset} are damaged")]
    Piece {
        /// Bytes before the piece.
        offset: u64,
    },
    /// A tensor of the model file cannot be decoded.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// What a file holds.
#[derive(Debug, Serialize, Deserialize)]
pub struct Index {
    /// Identity of the model, the format, the head and the version.
    pub key: [u8; 32],
    /// Fingerprint of the model.
    pub fingerprint: [u8; 32],
    /// Scales and groups.
    pub scales: Scales,
    /// Bytes of each section, without padding.
    pub sections: Vec<u64>,
}

/// What belongs to the matrices besides their bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Scales {
    /// By layer and then in the order of `Linear::OF_ATTENTION`.
    pub linears: Vec<LinearScale>,
    /// Inputs of a group of a ternary head.
    pub head_group: Option<usize>,
}

/// Scale and group of one linear.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "StoredScale", into = "StoredScale")]
pub struct LinearScale {
    /// Factor from integer sum to output.
    pub scale: Scale,
    /// Inputs of a group, if groups have scales.
    pub group: Option<usize>,
}

impl LinearScale {
    /// Returns the scale and the group of a linear with this many inputs.
    ///
    /// # Errors
    /// If the model has scales of groups and the linear has none that fit, or the reverse.
    pub fn checked(self, cols: usize, has_groups: bool) -> Result<Self, Damaged> {
        check_group(self.group, cols, has_groups).map(|()| self)
    }

    /// Returns the scale and the group of a linear.
    pub fn new(scale: Scale, group: Option<usize>) -> Self {
        Self { scale, group }
    }
}

/// Checks that a group divides the inputs, if there are groups.
///
/// # Errors
/// If it does not.
pub fn check_group(group: Option<usize>, cols: usize, has_groups: bool) -> Result<(), Damaged> {
    let fits = match group {
        Some(group) => has_groups && matches!(group, 64 | 128) && cols.is_multiple_of(group),
        None => !has_groups,
    };
    if fits { Ok(()) } else { Err(Damaged::OtherShape) }
}

/// A [`LinearScale`] as it is stored: the scale as bits, so that it comes back as it was.
#[derive(Serialize, Deserialize)]
struct StoredScale {
    divides: bool,
    bits: u32,
    group: Option<usize>,
}

impl From<StoredScale> for LinearScale {
    fn from(StoredScale { divides, bits, group }: StoredScale) -> Self {
        let scale = f32::from_bits(bits);
        Self { scale: if divides { Scale::Divide(scale) } else { Scale::Multiply(scale) }, group }
    }
}

impl From<LinearScale> for StoredScale {
    fn from(LinearScale { scale, group }: LinearScale) -> Self {
        let (divides, scale) = match scale {
            Scale::Divide(scale) => (true, scale),
            Scale::Multiply(scale) => (false, scale),
        };
        Self { divides, bits: scale.to_bits(), group }
    }
}

/// Sections to write.
#[derive(Default)]
pub struct Sections<'a>(Vec<&'a [u8]>);

impl<'a> Sections<'a> {
    /// Adds a section.
    pub fn push<T: Pod>(&mut self, elements: &'a [T]) {
        self.0.push(bytemuck::cast_slice(elements));
    }

    /// Returns the sections.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> {
        self.0.iter().copied()
    }
}

/// Writes a file, sections first: what stands before them is written last, when it is known, into the room that was left for it.
pub struct PackedWriter<'a> {
    file: &'a File,
    /// Bytes before the first section.
    start: u64,
    /// Place of the next section.
    offset: u64,
    lens: Vec<u64>,
    hashes: Vec<[u8; 32]>,
}

impl<'a> PackedWriter<'a> {
    /// Returns a writer to an empty file, with room for the scales and lengths of so many linears and for the hashes of so many bytes.
    pub fn new(file: &'a File, linears: usize, bytes: usize) -> Self {
        let sections = 2 * linears + HEAD_SECTIONS_MAX;
        let pieces = bytes.div_ceil(PIECE_BYTES) + sections;
        let index = KEYS_JSON_MAX + linears * SCALE_JSON_MAX + sections * LEN_JSON_MAX;
        let start = padded(PREAMBLE_BYTES + index + pieces * size_of::<[u8; 32]>()) as u64;
        Self { file, start, offset: start, lens: Vec::new(), hashes: Vec::new() }
    }

    /// Writes the next sections.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn append(&mut self, sections: &Sections<'_>) -> io::Result<()> {
        for section in sections.iter() {
            let pieces = section.par_chunks(PIECE_BYTES);
            self.hashes.par_extend(pieces.map(|piece| *blake3::hash(piece).as_bytes()));
            self.lens.push(section.len() as u64);
            self.file.write_all_at(section, self.offset)?;
            self.offset += padded(section.len()) as u64;
        }
        Ok(())
    }

    /// Writes what stands before the sections.
    ///
    /// # Errors
    /// If the file cannot be written, or there was too little room.
    pub fn finish(self, of: Written) -> io::Result<()> {
        let Self { file, start, offset, lens, hashes } = self;
        let Written { key, fingerprint, scales } = of;
        let hashes = hashes.as_flattened();
        let mut index = serde_json::to_vec(&Index { key, fingerprint, scales, sections: lens })?;
        let room = (start as usize).checked_sub(PREAMBLE_BYTES + hashes.len());
        let room = room.filter(|room| *room >= index.len());
        index.resize(room.ok_or(io::ErrorKind::FileTooLarge)?, b' ');
        let len = (index.len() as u64).to_le_bytes();
        let hash = hash_of(&index, hashes);
        file.write_all_at(&[MAGIC, &len, &hash[..], &index, hashes].concat(), 0)?;
        // The padding of the last section.
        file.set_len(offset)
    }
}

/// What a file states besides its sections.
pub struct Written {
    /// See [`Index::key`].
    pub key: [u8; 32],
    /// See [`Index::fingerprint`].
    pub fingerprint: [u8; 32],
    /// See [`Index::scales`].
    pub scales: Scales,
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(64)
}

fn hash_of(index: &[u8], hashes: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new().update(index).update(hashes).finalize().as_bytes()
}

/// What stands before the sections.
pub struct Head {
    /// The index.
    pub index: Index,
    hashes: Vec<[u8; 32]>,
    /// Bytes before the first section.
    len: u64,
}

impl Head {
    /// Reads the head of a file.
    ///
    /// # Errors
    /// If the file cannot be read, is not a packed file, or its head is damaged.
    pub fn read(file: &File) -> Result<Self, Damaged> {
        let mut preamble = [0; PREAMBLE_BYTES];
        file.read_exact_at(&mut preamble, 0)?;
        let (magic, rest) = preamble.split_at(MAGIC.len());
        let (index_len, expected) = rest.split_at(8);
        let index_len = u64::from_le_bytes(index_len.try_into().expect("eight bytes"));
        if magic != MAGIC || index_len > INDEX_BYTES_MAX.min(file.metadata()?.len()) {
            return Err(Damaged::Index);
        }
        let mut json = vec![0; index_len as usize];
        file.read_exact_at(&mut json, PREAMBLE_BYTES as u64)?;
        let index: Index = serde_json::from_slice(&json).map_err(|_| Damaged::Index)?;
        let pieces = index.sections.iter().map(|len| len.div_ceil(PIECE_BYTES as u64));
        let pieces = pieces.fold(0u64, u64::saturating_add);
        let hash_bytes = pieces.saturating_mul(32);
        if hash_bytes > file.metadata()?.len() {
            return Err(Damaged::Index);
        }
        let mut hashes = vec![[0; 32]; pieces as usize];
        let before = PREAMBLE_BYTES as u64 + index_len;
        file.read_exact_at(hashes.as_flattened_mut(), before)?;
        if hash_of(&json, hashes.as_flattened()) != *expected {
            return Err(Damaged::Index);
        }
        Ok(Self { index, hashes, len: before + hash_bytes })
    }

    /// Returns where the sections lie in the file, in order.
    pub fn places(&self) -> impl Iterator<Item = Range<usize>> {
        let place = |start: &mut usize, len: &u64| {
            let place = *start..start.saturating_add(*len as usize);
            *start = place.end.checked_next_multiple_of(64)?;
            Some(place)
        };
        self.index.sections.iter().scan(self.len as usize, place)
    }
}

/// Reads the sections of a file in order.
pub struct PackedReader<'a> {
    file: &'a File,
    scales: &'a Scales,
    lens: &'a [u64],
    hashes: &'a [[u8; 32]],
    offset: u64,
    /// The file, of which sections may stay where they are.
    map: Option<MappedFile>,
}

impl<'a> PackedReader<'a> {
    /// Returns a reader of the first section. If `maps`, the matrices of experts stay in the file.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn new(file: &'a File, head: &'a Head, maps: bool) -> io::Result<Self> {
        let Head { index: Index { scales, sections, .. }, hashes, len } = head;
        let map = maps.then(|| MappedFile::open(file)).transpose()?;
        Ok(Self { file, scales, lens: sections, hashes, offset: *len, map })
    }

    /// Returns the scales and groups.
    pub fn scales(&self) -> &'a Scales {
        self.scales
    }

    /// Reads the next section, which has `len` bytes, a multiple of 64.
    ///
    /// # Errors
    /// If it has another length, cannot be read or is damaged.
    pub fn aligned(&mut self, len: usize) -> Result<AlignedBytes, Damaged> {
        self.expect(len)?;
        let mut bytes = AlignedBytes::zeroed(len);
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Verifies the next section, which has `len` bytes, a multiple of 64, and leaves it in the file; as [`Self::aligned`] if
    /// sections do not stay there.
    ///
    /// # Errors
    /// As [`Self::aligned`].
    pub fn in_file(&mut self, len: usize) -> Result<AlignedBytes, Damaged> {
        let Some(map) = &self.map else { return self.aligned(len) };
        let start = self.offset as usize;
        let part = map.part(start..start.saturating_add(len));
        self.expect(len)?;
        let pieces = self.next_pieces(len);
        pieces.into_par_iter().try_for_each_init(
            || vec![0; PIECE_BYTES],
            |buffer, piece| piece.read(&mut buffer[..piece.len]),
        )?;
        part.ok_or(Damaged::OtherShape)
    }

    /// Reads the next section, which has `count` elements.
    ///
    /// # Errors
    /// As [`Self::aligned`].
    pub fn array<T: Pod>(&mut self, count: usize) -> Result<Vec<T>, Damaged> {
        self.expect(count * size_of::<T>())?;
        let mut elements = vec![T::zeroed(); count];
        self.fill(bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    /// Checks that all sections were read.
    ///
    /// # Errors
    /// If one is left.
    pub fn finish(self) -> Result<(), Damaged> {
        if self.lens.is_empty() { Ok(()) } else { Err(Damaged::OtherShape) }
    }

    /// Takes the length of the next section, before memory is allocated for it.
    fn expect(&mut self, len: usize) -> Result<(), Damaged> {
        let (next, rest) = self.lens.split_first().ok_or(Damaged::OtherShape)?;
        self.lens = rest;
        if *next == len as u64 { Ok(()) } else { Err(Damaged::OtherShape) }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Damaged> {
        let pieces = self.next_pieces(bytes.len());
        let parts = bytes.par_chunks_mut(PIECE_BYTES).zip(pieces);
        parts.try_for_each(|(bytes, piece)| piece.read(bytes))
    }

    /// Returns the pieces of a section of `len` bytes, and goes on to the next section.
    fn next_pieces(&mut self, len: usize) -> Vec<Piece<'a>> {
        let (hashes, rest) = self.hashes.split_at(len.div_ceil(PIECE_BYTES));
        let (file, start) = (self.file, self.offset);
        self.hashes = rest;
        self.offset += padded(len) as u64;
        let piece = |(index, hash)| {
            let before = index * PIECE_BYTES;
            let (offset, len) = (start + before as u64, PIECE_BYTES.min(len - before));
            Piece { file, offset, len, hash }
        };
        hashes.iter().enumerate().map(piece).collect()
    }
}

/// A piece of a section.
struct Piece<'a> {
    file: &'a File,
    offset: u64,
    len: usize,
    hash: &'a [u8; 32],
}

impl Piece<'_> {
    /// Reads the piece, and compares its hash.
    fn read(&self, bytes: &mut [u8]) -> Result<(), Damaged> {
        self.file.read_exact_at(bytes, self.offset)?;
        let is_intact = blake3::hash(bytes) == *self.hash;
        if is_intact { Ok(()) } else { Err(Damaged::Piece { offset: self.offset }) }
    }
}
