//! Files with keys, tensors or companions that no code reads are refused by name, and files with the keys that converters and
//! publishers write are not.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::{Value, json};
use support::{Folder, RawGguf, config_refusal, golden, parsed};
use tritmill_engine::files::{Model, ModelError};

/// A golden file of each architecture, with the prefix of its keys.
const FILES: [(&str, &str); 5] = [
    ("gguf/bitnet-tiny-i2_s.gguf", "bitnet-b1.58"),
    ("gguf/synth-TQ1_0.gguf", "bitnet"),
    ("../data/llama-tq2_0-q8_0.gguf", "llama"),
    ("group-linears/minicpm-tq2_0.gguf", "minicpm"),
    ("qwen3-group-tiny/qwen3-group-tiny-pq2_0.gguf", "qwen3"),
];

fn bonsai() -> RawGguf {
    RawGguf::read(&golden(FILES[4].0))
}

fn open(file: &RawGguf) -> Result<Model, ModelError> {
    Model::open_gguf_bytes("edited", file.bytes(32))
}

/// Checks that every golden file is refused after an edit, with an error that contains `names`.
fn all_refused(names: &[&str], edit: impl Fn(&mut RawGguf)) {
    for (path, _) in FILES {
        let mut file = RawGguf::read(&golden(path));
        edit(&mut file);
        let message = open(&file).expect_err("the file must be refused").to_string();
        assert!(names.iter().all(|name| message.contains(name)), "{path}: {message}");
    }
}

/// Adds a tensor like the first norm, under another name.
fn add_tensor(file: &mut RawGguf, name: &str) {
    let mut extra = file.tensor("blk.0.attn_norm.weight").clone();
    extra.name = name.to_owned();
    file.tensors.push(extra);
}

#[test]
fn keys_of_a_rotated_basis_are_refused_in_every_namespace() {
    all_refused(&["prism.hadamard.version = 1", "Hadamard"], |file| {
        file.set_u32("prism.hadamard.version", 1);
    });
    all_refused(&["prism.hadamard.sign_values", "a list of 3"], |file| {
        file.set_i32s("prism.hadamard.sign_values", &[1, 1, -1]);
    });
    for key in ["acme.hadamard.transform", "general.hadamard.transform", "quantize.rotation.by"] {
        all_refused(&[key], |file| file.set_text(key, "normalized"));
    }
}

#[test]
fn keys_of_unknown_tools_are_refused_unless_they_say_who_made_the_file() {
    for key in ["prism.scheme", "prism.version", "acme.weight_transform_by", "clip.vision.name"] {
        all_refused(&[key], |file| file.set_text(key, "two"));
    }
    all_refused(&["prism.converted_by"], |file| file.set_u32("prism.converted_by", 2));
    all_refused(&["qwen35.block_count"], |file| file.set_u32("qwen35.block_count", 4));
    all_refused(&["no_dot"], |file| file.set_bool("no_dot", true));
    for (path, _) in FILES {
        let mut file = RawGguf::read(&golden(path));
        let plain = open(&file).unwrap().fingerprint().unwrap();
        file.set_text("prism.converted_by", "a tool");
        file.set_text("acme.source.url", "https://example.org");
        assert_eq!(open(&file).unwrap().fingerprint().unwrap(), plain, "{path}");
    }
}

#[test]
fn keys_of_converters_and_publishers_are_accepted() {
    for (path, prefix) in FILES {
        let mut file = RawGguf::read(&golden(path));
        let plain = open(&file).unwrap().fingerprint().unwrap();
        for key in [
            "general.basename",
            "general.size_label",
            "general.license",
            "general.license.link",
            "general.quantized_by",
            "general.repo_url",
            "general.url",
            "general.source.url",
            "general.base_model.0.name",
            "general.base_model.0.organization",
            "general.base_model.0.repo_url",
            "general.finetune",
            "quantize.imatrix.file",
            "quantize.imatrix.dataset",
            "imatrix.datasets",
            "mradermacher.quantize_version",
            "mradermacher.quantized_by",
            "mradermacher.quantized_at",
            "mradermacher.quantized_on",
            "mradermacher.convert_type",
            "duynt.random.quote",
            "tokenizer.chat_template.tool_use",
        ] {
            file.set_text(key, "text");
        }
        file.set_text("general.type", "model");
        file.set_texts("general.tags", &["text-generation"]);
        file.set_texts("general.languages", &["en"]);
        for (key, value) in [
            ("general.quantization_version", 2),
            ("general.file_type", 142),
            ("general.base_model.count", 1),
            ("general.sampling.top_k", 20),
            ("quantize.imatrix.entries_count", 196),
            ("quantize.imatrix.chunks_count", 128),
            ("split.no", 0),
            ("split.count", 1),
            ("split.tensors.count", 9),
        ] {
            file.set_u32(key, value);
        }
        file.set_f32("general.sampling.temp", 0.6);
        let of_model = |key: &str| format!("{prefix}.{key}");
        for key in ["expert_count", "expert_used_count", "attention.sliding_window"] {
            file.set_u32(&of_model(key), 0);
        }
        file.set_bool(&of_model("attention.causal"), true);
        file.set_bool(&of_model("rope.scaling.finetuned"), false);
        file.set_f32(&of_model("rope.scaling.yarn_beta_fast"), 32.0);
        file.set_f32(&of_model("rope.scaling.yarn_beta_slow"), 1.0);
        file.set_text(&of_model("tensor_data_layout"), "Meta AI original pth");
        assert_eq!(open(&file).unwrap().fingerprint().unwrap(), plain, "{path}");
    }
}

#[test]
fn keys_of_features_are_refused_with_what_they_would_need() {
    for (key, need) in [
        ("expert_count", "experts"),
        ("expert_feed_forward_length", "experts"),
        ("ssm.state_size", "DeltaNet"),
        ("full_attention_interval", "DeltaNet"),
        ("attention.sliding_window", "window"),
        ("attn_logit_softcapping", "bounds"),
        ("rope.dimension_sections", "several dimensions"),
        ("rope.freq_base_swa", "window"),
        ("nextn_predict_layers", "draft"),
        ("attention.scale", "attention"),
        ("attention.layer_norm_epsilon", "attention"),
        ("swiglu_clamp_exp", "bounds"),
        ("never_heard_of", "what it means"),
    ] {
        let mut file = bonsai();
        file.set_u32(&format!("qwen3.{key}"), 3);
        let message = open(&file).unwrap_err().to_string();
        assert!(message.contains(&format!("qwen3.{key} = 3")), "{message}");
        assert!(message.contains(need), "{message}");
    }
}

#[test]
fn tensors_that_no_code_reads_are_refused_by_name_and_number() {
    let error = |names: &[&str]| {
        let mut file = bonsai();
        names.iter().for_each(|name| add_tensor(&mut file, name));
        open(&file).expect_err("a tensor has no role")
    };
    let one = error(&["blk.0.attn_q_norm_in.weight"]);
    let ModelError::UnexpectedTensor { tensor, others, needs } = &one else { panic!("{one}") };
    assert_eq!((tensor.as_str(), *others), ("blk.0.attn_q_norm_in.weight", 0));
    assert_eq!(*needs, "a norm in front of each linear");
    let several = error(&["never.heard_of", "blk.1.ffn_gate_exps.weight", "blk.0.ssm_a"]);
    let message = several.to_string();
    assert!(message.starts_with("tensor blk.0.ssm_a (and 2 more) is not part of"), "{message}");
    for name in [
        "blk.0.attn_output_norm_in.weight",
        "blk.2.nextn.eh_proj.weight",
        "v.patch_embd.weight",
        "blk.0.attn_q.scale",
        "rope_factors_short.weight",
        "blk.0.attn_rot_embd",
        "something_else",
    ] {
        let message = error(&[name]).to_string();
        assert!(message.contains(name) && !message.contains("more)"), "{message}");
    }
}

#[test]
fn head_beside_the_embedding_counts_except_in_bitnet_files() {
    // In the golden file the head is the embedding; the tensor makes another one of it.
    let mut file = bonsai();
    let mut head = file.tensor("token_embd.weight").clone();
    head.name = "output.weight".to_owned();
    file.tensors.push(head);
    assert!(!open(&file).unwrap().config().tied_head);
}

#[test]
fn golden_files_of_other_families_are_refused_by_what_they_need() {
    // A rotated basis that the family does not have.
    all_refused(&["prism.hadamard.version", "Hadamard"], |file| {
        file.set_u32("prism.hadamard.version", 1);
    });
    let embedding = "bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s.gguf";
    // Without the key of the pooling, a plain Qwen3 by its header; another pooling is not computed.
    let mut file = RawGguf::read(&golden(embedding));
    file.remove("qwen3.pooling_type");
    let message = open(&file).unwrap_err().to_string();
    assert!(message.contains("blk.0.attn_q.weight") && message.contains("I2_S"), "{message}");
    file.set_u32("qwen3.pooling_type", 1);
    assert!(open(&file).unwrap_err().to_string().contains("qwen3.pooling_type = 1"));
    let mut other = bonsai();
    other.set_u32("qwen3.pooling_type", 3);
    assert!(open(&other).unwrap_err().to_string().contains("token_embd.weight"));
    for (name, need) in [("qwen3moe", "experts"), ("qwen35moe", "DeltaNet"), ("gemma3", "windows")]
    {
        all_refused(&[name, need], |file| file.set_text("general.architecture", name));
    }
    all_refused(
        &["general.architecture = gpt2", "bitnet, llama, minicpm, qwen3, qwen35 and"],
        |file| {
            file.set_text("general.architecture", "gpt2");
        },
    );
}

#[test]
fn folders_in_a_rotated_basis_are_refused_by_the_file_that_says_so() {
    for name in ["bitnet-tiny", "qwen3-group-tiny"] {
        for file in ["hadamard.json", "hadamard_packing.json"] {
            let folder = Folder::copy(name);
            std::fs::write(folder.path().join(file), "{}").unwrap();
            let error = Model::open(folder.path()).unwrap_err();
            let ModelError::UnsupportedFile { file: named, .. } = &error else { panic!("{error}") };
            assert!(named == file && error.to_string().contains("Hadamard"), "{error}");
            // Also by the path of the weights.
            if name == "bitnet-tiny" {
                assert!(Model::open(&folder.path().join("model.safetensors")).is_err());
            }
        }
    }
}

#[test]
fn unknown_keys_of_configurations_are_refused_if_they_speak_of_the_arithmetic() {
    for (key, value, need) in [
        ("attn_output_gate", json!(true), "gated attention"),
        ("full_attention_interval", json!(4), "recurrent"),
        ("linear_num_value_heads", json!(4), "recurrent"),
        ("moe_intermediate_size", json!(256), "experts"),
        ("num_shared_experts", json!(1), "experts"),
        ("use_sliding_window", json!(true), "windowed"),
        ("swa_window", json!(128), "window"),
        ("nope_on_global_attention", json!(true), "positions"),
        ("mtp_num_hidden_layers", json!(1), "draft"),
        ("mlp_multipliers", json!([0.5, 0.5]), "factors"),
        ("attention_scale", json!(0.5), "attention"),
        ("layer_norm_eps", json!(0.5), "norms"),
        ("hadamard_block_size", json!(128), "Hadamard"),
        ("vision_config", json!({ "depth": 2 }), "text"),
        ("compression_config", json!({ "bits": 2 }), "storage"),
    ] {
        for folder in ["bitnet-tiny", "llama-tiny", "qwen3-group-tiny"] {
            let message = config_refusal(folder, |config| config[key] = value.clone());
            assert!(message.contains(key) && message.contains(need), "{folder}: {message}");
        }
    }
}

/// Keys of published configurations that change nothing at inference.
const HARMLESS: &str = r#"{
    "_attn_implementation_autoset": true, "_name_or_path": "x", "_flash_attn_2_enabled": true,
    "attention_dropout": 0.1, "attn_pdrop": 0.1, "attention_probs_dropout_prob": 0.1,
    "attn_implementation": "sdpa", "output_attentions": false, "output_hidden_states": false,
    "output_router_logits": true, "router_aux_loss_coef": 0.001, "num_logits_to_keep": 1,
    "use_flash_attention_2": true, "initializer_range": 0.02, "rope_interleaved": false,
    "max_window_layers": 28, "use_sliding_window": false, "sliding_window": null,
    "mlp_only_layers": [], "pruned_heads": {}, "use_mrope": false, "attn_output_gate": false,
    "chunk_size_feed_forward": 0, "embedding_multiplier": 1.0, "some_scale": 1,
    "layer_norm_eps": 1e-5, "transformers_version": "5.23.0", "unsloth_fixed": true,
    "auto_map": { "AutoConfig": "configuration_x.XConfig" }, "pretraining_tp": 1,
    "mup_denominator": 32, "use_cache": true, "neftune_noise_alpha": 5, "dtype": "bfloat16",
    "torch_dtype": "bfloat16", "gradient_checkpointing": true, "pad_token_id": 3,
    "cross_attention_hidden_size": null, "id2label": { "0": "LABEL_0" }, "head_dim": 32,
    "transformers.js_config": { "kv_cache_dtype": { "q4f16": "float16" } },
    "max_length": 20, "temperature": 1.0, "repetition_penalty": 1.1, "is_llama_config": true
}"#;

#[test]
fn harmless_keys_of_configurations_are_accepted() {
    for folder in ["bitnet-tiny", "llama-tiny"] {
        let plain = parsed(folder, |_| {}).unwrap();
        let decorated = parsed(folder, |config| {
            let harmless: Value = serde_json::from_str(HARMLESS).unwrap();
            for (key, value) in harmless.as_object().unwrap() {
                config[key] = value.clone();
            }
        });
        assert_eq!(decorated.unwrap(), plain, "{folder}");
    }
}

/// Adds an empty tensor to the weights of a folder.
fn with_tensor(name: &str) -> Result<Model, ModelError> {
    let folder = Folder::copy("bitnet-tiny");
    folder.edit_weights(|header, _| {
        let entry = json!({ "dtype": "BF16", "shape": [0], "data_offsets": [0, 0] });
        header.insert(name.to_owned(), entry);
    });
    Model::open(folder.path())
}

#[test]
fn only_listed_tensors_of_folders_may_be_left_out() {
    for name in [
        "lm_head.weight",
        "model.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ] {
        assert!(with_tensor(name).is_ok(), "{name}");
    }
    for (name, need) in [
        ("model.layers.0.self_attn.q_proj.norm.weight", "norm"),
        ("model.visual.blocks.0.weight", "text"),
        ("mtp.layers.0.mlp.up_proj.weight", "draft"),
        ("other.rotary_emb.inv_freq", "positions"),
        ("model.layers.0.linear_attn.A_log", "DeltaNet"),
        ("score.weight", "what it means"),
    ] {
        let error = with_tensor(name).expect_err("the tensor has no role").to_string();
        assert!(error.contains(name) && error.contains(need), "{error}");
    }
}

#[test]
fn parts_that_no_text_needs_are_skipped_and_named() {
    let plain = support::open("qwen35-tiny").fingerprint().unwrap();
    let folder = Folder::copy("qwen35-tiny");
    let extra = ["model.visual.blocks.0.weight", "mtp.fc.weight", "mtp.norm.weight"];
    let shard = folder.path().join("model-00001-of-00002.safetensors");
    let (mut header, data) = support::split_safetensors(&std::fs::read(&shard).unwrap());
    let entry = json!({ "dtype": "BF16", "shape": [0], "data_offsets": [0, 0] });
    header.extend(extra.map(|name| (name.to_owned(), entry.clone())));
    std::fs::write(shard, support::join_safetensors(&header, &data)).unwrap();
    let model = Model::open(folder.path()).unwrap();
    assert_eq!(skipped(&model), [("model.visual.*", 1), ("mtp.*", 2)]);
    assert_eq!(model.fingerprint().unwrap(), plain);
}

#[test]
fn blocks_that_draft_tokens_are_skipped_and_named() {
    for name in
        ["qwen35-tiny/qwen35-tiny-pq2_0.gguf", "qwen35-rotated-tiny/qwen35-rotated-tiny-q2_0.gguf"]
    {
        let mut file = RawGguf::read(&golden(name));
        let plain = open(&file).unwrap().fingerprint().unwrap();
        let layer = file.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.3."));
        let draft: Vec<_> = layer.cloned().collect();
        for mut tensor in draft {
            tensor.name = tensor.name.replace("blk.3.", "blk.4.");
            file.tensors.push(tensor);
        }
        add_tensor(&mut file, "blk.4.nextn.hnorm.weight");
        if name.contains("rotated") {
            const KEY: &str = "prism.hadamard.weight_names";
            let mut names = file.texts(KEY);
            names.push("blk.4.attn_q.weight".to_owned());
            file.set_texts(KEY, &names.iter().map(String::as_str).collect::<Vec<_>>());
        }
        assert!(open(&file).is_err(), "{name}: there are 4 blocks");
        file.set_u32("qwen35.block_count", 5);
        file.set_u32("qwen35.nextn_predict_layers", 1);
        let model = open(&file).unwrap();
        let of_draft = file.tensors.iter().filter(|tensor| tensor.name.starts_with("blk.4."));
        assert_eq!(skipped(&model), [("blk.4.*", of_draft.count())], "{name}");
        assert_eq!(model.fingerprint().unwrap(), plain, "{name}");
        file.remove("qwen35.nextn_predict_layers");
        assert!(open(&file).is_err(), "{name}: a draft block is no layer");
    }
}

fn skipped(model: &Model) -> Vec<(&str, usize)> {
    model.skipped().iter().map(|part| (&*part.tensors, part.count)).collect()
}
