//! Names of tensors in Hugging Face folders, by role.

use crate::config::{LayerTensor, Linear, Norm};

/// Returns the module path of a linear inside its layer.
pub(crate) fn linear_module(linear: Linear) -> &'static str {
    match linear {
        Linear::Q => "self_attn.q_proj",
        Linear::K => "self_attn.k_proj",
        Linear::V => "self_attn.v_proj",
        Linear::O => "self_attn.o_proj",
        Linear::Gate => "mlp.gate_proj",
        Linear::Up => "mlp.up_proj",
        Linear::Down => "mlp.down_proj",
        Linear::DeltaInput => "linear_attn.in_proj_qkv",
        Linear::DeltaGate => "linear_attn.in_proj_z",
        Linear::DecayRate => "linear_attn.in_proj_a",
        Linear::LearningRate => "linear_attn.in_proj_b",
        Linear::DeltaOutput => "linear_attn.out_proj",
        Linear::ExpertGate => "mlp.experts.gate_proj",
        Linear::ExpertUp => "mlp.experts.up_proj",
        Linear::ExpertDown => "mlp.experts.down_proj",
    }
}

/// Returns the name of a linear's tensor in the folder.
pub(crate) fn linear_name(layer: usize, linear: Linear) -> String {
    format!("model.layers.{layer}.{}.weight", linear_module(linear))
}

/// Returns the name of the tensor of an expert's linear in the folder.
pub(crate) fn expert_name(layer: usize, expert: usize, linear: Linear) -> String {
    let module = linear_module(linear).replace(".experts.", &format!(".experts.{expert}."));
    format!("model.layers.{layer}.{module}.weight")
}

/// Returns the name of a norm's tensor in the folder.
pub(crate) fn norm_name(norm: Norm) -> String {
    match norm {
        Norm::Attention(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        Norm::Query(layer) => format!("model.layers.{layer}.self_attn.q_norm.weight"),
        Norm::Key(layer) => format!("model.layers.{layer}.self_attn.k_norm.weight"),
        Norm::AttentionSub(layer) => format!("model.layers.{layer}.self_attn.attn_sub_norm.weight"),
        Norm::FeedForward(layer) => {
            format!("model.layers.{layer}.post_attention_layernorm.weight")
        }
        Norm::FeedForwardSub(layer) => format!("model.layers.{layer}.mlp.ffn_sub_norm.weight"),
        Norm::Linear(layer, linear) => {
            format!("model.layers.{layer}.{}.rms_norm.weight", linear_module(linear))
        }
        Norm::Delta(layer) => format!("model.layers.{layer}.linear_attn.norm.weight"),
        Norm::Final => "model.norm.weight".to_owned(),
    }
}

/// Returns the name of a dense tensor of a layer.
pub(crate) fn layer_tensor_name(layer: usize, tensor: LayerTensor) -> String {
    let of = |name: &str| format!("model.layers.{layer}.linear_attn.{name}");
    match tensor {
        LayerTensor::Decay => of("A_log"),
        LayerTensor::DecayBias => of("dt_bias"),
        LayerTensor::Convolution => of("conv1d.weight"),
        LayerTensor::DecayRate => linear_name(layer, Linear::DecayRate),
        LayerTensor::LearningRate => linear_name(layer, Linear::LearningRate),
        LayerTensor::Router => format!("model.layers.{layer}.mlp.gate.weight"),
    }
}
