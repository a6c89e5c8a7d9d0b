//! Models with a scale for each group of inputs in their linears, and dense tables: MiniCPM (BitCPM) and Llama (TriLM). The
//! log-probabilities are those of llama.cpp; `golden/group-linears/make.py` makes the files.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::{path::Path, sync::Arc};

use serde_json::{Map, Value, json};
use support::{RawGguf, all_logits, argmax, golden, hf_module, join_safetensors, numbers};
use tritmill_engine::{
    backend::{
        Backend,
        cpu::{self, CpuOptions, KvType},
    },
    config::{Linear, Norm, RopeScaling},
    files::{DenseType, Model, Target, convert, shape, synth},
    formats::Format,
    kernels::{Digits, Isa},
};

const FILES: [&str; 3] = ["minicpm-tq2_0", "minicpm-tq1_0", "llama-tq2_0"];
const BLOCKS: usize = 16;

fn path(file: &str) -> std::path::PathBuf {
    golden("group-linears").join(format!("{file}.gguf"))
}

fn open(file: &str) -> Arc<Model> {
    Arc::new(Model::open(&path(file)).unwrap())
}

fn backend(model: &Arc<Model>, activations: Digits) -> Box<dyn Backend> {
    let options = CpuOptions { threads: 2, kv: KvType::F32, ..CpuOptions::new(BLOCKS) };
    let options = CpuOptions { activations: Some(activations), ..options };
    cpu::load(Arc::clone(model), options).unwrap()
}

/// Returns prompts with the log-probabilities after their last token.
fn cases(file: &str) -> Vec<(Vec<u32>, Vec<f64>)> {
    let text = std::fs::read(golden("group-linears/cases.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    let cases = all[file.split('-').next().unwrap()].as_array().unwrap().clone();
    let ids = |case: &Value| numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
    cases.iter().map(|case| (ids(case), numbers(&case["log_probabilities"]))).collect()
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - largest) - sum.ln()).collect()
}

/// Returns the RMS of the differences, relative to the spread of the expected values.
fn difference(got: &[f64], want: &[f64]) -> f64 {
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let spread: f64 = want.iter().map(|w| (w - mean) * (w - mean)).sum();
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
    (error / spread).sqrt()
}

#[test]
fn log_probabilities_are_those_of_llama_cpp() {
    for file in FILES {
        let model = open(file);
        // As the golden data of the other families with these activations.
        for (activations, limit) in [(Digits::Two, 2e-3), (Digits::One, 0.05)] {
            let mut backend = backend(&model, activations);
            for (ids, want) in cases(file) {
                let logits = all_logits(backend.as_mut(), BLOCKS, &ids);
                let got = log_probabilities(logits.last().unwrap());
                let difference = difference(&got, &want);
                eprintln!("{file} {activations} {} tokens: {difference:.2e}", ids.len());
                assert!(difference <= limit, "{file} {activations}: {difference}");
                if activations == Digits::Two {
                    let largest = |values: &[f64]| {
                        argmax(&values.iter().map(|&value| value as f32).collect::<Vec<_>>())
                    };
                    assert_eq!(largest(&got), largest(&want), "{file}");
                }
            }
        }
    }
}

#[test]
fn isas_formats_and_screened_heads_give_the_same_bits() {
    for file in ["minicpm-tq2_0", "llama-tq2_0"] {
        let model = open(file);
        let (ids, _) = cases(file).swap_remove(2);
        let mut want = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for format in Format::ALL {
                let options = CpuOptions { format, isa, threads: 3, ..CpuOptions::new(BLOCKS) };
                let mut backend = cpu::load(Arc::clone(&model), options).unwrap();
                let got = all_logits(backend.as_mut(), BLOCKS, &ids);
                assert!(*want.get_or_insert_with(|| got.clone()) == got, "{file} {isa} {format}");
            }
        }
    }
}

#[test]
fn packings_of_a_model_are_the_same_model() {
    let (codes, digits) = (open("minicpm-tq2_0"), open("minicpm-tq1_0"));
    support::check_same_weights(&codes, &digits);
    assert_eq!(codes.fingerprint().unwrap(), digits.fingerprint().unwrap());
    let groups = codes.ternary(0, Linear::Q).unwrap().groups.unwrap();
    assert_eq!(groups.size, 128);
    assert_ne!(codes.fingerprint().unwrap(), open("llama-tq2_0").fingerprint().unwrap());
}

#[test]
fn factors_and_divisors_are_read() {
    let model = open("minicpm-tq2_0");
    let config = model.config();
    let factors = config.multipliers;
    assert_eq!((factors.embedding, factors.logit_divisor), (12.0, 4.0));
    assert!((factors.residual - 1.4 / 2f32.sqrt()).abs() < 1e-6);
    let RopeScaling::Divisors { divisors, .. } = &config.rope_scaling else {
        panic!("no divisors")
    };
    assert_eq!((divisors[0], divisors[31]), (1.0, 4.0), "the short ones");
    assert!(config.group_scales && !config.ternary_tables);
    let llama = open("llama-tq2_0").config().clone();
    assert!(llama.group_scales && llama.multipliers.is_none());
    assert_eq!(
        (llama.linear_biases, &config.linear_biases),
        (Linear::OF_ATTENTION.to_vec(), &vec![])
    );
}

/// The numbers are those of the `gguf` package.
#[test]
fn rows_of_q4_k_are_those_of_the_reference() {
    let model = open("llama-tq2_0");
    let embedding = model.embedding();
    assert_eq!(embedding.dtype, DenseType::Q4K);
    let mut row = [0f32; 256];
    embedding.row(3, &mut row);
    let some = [0, 31, 32, 63, 64, 128, 200, 255].map(|at| row[at]);
    let want = [
        -0.129_913_33,
        0.100_135_8,
        -1.365_051_3,
        0.735_397_34,
        -1.430_141_4,
        0.780_242_9,
        -1.555_156_7,
        -0.184_978_49,
    ];
    assert_eq!(some, want);
    embedding.row(511, &mut row);
    assert_eq!(row[255], -0.940_040_6);
}

/// Writes a model as a folder of dense f16 weights, as OpenBMB and SpectraSuite publish theirs.
fn write_folder(model: &Model, folder: &Path) {
    let config = model.config();
    let is_minicpm = !config.multipliers.is_none();
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut add = |name: String, dtype: &str, shape: &[usize], bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend_from_slice(bytes);
    };
    let table = [config.vocab_size, config.hidden_size];
    let embedding = model.embedding();
    let mut widened = vec![0f32; table[0] * table[1]];
    for (token, row) in widened.chunks_exact_mut(table[1]).enumerate() {
        embedding.row(token, row);
    }
    let bytes: Vec<u8> = widened.iter().flat_map(|element| element.to_le_bytes()).collect();
    add("model.embed_tokens.weight".into(), "F32", &table, &bytes);
    add("lm_head.weight".into(), "F16", &table, model.head().bytes);
    for norm in model.norms() {
        let name = match norm {
            Norm::Attention(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
            Norm::FeedForward(l) => format!("model.layers.{l}.post_attention_layernorm.weight"),
            _ => "model.norm.weight".to_owned(),
        };
        let weights = model.norm(norm).unwrap();
        let bytes: Vec<u8> = weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        add(name, "F32", &[weights.len()], &bytes);
    }
    for layer in 0..config.layer_count {
        for linear in Linear::OF_ATTENTION {
            let matrix = model.ternary(layer, linear).unwrap();
            let groups = matrix.groups.unwrap();
            let weight = |(at, trit): (usize, &i8)| {
                half::f16::from_f32(f32::from(*trit)) * groups.scales[at / groups.size]
            };
            let weights = matrix.trits.iter().enumerate().map(weight);
            let bytes: Vec<u8> = weights.flat_map(half::f16::to_le_bytes).collect();
            let name = format!("model.layers.{layer}.{}.weight", hf_module(linear));
            add(name, "F16", &[matrix.rows, matrix.cols], &bytes);
        }
    }
    for layer in 0..config.layer_count {
        for linear in Linear::OF_ATTENTION {
            let Some(bias) = model.bias(layer, linear).unwrap() else { continue };
            let bytes: Vec<u8> = bias.iter().flat_map(|element| element.to_le_bytes()).collect();
            let name = format!("model.layers.{layer}.{}.bias", hf_module(linear));
            add(name, "F32", &[bias.len()], &bytes);
        }
    }
    std::fs::write(folder.join("model.safetensors"), join_safetensors(&header, &data)).unwrap();
    let mut json = json!({
        "model_type": if is_minicpm { "minicpm" } else { "llama" }, "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layer_count, "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length, "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": false,
        "bos_token_id": config.bos_token, "eos_token_id": config.eos_tokens,
        "attention_bias": !is_minicpm, "mlp_bias": !is_minicpm,
    });
    if let RopeScaling::Divisors { divisors, long_factors: Some(beyond) } = &config.rope_scaling {
        (json["scale_emb"], json["scale_depth"], json["dim_model_base"]) =
            (json!(12), json!(1.4), json!(64));
        json["rope_scaling"] = json!({
            "rope_type": "longrope", "short_factor": divisors, "long_factor": beyond.divisors,
            "original_max_position_embeddings": config.context_length,
        });
    }
    std::fs::write(folder.join("config.json"), json.to_string()).unwrap();
    // Any tokenizer that fits will do.
    let (other, mut tiny) = (tempfile::tempdir().unwrap(), shape("llama-8b").unwrap());
    (tiny.layer_count, tiny.hidden_size, tiny.intermediate_size) = (1, 64, 64);
    tiny.vocab_size = config.vocab_size;
    synth(&tiny, &other.path().join("model"), 0).unwrap();
    let tokenizer = other.path().join("model/tokenizer.json");
    std::fs::copy(tokenizer, folder.join("tokenizer.json")).unwrap();
}

#[test]
fn folder_of_dense_weights_is_the_same_model() {
    for file in ["minicpm-tq2_0", "llama-tq2_0"] {
        let (model, folder) = (open(file), tempfile::tempdir().unwrap());
        write_folder(&model, folder.path());
        let copy = Arc::new(Model::open(folder.path()).unwrap());
        support::check_same_weights(&model, &copy);
        let (ids, _) = cases(file).swap_remove(1);
        let logits = |model| all_logits(backend(model, Digits::Two).as_mut(), BLOCKS, &ids);
        assert!(logits(&model) == logits(&copy), "{file}");
    }
}

/// Biases, constant factors, and the divisors of LongRoPE for short and long texts.
#[test]
fn conversions_keep_the_model_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("copy.gguf");
    for file in ["minicpm-tq2_0", "llama-tq2_0"] {
        let dense = folder.path().join(file);
        std::fs::create_dir(&dense).unwrap();
        write_folder(&open(file), &dense);
        // The BOS token of the other tokenizer.
        let config = std::fs::read_to_string(dense.join("config.json")).unwrap();
        let config = config.replace("\"bos_token_id\":257", "\"bos_token_id\":256");
        std::fs::write(dense.join("config.json"), config).unwrap();
        for source in [open(file), Arc::new(Model::open(&dense).unwrap())] {
            let (ids, _) = cases(file).swap_remove(1);
            let logits =
                |model: &Arc<Model>| all_logits(backend(model, Digits::Two).as_mut(), BLOCKS, &ids);
            let want = logits(&source);
            for target in GROUP_TARGETS {
                convert(&source, target, &out).unwrap();
                let copy = Arc::new(Model::open(&out).unwrap());
                support::check_same_weights(&source, &copy);
                assert_eq!(copy.fingerprint().unwrap(), source.fingerprint().unwrap());
                assert!(logits(&copy) == want, "{file} {target}");
            }
        }
    }
}

const GROUP_TARGETS: [Target; 4] =
    [Target::GgufQ2_0, Target::GgufPq2_0, Target::GgufPtq1_0, Target::GgufTq2_0];

/// The keys and tensors are those of llama.cpp's converter.
#[test]
fn longrope_and_biases_are_written_as_llama_cpp_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let converted = |file: &str, target| {
        let out = folder.path().join("copy.gguf");
        convert(&open(file), target, &out).unwrap();
        RawGguf::read(&out)
    };
    let mut longrope = converted("minicpm-tq2_0", Target::GgufTq2_0);
    let mut source = RawGguf::read(&path("minicpm-tq2_0"));
    for key in ["embedding_scale", "residual_scale", "logit_scale"] {
        assert_eq!(
            longrope.value(&format!("minicpm.{key}")),
            source.value(&format!("minicpm.{key}"))
        );
    }
    for key in ["type", "original_context_length"] {
        let key = format!("minicpm.rope.scaling.{key}");
        assert_eq!(longrope.value(&key), source.value(&key), "{key}");
    }
    for name in ["rope_factors_short.weight", "rope_factors_long.weight", "blk.1.attn_q.weight"] {
        assert_eq!(longrope.tensor(name).bytes, source.tensor(name).bytes, "{name}");
    }
    // Without the long divisors there is no LongRoPE, only divisors.
    source.tensors.retain(|tensor| tensor.name != "rope_factors_long.weight");
    let short = Model::open_gguf_bytes("short", source.bytes(32)).unwrap();
    let out = folder.path().join("short.gguf");
    convert(&short, Target::GgufTq2_0, &out).unwrap();
    assert_eq!(RawGguf::read(&out).value("minicpm.rope.scaling.type"), None);
    assert_eq!(Model::open(&out).unwrap().fingerprint().unwrap(), short.fingerprint().unwrap());

    let mut biased = converted("llama-tq2_0", Target::GgufTq2_0);
    let mut source = RawGguf::read(&path("llama-tq2_0"));
    for name in ["attn_q", "attn_k", "attn_output", "ffn_gate"] {
        let name = format!("blk.1.{name}.bias");
        assert_eq!(biased.tensor(&name).bytes, source.tensor(&name).bytes, "{name}");
    }
}

/// Returns the error for a file after an edit.
fn refusal_of(file: &str, edit: impl FnOnce(&mut RawGguf)) -> String {
    let mut raw = RawGguf::read(&path(file));
    edit(&mut raw);
    let opened = Model::open_gguf_bytes("edited", raw.bytes(32));
    let error = opened.and_then(|model| {
        cpu::load(Arc::new(model), CpuOptions::new(1)).map_err(|error| match error {
            cpu::LoadError::Model(error) => error,
            other => panic!("{other}"),
        })
    });
    error.err().unwrap().to_string()
}

fn refusal(edit: impl FnOnce(&mut RawGguf)) -> String {
    refusal_of("minicpm-tq2_0", edit)
}

#[test]
fn defects_of_biases_are_named() {
    let without = |name: &'static str| {
        refusal_of("llama-tq2_0", |raw| raw.tensors.retain(|tensor| tensor.name != name))
    };
    let error = without("blk.1.attn_v.bias");
    assert!(error.contains("blk.1.attn_v.bias"), "{error}");
    let error = without("blk.0.ffn_up.bias");
    assert!(error.contains("blk.0.ffn_gate.bias"), "{error}");
    let nan = |raw: &mut RawGguf| raw.tensor("blk.1.ffn_down.bias").bytes[..4].fill(0xff);
    let error = refusal_of("llama-tq2_0", nan);
    assert!(error.contains("blk.1.ffn_down.bias"), "{error}");
}

#[test]
fn defects_are_named() {
    for key in ["minicpm.embedding_scale", "minicpm.residual_scale", "minicpm.logit_scale"] {
        let error = refusal(|raw| raw.remove(key));
        assert!(error.contains(key), "{error}");
        for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let error = refusal(|raw| raw.set_f32(key, wrong));
            assert!(error.contains(key), "{wrong}: {error}");
        }
    }
    let error = refusal(|raw| raw.set_f32("minicpm.residual_scale", 1e-20));
    assert!(error.contains("residual_scale"), "{error}");
    let key = "minicpm.rope.scaling.original_context_length";
    let error = refusal(|raw| raw.set_u32(key, 511));
    assert!(error.contains(key), "{error}");
    let error = refusal(|raw| raw.set_f32("minicpm.unknown", 1.0));
    assert!(error.contains("minicpm.unknown"), "{error}");
    let error = refusal(|raw| raw.tensor("blk.1.ffn_up.weight").bytes[66 + 5] = 0xff);
    assert!(error.contains("blk.1.ffn_up.weight") && error.contains("code 3"), "{error}");
    let error = refusal(|raw| raw.tensor("blk.0.attn_v.weight").bytes[64..66].fill(0xff));
    assert!(error.contains("blk.0.attn_v.weight") && error.contains("scale"), "{error}");
    let error = refusal(|raw| raw.tensor("rope_factors_short.weight").bytes[..4].fill(0));
    assert!(error.contains("rope_factors_short.weight"), "{error}");
}
