//! Names of tensors in GGUF files, by role.

use crate::config::{LayerTensor, Linear, Norm};

/// The embedding.
pub(crate) const EMBEDDING: &str = "token_embd.weight";
/// The head of models that do not share it with the embedding.
pub(crate) const HEAD: &str = "output.weight";
/// Divisors of the RoPE frequencies, by which converters write the scaling of Llama 3.1.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// The same for MiniCPM4: within the original context, and beyond it, which is refused.
pub(crate) const LONGROPE_DIVISORS: [&str; 2] =
    ["rope_factors_short.weight", "rope_factors_long.weight"];
/// Key of the list of all end tokens, in files from [`crate::files::convert()`].
pub(crate) const EOS_TOKENS_KEY: &str = "tritmill.eos_token_ids";
/// Key of the merges of SentencePiece's BPE, in files from [`crate::files::convert()`] where their order does not follow from the
/// scores of the pieces.
pub(crate) const MERGES_KEY: &str = "tritmill.merges";

/// Returns the number of the block that a tensor is of.
pub(crate) fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// Returns the name of a linear's tensor in the file.
pub(crate) fn linear_name(layer: usize, linear: Linear) -> String {
    format!("blk.{layer}.{}.weight", linear_role(linear))
}

/// Returns the name of a linear's bias in the file.
pub(crate) fn bias_name(layer: usize, linear: Linear) -> String {
    format!("blk.{layer}.{}.bias", linear_role(linear))
}

fn linear_role(linear: Linear) -> &'static str {
    match linear {
        Linear::Q => "attn_q",
        Linear::K => "attn_k",
        Linear::V => "attn_v",
        Linear::O => "attn_output",
        Linear::Gate => "ffn_gate",
        Linear::Up => "ffn_up",
        Linear::Down => "ffn_down",
        Linear::DeltaInput => "attn_qkv",
        Linear::DeltaGate => "attn_gate",
        Linear::DecayRate => "ssm_alpha",
        Linear::LearningRate => "ssm_beta",
        Linear::DeltaOutput => "ssm_out",
        Linear::ExpertGate => "ffn_gate_exps",
        Linear::ExpertUp => "ffn_up_exps",
        Linear::ExpertDown => "ffn_down_exps",
    }
}

/// Returns the name of a norm's tensor in the file.
pub(crate) fn norm_name(norm: Norm) -> String {
    match norm {
        Norm::Attention(layer) => format!("blk.{layer}.attn_norm.weight"),
        Norm::AttentionSub(layer) => format!("blk.{layer}.attn_sub_norm.weight"),
        Norm::Query(layer) => format!("blk.{layer}.attn_q_norm.weight"),
        Norm::Key(layer) => format!("blk.{layer}.attn_k_norm.weight"),
        Norm::FeedForward(layer) => format!("blk.{layer}.ffn_norm.weight"),
        Norm::FeedForwardSub(layer) => format!("blk.{layer}.ffn_sub_norm.weight"),
        Norm::Delta(layer) => format!("blk.{layer}.ssm_norm.weight"),
        Norm::Final => "output_norm.weight".to_owned(),
        Norm::Linear(layer, linear) => {
            format!("blk.{layer}.{}_norm_in.weight", linear_role(linear))
        }
    }
}

/// Returns the name of the norm before the feed-forward block of a hybrid model.
pub(crate) fn post_attention_norm_name(layer: usize) -> String {
    format!("blk.{layer}.post_attention_norm.weight")
}

/// Returns the name of a dense tensor of a layer.
pub(crate) fn layer_tensor_name(layer: usize, tensor: LayerTensor) -> String {
    match tensor {
        LayerTensor::Decay => format!("blk.{layer}.ssm_a"),
        LayerTensor::DecayBias => format!("blk.{layer}.ssm_dt.bias"),
        LayerTensor::Convolution => format!("blk.{layer}.ssm_conv1d.weight"),
        LayerTensor::DecayRate => linear_name(layer, Linear::DecayRate),
        LayerTensor::LearningRate => linear_name(layer, Linear::LearningRate),
        LayerTensor::Router => format!("blk.{layer}.ffn_gate_inp.weight"),
    }
}
