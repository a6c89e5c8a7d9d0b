//! A model's weights on the device: their addresses, which are known before anything is loaded, and their upload.

use rayon::prelude::*;

use super::{
    device::{Address, Device},
    error::CudaLoadError,
    linear::{DeviceLinear, write_floats},
    shape::{Arena, Shape},
    tables::Tables,
};
use crate::{
    backend::{cpu::HeadMode, final_norm, positions},
    config::{Linear, Norm},
    files::Model,
};

/// One transformer layer; norms are 0 where the model has none.
#[derive(Debug, Clone)]
pub struct Layer {
    linears: Vec<DeviceLinear>, // in the order of `Linear::OF_ATTENTION`
    pub attention_norm: Address,
    /// Norms of each query and of each key head.
    pub head_norms: [Address; 2],
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

/// Everything that a forward pass reads.
#[derive(Debug, Clone)]
pub struct Weights {
    pub layers: Vec<Layer>,
    pub tables: Tables,
    pub final_norm: Address,
    /// Address of the rotation of every position: cosines, then sines. // (context, 2, head_dim / 2)
    pub rotations: Address,
}

impl Weights {
    /// Assigns an address to everything.
    pub fn place(model: &Model, shape: &Shape, mode: HeadMode, arena: &mut Arena) -> Self {
        let place = |index| place_layer(model, index, shape, arena);
        Self {
            layers: (0..shape.layers).map(place).collect(),
            tables: Tables::place(model, shape, mode, arena),
            final_norm: arena.words(shape.hidden),
            rotations: arena.words(shape.context * shape.head_dim),
        }
    }

    /// Returns the number of bytes that a decode step reads: the matrices, and the head or its int8 copy.
    pub fn step_bytes(&self) -> usize {
        let linears = self.layers.iter().flat_map(|layer| &layer.linears);
        linears.map(DeviceLinear::size_bytes).sum::<usize>() + self.tables.head.step_bytes()
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
        write_floats(device, self.final_norm, &final_norm(model)?)?;
        self.tables.fill(model, device)?;
        let config = model.config();
        let rope = positions::Rope::from_config(config);
        let mut rotations = vec![0f32; shape.context * shape.head_dim];
        rotations
            .par_chunks_exact_mut(shape.head_dim)
            .enumerate()
            .for_each(|(position, out)| rope.rotation(position, out));
        write_floats(device, self.rotations, &rotations)?;
        Ok(())
    }
}

fn place_layer(model: &Model, index: usize, shape: &Shape, arena: &mut Arena) -> Layer {
    let config = model.config();
    let linears = Linear::OF_ATTENTION.map(|linear| {
        let (rows, cols) = config.linear_shape(linear);
        let placed = DeviceLinear::place((rows, cols), model.group_min(index, linear), arena);
        let norm = if shape.linear_eps.is_some() { arena.words(cols) } else { 0 };
        let has_bias = config.linear_biases.contains(&linear);
        let bias = if has_bias { arena.words(rows) } else { 0 };
        DeviceLinear { norm, bias, ..placed }
    });
    let head_norms = [(); 2].map(|()| if config.qk_norm { arena.words(shape.head_dim) } else { 0 });
    let mut sub_norm = |width| if config.sub_norms { arena.words(width) } else { 0 };
    let attention_sub_norm = sub_norm(shape.query_width());
    let feed_forward_sub_norm = sub_norm(shape.intermediate);
    Layer {
        linears: linears.to_vec(),
        attention_norm: arena.words(shape.hidden),
        head_norms,
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
    for (linear, to) in Linear::OF_ATTENTION.into_iter().zip(&mut layer.linears) {
        to.fill(&model.ternary(index, linear)?, device)?;
        if to.norm != 0 {
            write_floats(device, to.norm, &model.norm(Norm::Linear(index, linear))?)?;
        }
        if let Some(bias) = model.bias(index, linear)? {
            write_floats(device, to.bias, &bias)?;
        }
    }
    for (to, norm) in [
        (layer.attention_norm, Norm::Attention(index)),
        (layer.head_norms[0], Norm::Query(index)),
        (layer.head_norms[1], Norm::Key(index)),
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
