//! The GGUF container: magic, version, metadata, tensor directory, aligned data.
//!
//! Layout: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Versions 2 and 3,
//! little-endian. This module reads the container; [`super::file`] interprets keys and tensors.
//! Everything borrows from the file's bytes: arrays stay as bytes and are walked when read, so a file
//! that announces 2⁶⁰ entries fails at the end of its bytes, not at an allocation.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::files::error::{ModelError, Problem, shorten};

/// Alignment of tensor data in files without `general.alignment`.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted.
const ALIGNMENT_MAX: u64 = 1 << 20;
/// Longest key or tensor name accepted; the specification allows 64 bytes for tensors.
const NAME_BYTES_MAX: u64 = 1 << 16;
/// Most dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;

/// A metadata value. It is shown shortened, for error messages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer type.
    Unsigned(u64),
    /// Any signed integer type.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8 text.
    Text(&'a str),
    /// A list of values of one type.
    Array(Array<'a>),
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(number) => number.fmt(f),
            Self::Signed(number) => number.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Bool(flag) => flag.fmt(f),
            Self::Text(text) => f.write_str(&shorten(text)),
            Self::Array(array) => write!(f, "a list of {}", array.len()),
        }
    }
}

/// A metadata array as bytes; the parser has checked that every element lies inside the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    type_id: u32,
    len: u64,
    bytes: &'a [u8],
    offset: u64,
}

impl<'a> Array<'a> {
    /// Returns the number of elements, all inside the file.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the elements, in order; an element that is not UTF-8 is an error.
    pub fn values(&self, file: &'a str) -> impl Iterator<Item = Result<Value<'a>, ModelError>> {
        let mut reader = Reader { file, bytes: self.bytes, position: 0, base: self.offset };
        let type_id = self.type_id;
        (0..self.len).map(move |_| reader.value(type_id))
    }
}

/// A tensor of the directory. Its size is unchecked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Dimensions, fastest first (`ne[0]` is the row length).
    pub dims: Vec<u64>,
    /// ggml type id.
    pub type_id: u32,
    /// Offset of the data in the data section, in bytes; a multiple of the alignment.
    pub offset: u64,
    /// Offset of this entry in the file, for error messages.
    pub entry_offset: u64,
}

/// A parsed file header.
#[derive(Debug)]
pub struct Gguf<'a> {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Alignment of tensor data.
    pub alignment: u64,
    /// Metadata by key.
    pub metadata: BTreeMap<&'a str, Value<'a>>,
    /// The tensor directory, in the order of the file.
    pub tensors: Vec<TensorEntry<'a>>,
    /// Offset of the data section in the file, in bytes.
    pub data_start: u64,
}

/// Parses the header of a GGUF file; `file` is its name for error messages.
///
/// # Errors
/// The first defect, with its byte offset.
pub fn parse<'a>(file: &'a str, bytes: &'a [u8]) -> Result<Gguf<'a>, ModelError> {
    let mut reader = Reader { file, bytes, position: 0, base: 0 };
    if reader.take(4)? != b"GGUF" {
        return Err(reader.error_at(0, Problem::BadMagic));
    }
    let version = reader.u32()?;
    if (1..=0xffff).contains(&version.swap_bytes()) {
        return Err(reader.error_at(4, Problem::Other("big-endian files are not supported")));
    }
    if !(2..=3).contains(&version) {
        return Err(reader.error_at(4, Problem::Version(version)));
    }
    let tensor_count = reader.count("tensor count", 4 + 8 + 4 + 8)?;
    let key_count = reader.count("key count", 8 + 4 + 1)?;

    let mut metadata = BTreeMap::new();
    for _ in 0..key_count {
        let at = reader.position;
        let key = reader.name()?;
        let type_id = reader.u32()?;
        let value = reader.value(type_id)?;
        if metadata.insert(key, value).is_some() {
            return Err(reader.error_at(at, Problem::Duplicate(shorten(key))));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(Value::Unsigned(alignment))
            if alignment.is_power_of_two() && *alignment <= ALIGNMENT_MAX =>
        {
            *alignment
        }
        Some(value) => {
            return Err(ModelError::BadKey {
                key: "general.alignment".to_owned(),
                value: value.to_string(),
                expected: "a power of two up to 2^20",
            });
        }
    };
    let tensors = directory(&mut reader, tensor_count, alignment)?;
    let data_start = (reader.position as u64).next_multiple_of(alignment);
    Ok(Gguf { version, alignment, metadata, tensors, data_start })
}

fn directory<'a>(
    reader: &mut Reader<'a>,
    count: u64,
    alignment: u64,
) -> Result<Vec<TensorEntry<'a>>, ModelError> {
    let mut tensors = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let entry_offset = reader.position as u64;
        let name = reader.name()?;
        if !names.insert(name) {
            let problem = Problem::Duplicate(shorten(name));
            return Err(reader.error_at(entry_offset as usize, problem));
        }
        let dimension_count = reader.u32()?;
        if !(1..=DIMENSIONS_MAX).contains(&dimension_count) {
            let problem = Problem::TooLarge {
                what: "dimension count",
                value: u64::from(dimension_count),
                limit: u64::from(DIMENSIONS_MAX),
            };
            return Err(ModelError::bad_tensor(name, entry_offset, problem));
        }
        let dims = (0..dimension_count).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
        let type_id = reader.u32()?;
        let offset = reader.u64()?;
        if !offset.is_multiple_of(alignment) {
            let problem = Problem::Misaligned { value: offset, alignment };
            return Err(ModelError::bad_tensor(name, entry_offset, problem));
        }
        tensors.push(TensorEntry { name, dims, type_id, offset, entry_offset });
    }
    Ok(tensors)
}

/// A cursor over the file that returns an error at its end.
struct Reader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    position: usize,
    /// Offset of `bytes` in the file.
    base: u64,
}

impl<'a> Reader<'a> {
    fn error_at(&self, position: usize, problem: Problem) -> ModelError {
        ModelError::malformed(self.file, self.base + position as u64, problem)
    }

    fn remaining(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], ModelError> {
        let available = self.remaining();
        if len > available {
            let problem = Problem::Truncated { needed: len, available };
            return Err(self.error_at(self.position, problem));
        }
        let start = self.position;
        self.position += len as usize;
        Ok(&self.bytes[start..self.position])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ModelError> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("take returns the length it was asked for"))
    }

    fn u32(&mut self) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a count of elements of at least `size` bytes each; a count that exceeds the rest of the
    /// file is an error.
    fn count(&mut self, what: &'static str, size: u64) -> Result<u64, ModelError> {
        let at = self.position;
        let value = self.u64()?;
        let limit = self.remaining() / size;
        if value > limit {
            return Err(self.error_at(at, Problem::TooLarge { what, value, limit }));
        }
        Ok(value)
    }

    fn text(&mut self) -> Result<&'a str, ModelError> {
        let len = self.u64()?;
        let at = self.position;
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map_err(|_| self.error_at(at, Problem::NotUtf8))
    }

    fn name(&mut self) -> Result<&'a str, ModelError> {
        let at = self.position;
        let name = self.text()?;
        if name.len() as u64 > NAME_BYTES_MAX {
            let (what, value) = ("name length", name.len() as u64);
            let problem = Problem::TooLarge { what, value, limit: NAME_BYTES_MAX };
            return Err(self.error_at(at, problem));
        }
        Ok(name)
    }

    fn value(&mut self, type_id: u32) -> Result<Value<'a>, ModelError> {
        let at = self.position;
        Ok(match type_id {
            0 => Value::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [_] => return Err(self.error_at(at, Problem::Other("a flag is neither 0 nor 1"))),
            },
            8 => Value::Text(self.text()?),
            9 => Value::Array(self.metadata_array()?),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.error_at(at, Problem::UnknownType(other))),
        })
    }

    fn metadata_array(&mut self) -> Result<Array<'a>, ModelError> {
        let at = self.position;
        let type_id = self.u32()?;
        let size = match type_id {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => return Err(self.error_at(at, Problem::Other("nested arrays are not supported"))),
            other => return Err(self.error_at(at, Problem::UnknownType(other))),
        };
        let len = self.count("array length", size)?;
        let start = self.position;
        if type_id == 8 {
            for _ in 0..len {
                let text_len = self.u64()?;
                self.take(text_len)?;
            }
        } else {
            // `count` bounds the product by the bytes that remain.
            self.take(len * size)?;
        }
        let bytes = &self.bytes[start..self.position];
        Ok(Array { type_id, len, bytes, offset: self.base + start as u64 })
    }
}

/// ggml's name of a tensor type. Ids 36 to 39 belong to bitnet.cpp; `is_bitnet_cpp` decides on ids
/// that mean another type in llama.cpp (39 is TL2 or MXFP4).
pub fn type_name(type_id: u32, is_bitnet_cpp: bool) -> &'static str {
    match type_id {
        0 => "F32",
        1 => "F16",
        2 => "Q4_0",
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        8 => "Q8_0",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16..=23 | 29 => "IQ",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        30 => "BF16",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "I2_S",
        37 => "I8_S",
        38 => "TL1",
        39 if is_bitnet_cpp => "TL2",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        142 => "PQ2_0",
        143 => "PTQ1_0",
        _ => "unknown",
    }
}
