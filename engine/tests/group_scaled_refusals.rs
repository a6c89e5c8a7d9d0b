//! Files of models with scales of groups that must be refused, or are the same model in another container.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::json;
use support::{Folder, Random, RawGguf, golden, split_safetensors};
use tritmill_engine::{
    config::Linear,
    files::{Model, ModelError, Problem, Target, convert, gguf, shape, synth},
};

const FILES: [&str; 4] = ["q2_0", "pq2_0", "q2_0-g128-legacy", "ptq1_0"];

fn path(encoding: &str) -> String {
    format!("qwen3-yarn-tiny/qwen3-yarn-tiny-{encoding}.gguf")
}

fn raw(encoding: &str) -> RawGguf {
    RawGguf::read(&golden(&path(encoding)))
}

fn open(file: &RawGguf) -> Result<Model, ModelError> {
    Model::open_gguf_bytes("edited", file.bytes(32))
}

/// Returns the offset in the file of a tensor's data.
fn offset_of(file: &RawGguf, tensor: &str) -> u64 {
    let bytes = file.bytes(32);
    let parsed = gguf::parse("edited", &bytes).unwrap();
    parsed.data_start + parsed.tensors.iter().find(|t| t.name == tensor).unwrap().offset
}

#[test]
fn invalid_codes_and_scales_are_errors_with_tensor_and_offset() {
    let nan = [0x00, 0x7e];
    let negative = [0x00, 0xb8];
    for (encoding, at, bytes, problem) in [
        ("q2_0", 18 * 9 + 7, vec![0b0000_1100], "code 3"),
        ("pq2_0", 34 * 9 + 33, vec![0b1100_0000], "code 3"),
        ("q2_0-g128-legacy", 34 * 9 + 2, vec![0b0000_0011], "code 3"),
        ("ptq1_0", 28 * 9 + 5, vec![1], "byte 1 does not hold ternary digits"),
        ("ptq1_0", 28 * 9 + 24, vec![1], "byte 1 does not hold ternary digits"),
        ("q2_0", 18 * 9, nan.to_vec(), "scale NaN"),
        ("pq2_0", 34 * 9, negative.to_vec(), "scale -0.5"),
        ("ptq1_0", 28 * 9 + 26, nan.to_vec(), "scale NaN"),
    ] {
        for tensor in ["blk.1.ffn_up.weight", "token_embd.weight", "output.weight"] {
            let mut file = raw(encoding);
            file.tensor(tensor).bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            let offset = offset_of(&file, tensor) + at as u64;
            let model = open(&file).unwrap();
            let error = match tensor {
                "token_embd.weight" => model.ternary_embedding().unwrap_err(),
                "output.weight" => model.ternary_head().unwrap_err(),
                _ => model.ternary(1, Linear::Up).unwrap_err(),
            };
            let message = error.to_string();
            let place = format!("tensor {tensor} at byte {offset}: {problem}");
            assert!(message.starts_with(&place), "{encoding}: {message}, not {place}");
            assert_eq!(model.fingerprint().unwrap_err().to_string(), message);
        }
    }
}

#[test]
fn type_42_is_told_apart_by_length_alone() {
    // With tensors at multiples of 64 KiB, the padded lengths of both layouts are equal.
    let mut file = raw("q2_0");
    file.set_u32("general.alignment", 1 << 16);
    let error = Model::open_gguf_bytes("wide", file.bytes(1 << 16)).unwrap_err();
    let ModelError::BadTensor { tensor, problem, .. } = &error else { panic!("{error}") };
    assert!(matches!(problem, Problem::AmbiguousLayout { .. }), "{tensor}: {error}");
    // The number of the other layout has one meaning.
    let mut file = raw("pq2_0");
    file.set_u32("general.alignment", 1 << 16);
    assert!(Model::open_gguf_bytes("wide", file.bytes(1 << 16)).is_ok());
    // Neither length fits.
    for encoding in ["q2_0", "q2_0-g128-legacy"] {
        let mut file = raw(encoding);
        let tensor = file.tensor("blk.0.ffn_up.weight");
        tensor.bytes.extend([0; 64]);
        let error = open(&file).unwrap_err().to_string();
        assert!(error.contains("blk.0.ffn_up.weight"), "{error}");
        let cut = file.tensor("blk.0.ffn_up.weight");
        cut.bytes.truncate(1024);
        let error = open(&file).unwrap_err().to_string();
        assert!(error.contains("blk.0.ffn_up.weight at byte"), "{error}");
    }
}

#[test]
fn keys_and_tensors_that_are_not_understood_are_refused_by_name() {
    let refused = |names: &[&str], edit: &dyn Fn(&mut RawGguf)| {
        let mut file = raw("pq2_0");
        edit(&mut file);
        let error = open(&file).expect_err("the file must be refused").to_string();
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    };
    refused(&["qwen3.rope.scaling.yarn_beta_fast"], &|file| {
        file.set_f32("qwen3.rope.scaling.yarn_beta_fast", 16.0);
    });
    refused(&["qwen3.expert_count"], &|file| file.set_u32("qwen3.expert_count", 8));
    refused(&["qwen3.rope.scaling.type", "longrope"], &|file| {
        file.set_text("qwen3.rope.scaling.type", "longrope");
    });
    refused(&["qwen3.rope.scaling.factor", "missing"], &|file| {
        file.remove("qwen3.rope.scaling.factor");
    });
    refused(&["qwen3.rope.scaling.attn_factor"], &|file| {
        file.set_f32("qwen3.rope.scaling.attn_factor", 2.0);
    });
    refused(&["qwen3.attention.value_length"], &|file| {
        file.set_u32("qwen3.attention.value_length", 64);
    });
    refused(&["general.architecture", "qwen3moe"], &|file| {
        file.set_text("general.architecture", "qwen3moe");
    });
    refused(&["blk.0.attn_q.bias"], &|file| {
        let mut bias = file.tensor("blk.0.attn_q_norm.weight").clone();
        bias.name = "blk.0.attn_q.bias".to_owned();
        file.tensors.push(bias);
    });
    refused(&["blk.1.attn_k_norm.weight", "missing"], &|file| {
        file.tensors.retain(|tensor| tensor.name != "blk.1.attn_k_norm.weight");
    });
    refused(&["blk.0.attn_v.weight", "Q4_0"], &|file| {
        file.tensor("blk.0.attn_v.weight").type_id = 2;
    });
}

#[test]
fn folders_that_are_not_ternary_are_refused_by_the_tensors_name() {
    let folder = Folder::copy("qwen3-group-tiny");
    let shard = folder.path().join("model-00001-of-00003.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    let (header, _) = split_safetensors(&bytes);
    let name = "model.layers.0.mlp.up_proj.weight";
    let start = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut damaged = bytes.clone();
    // The 100th weight of the second row, of 256 f16.
    let at = data + start + 2 * (256 + 100);
    damaged[at..at + 2].copy_from_slice(&[0x01, 0x2c]);
    std::fs::write(&shard, damaged).unwrap();
    let model = Model::open(folder.path()).unwrap();
    let error = model.ternary(0, Linear::Up).unwrap_err().to_string();
    // The group's largest weight may be this one or another; the offset is that of the first weight that differs from it.
    let within = format!("tensor {name} at byte ");
    assert!(error.starts_with(&within) && error.contains("is not ternary"), "{error}");
    assert!(model.fingerprint().is_err());
    std::fs::write(&shard, bytes).unwrap();

    let refused = |names: &[&str], edit: &dyn Fn(&mut serde_json::Value)| {
        let folder = Folder::copy("qwen3-yarn-tiny");
        folder.edit_json("config.json", edit);
        let error = Model::open(folder.path()).expect_err("refused").to_string();
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    };
    refused(&["rope_parameters.beta_fast"], &|config| {
        config["rope_parameters"]["beta_fast"] = json!(16.0);
    });
    refused(&["rope_parameters.mscale"], &|config| {
        config["rope_parameters"]["mscale"] = json!(1.0);
    });
    refused(&["rope_parameters.rope_type", "longrope"], &|config| {
        config["rope_parameters"]["rope_type"] = json!("longrope");
    });
    refused(&["rope_parameters.factor", "missing"], &|config| {
        config["rope_parameters"].as_object_mut().unwrap().remove("factor");
    });
    refused(&["quantization_config"], &|config| {
        config["quantization_config"] = json!({ "bits": 2 });
    });
    refused(&["self_attn.q_proj.bias"], &|config| config["attention_bias"] = json!(true));
    refused(&["self_attn.q_proj.weight", "row length 250 is not a multiple of 64"], &|config| {
        config["hidden_size"] = json!(250);
    });
}

#[test]
fn damaged_files_are_refused_or_read() {
    let mut random = Random(19);
    let mut opened = 0;
    for encoding in FILES {
        let bytes = std::fs::read(golden(&path(encoding))).unwrap();
        let header = gguf::parse("tiny", &bytes).unwrap().data_start as usize;
        for round in 0..120 {
            let mut damaged = bytes.clone();
            match round % 3 {
                0 => random.mutate(&mut damaged, bytes.len()),
                1 => random.mutate(&mut damaged, header),
                // Most types, dimensions and offsets.
                _ => damaged[header - 1800 + random.below(1790)] = random.below(256) as u8,
            }
            if let Ok(model) = Model::open_gguf_bytes("damaged", damaged) {
                opened += 1;
                let _ = model.fingerprint();
                let mut row = vec![0.0; model.config().hidden_size];
                model.embedding().row(model.config().vocab_size - 1, &mut row);
                model.head().row(0, &mut row);
                let _ = model.tokenizer().encode("Hello, wörld 12345 <|im_end|>", true);
            }
        }
    }
    assert!(opened > 20 && opened < 470, "{opened} of 480 opened");
}

#[test]
fn converted_files_are_the_same_model() {
    let dir = tempfile::TempDir::new().unwrap();
    for name in ["qwen3-group-tiny", "qwen3-yarn-tiny"] {
        let folder = Model::open(&golden(name)).unwrap();
        let fingerprint = folder.fingerprint().unwrap();
        for target in [Target::GgufQ2_0, Target::GgufPq2_0, Target::GgufPtq1_0] {
            let out = dir.path().join("converted.gguf");
            assert_eq!(convert(&folder, target, &out).unwrap().inexact_scale_count, 0);
            let model = Model::open(&out).unwrap();
            assert_eq!(model.fingerprint().unwrap(), fingerprint, "{name} {target}");
            let encoding = target.name();
            let golden = Model::open(&golden(&format!("{name}/{name}-{encoding}.gguf"))).unwrap();
            let size = |model: &Model| model.tensors().iter().map(|t| t.size_bytes).sum::<u64>();
            assert_eq!(size(&model), size(&golden), "{name} {target}");
        }
        for (target, why) in [
            (Target::GgufI2S, "one scale per tensor"),
            (Target::GgufTq2_0, "differ inside blocks"),
            (Target::Folder, "one scale per tensor"),
        ] {
            let error =
                convert(&folder, target, &dir.path().join("no.gguf")).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
    let bitnet = Model::open(&golden("bitnet-tiny")).unwrap();
    let error = convert(&bitnet, Target::GgufPq2_0, &dir.path().join("no.gguf")).unwrap_err();
    assert!(error.to_string().contains("one scale per tensor"), "{error}");
}

#[test]
fn synthetic_bonsai_is_a_gguf_file_that_opens() {
    let dir = tempfile::TempDir::new().unwrap();
    let mut config = shape("bonsai-8b").unwrap();
    (config.hidden_size, config.intermediate_size, config.layer_count) = (256, 384, 2);
    (config.head_count, config.kv_head_count, config.vocab_size) = (2, 1, 300);
    let out = dir.path().join("small.gguf");
    synth(&config, &out, 7).unwrap();
    let model = Model::open(&out).unwrap();
    let head = model.ternary_head().unwrap().unwrap();
    assert_eq!((head.rows, head.cols, head.groups.unwrap().size), (300, 256, 128));
    assert!(!model.config().tied_head && model.config().qk_norm);
    assert_eq!(model.config().head_dim, 128);
    let fingerprint = model.fingerprint().unwrap();
    synth(&config, &out, 7).unwrap();
    assert_eq!(Model::open(&out).unwrap().fingerprint().unwrap(), fingerprint);
    let error = synth(&config, &dir.path().join("folder"), 7).unwrap_err();
    assert!(matches!(error, ModelError::NotNamedGguf { .. }), "{error}");
    assert!(shape("bonsai-1.7b").unwrap().tied_head && shape("bonsai-4b").unwrap().tied_head);
}
