//! The head: logits of a hidden row against every row of the vocabulary, in the file's precision,
//! or as int8 when asked for.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::files::{Dense, DenseType};
use crate::kernels::float::FloatKernels;

/// How the head's weights are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadMode {
    /// As in the file; exact.
    #[default]
    Exact,
    /// One int8 per weight and one scale per row: half the memory of f16, and lossy.
    Q8,
}

/// Head rows per call of a kernel: a task's unit.
pub const HEAD_ROWS: usize = 64;

enum Rows {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Int8 {
        rows: Vec<i8>,
        /// Per row: `weight = scale × int8`.
        scales: Vec<f32>,
    },
    /// Quantized blocks as in the file, dequantized row by row when they are used.
    Blocks {
        dtype: DenseType,
        bytes: Vec<u8>,
    },
}

/// The head's weights. // (vocab, hidden)
pub struct Head {
    rows: Rows,
    vocab_size: usize,
    hidden_size: usize,
}

impl Head {
    /// Copies the matrix out of the model file.
    pub fn load(dense: Dense<'_>, mode: HeadMode) -> Self {
        let rows = match (mode, dense.dtype) {
            (HeadMode::Q8, _) => quantize_rows(dense),
            (HeadMode::Exact, DenseType::F32) => {
                Rows::F32(copy(dense.bytes, |b: [u8; 4]| f32::from_le_bytes(b)))
            }
            (HeadMode::Exact, DenseType::F16) => {
                Rows::F16(copy(dense.bytes, |b: [u8; 2]| f16::from_le_bytes(b)))
            }
            (HeadMode::Exact, DenseType::Bf16) => {
                Rows::Bf16(copy(dense.bytes, |b: [u8; 2]| bf16::from_le_bytes(b)))
            }
            (HeadMode::Exact, dtype @ (DenseType::Q8_0 | DenseType::Q6K)) => {
                Rows::Blocks { dtype, bytes: dense.bytes.to_vec() }
            }
        };
        Self { rows, vocab_size: dense.rows, hidden_size: dense.cols }
    }

    /// Rows of the matrix.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        match &self.rows {
            Rows::F32(rows) => rows.len() * 4,
            Rows::F16(rows) => rows.len() * 2,
            Rows::Bf16(rows) => rows.len() * 2,
            Rows::Int8 { rows, scales } => rows.len() + scales.len() * 4,
            Rows::Blocks { bytes, .. } => bytes.len(),
        }
    }

    /// Name of the precision, for logs and the numerics class.
    pub fn precision(&self) -> &'static str {
        match &self.rows {
            Rows::F32(_) => "f32",
            Rows::F16(_) => "f16",
            Rows::Bf16(_) => "bf16",
            Rows::Int8 { .. } => "q8",
            Rows::Blocks { dtype, .. } => dtype.name(),
        }
    }

    /// Logits of rows `first .. first + count` for hidden rows `xs` `(n, hidden)`, into `out`
    /// `(n, count)`. `scratch` is reused between calls.
    pub fn logits(
        &self,
        kernels: &FloatKernels,
        first: usize,
        count: usize,
        xs: &[f32],
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let len = self.hidden_size;
        let range = first * len..(first + count) * len;
        match &self.rows {
            Rows::F32(rows) => kernels.head(&rows[range], len, xs, out),
            Rows::F16(rows) => kernels.head(&rows[range], len, xs, out),
            Rows::Bf16(rows) => kernels.head(&rows[range], len, xs, out),
            Rows::Int8 { rows, scales } => {
                kernels.head(&rows[range], len, xs, out);
                for row in out.chunks_exact_mut(count) {
                    for (logit, scale) in row.iter_mut().zip(&scales[first..first + count]) {
                        *logit *= scale;
                    }
                }
            }
            Rows::Blocks { dtype, bytes } => {
                scratch.resize(count * len, 0.0);
                let dense = Dense { dtype: *dtype, rows: self.vocab_size, cols: len, bytes };
                for (i, row) in scratch.chunks_exact_mut(len).enumerate() {
                    dense.row(first + i, row);
                }
                kernels.head(scratch, len, xs, out);
            }
        }
    }
}

fn copy<T: Send, const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> T + Sync) -> Vec<T> {
    bytes.as_chunks::<N>().0.par_iter().map(|chunk| decode(*chunk)).collect()
}

/// `scale = max|w| / 127` per row, `int8 = round_half_even(w / scale)`.
fn quantize_rows(dense: Dense<'_>) -> Rows {
    let mut rows = vec![0i8; dense.rows * dense.cols];
    let scales = rows
        .par_chunks_exact_mut(dense.cols)
        .enumerate()
        .map_init(
            || vec![0f32; dense.cols],
            |wide, (row, out)| {
                dense.row(row, wide);
                let largest = wide.iter().fold(0f32, |a, b| a.max(b.abs()));
                let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
                for (q, w) in out.iter_mut().zip(wide.iter()) {
                    *q = (w / scale).round_ties_even() as i8;
                }
                scale
            },
        )
        .collect();
    Rows::Int8 { rows, scales }
}
