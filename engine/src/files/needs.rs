//! What a build would need for a key or a tensor that no code reads, guessed from the words of its name. Both containers use
//! it: for messages, and to tell keys that may change a result from those that describe a file.
//!
//! A name is compared as whole words: `blk.0.attn_q_norm_in.weight` has the words `norm_in`, but not `form`.

/// What drafts tokens, and changes no answer.
pub(crate) const DRAFTS: &str = "layers that draft several tokens";
/// What reads images and sound.
pub(crate) const OTHER_INPUTS: &str = "inputs other than text";

/// Words of names, and what they stand for. The first row with a word of the name counts.
const NEEDS: &[(&[&str], &str)] = &[
    (
        &["hadamard", "walsh", "rotation", "rotations", "rotated", "rotate", "sign", "signs"],
        "weights in a rotated (Hadamard) basis",
    ),
    (&["norm_in", "proj_norm"], "a norm in front of each linear"),
    (
        &["expert", "experts", "exps", "shexp", "moe", "router", "routed", "gate_inp", "topk"],
        "a mixture of experts",
    ),
    (&["nextn", "mtp", "eagle"], DRAFTS),
    (
        &["ssm", "mamba", "conv", "conv1d", "linear", "delta", "recurrent", "interval", "hybrid"],
        "recurrent layers (Gated DeltaNet, state spaces)",
    ),
    (&["sliding", "window", "swa", "chunked"], "attention within a window"),
    (&["softcap", "softcapping", "clamp", "clip"], "bounds of scores, gates or logits"),
    (&["sink", "sinks"], "attention sinks"),
    (&["output_gate", "attn_gate", "gating"], "gated attention"),
    (&["mrope", "dimension_sections"], "positions of several dimensions"),
    (&["rope", "rotary", "yarn", "alibi", "nope"], "other positions"),
    (&["pooling"], "another embedding of a whole text as the output"),
    (&["lora", "adapter"], "adapters"),
    (&["vision", "visual", "mmproj", "audio", "multimodal"], OTHER_INPUTS),
    (&["causal", "attn", "attention", "qkv", "qk", "heads"], "another attention"),
    (&["bias", "biases"], "biases that no linear here has"),
    (&["norm", "norms", "rmsnorm", "layernorm"], "other norms"),
    (
        &["scale", "scales", "scaling", "multiplier", "multipliers", "residual", "logit", "logits"],
        "factors of activations or logits",
    ),
    (&["gate", "gated", "swiglu", "glu"], "another gate"),
    (
        &["transform", "permutation", "permuted", "shape", "quantization", "compression", "sparse"],
        "another storage of the weights",
    ),
];

/// Returns what a key or tensor would need, if words of its name say so.
pub(crate) fn by_words(name: &str) -> Option<&'static str> {
    let words = joined(name);
    let found = NEEDS.iter().find(|(words_of_need, _)| has_word(&words, words_of_need));
    found.map(|(_, need)| *need)
}

/// Returns what a key or tensor would need.
pub(crate) fn of(name: &str) -> &'static str {
    by_words(name).unwrap_or("code that knows what it means")
}

/// Returns whether a name has one of the words, each of which may be several joined by `_`.
pub(crate) fn has_any(name: &str, words: &[&str]) -> bool {
    has_word(&joined(name), words)
}

/// Returns the words of a name in lower case, with `_` before and after each.
fn joined(name: &str) -> String {
    let mut words = String::from("_");
    for word in name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()) {
        words.push_str(&word.to_ascii_lowercase());
        words.push('_');
    }
    words
}

fn has_word(joined: &str, words: &[&str]) -> bool {
    words.iter().any(|word| joined.contains(&format!("_{word}_")))
}

/// Returns what models of an architecture have that this build lacks, by the architecture's name in GGUF files or
/// configurations.
pub(crate) fn of_architecture(name: &str) -> &'static str {
    const DELTA_NET: &str = "its Gated DeltaNet layers are not in this build";
    const EXPERTS: &str = "its mixture of experts is not in this build";
    match name {
        "qwen3next" | "qwen3_next" => DELTA_NET,
        "qwen35moe" | "qwen3_5_moe" | "qwen3_5_moe_text" => {
            "its Gated DeltaNet layers and mixture of experts are not in this build"
        }
        "qwen2moe" | "qwen2_moe" | "qwen3moe" | "qwen3_moe" | "mixtral" => EXPERTS,
        "gemma3" | "gemma3_text" => "its windows of attention and norms are not in this build",
        "clip" => "it holds a projector for images, not a language model",
        _ => "this build knows bitnet, llama, minicpm, qwen3, qwen35 and maple",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_follow_from_whole_words() {
        for (name, need) in [
            ("prism.hadamard.block_size", "Hadamard"),
            ("blk.0.attn_q_norm_in.weight", "in front of each linear"),
            ("model.layers.1.mlp.experts.7.up_proj.weight", "experts"),
            ("qwen35.ssm.conv_kernel", "DeltaNet"),
            ("blk.3.nextn.eh_proj.weight", "draft"),
            ("attn_output_gate", "gated attention"),
            ("model.visual.blocks.0.weight", "other than text"),
            ("blk.0.ffn_up.scale", "factors"),
        ] {
            assert!(of(name).contains(need), "{name}: {}", of(name));
        }
        for name in ["something_new", "normal", "formation", "upscale.gateway", ""] {
            assert_eq!(by_words(name), None, "{name}");
        }
        assert!(has_any("A.flash-attn", &["flash_attn"]) && !has_any("flashy", &["flash"]));
    }
}
