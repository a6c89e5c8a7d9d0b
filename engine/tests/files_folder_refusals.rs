//! Hugging Face folders that must be refused as a whole.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::{Value, json};
use support::{Folder, config_refusal, golden, join_safetensors, parsed, split_safetensors};
use tritmill_engine::{
    config::{Linear, RopeScaling},
    files::{Model, ModelError, Problem, hugging_face::config as hf_config, shard_names},
};

fn accepted(folder: &str, edit: impl FnOnce(&mut Value)) -> hf_config::HfConfig {
    parsed(folder, edit).unwrap()
}

#[test]
fn keys_that_change_the_computation_are_refused_by_name() {
    for (key, value) in [
        ("model_type", json!("mistral")),
        ("hidden_act", json!("gelu")),
        ("qkv_bias", json!(true)),
        ("sparse_config", json!({ "kernel_size": 32 })),
        ("scale_emb", json!(12)),
        ("rope_scaling", json!({ "rope_type": "dynamic", "factor": 2.0 })),
        ("rope_scaling", json!({ "type": "linear", "factor": 2.0, "beta_fast": 32.0 })),
        ("rope_parameters", json!({ "rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0 })),
        ("rope_parameters", json!({ "full_attention": { "rope_theta": 1e4 } })),
        ("sliding_window", json!(4096)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("num_experts", json!(8)),
        ("num_local_experts", json!(8)),
        ("partial_rotary_factor", json!(0.5)),
        ("final_logit_softcapping", json!(30.0)),
        ("attention_multiplier", json!(0.1)),
        ("weight_bits", json!(1)),
    ] {
        let message = config_refusal("llama-tiny", |config| config[key] = value.clone());
        assert!(message.contains(key), "{key}: {message}");
    }
}

#[test]
fn rope_scaling_of_kind_linear_and_llama3_is_read_from_either_block() {
    let scaling = |config: hf_config::HfConfig| config.model.rope_scaling;
    let parsed =
        |block: &str, value: Value| scaling(accepted("llama-tiny", |config| config[block] = value));
    let linear = RopeScaling::Linear { factor: 2.5 };
    assert_eq!(parsed("rope_scaling", json!({ "type": "linear", "factor": 2.5 })), linear);
    let both = json!({ "rope_theta": 3e4, "rope_type": "linear", "factor": 2.5 });
    let config = accepted("llama-tiny", |config| config["rope_parameters"] = both);
    assert_eq!((config.model.rope_theta, scaling(config)), (3e4, linear));
    let by_one = json!({ "rope_type": "linear", "factor": 1 });
    assert_eq!(parsed("rope_scaling", by_one), RopeScaling::None);

    let mut llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let expected = |original_context_length| RopeScaling::Llama3 {
        factor: 8.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context_length,
    };
    assert_eq!(parsed("rope_scaling", llama3.clone()), expected(8192));
    llama3.as_object_mut().unwrap().shift_remove("original_max_position_embeddings");
    let context = accepted("llama-tiny", |_| {}).model.context_length;
    assert_eq!(parsed("rope_parameters", llama3), expected(context));
}

#[test]
fn rope_scaling_with_missing_or_wrong_values_is_refused_by_key() {
    let llama3 = |high: f64| json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": high });
    for (key, value) in [
        ("rope_scaling.factor", json!({ "rope_type": "linear" })),
        ("rope_scaling.factor", json!({ "rope_type": "linear", "factor": 0.0 })),
        ("rope_scaling.factor", json!({ "rope_type": "linear", "factor": "two" })),
        ("rope_scaling.high_freq_factor", llama3(1.0)),
        ("rope_scaling.low_freq_factor", json!({ "rope_type": "llama3", "factor": 8.0 })),
        ("rope_scaling.rope_type", json!({ "rope_type": 7 })),
        ("rope_scaling", json!(2.0)),
    ] {
        let message = config_refusal("llama-tiny", |config| config["rope_scaling"] = value.clone());
        assert!(message.contains(key), "{key}: {message}");
    }
    let message = config_refusal("llama-tiny", |config| {
        config["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 });
        config["rope_parameters"] = json!({ "rope_type": "linear", "factor": 3.0 });
    });
    assert!(message.contains("rope_parameters"), "{message}");
}

#[test]
fn unknown_quantization_settings_are_refused_by_name() {
    for (key, value) in [
        ("quant_method", json!("gptq")),
        ("linear_class", json!("linear4bit")),
        ("quantization_mode", json!("dynamic")),
        ("quantization_mode", json!("online")), // not with bitlinear
        ("modules_to_not_convert", json!(["lm_head", "model.layers.0.mlp.down_proj"])),
        ("group_size", json!(128)),
    ] {
        let message = config_refusal("llama-tiny", |config| {
            config["quantization_config"][key] = value.clone();
        });
        assert!(message.contains(key), "{key}: {message}");
    }
    let message =
        config_refusal("bitnet-tiny", |config| config["quantization_config"] = Value::Null);
    assert!(message.contains("quantization_config"), "{message}");
    // A Llama without it has dense weights, which may be ternary.
    let folder = Folder::copy("llama-tiny");
    folder.edit_json("config.json", |config| config["quantization_config"] = Value::Null);
    let message = Model::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("model.layers.0.") && message.contains("shape"), "{message}");
}

#[test]
fn neutral_values_and_unknown_keys_are_accepted() {
    let plain = accepted("llama-tiny", |_| {});
    let decorated = accepted("llama-tiny", |config| {
        config["sliding_window"] = json!(4096);
        config["use_sliding_window"] = json!(false);
        config["partial_rotary_factor"] = json!(1.0);
        config["num_experts"] = json!(0);
        config["rope_scaling"] = json!({ "rope_type": "default" });
        config["layer_types"] = json!(["full_attention"]);
        config["something_new"] = json!({ "a": [1, 2, 3] });
    });
    assert_eq!(plain, decorated);
}

#[test]
fn missing_keys_take_the_documented_defaults() {
    let config = accepted("llama-tiny", |config| {
        let map = config.as_object_mut().unwrap();
        for key in [
            "rope_theta",
            "rope_scaling",
            "rms_norm_eps",
            "num_key_value_heads",
            "tie_word_embeddings",
            "hidden_act",
        ] {
            map.shift_remove(key);
        }
        config["quantization_config"] = json!({ "quant_method": "bitnet" });
    });
    assert_eq!(config.storage, hf_config::WeightStorage::PackedDivide);
    assert_eq!((config.model.rope_theta, config.model.rms_norm_eps), (10_000.0, 1e-6));
    assert_eq!((config.model.kv_head_count, config.model.tied_head), (8, false));
    let norm = accepted("llama-norm-tiny", |config| {
        config["quantization_config"].as_object_mut().unwrap().shift_remove("rms_norm_eps");
    });
    assert_eq!(norm.model.linear_norm_eps, Some(1e-6));
}

#[test]
fn shapes_out_of_range_are_refused_by_key() {
    for (key, value) in [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-256)),
        ("hidden_size", json!(1u64 << 60)),
        ("hidden_size", json!("256")),
        ("num_hidden_layers", json!(1u64 << 40)),
        ("num_attention_heads", json!(7)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(31)),
        ("vocab_size", json!(1u64 << 40)),
        ("rms_norm_eps", json!(0.0)),
        ("rope_theta", json!(-1.0)),
        ("eos_token_id", json!([1023, 4096])),
        ("bos_token_id", json!(-1)),
    ] {
        let message = config_refusal("bitnet-tiny", |config| config[key] = value.clone());
        assert!(message.contains(key), "{key} = {value}: {message}");
    }
}

fn weights_refusal(
    name: &str,
    edit: impl FnOnce(&mut serde_json::Map<String, Value>, &mut Vec<u8>),
) -> ModelError {
    let folder = Folder::copy(name);
    folder.edit_weights(edit);
    Model::open(folder.path()).expect_err("the weights must be refused")
}

const GATE: &str = "model.layers.1.mlp.gate_proj.weight";

#[test]
fn unknown_tensors_are_refused_by_name() {
    for name in ["model.layers.0.self_attn.q_proj.bias", "model.layers.4.mlp.up_proj.weight"] {
        let error = weights_refusal("bitnet-tiny", |header, _| {
            header.insert(
                name.to_owned(),
                json!({ "dtype": "BF16", "shape": [0], "data_offsets": [0, 0] }),
            );
        });
        let ModelError::UnexpectedTensor { tensor, .. } = error else { panic!("{error}") };
        assert_eq!(tensor, name);
    }
}

#[test]
fn missing_misshapen_and_mistyped_tensors_are_named() {
    let error = weights_refusal("bitnet-tiny", |header, _| drop(header.shift_remove(GATE)));
    assert!(matches!(error, ModelError::MissingTensor { tensor } if tensor == GATE));
    let scale = format!("{GATE}_scale");
    let error = weights_refusal("bitnet-tiny", |header, _| drop(header.shift_remove(&scale)));
    assert!(matches!(error, ModelError::MissingTensor { tensor } if tensor == scale));
    let error =
        weights_refusal("bitnet-tiny", |header, _| header[GATE]["shape"] = json!([256, 160]));
    assert!(matches!(error, ModelError::TensorShape { tensor, .. } if tensor == GATE));
    let error = weights_refusal("bitnet-tiny", |header, _| header[GATE]["dtype"] = json!("I8"));
    assert!(matches!(error, ModelError::TensorType { tensor, .. } if tensor == GATE));
}

#[test]
fn offsets_outside_the_file_and_overlaps_are_refused() {
    for offsets in [json!([0, u64::MAX]), json!([u64::MAX, u64::MAX]), json!([100, 50])] {
        let error = weights_refusal("bitnet-tiny", |header, _| {
            header[GATE]["data_offsets"] = offsets.clone();
        });
        assert!(
            matches!(&error, ModelError::BadTensor { tensor, .. } if tensor == GATE),
            "{error}"
        );
    }
    let error = weights_refusal("bitnet-tiny", |header, _| {
        header[GATE]["data_offsets"] =
            header["model.layers.2.mlp.gate_proj.weight"]["data_offsets"].clone();
    });
    assert!(error.to_string().contains("overlap"), "{error}");
    let error = weights_refusal("bitnet-tiny", |header, _| {
        header[GATE]["shape"] = json!([1u64 << 40, 1u64 << 40]);
    });
    assert!(matches!(error, ModelError::BadTensor { problem: Problem::SizeMismatch { .. }, .. }));
}

#[test]
fn header_longer_than_the_file_is_refused() {
    let folder = Folder::copy("bitnet-tiny");
    let path = folder.path().join("model.safetensors");
    for len in [u64::MAX, 1 << 60, 50_000_000] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let error = Model::open(folder.path()).unwrap_err();
        assert!(matches!(error, ModelError::Malformed { .. }), "{error}");
    }
    std::fs::write(&path, b"").unwrap();
    assert!(Model::open(folder.path()).is_err());
}

#[test]
fn code_three_is_an_error_with_tensor_and_offset() {
    let folder = Folder::copy("bitnet-tiny");
    let mut position = 0;
    folder.edit_weights(|header, data| {
        position = header[GATE]["data_offsets"][0].as_u64().unwrap() + 1234;
        data[position as usize] = 0b0011_0000;
    });
    let model = Model::open(folder.path()).unwrap();
    let error = model.ternary(1, Linear::Gate).unwrap_err();
    let ModelError::BadTensor { tensor, offset, problem } = &error else { panic!("{error}") };
    let bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert_eq!((tensor.as_str(), *offset), (GATE, 8 + header_len + position));
    assert_eq!(*problem, Problem::BadCode { code: 3 });
}

#[test]
fn scales_that_are_not_positive_numbers_are_refused() {
    for bits in [0x0000u16, 0x7fc0, 0x7f80, 0xbf80] {
        let error = weights_refusal("bitnet-tiny", |header, data| {
            let at = header[&format!("{GATE}_scale")]["data_offsets"][0].as_u64().unwrap() as usize;
            data[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        });
        assert!(
            matches!(&error, ModelError::BadTensor { problem: Problem::BadScale(_), .. }),
            "{error}"
        );
    }
}

#[test]
fn sharded_weights_are_the_same_model() {
    let folder = Folder::copy("llama-tiny");
    let whole = Model::open(folder.path()).unwrap().fingerprint().unwrap();
    let path = folder.path().join("model.safetensors");
    let (header, data) = split_safetensors(&std::fs::read(&path).unwrap());
    let mut shards = [(serde_json::Map::new(), Vec::new()), (serde_json::Map::new(), Vec::new())];
    let mut map = serde_json::Map::new();
    for (i, (name, entry)) in header.iter().filter(|(name, _)| *name != "__metadata__").enumerate()
    {
        let offset = |j: usize| entry["data_offsets"][j].as_u64().unwrap() as usize;
        let (shard_header, shard_data) = &mut shards[i % 2];
        let start = shard_data.len();
        shard_data.extend(&data[offset(0)..offset(1)]);
        let mut entry = entry.clone();
        entry["data_offsets"] = json!([start, shard_data.len()]);
        shard_header.insert(name.clone(), entry);
        map.insert(name.clone(), json!(format!("model-{}.safetensors", i % 2)));
    }
    for (i, (header, data)) in shards.iter().enumerate() {
        let path = folder.path().join(format!("model-{i}.safetensors"));
        std::fs::write(path, join_safetensors(header, data)).unwrap();
    }
    std::fs::remove_file(path).unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index, json!({ "weight_map": map }).to_string()).unwrap();
    assert_eq!(Model::open(folder.path()).unwrap().fingerprint().unwrap(), whole);
    assert_eq!(Model::open(folder.path()).unwrap().tensors().len(), header.len() - 1);
}

#[test]
fn shard_names_cannot_leave_the_folder() {
    for name in ["../x.safetensors", "/etc/passwd", "..", "", "a\\b", "c:x"] {
        let index = json!({ "weight_map": { "a": name } }).to_string();
        assert!(shard_names("index", index.as_bytes()).is_err(), "{name}");
    }
    let index = json!({ "weight_map": { "a": "2", "b": "1", "c": "2" } }).to_string();
    assert_eq!(shard_names("index", index.as_bytes()).unwrap(), ["1", "2"]);
}

#[test]
fn missing_files_are_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = Folder::copy("bitnet-tiny");
        std::fs::remove_file(folder.path().join(file)).unwrap();
        let error = Model::open(folder.path()).unwrap_err();
        assert!(
            matches!(&error, ModelError::MissingFile { file: name, .. } if name == file),
            "{error}"
        );
    }
    let folder = Folder::copy("bitnet-tiny");
    std::fs::rename(folder.path().join("tokenizer.json"), folder.path().join("tokenizer.model"))
        .unwrap();
    let message = Model::open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.model at byte 0"), "{message}");
}

/// Checks that an edited tokenizer is refused with an error that contains `name`.
fn tokenizer_refused(name: &str, edit: impl FnOnce(&mut Value)) {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer.json", edit);
    let error = Model::open(folder.path()).expect_err("the tokenizer must be refused");
    assert!(error.to_string().contains(name), "{error}");
}

#[test]
fn tokenizers_of_other_kinds_are_refused_by_key() {
    tokenizer_refused("model.type", |json| json["model"]["type"] = json!("Unigram"));
    tokenizer_refused("byte_fallback", |json| json["model"]["byte_fallback"] = json!(true));
    tokenizer_refused("dropout", |json| json["model"]["dropout"] = json!(0.1));
    tokenizer_refused("pre_tokenizer", |json| {
        json["pre_tokenizer"] = json!({ "type": "Whitespace" })
    });
    tokenizer_refused("decoder", |json| json["decoder"] = json!({ "type": "WordPiece" }));
}

#[test]
fn token_ids_that_do_not_fit_are_refused() {
    tokenizer_refused("1024", |json| {
        let mut token = json["added_tokens"][4].clone();
        (token["id"], token["content"]) = (json!(1024), json!("<|one_more|>"));
        json["added_tokens"].as_array_mut().unwrap().push(token);
    });
    tokenizer_refused("zzz", |json| json["model"]["vocab"]["zzz"] = json!(u32::MAX));
    tokenizer_refused("two tokens", |json| json["model"]["vocab"]["zzz"] = json!(5));
    tokenizer_refused("<|eot_id|>", |json| json["added_tokens"][4]["id"] = json!(900));
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_json("tokenizer.json", |json| {
        json["truncation"] =
            json!({ "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 });
        json["padding"] = json!({
            "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
        });
    });
    let (edited, plain) =
        (Model::open(folder.path()).unwrap(), Model::open(&golden("bitnet-tiny")).unwrap());
    let ids = |model: &Model| model.tokenizer().encode("one two three four five", true).unwrap();
    assert_eq!(ids(&edited), ids(&plain));
}
