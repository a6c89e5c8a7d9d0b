//! Writes GGUF files: version 3, little-endian, tensors aligned to 32 bytes.

use std::io::{self, Write};

use super::container::DEFAULT_ALIGNMENT;
use crate::files::encodings::dense::DenseType;

/// A metadata value to write.
#[derive(Debug, Clone)]
pub(crate) enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    U32s(Vec<u32>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    U8s(Vec<u8>),
    Bools(Vec<bool>),
}

/// A tensor to write; the data of all tensors follow the header in the same order.
#[derive(Debug, Clone)]
pub(crate) struct TensorPlan {
    pub name: String,
    /// Dimensions, fastest first.
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub size_bytes: u64,
}

/// Returns the entry of a matrix.
pub(crate) fn matrix_plan(name: String, rows: usize, cols: usize, dtype: DenseType) -> TensorPlan {
    // Rows that are not whole blocks are refused when they are encoded, before the file has its name.
    let size_bytes = (dtype.row_bytes(cols).unwrap_or(0) * rows) as u64;
    let dims = vec![cols as u64, rows as u64];
    TensorPlan { name, dims, type_id: type_id(dtype), size_bytes }
}

/// Returns the type id of a tensor.
pub(crate) fn type_id(dtype: DenseType) -> u32 {
    match dtype {
        DenseType::F32 => 0,
        DenseType::F16 => 1,
        DenseType::Bf16 => 30,
        DenseType::Q8_0 => 8,
        DenseType::Q6K => 14,
        DenseType::Q4K => 12,
        DenseType::Q2_0 => 42,
        DenseType::Pq2_0 => 142,
        DenseType::Ptq1_0 => 143,
        DenseType::Tq1_0 => 34,
        DenseType::Tq2_0 => 35,
    }
}

/// Writes everything before the data section, padded to its start.
pub(crate) fn write_header(
    out: &mut impl Write,
    metadata: &[(String, Meta)],
    tensors: &[TensorPlan],
) -> io::Result<()> {
    let mut header = Vec::from(*b"GGUF");
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        header.extend(text(key));
        push_value(&mut header, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        header.extend(text(&tensor.name));
        header.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
        header.extend(tensor.type_id.to_le_bytes());
        header.extend(offset.to_le_bytes());
        offset += tensor.size_bytes.next_multiple_of(DEFAULT_ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
    out.write_all(&header)
}

/// Writes the zeros between a tensor's end and the next one's start.
pub(crate) fn write_padding(out: &mut impl Write, size_bytes: u64) -> io::Result<()> {
    let padding = size_bytes.next_multiple_of(DEFAULT_ALIGNMENT) - size_bytes;
    out.write_all(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize])
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Appends the type id of a value and its bytes. An array (9) has the elements' type and number before
/// the elements.
fn push_value(out: &mut Vec<u8>, value: &Meta) {
    let array = |type_id: u32, elements: Vec<Vec<u8>>| {
        let mut bytes = type_id.to_le_bytes().to_vec();
        bytes.extend((elements.len() as u64).to_le_bytes());
        bytes.extend(elements.concat());
        (9, bytes)
    };
    let (type_id, bytes): (u32, Vec<u8>) = match value {
        Meta::U32(number) => (4, number.to_le_bytes().to_vec()),
        Meta::F32(number) => (6, number.to_le_bytes().to_vec()),
        Meta::Bool(flag) => (7, vec![u8::from(*flag)]),
        Meta::Text(value) => (8, text(value)),
        Meta::Texts(texts) => array(8, texts.iter().map(|value| text(value)).collect()),
        Meta::U32s(numbers) => array(4, numbers.iter().map(|n| n.to_le_bytes().to_vec()).collect()),
        Meta::I32s(numbers) => array(5, numbers.iter().map(|n| n.to_le_bytes().to_vec()).collect()),
        Meta::F32s(numbers) => array(6, numbers.iter().map(|n| n.to_le_bytes().to_vec()).collect()),
        Meta::Bools(flags) => array(7, flags.iter().map(|&flag| vec![u8::from(flag)]).collect()),
        Meta::U8s(bytes) => array(0, bytes.iter().map(|&byte| vec![byte]).collect()),
    };
    out.extend(type_id.to_le_bytes());
    out.extend(bytes);
}
