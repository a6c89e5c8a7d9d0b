//! Embedding and head on the device: dense matrices, the head with the screen's int8 copy, or ternary matrices with scales
//! of groups. A tied head lies in memory once.

use rayon::prelude::*;

use super::{
    device::{Address, Device, DeviceError},
    error::CudaLoadError,
    layout,
    linear::{DeviceLinear, write_floats},
    shape::{Arena, Shape},
};
use crate::{
    backend::cpu::{
        HeadMode,
        head::quantize_row,
        screen::copies::{self, can_screen},
    },
    files::{Dense, DenseType, Model},
};

/// Bytes that are converted or copied at once.
const CHUNK_BYTES: usize = 32 << 20;

/// Element type of a dense matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
    I8 = 3,
}

impl Dtype {
    /// Returns the type on the device of a matrix in the file. Quantized blocks are converted to f32, as on the
    /// CPU.
    fn from_dense(dense: &Dense<'_>) -> Self {
        match dense.dtype {
            DenseType::F16 => Self::F16,
            DenseType::Bf16 => Self::Bf16,
            // Ternary tables have no such type.
            _ => Self::F32,
        }
    }

    fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::I8 => 1,
        }
    }
}

/// The int8 copy of the head, with which the screen bounds logits.
#[derive(Debug, Clone, Copy)]
pub struct ScreenRows {
    pub rows: Address,
    pub scales: Address,
    pub errors: Address,
    pub norms: Address,
}

/// The embedding. // (vocab, hidden)
#[derive(Debug, Clone, Copy)]
pub enum Embedding {
    /// Rows of floats.
    Dense {
        /// Address of the rows.
        rows: Address,
        /// Type of the elements.
        dtype: Dtype,
    },
    /// A matrix with scales of groups.
    Ternary(DeviceLinear),
}

/// A head of floats or int8. // (vocab, hidden)
#[derive(Debug, Clone, Copy)]
pub struct DenseHead {
    pub rows: Address,
    pub dtype: Dtype,
    /// Address of the scales of int8 rows, or 0.
    pub scales: Address,
    pub screen: Option<ScreenRows>,
    /// Bytes that a decode step reads: the rows, or their int8 copy.
    step_bytes: usize,
}

/// The head.
#[derive(Debug, Clone, Copy)]
pub enum Head {
    /// Floats or int8.
    Dense(DenseHead),
    /// A linear with scales of groups; its input always has two digits.
    Ternary(DeviceLinear),
}

impl Head {
    /// Returns whether the device finds the first tokens of a question: by the screen, or from all logits where these take as
    /// little time.
    pub fn finds(&self) -> bool {
        match self {
            Self::Dense(head) => head.screen.is_some(),
            Self::Ternary(_) => true,
        }
    }

    /// Returns the number of bytes that a decode step reads.
    pub fn step_bytes(&self) -> usize {
        match self {
            Self::Dense(head) => head.step_bytes,
            Self::Ternary(matrix) => matrix.size_bytes(),
        }
    }
}

/// Embedding and head.
#[derive(Debug, Clone, Copy)]
pub struct Tables {
    pub embedding: Embedding,
    pub head: Head,
}

impl Tables {
    /// Assigns an address to everything.
    pub fn place(model: &Model, shape: &Shape, mode: HeadMode, arena: &mut Arena) -> Self {
        let (embedding, head) = (model.embedding(), model.head());
        let tied = head.bytes.as_ptr() == embedding.bytes.as_ptr();
        if model.config().ternary_tables {
            let matrix = |dense: &Dense<'_>, arena: &mut Arena| {
                let (shape, group) = ((dense.rows, dense.cols), dense.dtype.group_min());
                DeviceLinear::place(shape, Some(group), arena)
            };
            let embedding = matrix(&embedding, arena);
            let head = if tied { embedding } else { matrix(&head, arena) };
            let embedding = Embedding::Ternary(embedding);
            return Self { embedding, head: Head::Ternary(head) };
        }
        let matrix = |dense: &Dense<'_>, arena: &mut Arena| {
            arena.take(dense.rows * dense.cols * Dtype::from_dense(dense).size_bytes())
        };
        let (rows, dtype) = (matrix(&embedding, arena), Dtype::from_dense(&embedding));
        let embedding = Embedding::Dense { rows, dtype };
        let (rows, dtype, scales) = match mode {
            HeadMode::Q8 => (arena.take(head.rows * head.cols), Dtype::I8, arena.words(head.rows)),
            _ if tied => (rows, dtype, 0),
            _ => (matrix(&head, arena), Dtype::from_dense(&head), 0),
        };
        let screened = mode == HeadMode::Exact && can_screen(head);
        let copy_bytes = shape.groups() * layout::group_bytes(head.cols);
        let screen = screened.then(|| {
            let padded = shape.groups() * layout::TILE_ROWS;
            ScreenRows {
                rows: arena.take(copy_bytes),
                scales: arena.words(padded),
                errors: arena.words(padded),
                norms: arena.words(padded),
            }
        });
        let rows_bytes = head.rows * head.cols * dtype.size_bytes();
        let step_bytes = if screened { copy_bytes } else { rows_bytes };
        Self { embedding, head: Head::Dense(DenseHead { rows, dtype, scales, screen, step_bytes }) }
    }

    /// Uploads everything to its address.
    pub fn fill(&mut self, model: &Model, device: &mut dyn Device) -> Result<(), CudaLoadError> {
        let at = match &mut self.embedding {
            Embedding::Dense { rows, .. } => {
                write_dense(device, *rows, model.embedding(), model)?;
                *rows
            }
            Embedding::Ternary(to) => {
                if let Some(matrix) = model.ternary_embedding()? {
                    to.fill(&matrix, device)?;
                }
                to.weights
            }
        };
        match &mut self.head {
            Head::Dense(DenseHead { rows, dtype, scales, screen, .. }) => {
                if *dtype == Dtype::I8 {
                    write_int8(device, *rows, *scales, model.head())?;
                } else if *rows != at {
                    write_dense(device, *rows, model.head(), model)?;
                }
                if let Some(screen) = screen {
                    write_screen(device, screen, model.head())?;
                }
            }
            Head::Ternary(to) => match self.embedding {
                Embedding::Ternary(embedding) if embedding.weights == to.weights => *to = embedding,
                _ => {
                    if let Some(matrix) = model.ternary_head()? {
                        to.fill(&matrix, device)?;
                    }
                }
            },
        }
        model.release_pages();
        Ok(())
    }
}

/// Uploads a matrix; converts quantized blocks to f32.
fn write_dense(
    device: &mut dyn Device,
    to: Address,
    dense: Dense<'_>,
    model: &Model,
) -> Result<(), DeviceError> {
    let as_stored = matches!(dense.dtype, DenseType::F32 | DenseType::F16 | DenseType::Bf16);
    if as_stored {
        for (index, bytes) in dense.bytes.chunks(CHUNK_BYTES).enumerate() {
            device.write(to + (index * CHUNK_BYTES) as u64, bytes)?;
            model.release_pages();
        }
        return Ok(());
    }
    let row_bytes = dense.cols * 4;
    each_rows(dense, row_bytes, |first, rows| {
        let mut wide = vec![0f32; rows * dense.cols];
        wide.par_chunks_exact_mut(dense.cols)
            .enumerate()
            .for_each(|(row, out)| dense.row(first + row, out));
        write_floats(device, to + (first * row_bytes) as u64, &wide)
    })
}

/// Splits a matrix into parts; calls `each` with the first row and the number of rows of each.
fn each_rows<E>(
    dense: Dense<'_>,
    row_bytes: usize,
    mut each: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let rows = (CHUNK_BYTES / row_bytes.max(1)).max(1);
    (0..dense.rows).step_by(rows).try_for_each(|first| each(first, rows.min(dense.rows - first)))
}

fn write_int8(
    device: &mut dyn Device,
    to: Address,
    scales: Address,
    dense: Dense<'_>,
) -> Result<(), DeviceError> {
    let mut all_scales = Vec::with_capacity(dense.rows);
    each_rows(dense, dense.cols, |first, rows| {
        let mut bytes = vec![0u8; rows * dense.cols];
        all_scales.par_extend(bytes.par_chunks_exact_mut(dense.cols).enumerate().map_init(
            || vec![0f32; dense.cols],
            |wide, (row, out)| {
                dense.row(first + row, wide);
                quantize_row(wide, out)
            },
        ));
        device.write(to + (first * dense.cols) as u64, &bytes)
    })?;
    write_floats(device, scales, &all_scales)
}

fn write_screen(
    device: &mut dyn Device,
    to: &ScreenRows,
    dense: Dense<'_>,
) -> Result<(), DeviceError> {
    let (groups, of_group) =
        (dense.rows.div_ceil(layout::TILE_ROWS), layout::group_bytes(dense.cols));
    let together = (CHUNK_BYTES / of_group).clamp(1, groups);
    let padded = groups * layout::TILE_ROWS;
    let (mut scales, mut errors, mut norms) = (vec![], vec![], vec![]);
    for first in (0..groups).step_by(together) {
        let count = together.min(groups - first);
        let mut bytes = vec![0u8; count * of_group];
        let of_rows: Vec<Vec<copies::RowStats>> = bytes
            .par_chunks_exact_mut(of_group)
            .enumerate()
            .map(|(group, out)| quantize_group(dense, first + group, out))
            .collect();
        for row in of_rows.iter().flatten() {
            scales.push(row.scale);
            errors.push(row.error);
            norms.push(row.norm);
        }
        device.write(to.rows + (first * of_group) as u64, &bytes)?;
    }
    for (to, values) in [(to.scales, &mut scales), (to.errors, &mut errors), (to.norms, &mut norms)]
    {
        values.resize(padded, 0.0);
        write_floats(device, to, values)?;
    }
    Ok(())
}

/// Quantizes the rows of a group; the last group may have fewer.
fn quantize_group(dense: Dense<'_>, group: usize, out: &mut [u8]) -> Vec<copies::RowStats> {
    let (mut wide, mut int8) = (vec![0f32; dense.cols], vec![0u8; dense.cols]);
    let first = group * layout::TILE_ROWS;
    (0..layout::TILE_ROWS.min(dense.rows - first))
        .map(|row| {
            dense.row(first + row, &mut wide);
            let of_row = copies::quantize(&wide, &mut int8);
            layout::pack_screen_row(row, &int8, out);
            of_row
        })
        .collect()
}
