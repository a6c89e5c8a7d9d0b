//! A model's weights, repacked for the kernels.

use std::sync::Arc;

use super::{HeadMode, head::Head};
use crate::config::{Linear, ModelConfig, Norm};
use crate::files::{Model, ModelError};
use crate::formats::{Format, PackedMatrix, Scale};
use crate::kernels::Isa;

/// One ternary linear; its matrix may have scales of groups.
pub struct TernaryLinear {
    /// The packed trits.
    pub matrix: PackedMatrix,
    /// Factor from integer sum to output.
    pub scale: Scale,
    /// Weights of the norm before it, if the model has one.
    pub norm: Option<Vec<f32>>,
}

/// One transformer layer.
pub struct Layer {
    /// The layer's linears, in the order of [`Linear::ALL`].
    linears: Vec<TernaryLinear>,
    /// Norm before attention. // (hidden)
    pub attention_norm: Vec<f32>,
    /// Norms of each query and of each key head, before RoPE. // (head_dim)
    pub head_norms: Option<[Vec<f32>; 2]>,
    /// Norm before the attention output linear. // (heads * head_dim)
    pub attention_sub_norm: Option<Vec<f32>>,
    /// Norm before the feed-forward block. // (hidden)
    pub feed_forward_norm: Vec<f32>,
    /// Norm before the down linear. // (intermediate)
    pub feed_forward_sub_norm: Option<Vec<f32>>,
}

impl Layer {
    /// Returns one of the layer's linears.
    pub fn linear(&self, linear: Linear) -> &TernaryLinear {
        &self.linears[linear as usize]
    }
}

/// Everything that a forward pass reads.
pub struct Weights {
    /// The opened file; its embedding rows are read in place.
    pub model: Arc<Model>,
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Transformer layers.
    pub layers: Vec<Layer>,
    /// Norm before the head. // (hidden)
    pub final_norm: Vec<f32>,
    /// The head.
    pub head: Head,
}

impl Weights {
    /// Decodes and repacks every tensor, and releases the file's pages.
    ///
    /// # Errors
    /// If a tensor cannot be decoded.
    pub fn load(model: Arc<Model>, format: Format, head: HeadMode) -> Result<Self, ModelError> {
        let config = model.config().clone();
        let mut layers = Vec::with_capacity(config.layer_count);
        for layer in 0..config.layer_count {
            layers.push(load_layer(&model, &config, format, layer)?);
            model.release_pages();
        }
        let final_norm = model.norm(Norm::Final)?;
        let head = Head::load(&model, format, head)?;
        model.release_pages();
        Ok(Self { model, format, layers, final_norm, head })
    }

    /// Returns the shape and conventions of the model.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Returns the memory in bytes: the packed matrices and the head with its copies.
    pub fn size_bytes(&self) -> usize {
        self.packed_bytes() + self.head.size_bytes()
    }

    /// Returns the number of bytes that a decode step reads: the packed matrices, and the head or
    /// its screening copy.
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
            let norm = config.linear_norm_eps.map(|_| model.norm(Norm::Linear(layer, linear)));
            let norm = norm.transpose()?;
            let matrix = PackedMatrix::pack_matrix(format, &ternary)
                .expect("the reader returns trits of the stated shape");
            Ok(TernaryLinear { matrix, scale: ternary.scale, norm })
        })
        .collect::<Result<_, ModelError>>()?;
    let head_norms = [Norm::Query(layer), Norm::Key(layer)];
    let head_norms = match config.qk_norm {
        true => Some([model.norm(head_norms[0])?, model.norm(head_norms[1])?]),
        false => None,
    };
    let sub_norm = |norm| config.sub_norms.then(|| model.norm(norm)).transpose();
    Ok(Layer {
        linears,
        attention_norm: model.norm(Norm::Attention(layer))?,
        head_norms,
        attention_sub_norm: sub_norm(Norm::AttentionSub(layer))?,
        feed_forward_norm: model.norm(Norm::FeedForward(layer))?,
        feed_forward_sub_norm: sub_norm(Norm::FeedForwardSub(layer))?,
    })
}
