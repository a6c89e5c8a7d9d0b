//! GGUF files that must be refused as a whole, and the pitfalls of the format's variants.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use support::{RawGguf, golden};
use tritmill_engine::{
    config::{Linear, RopeScaling},
    files::{Model, ModelError, Problem},
    formats::Scale,
};

fn i2_s() -> RawGguf {
    RawGguf::read(&golden("gguf/bitnet-tiny-i2_s.gguf"))
}

fn open(file: &RawGguf) -> Result<Model, ModelError> {
    Model::open_gguf_bytes("edited", file.bytes(32))
}

/// Checks that an edited file is refused with an error that contains `names`.
fn refused(names: &[&str], edit: impl FnOnce(&mut RawGguf)) {
    let mut file = i2_s();
    edit(&mut file);
    let message = open(&file).expect_err("the file must be refused").to_string();
    assert!(names.iter().all(|name| message.contains(name)), "{message}");
}

#[test]
fn file_rewritten_without_edits_is_the_same_model() {
    let original = Model::open(&golden("gguf/bitnet-tiny-i2_s.gguf")).unwrap();
    let edited = open(&i2_s()).unwrap();
    assert_eq!(original.fingerprint().unwrap(), edited.fingerprint().unwrap());
}

#[test]
fn type_id_39_is_tl2_in_bitnet_files_and_mxfp4_in_others() {
    refused(&["blk.2.attn_v.weight", "TL2"], |file| {
        file.set_u32("general.file_type", 39);
        file.tensor("blk.2.attn_v.weight").type_id = 39;
    });

    let mut file = RawGguf::read(&golden("../data/llama-tq2_0-q8_0.gguf"));
    file.tensor("blk.0.attn_v.weight").type_id = 39;
    let mxfp4 = open(&file).unwrap_err().to_string();
    assert!(mxfp4.contains("blk.0.attn_v.weight") && mxfp4.contains("MXFP4"), "{mxfp4}");
}

#[test]
fn type_id_36_is_i2_s_and_its_neighbours_are_refused_by_name() {
    assert!(open(&i2_s()).is_ok());
    for (type_id, name) in [(37, "I8_S"), (38, "TL1"), (42, "Q2_0"), (2, "Q4_0"), (99, "unknown")] {
        refused(&["blk.0.attn_q.weight", name], |file| {
            file.tensor("blk.0.attn_q.weight").type_id = type_id
        });
    }
}

#[test]
fn arm_layout_has_no_marker_and_is_read_as_x86_layout() {
    // The same codes in 64-weight blocks of 16 bytes, as ARM builds write them under the same id.
    let x86 = open(&i2_s()).unwrap().ternary(0, Linear::Q).unwrap().trits;
    let mut file = i2_s();
    let tensor = file.tensor("blk.0.attn_q.weight");
    tensor.bytes[..x86.len() / 4].fill(0);
    for (n, &trit) in x86.iter().enumerate() {
        let (block, j) = (n / 64, n % 64);
        tensor.bytes[block * 16 + j % 16] |= ((trit + 1) as u8) << (6 - 2 * (j / 16));
    }
    let arm = open(&file).unwrap().ternary(0, Linear::Q).unwrap().trits;
    assert_ne!(arm, x86);
    let sum = |trits: &[i8]| trits.iter().map(|&trit| i32::from(trit)).sum::<i32>();
    assert_eq!(sum(&arm), sum(&x86), "the same trits in another order, which cannot be detected");
}

#[test]
fn bytes_after_the_i2_s_scale_are_never_read() {
    let mut file = i2_s();
    let fingerprint = open(&file).unwrap().fingerprint().unwrap();
    for tensor in file.tensors.iter_mut().filter(|tensor| tensor.type_id == 36) {
        let codes = (tensor.dims[0] * tensor.dims[1] / 4) as usize;
        tensor.bytes[codes + 4..].fill(0xa5);
    }
    assert_eq!(open(&file).unwrap().fingerprint().unwrap(), fingerprint);
}

#[test]
fn missing_pre_tokenizer_key_means_that_of_llama_3() {
    let mut file = i2_s();
    let named = open(&file).unwrap();
    file.remove("tokenizer.ggml.pre");
    let unnamed = open(&file).unwrap();
    let text = "It's 1234567 lighthouses,\n\n  naïve!";
    let ids = |model: &Model| model.tokenizer().encode(text, true).unwrap();
    assert_eq!(ids(&named), ids(&unnamed));
    assert_eq!(named.fingerprint().unwrap(), unnamed.fingerprint().unwrap());
}

#[test]
fn falcon_names_mean_the_pre_tokenizer_of_llama_3() {
    let text = "It's 1234567 lighthouses,\n\n  naïve!  \t<|x|>";
    let ids = |model: &Model| model.tokenizer().encode(text, true).unwrap();
    let mut file = i2_s();
    file.set_text("tokenizer.ggml.pre", "gpt-2");
    let gpt2 = open(&file).unwrap().fingerprint().unwrap();
    file.set_text("tokenizer.ggml.pre", "llama-bpe");
    let llama = open(&file).unwrap();
    for name in ["falcon3", "falcon_e", "falcon-e", "falcon-h1"] {
        file.set_text("tokenizer.ggml.pre", name);
        let falcon = open(&file).unwrap();
        assert_eq!(ids(&falcon), ids(&llama), "{name}");
        assert_eq!(falcon.fingerprint().unwrap(), llama.fingerprint().unwrap(), "{name}");
        assert_ne!(falcon.fingerprint().unwrap(), gpt2, "{name}");
    }
    file.set_text("tokenizer.ggml.pre", "falcon");
    let message = open(&file).unwrap_err().to_string();
    assert!(message.contains("tokenizer.ggml.pre") && message.contains("falcon"), "{message}");
}

#[test]
fn scales_of_gguf_files_are_multiplied() {
    let model = open(&i2_s()).unwrap();
    let folder = Model::open(&golden("bitnet-tiny")).unwrap();
    let scale = model.ternary(3, Linear::Up).unwrap().scale;
    assert!(matches!(scale, Scale::Multiply(value) if value < 1.0));
    assert_eq!(scale, folder.ternary(3, Linear::Up).unwrap().scale);
}

#[test]
fn keys_that_change_the_computation_are_refused_by_name() {
    for key in [
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "expert_count",
        "expert_used_count",
        "attention.sliding_window",
        "attention.causal",
        "attention.scale",
        "logit_scale",
        "residual_scale",
        "never_heard_of",
    ] {
        let key = format!("bitnet-b1.58.{key}");
        refused(&[&key], |file| file.set_u32(&key, 2));
    }
    refused(&["rope.scaling.type"], |file| file.set_text("bitnet-b1.58.rope.scaling.type", "yarn"));
    refused(&["rope.dimension_count"], |file| {
        file.set_u32("bitnet-b1.58.rope.dimension_count", 16)
    });
    refused(&["attention.value_length"], |file| {
        file.set_u32("bitnet-b1.58.attention.value_length", 16)
    });
    // The keys are those of another architecture.
    refused(&["bitnet-b1.58."], |file| file.set_text("general.architecture", "qwen3"));
    refused(&["general.type"], |file| file.set_text("general.type", "adapter"));
    refused(&["split.count"], |file| file.set_u32("split.count", 3));
}

#[test]
fn linear_rope_scaling_by_one_is_accepted() {
    let mut file = i2_s();
    file.set_text("bitnet-b1.58.rope.scaling.type", "linear");
    file.set_f32("bitnet-b1.58.rope.scaling.factor", 1.0);
    assert!(open(&file).is_ok());
    let unscaled = open(&file).unwrap();
    assert_eq!(unscaled.config().rope_scaling, RopeScaling::None);
    file.set_f32("bitnet-b1.58.rope.scaling.factor", 4.0);
    let linear = open(&file).unwrap();
    assert_eq!(linear.config().rope_scaling, RopeScaling::Linear { factor: 4.0 });
    assert_ne!(linear.fingerprint().unwrap(), unscaled.fingerprint().unwrap());
    file.remove("bitnet-b1.58.rope.scaling.type");
    assert_eq!(open(&file).unwrap().fingerprint().unwrap(), linear.fingerprint().unwrap());
    file.set_text("bitnet-b1.58.rope.scaling.type", "none");
    assert!(open(&file).unwrap_err().to_string().contains("rope.scaling.factor"));
}

/// Adds a `rope_freqs.weight` tensor of f32 values.
fn add_rope_divisors(file: &mut RawGguf, divisors: &[f32]) {
    let mut tensor = file.tensor("output_norm.weight").clone();
    tensor.name = "rope_freqs.weight".to_owned();
    tensor.dims = vec![divisors.len() as u64];
    tensor.bytes = divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect();
    file.tensors.push(tensor);
}

#[test]
fn divisors_of_rope_frequencies_are_read_and_checked() {
    let file = || RawGguf::read(&golden("../data/llama-tq2_0-q8_0.gguf"));
    let plain = open(&file()).unwrap();
    let half = plain.config().head_dim / 2;
    let opened = |divisors: &[f32]| {
        let mut file = file();
        add_rope_divisors(&mut file, divisors);
        open(&file)
    };
    let ones = opened(&vec![1.0; half]).unwrap();
    assert_eq!(ones.fingerprint().unwrap(), plain.fingerprint().unwrap());
    let divisors: Vec<f32> = (0..half).map(|j| 1.0 + j as f32).collect();
    let scaled = opened(&divisors).unwrap();
    assert_ne!(scaled.fingerprint().unwrap(), plain.fingerprint().unwrap());
    assert_eq!(
        scaled.config().rope_scaling,
        RopeScaling::Divisors { divisors: divisors.clone(), long_factors: None }
    );
    for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut divisors = divisors.clone();
        divisors[3] = wrong;
        assert!(opened(&divisors).unwrap_err().to_string().contains("rope_freqs.weight"));
    }
    let message = opened(&divisors[1..]).unwrap_err().to_string();
    assert!(message.contains("rope_freqs.weight"), "{message}");
    let mut twice = file();
    add_rope_divisors(&mut twice, &divisors);
    twice.set_f32("llama.rope.scaling.factor", 2.0);
    let message = open(&twice).unwrap_err().to_string();
    assert!(message.contains("rope_freqs.weight"), "{message}");
}

#[test]
fn unknown_tensors_are_refused_by_name() {
    for name in [
        "blk.0.ffn_gate.bias",
        "blk.0.ffn_up.scale",
        "rope_factors_long.weight",
        "blk.9.attn_q.weight",
    ] {
        refused(&[name], |file| {
            let mut extra = file.tensor("blk.0.attn_norm.weight").clone();
            extra.name = name.to_owned();
            file.tensors.push(extra);
        });
    }
}

#[test]
fn output_matrix_of_a_tied_architecture_is_ignored() {
    let mut file = i2_s();
    let mut head = file.tensor("token_embd.weight").clone();
    head.name = "output.weight".to_owned();
    head.bytes.fill(0);
    file.tensors.push(head);
    let model = open(&file).unwrap();
    assert!(model.config().tied_head);
    assert_eq!(model.head().bytes, model.embedding().bytes);
}

#[test]
fn other_vocabularies_are_refused_by_name() {
    for model in ["bert", "rwkv"] {
        refused(&["tokenizer.ggml.model"], |file| file.set_text("tokenizer.ggml.model", model));
    }
    refused(&["tokenizer.ggml.scores"], |file| file.set_text("tokenizer.ggml.model", "llama"));
    refused(&["tokenizer.ggml.pre", "deepseek-llm"], |file| {
        file.set_text("tokenizer.ggml.pre", "deepseek-llm")
    });
}

#[test]
fn versions_2_and_3_are_read_and_others_refused() {
    let mut file = i2_s();
    file.version = 2;
    assert!(open(&file).is_ok());
    for version in [0, 1, 4] {
        file.version = version;
        let error = open(&file).unwrap_err().to_string();
        assert!(error.contains(&format!("version {version} is not supported")), "{error}");
    }
    file.version = 3u32.swap_bytes();
    assert!(open(&file).unwrap_err().to_string().contains("big-endian"));
}

#[test]
fn alignment_key_is_used() {
    let mut file = i2_s();
    let fingerprint = open(&file).unwrap().fingerprint().unwrap();
    file.set_u32("general.alignment", 256);
    let model = Model::open_gguf_bytes("aligned", file.bytes(256)).unwrap();
    assert_eq!(model.fingerprint().unwrap(), fingerprint);
    let error = open(&file).unwrap_err();
    assert!(matches!(error, ModelError::BadTensor { problem: Problem::Misaligned { .. }, .. }));
    file.set_u32("general.alignment", 0);
    let error = open(&file).unwrap_err().to_string();
    assert_eq!(error, "key general.alignment is 0, expected a power of two up to 2^20");
}

#[test]
fn code_three_is_an_error_with_tensor_and_offset() {
    let mut file = i2_s();
    file.tensor("blk.1.ffn_gate.weight").bytes[77] = 0b1100_0000;
    let model = open(&file).unwrap();
    let error = model.ternary(1, Linear::Gate).unwrap_err();
    let ModelError::BadTensor { tensor, problem, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (tensor.as_str(), problem),
        ("blk.1.ffn_gate.weight", &Problem::BadCode { code: 3 })
    );
    assert!(model.fingerprint().is_err());
    assert!(model.ternary(1, Linear::Up).is_ok());
}

#[test]
fn bytes_without_ternary_digits_are_refused_with_tensor_and_offset() {
    let name = "blk.0.ffn_up.weight";
    let mut file = RawGguf::read(&golden("../data/bitnet-tq1_0-bf16.gguf"));
    // The last byte of the second block's codes: four digits, of which the fifth would be 0.
    file.tensor(name).bytes[54 + 51] = 255;
    let error = open(&file).unwrap().ternary(0, Linear::Up).unwrap_err();
    let ModelError::BadTensor { tensor, problem, .. } = &error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), problem), (name, &Problem::BadDigits { byte: 255 }));
}

#[test]
fn scales_that_are_not_positive_numbers_are_refused() {
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(&["blk.0.attn_q.weight"], |file| {
            let tensor = file.tensor("blk.0.attn_q.weight");
            tensor.bytes[256 * 256 / 4..][..4].copy_from_slice(&scale.to_le_bytes());
        });
    }
}

#[test]
fn blocks_with_different_scales_are_refused_except_for_blocks_of_zeros() {
    let name = "blk.0.ffn_up.weight";
    let mut file = RawGguf::read(&golden("../data/llama-tq2_0-q8_0.gguf"));
    // The first row is zeros, with a scale of 0.
    assert_eq!(file.tensor(name).bytes[64..66], [0, 0]);
    let scale: [u8; 2] = file.tensor(name).bytes[130..132].try_into().unwrap();
    assert_ne!(scale, [0, 0]);
    assert!(open(&file).unwrap().ternary(0, Linear::Up).is_ok());
    file.tensor(name).bytes[130] ^= 1;
    let error = open(&file).unwrap().ternary(0, Linear::Up).unwrap_err();
    let ModelError::BadTensor { tensor, problem, .. } = &error else { panic!("{error}") };
    assert!(tensor == name && matches!(problem, Problem::MixedScales(..)), "{error}");
}

#[test]
fn counts_larger_than_the_file_are_refused_before_allocation() {
    let bytes = i2_s().bytes(32);
    for at in [8, 16] {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        let error = Model::open_gguf_bytes("counts", bytes).unwrap_err();
        let ModelError::Malformed { offset, problem, .. } = &error else { panic!("{error}") };
        assert!(matches!(problem, Problem::TooLarge { .. }) && *offset == at as u64, "{error}");
    }
    // The same for the length of an array inside the metadata.
    let mut file = i2_s();
    let tokens = file.metadata.iter_mut().find(|(key, _)| key == "tokenizer.ggml.tokens").unwrap();
    tokens.1[8..16].copy_from_slice(&(1u64 << 60).to_le_bytes());
    assert!(matches!(open(&file).unwrap_err(), ModelError::Malformed { .. }));
}

#[test]
fn dimensions_of_one_change_no_shape() {
    let mut file = i2_s();
    let plain = open(&file).unwrap().fingerprint().unwrap();
    file.tensor("blk.0.attn_norm.weight").dims = vec![256, 1, 1, 1];
    file.tensor("blk.1.attn_norm.weight").dims = vec![1, 256];
    file.tensor("blk.2.attn_q.weight").dims = vec![256, 256, 1];
    assert_eq!(open(&file).unwrap().fingerprint().unwrap(), plain);
    file.tensor("blk.1.attn_norm.weight").dims = vec![2, 128];
    assert!(open(&file).unwrap_err().to_string().contains("has shape [128, 2], expected [256]"));
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    refused(&["blk.3.ffn_sub_norm.weight"], |file| {
        file.tensors.retain(|t| t.name != "blk.3.ffn_sub_norm.weight")
    });
    refused(&["blk.0.attn_k.weight", "[64, 256]"], |file| {
        file.tensor("blk.0.attn_k.weight").dims = vec![256, 65]
    });
    refused(&["blk.4."], |file| file.set_u32("bitnet-b1.58.block_count", 4096));
}
