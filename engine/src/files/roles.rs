//! The tensors that a configuration asks for, by role, and the order of their rows.

use crate::config::{DeltaNet, LayerTensor, Linear, ModelConfig, Norm};

/// Returns the norms of a configuration, in the order of the forward pass.
pub(crate) fn norms(config: &ModelConfig) -> Vec<Norm> {
    let mut norms = Vec::new();
    for layer in 0..config.layer_count {
        norms.extend([Norm::Attention(layer), Norm::FeedForward(layer)]);
        if config.delta_layer(layer).is_some() {
            norms.push(Norm::Delta(layer));
        } else if config.qk_norm {
            norms.extend([Norm::Query(layer), Norm::Key(layer)]);
        }
        if config.sub_norms {
            norms.extend([Norm::AttentionSub(layer), Norm::FeedForwardSub(layer)]);
        }
        if config.linear_norm_eps.is_some() {
            norms.extend(config.linears(layer).iter().map(|linear| Norm::Linear(layer, *linear)));
        }
    }
    norms.push(Norm::Final);
    norms
}

/// Returns the length of a norm's weights.
pub(crate) fn norm_len(config: &ModelConfig, norm: Norm) -> usize {
    match norm {
        Norm::Attention(_) | Norm::FeedForward(_) | Norm::Final => config.hidden_size,
        Norm::Query(_) | Norm::Key(_) => config.head_dim,
        Norm::Delta(_) => config.delta_net.map_or(0, |delta| delta.head_dim),
        Norm::AttentionSub(_) => config.head_count * config.head_dim,
        Norm::FeedForwardSub(_) => config.intermediate_size,
        Norm::Linear(_, linear) => config.linear_shape(linear).1,
    }
}

/// Returns the layer and linear of every ternary tensor, in the order of the forward pass.
pub(crate) fn linears(config: &ModelConfig) -> impl Iterator<Item = (usize, Linear)> + '_ {
    let of_layer = |layer| config.linears(layer).iter().map(move |linear| (layer, *linear));
    (0..config.layer_count).flat_map(of_layer)
}

/// Returns the layer and role of every other dense tensor of layers, in the order of the forward pass.
pub(crate) fn layer_tensors(
    config: &ModelConfig,
) -> impl Iterator<Item = (usize, LayerTensor)> + '_ {
    (0..config.layer_count).flat_map(|layer| {
        let delta = config.delta_layer(layer);
        let count = delta.map_or(0, |delta| if delta.dense_rates { 5 } else { 3 });
        let router = config.experts.as_ref().map(|_| LayerTensor::Router);
        let of_delta = LayerTensor::OF_DELTA_NET.into_iter().take(count);
        of_delta.chain(router).map(move |tensor| (layer, tensor))
    })
}

/// Returns the rows and columns of a dense tensor of a layer in files; one row for a vector.
pub(crate) fn layer_tensor_shape(config: &ModelConfig, tensor: LayerTensor) -> (usize, usize) {
    if let (LayerTensor::Router, Some(experts)) = (tensor, &config.experts) {
        return (experts.count, config.hidden_size);
    }
    let Some(delta) = &config.delta_net else { return (0, 0) };
    match tensor {
        LayerTensor::Decay | LayerTensor::DecayBias => (1, delta.value_heads),
        LayerTensor::Convolution => (delta.channels(), DeltaNet::TAPS),
        LayerTensor::DecayRate | LayerTensor::LearningRate => {
            (delta.value_heads, config.hidden_size)
        }
        LayerTensor::Router => (0, 0),
    }
}

/// Returns the layer and linear of every bias, in the order of the forward pass.
pub(crate) fn biases(config: &ModelConfig) -> impl Iterator<Item = (usize, Linear)> + '_ {
    let of_layer = |layer| config.linear_biases.iter().map(move |&linear| (layer, linear));
    (0..config.layer_count).flat_map(of_layer)
}

/// Returns the row of the file for each row in half-split order. llama.cpp's converter writes Q and K for adjacent-pair
/// RoPE: within a head, row `2i + j` of the file is row `j·head_dim/2 + i` of the half-split order.
pub(crate) fn half_split(rows: usize, heads: usize) -> impl Iterator<Item = usize> {
    let head_dim = rows / heads;
    (0..rows).map(move |row| {
        let (head, within) = (row / head_dim, row % head_dim);
        let (j, i) = (within / (head_dim / 2), within % (head_dim / 2));
        head * head_dim + 2 * i + j
    })
}
