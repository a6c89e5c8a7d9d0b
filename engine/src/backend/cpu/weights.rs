//! A model's weights, repacked for the kernels.

use std::sync::Arc;

use super::head::{Head, HeadMode};
use crate::config::{Linear, ModelConfig, Norm};
use crate::files::{Model, ModelError};
use crate::formats::{Format, PackedMatrix, Scale};
use crate::kernels::Isa;

/// One ternary linear.
pub struct TernaryLinear {
    /// The trits.
    pub matrix: PackedMatrix,
    /// From integer sum to output.
    pub scale: Scale,
    /// Weights of the norm in front of it, if the model has one.
    pub norm: Option<Vec<f32>>,
}

/// One transformer layer.
pub struct Layer {
    /// In the order of [`Linear::ALL`].
    linears: Vec<TernaryLinear>,
    /// Before attention.
    pub attention_norm: Vec<f32>,
    /// Before the attention output linear.
    pub attention_sub_norm: Option<Vec<f32>>,
    /// Before the feed-forward block.
    pub feed_forward_norm: Vec<f32>,
    /// Before the down linear.
    pub feed_forward_sub_norm: Option<Vec<f32>>,
}

impl Layer {
    /// One of the layer's linears.
    pub fn linear(&self, linear: Linear) -> &TernaryLinear {
        &self.linears[linear as usize]
    }
}

/// Everything a forward pass reads; shared by `Arc`.
pub struct Weights {
    /// The opened file: its embedding rows are read in place.
    pub model: Arc<Model>,
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Transformer layers.
    pub layers: Vec<Layer>,
    /// Before the head.
    pub final_norm: Vec<f32>,
    /// The head.
    pub head: Head,
}

impl Weights {
    /// Decodes and repacks every tensor, then lets the file's pages go.
    ///
    /// # Errors
    /// The file's own: a tensor that cannot be decoded.
    pub fn load(model: Arc<Model>, format: Format, head: HeadMode) -> Result<Self, ModelError> {
        let config = model.config().clone();
        let mut layers = Vec::with_capacity(config.layer_count);
        for layer in 0..config.layer_count {
            layers.push(load_layer(&model, &config, format, layer)?);
            model.release_pages();
        }
        let final_norm = model.norm(Norm::Final)?;
        let head = Head::load(&model, head);
        model.release_pages();
        Ok(Self { model, format, layers, final_norm, head })
    }

    /// Shape and conventions.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Bytes held: the packed matrices and the head with its copies.
    pub fn size_bytes(&self) -> usize {
        self.packed_bytes() + self.head.size_bytes()
    }

    /// Bytes a decode step reads: the packed matrices, and the head or the copy it is screened by.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        self.packed_bytes() + self.head.step_bytes(isa)
    }

    fn packed_bytes(&self) -> usize {
        self.layers.iter().flat_map(|l| &l.linears).map(|l| l.matrix.size_bytes()).sum()
    }
}

fn load_layer(
    model: &Model,
    config: &ModelConfig,
    format: Format,
    layer: usize,
) -> Result<Layer, ModelError> {
    let linears = Linear::ALL
        .into_iter()
        .map(|linear| {
            let ternary = model.ternary(layer, linear)?;
            let norm = match config.linear_norm_eps {
                Some(_) => Some(model.norm(Norm::Linear(layer, linear))?),
                None => None,
            };
            let matrix = PackedMatrix::pack(format, ternary.rows, ternary.cols, &ternary.trits)
                .expect("the reader returns trits of the stated shape");
            Ok(TernaryLinear { matrix, scale: ternary.scale, norm })
        })
        .collect::<Result<_, ModelError>>()?;
    let sub_norm = |norm| config.sub_norms.then(|| model.norm(norm)).transpose();
    Ok(Layer {
        linears,
        attention_norm: model.norm(Norm::Attention(layer))?,
        attention_sub_norm: sub_norm(Norm::AttentionSub(layer))?,
        feed_forward_norm: model.norm(Norm::FeedForward(layer))?,
        feed_forward_sub_norm: sub_norm(Norm::FeedForwardSub(layer))?,
    })
}
