//! A model's weights, repacked for the kernels.

use std::sync::Arc;

use super::{
    HeadMode,
    head::Head,
    sections::{Damaged, LinearScale, PackedReader, PackedWriter, Scales, Sections},
};
use crate::backend::final_norm;
use crate::config::{LayerTensor, Linear, ModelConfig, Norm};
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
    /// Added to the output, if the model has it. // (outputs,)
    pub bias: Option<Vec<f32>>,
}

/// One transformer layer.
pub struct Layer {
    /// The layer's linears, in the order of [`ModelConfig::linears`].
    linears: Vec<(Linear, TernaryLinear)>,
    /// What a recurrent layer has besides.
    pub delta: Option<DeltaWeights>,
    /// The router of a mixture of experts. // (experts, hidden)
    pub router: Option<Vec<f32>>,
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
    ///
    /// # Panics
    /// If the layer does not have it.
    pub fn linear(&self, linear: Linear) -> &TernaryLinear {
        self.find(linear).expect("a linear of the layer")
    }

    /// Returns one of the layer's linears, if it has it.
    pub fn find(&self, linear: Linear) -> Option<&TernaryLinear> {
        self.linears.iter().find(|(of, _)| *of == linear).map(|(_, found)| found)
    }

    /// Returns the bytes of the dense tensors besides norms and biases.
    fn dense_bytes(&self) -> usize {
        let delta = self.delta.iter().flat_map(|delta| {
            let DeltaWeights { decay, decay_bias, convolution, dense_rates, .. } = delta;
            [decay, decay_bias, convolution].into_iter().chain(dense_rates.iter().flatten())
        });
        delta.chain(&self.router).map(|tensor| size_of_val(&tensor[..])).sum()
    }

    fn write<'a>(&'a self, sections: &mut Sections<'a>) {
        let matrices = self.all().flat_map(|(_, linear)| linear.matrix.buffers());
        matrices.for_each(|bytes| sections.push(&bytes[..]));
    }

    fn scales(&self) -> impl Iterator<Item = LinearScale> {
        self.all().map(|(_, linear)| LinearScale::new(linear.scale, linear.matrix.group()))
    }

    /// Returns all linears of the layer.
    pub fn all(&self) -> impl Iterator<Item = (Linear, &TernaryLinear)> {
        self.linears.iter().map(|(of, linear)| (*of, linear))
    }
}

/// What a recurrent layer has besides linears.
pub struct DeltaWeights {
    /// Rate of the decay, negative, and what is added to the input's part in it. // each: (value_heads,)
    pub decay: Vec<f32>,
    pub decay_bias: Vec<f32>,
    pub convolution: Vec<f32>, // (TAPS, channels)
    /// Norm of what a value head reads. // (head_dim,)
    pub norm: Vec<f32>,
    /// Matrices of decay and learning rate, if they are dense. // each: (value_heads, hidden)
    pub dense_rates: Option<[Vec<f32>; 2]>,
}

impl DeltaWeights {
    fn load(model: &Model, layer: usize) -> Result<Option<Self>, ModelError> {
        let Some(delta) = model.config().delta_layer(layer) else { return Ok(None) };
        let tensor = |tensor| model.layer_tensor(layer, tensor);
        let dense_rates = match delta.dense_rates {
            true => Some([tensor(LayerTensor::DecayRate)?, tensor(LayerTensor::LearningRate)?]),
            false => None,
        };
        Ok(Some(Self {
            decay: tensor(LayerTensor::Decay)?,
            decay_bias: tensor(LayerTensor::DecayBias)?,
            convolution: tensor(LayerTensor::Convolution)?,
            norm: model.norm(Norm::Delta(layer))?,
            dense_rates,
        }))
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
        let layer_count = model.config().layer_count;
        let mut layers = Vec::with_capacity(layer_count);
        for layer in 0..layer_count {
            layers.push(load_layer(&model, format, layer)?);
            model.release_pages();
        }
        let final_norm = final_norm(&model)?;
        let head = Head::load(&model, format, head)?;
        model.release_pages();
        Ok(Self { model, format, layers, final_norm, head })
    }

    /// Packs a model as [`Self::load`] does, into a file: one layer is in memory at a time, and the head last. Returns what the
    /// sections do not say.
    ///
    /// # Errors
    /// If a tensor cannot be decoded, or the file cannot be written.
    pub(super) fn pack(
        model: &Model,
        (format, head): (Format, HeadMode),
        to: &mut PackedWriter<'_>,
    ) -> Result<Scales, Damaged> {
        let mut linears = Vec::new();
        for layer in 0..model.config().layer_count {
            let layer = load_layer(model, format, layer)?;
            let mut sections = Sections::default();
            layer.write(&mut sections);
            to.append(&sections)?;
            linears.extend(layer.scales());
            model.release_pages();
        }
        let head = Head::load(model, format, head)?;
        let mut sections = Sections::default();
        head.write(&mut sections);
        to.append(&sections)?;
        model.release_pages();
        Ok(Scales { linears, head_group: head.ternary().and_then(PackedMatrix::group) })
    }

    /// Returns the packed matrices and the head.
    pub(super) fn sections(&self) -> Sections<'_> {
        let mut sections = Sections::default();
        self.layers.iter().for_each(|layer| layer.write(&mut sections));
        self.head.write(&mut sections);
        sections
    }

    /// Returns what [`Self::sections`] do not say.
    pub(super) fn scales(&self) -> Scales {
        let linears = self.layers.iter().flat_map(Layer::scales).collect();
        Scales { linears, head_group: self.head.ternary().and_then(PackedMatrix::group) }
    }

    /// Reads the [`Self::sections`] of this model; norms, and rows that are as in the model file, come from there.
    ///
    /// # Errors
    /// If the packed file is damaged, or a norm cannot be decoded.
    pub(super) fn read(
        model: Arc<Model>,
        format: Format,
        head: HeadMode,
        from: &mut PackedReader<'_>,
    ) -> Result<Self, Damaged> {
        let config = model.config().clone();
        let scales = from.scales().clone();
        let count = |layer| config.linears(layer).len();
        if scales.linears.len() != (0..config.layer_count).map(count).sum::<usize>() {
            return Err(Damaged::OtherShape);
        }
        let mut scales_left = scales.linears.iter();
        let layers = (0..config.layer_count).map(|layer| {
            let linear = |linear: &Linear| {
                let linear = *linear;
                let shape = config.linear_shape(linear);
                let scale = scales_left.next().ok_or(Damaged::OtherShape)?;
                let scale = scale.checked(shape.1, config.group_scales)?;
                let LinearScale { scale, group } = scale;
                let matrix = PackedMatrix::from_buffers(format, shape, group, |len| {
                    if linear.is_of_experts() { from.in_file(len) } else { from.aligned(len) }
                })?;
                Ok((linear, linear_with(&model, (layer, linear), matrix, scale)?))
            };
            let linears = config.linears(layer).iter().map(linear);
            let linears = linears.collect::<Result<_, Damaged>>()?;
            Ok(layer_with(&model, layer, linears)?)
        });
        let layers = layers.collect::<Result<_, Damaged>>()?;
        let final_norm = final_norm(&model)?;
        let head = Head::read(&model, (format, head), scales.head_group, from)?;
        model.release_pages();
        Ok(Self { model, format, layers, final_norm, head })
    }

    /// Returns the shape and conventions of the model.
    pub fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// Returns the memory in bytes: the packed matrices, the dense tensors of layers, and the head with its copies.
    pub fn size_bytes(&self) -> usize {
        let dense: usize = self.layers.iter().map(Layer::dense_bytes).sum();
        self.packed_bytes() + dense + self.head.size_bytes()
    }

    /// Returns the number of bytes that a decode step of one token reads: the packed matrices, of experts those that a token
    /// goes through, and the head or its screening copy.
    pub fn step_bytes(&self, isa: Isa) -> usize {
        let linears = self.layers.iter().flat_map(Layer::all);
        let experts = self.config().experts.as_ref();
        let read = linears.map(|(linear, l)| match experts {
            Some(experts) if linear.is_of_experts() => {
                l.matrix.size_bytes() / experts.count * experts.used
            }
            _ => l.matrix.size_bytes(),
        });
        let routers = self.layers.iter().filter_map(|layer| layer.router.as_ref());
        let routers = routers.map(|router| size_of_val(&router[..]));
        read.chain(routers).sum::<usize>() + self.head.step_bytes(isa)
    }

    fn packed_bytes(&self) -> usize {
        self.layers.iter().flat_map(Layer::all).map(|(_, l)| l.matrix.size_bytes()).sum()
    }
}

fn load_layer(model: &Model, format: Format, layer: usize) -> Result<Layer, ModelError> {
    let linear = |linear: &Linear| {
        let linear = *linear;
        let ternary = model.ternary(layer, linear)?;
        let matrix = PackedMatrix::pack_matrix(format, &ternary)
            .expect("the reader returns trits of the stated shape");
        Ok((linear, linear_with(model, (layer, linear), matrix, ternary.scale)?))
    };
    let linears = model.config().linears(layer).iter().map(linear);
    let mut linears = linears.collect::<Result<Vec<_>, ModelError>>()?;
    share_groups_of_experts(model, (format, layer), &mut linears)?;
    layer_with(model, layer, linears)
}

/// Gives the gates and the other inputs of experts groups of the same size, since they read the same activations: by their scales the
/// pairs of one may join, and not those of the other.
fn share_groups_of_experts(
    model: &Model,
    (format, layer): (Format, usize),
    linears: &mut [(Linear, TernaryLinear)],
) -> Result<(), ModelError> {
    let inputs =
        |(of, _): &(Linear, TernaryLinear)| matches!(of, Linear::ExpertGate | Linear::ExpertUp);
    let groups = |linears: &[(Linear, TernaryLinear)]| {
        let of_inputs = linears.iter().filter(|linear| inputs(linear));
        of_inputs.filter_map(|(_, linear)| linear.matrix.group()).min()
    };
    let least = groups(linears);
    for entry in linears.iter_mut().filter(|linear| inputs(linear)) {
        let (linear, packed) = entry;
        if packed.matrix.group() != least {
            let mut ternary = model.ternary(layer, *linear)?;
            ternary.divide_groups(least);
            packed.matrix = PackedMatrix::pack_matrix(format, &ternary)
                .expect("the reader returns trits of the stated shape");
        }
    }
    Ok(())
}

/// Returns a linear of this matrix, with the norm and the bias of the model.
fn linear_with(
    model: &Model,
    (layer, linear): (usize, Linear),
    matrix: PackedMatrix,
    scale: Scale,
) -> Result<TernaryLinear, ModelError> {
    let has_norm = model.config().linear_norm_eps.is_some();
    let norm = has_norm.then(|| model.norm(Norm::Linear(layer, linear))).transpose()?;
    Ok(TernaryLinear { matrix, scale, norm, bias: model.bias(layer, linear)? })
}

/// Returns a layer of these linears, with the norms of the model.
fn layer_with(
    model: &Model,
    layer: usize,
    linears: Vec<(Linear, TernaryLinear)>,
) -> Result<Layer, ModelError> {
    let config = model.config();
    let head_norms = match config.qk_norm && config.delta_layer(layer).is_none() {
        true => Some([model.norm(Norm::Query(layer))?, model.norm(Norm::Key(layer))?]),
        false => None,
    };
    let has_router = config.experts.is_some();
    let router = has_router.then(|| model.layer_tensor(layer, LayerTensor::Router)).transpose()?;
    let sub_norm = |norm| config.sub_norms.then(|| model.norm(norm)).transpose();
    Ok(Layer {
        linears,
        delta: DeltaWeights::load(model, layer)?,
        router,
        attention_norm: model.norm(Norm::Attention(layer))?,
        head_norms,
        attention_sub_norm: sub_norm(Norm::AttentionSub(layer))?,
        feed_forward_norm: model.norm(Norm::FeedForward(layer))?,
        feed_forward_sub_norm: sub_norm(Norm::FeedForwardSub(layer))?,
    })
}
