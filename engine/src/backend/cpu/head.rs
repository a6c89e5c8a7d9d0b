//! The head: logits of a hidden row against every row of the vocabulary, in the file's precision,
//! or as int8 when asked for.

use half::{bf16, f16};
use rayon::prelude::*;

use super::screen::Screen;
use crate::{
    files::{Dense, DenseType, Model},
    formats::memory::AlignedBytes,
    kernels::{Isa, float::FloatKernels},
    names::names,
};

/// How the head's weights are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeadMode {
    /// As in the file, and exact: a copy in int8 says which rows may matter, where not all logits are
    /// asked for ([`super::screen`]).
    #[default]
    Exact,
    /// As in the file, without the copy: every logit is computed.
    Full,
    /// One int8 per weight and one scale per row: half the memory of f16, and lossy.
    Q8,
}

names!(HeadMode, "head", Exact = "exact", Full = "full", Q8 = "q8");

/// Head rows per call of a kernel: a task's unit.
pub const HEAD_ROWS: usize = 64;

/// Bytes copied between two releases of the file's pages.
const COPY_BYTES: usize = 32 << 20;

const _: () = assert!(cfg!(target_endian = "little"), "model files are little-endian");

enum Rows {
    /// As in the file, quantized blocks too: those are dequantized row by row when they are used.
    Stored {
        dtype: DenseType,
        bytes: AlignedBytes, // (vocab, row bytes), zero-padded to whole cache lines
    },
    Int8 {
        rows: AlignedBytes, // (vocab, hidden) of i8
        /// Per row: `weight = scale × int8`.
        scales: Vec<f32>,
    },
}

/// The head's weights. // (vocab, hidden)
pub struct Head {
    rows: Rows,
    screen: Option<Screen>,
    vocab_size: usize,
    hidden_size: usize,
}

impl Head {
    /// Copies the matrix out of the model file.
    pub fn load(model: &Model, mode: HeadMode) -> Self {
        Self::of(model.head(), mode, || model.release_pages())
    }

    /// Copies a matrix; `release` hears when much of it has been read.
    pub fn of(dense: Dense<'_>, mode: HeadMode, release: impl Fn()) -> Self {
        let rows = match mode {
            HeadMode::Q8 => quantize_rows(dense),
            HeadMode::Exact | HeadMode::Full => {
                let mut bytes = AlignedBytes::zeroed(dense.bytes.len().next_multiple_of(64));
                for (to, from) in bytes.chunks_mut(COPY_BYTES).zip(dense.bytes.chunks(COPY_BYTES)) {
                    to[..from.len()].copy_from_slice(from);
                    release();
                }
                Rows::Stored { dtype: dense.dtype, bytes }
            }
        };
        let screen = (mode == HeadMode::Exact).then(|| Screen::of(dense)).flatten();
        Self { rows, screen, vocab_size: dense.rows, hidden_size: dense.cols }
    }

    /// What finds the largest logits without computing all.
    pub fn screen(&self) -> Option<&Screen> {
        self.screen.as_ref()
    }

    /// Rows of the matrix.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        self.rows_bytes() + self.screen.as_ref().map_or(0, Screen::size_bytes)
    }

    /// Bytes read where only the largest logits are asked for, but for the rows that may have them.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        self.screen.as_ref().map_or_else(|| self.rows_bytes(), |screen| screen.step_bytes(isa))
    }

    fn rows_bytes(&self) -> usize {
        match &self.rows {
            Rows::Stored { bytes, .. } => bytes.len(),
            Rows::Int8 { rows, scales } => rows.len() + scales.len() * 4,
        }
    }

    /// Name of the precision, for logs and the numerics class.
    pub fn precision(&self) -> &'static str {
        match &self.rows {
            Rows::Stored { dtype, .. } => dtype.name(),
            Rows::Int8 { .. } => "q8",
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
        match &self.rows {
            Rows::Stored { dtype: DenseType::F32, bytes } => {
                kernels.head(rows_of::<f32>(bytes, len, first, count), len, xs, out);
            }
            Rows::Stored { dtype: DenseType::F16, bytes } => {
                kernels.head(rows_of::<f16>(bytes, len, first, count), len, xs, out);
            }
            Rows::Stored { dtype: DenseType::Bf16, bytes } => {
                kernels.head(rows_of::<bf16>(bytes, len, first, count), len, xs, out);
            }
            Rows::Stored { dtype, bytes } => {
                scratch.resize(count * len, 0.0);
                let row_bytes = dtype.row_bytes(len).expect("the reader checked whole blocks");
                let bytes = &bytes[first * row_bytes..(first + count) * row_bytes];
                let dense = Dense { dtype: *dtype, rows: count, cols: len, bytes };
                for (row, wide) in scratch.chunks_exact_mut(len).enumerate() {
                    dense.row(row, wide);
                }
                kernels.head(scratch, len, xs, out);
            }
            Rows::Int8 { rows, scales } => {
                kernels.head(rows_of::<i8>(rows, len, first, count), len, xs, out);
                for row in out.chunks_exact_mut(count) {
                    for (logit, scale) in row.iter_mut().zip(&scales[first..first + count]) {
                        *logit *= scale;
                    }
                }
            }
        }
    }
}

/// Rows `first .. first + count` of a matrix of `len` elements a row.
fn rows_of<T: bytemuck::Pod>(bytes: &[u8], len: usize, first: usize, count: usize) -> &[T] {
    let row = len * size_of::<T>();
    bytemuck::cast_slice(&bytes[first * row..(first + count) * row])
}

/// `scale = max|w| / 127`, `int8 = round_half_even(w / scale)`; returns the scale.
pub(in crate::backend) fn quantize_row(w: &[f32], out: &mut [u8]) -> f32 {
    let largest = w.iter().fold(0f32, |a, b| a.max(b.abs()));
    let scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
    for (q, w) in out.iter_mut().zip(w.iter()) {
        *q = (w / scale).round_ties_even() as i8 as u8;
    }
    scale
}

fn quantize_rows(dense: Dense<'_>) -> Rows {
    let elements = dense.rows * dense.cols;
    let mut rows = AlignedBytes::zeroed(elements.next_multiple_of(64));
    let scales = rows[..elements]
        .par_chunks_exact_mut(dense.cols)
        .enumerate()
        .map_init(
            || vec![0f32; dense.cols],
            |wide, (row, out)| {
                dense.row(row, wide);
                quantize_row(wide, out)
            },
        )
        .collect();
    Rows::Int8 { rows, scales }
}
