//! A model's weights on the device: their addresses, which are known before anything is loaded, and their upload.

use rayon::prelude::*;

use super::{
    device::{Address, Device, DeviceError},
    error::CudaLoadError,
    layout,
    shape::{Arena, Shape},
};
use crate::{
    backend::{
        cpu::{
            HeadMode,
            head::quantize_row,
            screen::{self, can_screen},
        },
        positions,
    },
    config::{Linear, Norm},
    files::{Dense, DenseType, Model},
    formats::Scale,
};

/// Bytes that are converted or copied at once.
const CHUNK_BYTES: usize = 32 << 20;

/// A ternary linear.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLinear {
    pub weights: Address,
    pub scale: Scale,
    pub rows: usize,
    pub cols: usize,
    /// Address of the linear's own norm, or 0.
    pub norm: Address,
}

/// One transformer layer; norms are 0 where the model has none.
#[derive(Debug, Clone)]
pub struct Layer {
    linears: Vec<DeviceLinear>, // in the order of `Linear::ALL`
    pub attention_norm: Address,
    pub attention_sub_norm: Address,
    pub feed_forward_norm: Address,
    pub feed_forward_sub_norm: Address,
}

impl Layer {
    /// Returns one of the layer's linears.
    pub fn linear(&self, linear: Linear) -> &DeviceLinear {
        &self.linears[linear as usize]
    }
}

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
    fn of(dense: &Dense<'_>) -> Self {
        match dense.dtype {
            DenseType::F16 => Self::F16,
            DenseType::Bf16 => Self::Bf16,
            // Models with ternary tables are refused before: see `super::check_scales`.
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

/// The head. // (vocab, hidden)
#[derive(Debug, Clone, Copy)]
pub struct DeviceHead {
    pub rows: Address,
    pub dtype: Dtype,
    /// Address of the scales of int8 rows, or 0.
    pub scales: Address,
    pub screen: Option<ScreenRows>,
}

/// Everything that a forward pass reads.
#[derive(Debug, Clone)]
pub struct Weights {
    pub layers: Vec<Layer>,
    pub embedding: Address,
    pub embedding_dtype: Dtype,
    pub head: DeviceHead,
    pub final_norm: Address,
    /// Address of the rotation of every position: cosines, then sines. // (context, 2, head_dim / 2)
    pub rotations: Address,
    /// Bytes that a decode step reads: the matrices, and the head or its int8 copy.
    pub step_bytes: usize,
}

impl Weights {
    /// Assigns an address to everything.
    pub fn place(model: &Model, shape: &Shape, mode: HeadMode, arena: &mut Arena) -> Self {
        let layers = (0..shape.layers).map(|_| place_layer(model, shape, arena)).collect();
        let dense = model.embedding();
        let embedding_dtype = Dtype::of(&dense);
        let matrix = |dense: &Dense<'_>, arena: &mut Arena| {
            arena.take(dense.rows * dense.cols * Dtype::of(dense).size_bytes())
        };
        let embedding = matrix(&dense, arena);
        let tied = model.head().bytes.as_ptr() == dense.bytes.as_ptr();
        let dense = model.head();
        let (rows, dtype, scales) = match mode {
            HeadMode::Q8 => {
                (arena.take(dense.rows * dense.cols), Dtype::I8, arena.words(dense.rows))
            }
            _ if tied => (embedding, embedding_dtype, 0),
            _ => (matrix(&dense, arena), Dtype::of(&dense), 0),
        };
        let screened = mode == HeadMode::Exact && can_screen(dense);
        let screen = screened.then(|| {
            let padded = shape.groups() * layout::TILE_ROWS;
            ScreenRows {
                rows: arena.take(shape.groups() * layout::group_bytes(dense.cols)),
                scales: arena.words(padded),
                errors: arena.words(padded),
                norms: arena.words(padded),
            }
        });
        let of_head = match screen {
            Some(_) => shape.groups() * layout::group_bytes(dense.cols),
            None => dense.rows * dense.cols * dtype.size_bytes(),
        };
        let packed = |linear| {
            let (rows, cols) = model.config().linear_shape(linear);
            layout::ternary_bytes(rows, cols)
        };
        Self {
            layers,
            embedding,
            embedding_dtype,
            head: DeviceHead { rows, dtype, scales, screen },
            final_norm: arena.words(shape.hidden),
            rotations: arena.words(shape.context * shape.head_dim),
            step_bytes: of_head + shape.layers * Linear::ALL.map(packed).iter().sum::<usize>(),
        }
    }

    /// Uploads everything to its address.
    pub fn fill(
        &mut self,
        model: &Model,
        shape: &Shape,
        device: &mut dyn Device,
    ) -> Result<(), CudaLoadError> {
        for (index, layer) in self.layers.iter_mut().enumerate() {
            fill_layer(layer, index, model, device)?;
            model.release_pages();
        }
        write_floats(device, self.final_norm, &model.norm(Norm::Final)?)?;
        write_dense(device, self.embedding, model.embedding(), model)?;
        let DeviceHead { rows, scales, screen, dtype } = self.head;
        if dtype == Dtype::I8 {
            write_int8(device, rows, scales, model.head())?;
        } else if rows != self.embedding {
            write_dense(device, rows, model.head(), model)?;
        }
        if let Some(screen) = screen {
            write_screen(device, &screen, model.head())?;
        }
        model.release_pages();
        let config = model.config();
        let rope = positions::Rope::of(config);
        let mut rotations = vec![0f32; shape.context * shape.head_dim];
        rotations
            .par_chunks_exact_mut(shape.head_dim)
            .enumerate()
            .for_each(|(position, out)| rope.rotation(position, out));
        write_floats(device, self.rotations, &rotations)?;
        Ok(())
    }
}

fn place_layer(model: &Model, shape: &Shape, arena: &mut Arena) -> Layer {
    let config = model.config();
    let linears = Linear::ALL.map(|linear| {
        let (rows, cols) = config.linear_shape(linear);
        let weights = arena.take(layout::ternary_bytes(rows, cols));
        let norm = if shape.linear_eps.is_some() { arena.words(cols) } else { 0 };
        DeviceLinear { weights, scale: Scale::Multiply(1.0), rows, cols, norm }
    });
    let mut sub_norm = |width| if config.sub_norms { arena.words(width) } else { 0 };
    let attention_sub_norm = sub_norm(shape.query_width());
    let feed_forward_sub_norm = sub_norm(shape.intermediate);
    Layer {
        linears: linears.to_vec(),
        attention_norm: arena.words(shape.hidden),
        attention_sub_norm,
        feed_forward_norm: arena.words(shape.hidden),
        feed_forward_sub_norm,
    }
}

fn fill_layer(
    layer: &mut Layer,
    index: usize,
    model: &Model,
    device: &mut dyn Device,
) -> Result<(), CudaLoadError> {
    for (linear, to) in Linear::ALL.into_iter().zip(&mut layer.linears) {
        let ternary = model.ternary(index, linear)?;
        to.scale = ternary.scale;
        let packed = layout::pack_ternary(ternary.rows, ternary.cols, &ternary.trits);
        device.write(to.weights, &packed)?;
        if to.norm != 0 {
            write_floats(device, to.norm, &model.norm(Norm::Linear(index, linear))?)?;
        }
    }
    for (to, norm) in [
        (layer.attention_norm, Norm::Attention(index)),
        (layer.attention_sub_norm, Norm::AttentionSub(index)),
        (layer.feed_forward_norm, Norm::FeedForward(index)),
        (layer.feed_forward_sub_norm, Norm::FeedForwardSub(index)),
    ] {
        if to != 0 {
            write_floats(device, to, &model.norm(norm)?)?;
        }
    }
    Ok(())
}

fn write_floats(device: &mut dyn Device, to: Address, values: &[f32]) -> Result<(), DeviceError> {
    device.write(to, bytemuck::cast_slice(values))
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
        let of_rows: Vec<Vec<screen::RowStats>> = bytes
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
fn quantize_group(dense: Dense<'_>, group: usize, out: &mut [u8]) -> Vec<screen::RowStats> {
    let (mut wide, mut int8) = (vec![0f32; dense.cols], vec![0u8; dense.cols]);
    let first = group * layout::TILE_ROWS;
    (0..layout::TILE_ROWS.min(dense.rows - first))
        .map(|row| {
            dense.row(first + row, &mut wide);
            let of_row = screen::quantize(&wide, &mut int8);
            layout::pack_screen_row(row, &int8, out);
            of_row
        })
        .collect()
}
