//! The tensors that a configuration asks for, by role.

use crate::config::{Linear, ModelConfig, Norm};

/// Returns the norms of a configuration, in the order of the forward pass.
pub(crate) fn norms(config: &ModelConfig) -> Vec<Norm> {
    let mut norms = Vec::new();
    for layer in 0..config.layer_count {
        norms.extend([Norm::Attention(layer), Norm::FeedForward(layer)]);
        if config.qk_norm {
            norms.extend([Norm::Query(layer), Norm::Key(layer)]);
        }
        if config.sub_norms {
            norms.extend([Norm::AttentionSub(layer), Norm::FeedForwardSub(layer)]);
        }
        if config.linear_norm_eps.is_some() {
            norms.extend(Linear::ALL.map(|linear| Norm::Linear(layer, linear)));
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
        Norm::AttentionSub(_) => config.head_count * config.head_dim,
        Norm::FeedForwardSub(_) => config.intermediate_size,
        Norm::Linear(_, linear) => config.linear_shape(linear).1,
    }
}

/// Returns the layer and linear of every bias, in the order of the forward pass.
pub(crate) fn biases(config: &ModelConfig) -> impl Iterator<Item = (usize, Linear)> + '_ {
    let of_layer = |layer| config.linear_biases.iter().map(move |&linear| (layer, linear));
    (0..config.layer_count).flat_map(of_layer)
}
