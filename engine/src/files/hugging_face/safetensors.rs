//! The safetensors header: an 8-byte little-endian length, a JSON object of tensors, then data.
//!
//! Layout: <https://github.com/huggingface/safetensors>. This module reads the header. Tensors are byte
//! ranges of the file, checked against type, shape and file length. Allocations do not depend on
//! numbers in the file: the header is parsed from bytes that exist.

use std::ops::Range;

use serde::Deserialize;

use crate::files::error::{ModelError, Problem, check_overlaps};

/// Largest header accepted, the limit of the reference implementation.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Element type of a tensor; types that models do not need are kept as names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dtype {
    /// 8-bit unsigned: packed ternary weights.
    U8,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// Any other type, by name.
    Other(String),
}

impl Dtype {
    /// Returns the number of bytes per element; `None` for [`Self::Other`].
    pub fn size_bytes(&self) -> Option<u64> {
        match self {
            Self::U8 => Some(1),
            Self::F16 | Self::Bf16 => Some(2),
            Self::F32 => Some(4),
            Self::Other(_) => None,
        }
    }

    /// Returns the name in the file.
    pub fn name(&self) -> &str {
        match self {
            Self::U8 => "U8",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::Other(name) => name,
        }
    }
}

impl From<String> for Dtype {
    fn from(name: String) -> Self {
        match name.as_str() {
            "U8" => Self::U8,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            _ => Self::Other(name),
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<u64>,
    /// Byte range in the file, checked against the file's length, the type and the shape.
    pub range: Range<usize>,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Parses the header of a safetensors file; returns its tensors in the order of the header.
///
/// # Errors
/// If the header is malformed, or a tensor does not fit its type, its shape or the file.
pub fn parse(file: &str, bytes: &[u8]) -> Result<Vec<TensorEntry>, ModelError> {
    let available = bytes.len() as u64;
    let Some(prefix) = bytes.first_chunk::<8>() else {
        let problem = Problem::Truncated { needed: 8, available };
        return Err(ModelError::malformed(file, 0, problem));
    };
    let header_len = u64::from_le_bytes(*prefix);
    if header_len > HEADER_BYTES_MAX {
        let problem =
            Problem::TooLarge { what: "header length", value: header_len, limit: HEADER_BYTES_MAX };
        return Err(ModelError::malformed(file, 0, problem));
    }
    let data_start = 8 + header_len;
    if data_start > available {
        let problem = Problem::Truncated { needed: header_len, available: available - 8 };
        return Err(ModelError::malformed(file, 8, problem));
    }
    // `data_start <= bytes.len()`, so it fits a usize.
    let data_start = data_start as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..data_start])
            .map_err(|source| ModelError::Json { file: file.to_owned(), source })?;

    let mut tensors = Vec::new();
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        let raw: RawEntry = serde_json::from_value(value)
            .map_err(|source| ModelError::Json { file: format!("{file}: {name}"), source })?;
        tensors.push(check_entry(name, raw, data_start as u64, available)?);
    }
    let ranges = tensors.iter().map(|tensor| (tensor.range.clone(), tensor.name.as_str()));
    check_overlaps(ranges.collect())?;
    Ok(tensors)
}

fn check_entry(
    name: String,
    raw: RawEntry,
    data_start: u64,
    file_len: u64,
) -> Result<TensorEntry, ModelError> {
    let (begin, end) = raw.data_offsets;
    let data_len = file_len - data_start;
    if begin > end || end > data_len {
        let problem = Problem::Truncated { needed: end.saturating_sub(begin), available: data_len };
        return Err(ModelError::bad_tensor(&name, data_start.saturating_add(begin), problem));
    }
    let dtype = Dtype::from(raw.dtype);
    let elements = raw.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    if let Some(size) = dtype.size_bytes() {
        let expected = elements.and_then(|n| n.checked_mul(size));
        if expected != Some(end - begin) {
            let problem = Problem::SizeMismatch {
                found: end - begin,
                expected: expected.unwrap_or(u64::MAX),
            };
            return Err(ModelError::bad_tensor(&name, data_start + begin, problem));
        }
    }
    let range = (data_start + begin) as usize..(data_start + end) as usize;
    Ok(TensorEntry { name, dtype, shape: raw.shape, range })
}
