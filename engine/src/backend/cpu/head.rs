//! The weights of the head, in the file's precision, as int8 or as packed trits, with the copies of its screen.

use half::{bf16, f16};
use rayon::prelude::*;

use super::{
    HeadMode,
    screen::copies::Screen,
    sections::{Damaged, PackedReader, Sections, check_group},
};
use crate::{
    files::{Dense, DenseType, Model, ModelError},
    formats::{Format, PackedMatrix, memory::AlignedBytes},
    kernels::{
        Isa,
        float::{FloatKernels, HeadElement},
        prefetch,
    },
    sampling::TokenLogit,
};

/// Head rows per kernel call and task.
pub const HEAD_ROWS: usize = 64;

/// Bytes copied between two releases of the file's pages.
const COPY_BYTES: usize = 32 << 20;

const _: () = assert!(cfg!(target_endian = "little"), "model files are little-endian");

enum Rows {
    /// As in the file. Quantized blocks are dequantized row by row when they are used.
    Stored {
        dtype: DenseType,
        bytes: AlignedBytes, // (vocab, row bytes), zero-padded to whole cache lines
    },
    Int8 {
        rows: AlignedBytes, // (vocab, hidden) of i8
        /// Per row: `weight = scale × int8`.
        scales: Vec<f32>,
    },
    Ternary(PackedMatrix),
    /// Of models that embed texts.
    Absent,
}

impl Rows {
    /// Copies a matrix as it is; calls `release` after each [`COPY_BYTES`] read.
    fn copied(dense: Dense<'_>, release: impl Fn()) -> Self {
        const PART_BYTES: usize = 1 << 20;
        let mut bytes = AlignedBytes::zeroed(dense.bytes.len().next_multiple_of(64));
        for (to, from) in bytes.chunks_mut(COPY_BYTES).zip(dense.bytes.chunks(COPY_BYTES)) {
            let parts = to[..from.len()].par_chunks_mut(PART_BYTES);
            parts.zip(from.par_chunks(PART_BYTES)).for_each(|(to, from)| to.copy_from_slice(from));
            release();
        }
        Self::Stored { dtype: dense.dtype, bytes }
    }
}

/// The head's weights. // (vocab, hidden)
pub struct Head {
    rows: Rows,
    screen: Option<Screen>,
    hidden_size: usize,
}

impl Head {
    /// Copies the matrix out of the model file. A ternary head is packed, whatever the mode.
    ///
    /// # Errors
    /// If the matrix is ternary and cannot be decoded.
    pub fn load(model: &Model, format: Format, mode: HeadMode) -> Result<Self, ModelError> {
        if model.config().pooling.is_some() {
            return Ok(Self::absent(model));
        }
        let Some(matrix) = model.ternary_head()? else {
            return Ok(Self::from_dense(model.head(), mode, || model.release_pages()));
        };
        let packed = PackedMatrix::pack_matrix(format, &matrix)
            .expect("the reader returns trits of the stated shape");
        Ok(Self { rows: Rows::Ternary(packed), screen: None, hidden_size: matrix.cols })
    }

    /// Returns the head of a model that has none.
    fn absent(model: &Model) -> Self {
        let hidden_size = model.config().hidden_size;
        Self { rows: Rows::Absent, screen: None, hidden_size }
    }

    /// Copies a matrix; calls `release` after each [`COPY_BYTES`] read.
    pub fn from_dense(dense: Dense<'_>, mode: HeadMode, release: impl Fn()) -> Self {
        let rows = match mode {
            HeadMode::Q8 => quantize_rows(dense),
            HeadMode::Exact | HeadMode::Full => Rows::copied(dense, release),
        };
        let screen = (mode == HeadMode::Exact).then(|| Screen::from_dense(dense)).flatten();
        Self { rows, screen, hidden_size: dense.cols }
    }

    /// Writes the buffers that hold the head, but for rows that are as in the model file.
    pub fn write<'a>(&'a self, sections: &mut Sections<'a>) {
        match &self.rows {
            Rows::Stored { .. } | Rows::Absent => {}
            Rows::Int8 { rows, scales } => {
                sections.push(&rows[..]);
                sections.push(scales);
            }
            Rows::Ternary(matrix) => matrix.buffers().for_each(|bytes| sections.push(&bytes[..])),
        }
        if let Some(screen) = &self.screen {
            screen.write(sections);
        }
    }

    /// Reads what [`Self::write`] wrote for this model, and copies rows that are as in its file. `group` is that of
    /// a ternary head.
    pub fn read(
        model: &Model,
        (format, mode): (Format, HeadMode),
        group: Option<usize>,
        from: &mut PackedReader<'_>,
    ) -> Result<Self, Damaged> {
        if model.config().pooling.is_some() {
            return Ok(Self::absent(model));
        }
        let dense = model.head();
        let (vocab_size, hidden_size) = (dense.rows, dense.cols);
        let is_ternary = model.config().ternary_tables;
        check_group(group, hidden_size, is_ternary)?;
        if is_ternary {
            let shape = (vocab_size, hidden_size);
            let matrix = PackedMatrix::from_buffers(format, shape, group, |len| from.aligned(len));
            return Ok(Self { rows: Rows::Ternary(matrix?), screen: None, hidden_size });
        }
        let rows = match mode {
            HeadMode::Q8 => {
                let rows = from.aligned((vocab_size * hidden_size).next_multiple_of(64))?;
                Rows::Int8 { rows, scales: from.array(vocab_size)? }
            }
            HeadMode::Exact | HeadMode::Full => Rows::copied(dense, || model.release_pages()),
        };
        let is_screened = mode == HeadMode::Exact;
        let screen = if is_screened { Screen::read(dense, from)? } else { None };
        Ok(Self { rows, screen, hidden_size })
    }

    /// Returns the memory in bytes that [`Self::load`] would take. `group` is that of a ternary head.
    pub fn size_for(model: &Model, format: Format, mode: HeadMode, group: Option<usize>) -> usize {
        let dense = model.head();
        if model.config().pooling.is_some() {
            return 0;
        }
        if model.config().ternary_tables {
            return PackedMatrix::size_for(format, dense.rows, dense.cols, group);
        }
        let rows = match mode {
            HeadMode::Q8 => (dense.rows * dense.cols).next_multiple_of(64) + dense.rows * 4,
            HeadMode::Exact | HeadMode::Full => dense.bytes.len().next_multiple_of(64),
        };
        let screen = if mode == HeadMode::Exact { Screen::size_for(dense) } else { 0 };
        rows + screen
    }

    /// Returns the screen that finds the largest logits without computing all, if the mode has one.
    pub fn screen(&self) -> Option<&Screen> {
        self.screen.as_ref()
    }

    /// Returns the matrix, if the head is ternary.
    pub fn ternary(&self) -> Option<&PackedMatrix> {
        match &self.rows {
            Rows::Ternary(matrix) => Some(matrix),
            Rows::Stored { .. } | Rows::Int8 { .. } | Rows::Absent => None,
        }
    }

    /// Returns the memory in bytes.
    pub fn size_bytes(&self) -> usize {
        self.rows_bytes() + self.screen.as_ref().map_or(0, Screen::size_bytes)
    }

    /// Returns the number of bytes read to find the largest logits, not counting the exact rows read
    /// for candidates.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        self.screen.as_ref().map_or_else(|| self.rows_bytes(), |screen| screen.step_bytes(isa))
    }

    fn rows_bytes(&self) -> usize {
        match &self.rows {
            Rows::Stored { bytes, .. } => bytes.len(),
            Rows::Int8 { rows, scales } => rows.len() + scales.len() * 4,
            Rows::Ternary(matrix) => matrix.size_bytes(),
            Rows::Absent => 0,
        }
    }

    /// Writes the logits of head rows `first .. first + count` for hidden rows `xs` `(n, hidden)` to
    /// `out` `(n, count)`. `scratch` is reused between calls.
    ///
    /// # Panics
    /// If the head is ternary, or the model has none.
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
            Rows::Ternary(_) => unreachable!("a ternary head is a linear"),
            Rows::Absent => unreachable!("embedding models have no logits"),
        }
    }

    /// Writes the logits of some tokens, in any order, for one hidden row. `scratch` is reused between calls.
    ///
    /// # Panics
    /// As [`Self::logits`].
    pub fn logits_of(
        &self,
        kernels: &FloatKernels,
        tokens: &mut [TokenLogit],
        x: &[f32],
        scratch: &mut Vec<f32>,
    ) {
        match &self.rows {
            Rows::Stored { dtype: DenseType::F32, bytes } => {
                logits_of_rows::<f32>(kernels, bytes, tokens, x);
            }
            Rows::Stored { dtype: DenseType::F16, bytes } => {
                logits_of_rows::<f16>(kernels, bytes, tokens, x);
            }
            Rows::Stored { dtype: DenseType::Bf16, bytes } => {
                logits_of_rows::<bf16>(kernels, bytes, tokens, x);
            }
            Rows::Int8 { rows, scales } => {
                logits_of_rows::<i8>(kernels, rows, tokens, x);
                for TokenLogit { id, logit } in tokens {
                    *logit *= scales[*id as usize];
                }
            }
            Rows::Stored { .. } | Rows::Ternary(_) | Rows::Absent => {
                for TokenLogit { id, logit } in tokens {
                    let logit = std::slice::from_mut(logit);
                    self.logits(kernels, *id as usize, 1, x, scratch, logit);
                }
            }
        }
    }
}

/// Computes the logits of some tokens for a hidden row, some rows together; asks for the next ones meanwhile.
fn logits_of_rows<T: HeadElement + bytemuck::Pod>(
    kernels: &FloatKernels,
    bytes: &[u8],
    tokens: &mut [TokenLogit],
    x: &[f32],
) {
    const TOGETHER: usize = 4;
    let row_of = |token: &TokenLogit| rows_of::<T>(bytes, x.len(), token.id as usize, 1);
    let mut left = tokens;
    while !left.is_empty() {
        let (now, next) = left.split_at_mut(TOGETHER.min(left.len()));
        for token in next.iter().take(TOGETHER) {
            prefetch::all(bytemuck::cast_slice(row_of(token)));
        }
        let (mut rows, mut logits) = ([&[][..]; TOGETHER], [0.0; TOGETHER]);
        rows.iter_mut().zip(&*now).for_each(|(row, token)| *row = row_of(token));
        kernels.head_some(&rows[..now.len()], x, &mut logits[..now.len()]);
        now.iter_mut().zip(logits).for_each(|(token, logit)| token.logit = logit);
        left = next;
    }
}

/// Returns rows `first .. first + count` of a matrix with `len` elements per row.
fn rows_of<T: bytemuck::Pod>(bytes: &[u8], len: usize, first: usize, count: usize) -> &[T] {
    let row = len * size_of::<T>();
    bytemuck::cast_slice(&bytes[first * row..(first + count) * row])
}

/// Writes `int8 = round_half_even(w / scale)` and returns `scale = max|w| / 127`.
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
