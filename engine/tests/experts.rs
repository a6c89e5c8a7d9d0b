//! A mixture of experts with windows of attention (Maple): logits and greedy answers are those of the reference, whatever the steps.
//! golden/README.md explains the permitted differences.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use support::{
    RawGguf, cases, config_refusal,
    forward::{Tolerance, check_bits, check_greedy, check_logits, open_shared, prompts_of},
    golden, hf_module, numbers, table, write_weights,
};
use tritmill_engine::{
    backend::cpu::KvType,
    config::{LayerTensor, Linear, Norm},
    files::{Model, Target, convert},
    load::{self, DeviceChoice, EngineOptions, LoadError},
};

const FILES: [&str; 2] = ["maple-tiny/maple-tiny-tq1_0.gguf", "maple-tiny/maple-tiny-tq2_0.gguf"];
/// Wider than of other models: a small difference may choose another expert. The third prompt has four values within 3e-6 of the middle
/// of two integers, by arithmetic in f64: f32 does not tell on which side they are.
const TOLERANCE: Tolerance = Tolerance { exact: 2, int8: 0.1, int16: 5e-3, margin: 0.1 };

#[test]
fn logits_are_those_of_the_reference() {
    for file in FILES {
        check_logits(file, TOLERANCE);
    }
}

#[test]
fn greedy_answers_are_those_of_the_reference() {
    check_greedy(FILES[0], TOLERANCE);
}

#[test]
fn bits_do_not_depend_on_pieces_neighbours_threads_isas_or_formats() {
    let prompts = prompts_of(FILES[1]);
    let longest = prompts.iter().max_by_key(|prompt| prompt.ids.len()).unwrap();
    let tokens = &longest.ids[..longest.ids.len().min(230)];
    for kv in [KvType::F32, KvType::F16, KvType::Q8] {
        check_bits(&open_shared(FILES[1]), kv, tokens, &prompts[2].ids);
    }
}

#[test]
fn both_files_are_the_same_model() {
    let [first, second] = FILES.map(open_shared);
    assert_eq!(first.fingerprint().unwrap(), second.fingerprint().unwrap());
    let config = first.config();
    let experts = config.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.used, config.intermediate_size), (8, 3, 256));
    assert_eq!([0, 2, 3].map(|layer| config.window(layer)), [Some(24), Some(24), None]);
    assert_eq!([0, 3].map(|layer| config.rotary_dim_of(layer)), [32, 0]);
    let gates = first.ternary(1, Linear::ExpertGate).unwrap();
    assert_eq!((gates.rows, gates.cols), (8 * 256, 256));
    for case in cases("maple-tiny")["tokenizer"].as_array().map_or(&[][..], Vec::as_slice) {
        let ids: Vec<u32> = numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
        let text = case["text"].as_str().unwrap();
        assert_eq!(first.tokenizer().encode(text, true).unwrap(), ids, "{text:?}");
    }
}

/// Writes the model of a file as a folder, with the names and the dense weights of the published one.
fn write_folder(model: &Model, folder: &Path) {
    let config = model.config();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for (name, matrix) in [("model.word_embeddings", model.embedding()), ("lm_head", model.head())]
    {
        let (shape, values) = table(matrix);
        tensors.push((format!("{name}.weight"), shape, values));
    }
    for norm in model.norms() {
        let name = match norm {
            Norm::Attention(layer) => format!("model.layers.{layer}.input_layernorm"),
            Norm::FeedForward(layer) => format!("model.layers.{layer}.post_attention_layernorm"),
            Norm::Query(layer) => format!("model.layers.{layer}.self_attn.q_norm"),
            Norm::Key(layer) => format!("model.layers.{layer}.self_attn.k_norm"),
            _ => "model.norm".to_owned(),
        };
        let values = model.norm(norm).unwrap();
        tensors.push((format!("{name}.weight"), vec![values.len()], values));
    }
    for layer in 0..config.layer_count {
        let router = model.layer_tensor(layer, LayerTensor::Router).unwrap();
        let shape = vec![8, config.hidden_size];
        tensors.push((format!("model.layers.{layer}.mlp.gate.weight"), shape, router));
        for &linear in config.linears(layer) {
            let matrix = model.ternary(layer, linear).unwrap();
            let groups = matrix.groups.unwrap();
            let rows: Vec<f32> = matrix
                .trits
                .chunks_exact(groups.size)
                .zip(&groups.scales)
                .flat_map(|(trits, scale)| trits.iter().map(|t| f32::from(*t) * scale.to_f32()))
                .collect();
            let name = match linear {
                Linear::ExpertGate => "mlp.experts.{}.gate_proj",
                Linear::ExpertUp => "mlp.experts.{}.up_proj",
                Linear::ExpertDown => "mlp.experts.{}.down_proj",
                linear => hf_module(linear),
            };
            let count = if name.contains("{}") { 8 } else { 1 };
            let shape = vec![matrix.rows / count, matrix.cols];
            for (expert, part) in rows.chunks_exact(rows.len() / count).enumerate() {
                let name = name.replace("{}", &expert.to_string());
                let name = format!("model.layers.{layer}.{name}.weight");
                tensors.push((name, shape.clone(), part.to_vec()));
            }
        }
    }
    write_weights(&tensors, folder);
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden("maple-tiny").join(file), folder.join(file)).unwrap();
    }
}

#[test]
fn a_folder_is_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = open_shared(FILES[1]);
    write_folder(&file, folder.path());
    let model = Model::open(folder.path()).unwrap();
    assert_eq!(model.config().experts, file.config().experts);
    assert_eq!(model.config().windows, file.config().windows);
    for layer in 0..4 {
        for &linear in file.config().linears(layer) {
            let [a, b] = [&model, &*file].map(|m| m.ternary(layer, linear).unwrap());
            assert!(a.trits == b.trits && a.groups == b.groups, "{layer} {linear:?}");
        }
    }
    assert_eq!(model.fingerprint().unwrap(), file.fingerprint().unwrap());
    for (key, value) in [
        ("num_shared_experts", json!(1)),
        ("norm_topk_prob", json!(false)),
        ("nope_on_global_attention", json!(false)),
        ("use_qk_norm", json!(false)),
        ("hidden_act", json!("gelu")),
        ("hidden_act", json!("relu2")),
        ("scoring_func", json!("sigmoid")),
        ("tie_word_embeddings", json!(true)),
        ("is_causal", json!(false)),
        ("use_bias", json!(true)),
        ("use_sliding_window", json!(false)),
        ("router_dtype", json!("bf16")),
        ("num_experts_per_tok", json!(9)),
        ("layer_types", json!(["full_attention"])),
        ("sliding_window", Value::Null),
        ("partial_rotary_factor", Value::Null),
        ("moe_intermediate_size", json!(24)),
        ("n_group", json!(4)),
    ] {
        let message = config_refusal("maple-tiny", |config| config[key] = value);
        assert!(message.contains(key), "{key}: {message}");
    }
    let message = config_refusal("maple-tiny", |config| config["num_experts_per_tok"] = json!(9));
    assert!(message.ends_with("is 9, expected at most num_experts"), "{message}");
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let model = open_shared(FILES[0]);
    let on_gpu = EngineOptions { device: DeviceChoice::Cuda(0), ..EngineOptions::default() };
    let refused = load::engine(&model, &on_gpu).err().unwrap();
    assert!(matches!(refused, LoadError::ExpertsOnGpu { .. }), "{refused}");
}

#[test]
fn gates_and_other_inputs_may_have_groups_of_different_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q2_0.gguf");
    convert(&open_shared(FILES[1]), Target::GgufQ2_0, &path).unwrap();
    let mut file = RawGguf::read(&path);
    // The first scale, doubled: the pairs of this matrix cannot be joined any more.
    file.tensor("blk.0.ffn_gate_exps.weight").bytes[1] += 4;
    let model = Arc::new(Model::open_gguf_bytes("groups", file.bytes(32)).unwrap());
    let size = |linear| model.ternary(0, linear).unwrap().groups.unwrap().size;
    assert_eq!([Linear::ExpertGate, Linear::ExpertUp].map(size), [64, 128]);
    let tokens = &prompts_of(FILES[1])[2].ids;
    check_bits(&model, KvType::F32, &[&tokens[..], tokens].concat(), tokens);
}

#[test]
fn conversions_keep_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = open_shared(FILES[0]);
    for (name, target) in [("tq2", Target::GgufTq2_0), ("pq2", Target::GgufPq2_0)] {
        let path = folder.path().join(format!("{name}.gguf"));
        let report = convert(&model, target, &path).unwrap();
        assert_eq!(report.inexact_scale_count, 0);
        let converted = Model::open(&path).unwrap();
        assert_eq!(converted.config(), model.config());
        assert_eq!(converted.fingerprint().unwrap(), model.fingerprint().unwrap());
    }
    for target in [Target::GgufI2S, Target::Folder] {
        let error = convert(&model, target, &folder.path().join("never.gguf")).unwrap_err();
        assert!(error.to_string().contains("blk.0.attn_q.weight"), "{error}");
    }
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let refused = |edit: &dyn Fn(&mut RawGguf)| {
        let mut file = RawGguf::read(&golden(FILES[0]));
        edit(&mut file);
        Model::open_gguf_bytes("changed", file.bytes(32)).unwrap_err().to_string()
    };
    for (key, value) in [
        ("expert_count", 7),
        ("expert_used_count", 9),
        ("expert_feed_forward_length", 128),
        ("expert_shared_count", 1),
        ("rope.dimension_count", 31),
    ] {
        let key = format!("maple.{key}");
        let error = refused(&|file| file.set_u32(&key, value));
        let named = match value {
            7 | 128 => "ffn_gate_exps",
            _ => &key[..],
        };
        assert!(error.contains(named), "{key}: {error}");
    }
    let error = refused(&|file| file.set_u32("maple.expert_used_count", 9));
    assert!(error.ends_with("is 9, expected at most expert_count"), "{error}");
    for key in [
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
    ] {
        let key = format!("maple.{key}");
        let error = refused(&|file| file.remove(&key));
        assert!(error.contains(&key), "{key}: {error}");
    }
    for (key, values) in
        [("attention.sliding_window_pattern", &[1; 4][..]), ("swiglu_clamp_exp", &[7; 3])]
    {
        let key = format!("maple.{key}");
        let error = refused(&|file| file.set_bytes(&key, values));
        assert!(error.contains(&key), "{key}: {error}");
    }
}

#[test]
fn router_of_one_expert_may_have_one_or_two_dimensions() {
    let fingerprint = |dims: &[u64]| {
        let mut file = RawGguf::read(&golden(FILES[1]));
        file.set_u32("maple.expert_count", 1);
        file.set_u32("maple.expert_used_count", 1);
        for layer in 0..4 {
            for part in ["gate", "up", "down"] {
                let experts = file.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"));
                experts.dims[2] = 1;
                experts.bytes.truncate(experts.bytes.len() / 8);
            }
            let router = file.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"));
            router.bytes.truncate(4 * 256);
            router.dims = dims.to_vec();
        }
        Model::open_gguf_bytes("one", file.bytes(32)).unwrap().fingerprint().unwrap()
    };
    let one = fingerprint(&[256]);
    assert_eq!(fingerprint(&[256, 1]), one);
    assert_eq!(fingerprint(&[256, 1, 1]), one);
}

#[test]
fn older_files_without_bounds_have_those_of_the_published_model() {
    let mut file = RawGguf::read(&golden(FILES[0]));
    file.remove("maple.swiglu_clamp_exp");
    let model = Model::open_gguf_bytes("older", file.bytes(32)).unwrap();
    assert_eq!(model.fingerprint().unwrap(), open_shared(FILES[0]).fingerprint().unwrap());
}
