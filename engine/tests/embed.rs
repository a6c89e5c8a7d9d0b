//! Vectors of texts compared with those of transformers, which are in `golden/bitnet-embedding-tiny`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{fs, path::Path, sync::Arc};

use safetensors::SafeTensors;
use serde_json::json;
use support::{RawGguf, cases, golden, hf_module, numbers, table, write_weights};
use tritmill_engine::{
    Request, SubmitError,
    backend::{LogitsFor, cpu::KvType},
    config::Norm,
    embed::{self, EmbedError},
    files::{Model, Target, convert},
    formats::{Format, Scale, TernaryMatrix},
    kernels::Isa,
    load::{self, DeviceChoice, EngineOptions, LoadError},
    measure::{self, Phase, Workload},
};

const FILE: &str = "bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s.gguf";

fn model() -> Arc<Model> {
    Arc::new(Model::open(&golden(FILE)).unwrap())
}

/// The texts of the golden data as tokens, and their vectors.
fn texts() -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let bytes = fs::read(golden("bitnet-embedding-tiny/logits.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let cases = cases("bitnet-embedding-tiny");
    let text = |prompt: &serde_json::Value| {
        let ids = numbers(&prompt["ids"]).into_iter().map(|id| id as u32).collect();
        let name = format!("{}.pooled", prompt["name"].as_str().unwrap());
        let pooled = tensors.tensor(&name).unwrap();
        let floats = pooled.data().as_chunks::<4>().0;
        (ids, floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    };
    cases["prompts"].as_array().unwrap().iter().map(text).unzip()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn vectors_are_those_of_the_reference() {
    let (texts, expected) = texts();
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    let each = isas.flat_map(|isa| Format::ALL.map(|format| (isa, format)));
    let mut first: Option<Vec<Vec<f32>>> = None;
    // As in the reference.
    let kv = KvType::F32;
    for (isa, format) in each {
        let options = EngineOptions { isa: Some(isa), format, kv, ..EngineOptions::default() };
        let vectors =
            embed::vectors(&mut load::engine(&model(), &options).unwrap(), &texts).unwrap();
        for (index, (vector, expected)) in vectors.iter().zip(&expected).enumerate() {
            assert!((dot(vector, vector) - 1.0).abs() < 1e-5, "a vector of length 1");
            // Longer texts meet values between two integers, which round one way or the other.
            let limit = if index < 3 { 1e-6 } else { 1e-3 };
            let distance = 1.0 - dot(vector, expected);
            assert!(distance < limit, "{isa} {format}, text {index}: 1 - cosine = {distance}");
        }
        assert_eq!(*first.get_or_insert_with(|| vectors.clone()), vectors, "{isa} {format}");
    }
}

#[test]
fn vectors_do_not_depend_on_what_is_computed_beside() {
    let (mut texts, _) = texts();
    // Texts longer than a step, between short ones.
    for len in [600, 3, 17, 1000, 1, 512, 40] {
        texts.push((0..len).map(|i| (i * 7 + len) % 500).collect());
    }
    let mut raw = RawGguf::read(&golden(FILE));
    raw.set_u32("qwen3.context_length", 1024);
    let model = Arc::new(Model::open_gguf_bytes("long", raw.bytes(32)).unwrap());
    let mut engine = load::engine(&model, &EngineOptions::default()).unwrap();
    let alone: Vec<Vec<f32>> = texts
        .iter()
        .map(|text| embed::vectors(&mut engine, std::slice::from_ref(text)).unwrap().remove(0))
        .collect();
    assert_eq!(embed::vectors(&mut engine, &texts).unwrap(), alone);
    texts.reverse();
    assert!(embed::vectors(&mut engine, &texts).unwrap().iter().eq(alone.iter().rev()));
}

#[test]
fn texts_get_the_end_token() {
    let cases = cases("bitnet-embedding-tiny");
    for case in cases["tokenizer_with_eos"].as_array().unwrap() {
        let ids: Vec<u32> = numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
        assert_eq!(embed::tokens(&model(), case["text"].as_str().unwrap()).unwrap(), ids);
    }
}

#[test]
fn texts_that_cannot_be_embedded_are_named() {
    let mut engine = load::engine(&model(), &EngineOptions::default()).unwrap();
    let mut error = |text: Vec<u32>| {
        let error = embed::vectors(&mut engine, &[vec![1, 2], text, vec![3]]);
        match error.expect_err("it cannot be embedded") {
            EmbedError::Refused { index: 1, source } => source,
            other => panic!("{other}"),
        }
    };
    assert_eq!(error(vec![]), SubmitError::EmptyPrompt);
    let too_long = error(vec![1; 513]);
    assert!(matches!(
        too_long,
        SubmitError::PromptTooLong { tokens: 513, context_length: 512, .. }
    ));
    let outside = error(vec![3, 512]);
    assert!(matches!(outside, SubmitError::TokenOutOfRange { token: 512, .. }), "{outside}");
    assert!(engine.is_idle());
    assert!(embed::vectors(&mut engine, &[]).unwrap().is_empty());
    let longest = embed::vectors(&mut engine, &[vec![1; 512]]).unwrap();
    assert_eq!(longest[0].len(), model().config().hidden_size);
}

#[test]
fn embedding_models_do_not_generate_and_others_do_not_embed() {
    let options = EngineOptions::default();
    let submit = |model: &Arc<Model>, embeds| {
        let request = Request { prompt: vec![1, 2], embeds, ..Request::default() };
        load::engine(model, &options).unwrap().submit(request)
    };
    assert_eq!(submit(&model(), false), Err(SubmitError::Embeds));
    assert!(matches!(load::backend(&model(), &options, 4), Err(LoadError::Embeds { .. })));
    let other = Arc::new(Model::open(&golden("bitnet-tiny")).unwrap());
    assert_eq!(submit(&other, true), Err(SubmitError::Generates));
    let on_gpu = EngineOptions { device: DeviceChoice::Cuda(0), ..options };
    let refused = load::engine(&model(), &on_gpu).err().unwrap();
    assert!(matches!(refused, LoadError::EmbedsOnGpu { .. }), "{refused}");
}

/// Writes the model of the golden file as a folder with dense weights: trits times the scale, which the mean of the magnitudes gives
/// back after a factor.
fn write_folder(model: &Model, folder: &Path, prefix: &str) {
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    let (shape, values) = table(model.embedding());
    tensors.push((format!("{prefix}embed_tokens.weight"), shape, values));
    for norm in model.norms() {
        let name = match norm {
            Norm::Attention(layer) => format!("layers.{layer}.input_layernorm"),
            Norm::FeedForward(layer) => format!("layers.{layer}.post_attention_layernorm"),
            Norm::Query(layer) => format!("layers.{layer}.self_attn.q_norm"),
            Norm::Key(layer) => format!("layers.{layer}.self_attn.k_norm"),
            Norm::Linear(layer, linear) => format!("layers.{layer}.{}.norm", hf_module(linear)),
            _ => "norm".to_owned(),
        };
        let values = model.norm(norm).unwrap();
        tensors.push((format!("{prefix}{name}.weight"), vec![values.len()], values));
    }
    for layer in 0..model.config().layer_count {
        for &linear in model.config().linears(layer) {
            let TernaryMatrix { rows, cols, trits, scale, .. } =
                model.ternary(layer, linear).unwrap();
            let Scale::Multiply(scale) = scale else { panic!("one scale") };
            let ones = trits.iter().filter(|trit| **trit != 0).count();
            let factor = f64::from(scale) * trits.len() as f64 / ones as f64;
            let values = trits.iter().map(|trit| (f64::from(*trit) * factor) as f32).collect();
            let name = format!("{prefix}layers.{layer}.{}.weight", hf_module(linear));
            tensors.push((name, vec![rows, cols], values));
        }
    }
    write_weights(&tensors, folder);
    let config = model.config();
    let json = json!({
        "architectures": ["Qwen3Model"], "model_type": "qwen3", "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layer_count, "num_attention_heads": config.head_count,
        "num_key_value_heads": config.kv_head_count, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "rms_norm_eps": 1e-6, "rope_theta": config.rope_theta,
        "max_position_embeddings": config.context_length, "tie_word_embeddings": true,
        "use_sliding_window": false, "sliding_window": null, "torch_dtype": "bfloat16",
    });
    fs::write(folder.join("config.json"), json.to_string()).unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(golden("bitnet-embedding-tiny").join(file), folder.join(file)).unwrap();
    }
}

#[test]
fn folders_give_the_vectors_of_the_reference() {
    let (texts, expected) = texts();
    let file = model();
    for prefix in ["", "model."] {
        let folder = tempfile::tempdir().unwrap();
        write_folder(&file, folder.path(), prefix);
        let refused = Model::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("1_Pooling/config.json"), "{refused}");
        fs::create_dir(folder.path().join("1_Pooling")).unwrap();
        let pooling = |mean: bool| {
            let json = json!({
                "word_embedding_dimension": 256, "pooling_mode_cls_token": false,
                "pooling_mode_mean_tokens": mean, "pooling_mode_lasttoken": !mean,
            });
            fs::write(folder.path().join("1_Pooling/config.json"), json.to_string()).unwrap();
        };
        pooling(true);
        let refused = Model::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("pooling_mode_"), "{refused}");
        let newer = json!({ "embedding_dimension": 256, "pooling_mode": "mean" });
        fs::write(folder.path().join("1_Pooling/config.json"), newer.to_string()).unwrap();
        let refused = Model::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("pooling_mode = \"mean\""), "{refused}");
        pooling(false);
        let modules = |kind: &str| {
            let json = json!([
                { "idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer" },
                { "idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling" },
                { "idx": 2, "name": "2", "path": "2", "type": format!("sentence_transformers.models.{kind}") },
            ]);
            fs::write(folder.path().join("modules.json"), json.to_string()).unwrap();
        };
        modules("Dense");
        let refused = Model::open(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("modules.type") && refused.contains("Dense"), "{refused}");
        modules("Normalize");
        // The end token of texts is not that of conversations.
        let config = folder.path().join("tokenizer_config.json");
        let json = fs::read_to_string(&config).unwrap();
        let json =
            json.replace("\"eos_token\": \"<|endoftext|>\"", "\"eos_token\": \"<|im_end|>\"");
        assert!(json.contains("im_end"));
        fs::write(&config, json).unwrap();
        let model = Arc::new(Model::open(folder.path()).unwrap());
        assert!(model.config().pooling.is_some() && model.config().linear_norm_eps.is_some());
        for layer in 0..model.config().layer_count {
            for &linear in model.config().linears(layer) {
                let [a, b] = [&model, &file].map(|m| m.ternary(layer, linear).unwrap());
                assert!(a.trits == b.trits, "{layer} {linear:?}");
            }
        }
        for case in cases("bitnet-embedding-tiny")["tokenizer_with_eos"].as_array().unwrap() {
            let ids: Vec<u32> = numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
            let text = case["text"].as_str().unwrap();
            assert_eq!(model.tokenizer().encode(text, true).unwrap(), ids, "{text:?}");
        }
        let options = EngineOptions { kv: KvType::F32, ..EngineOptions::default() };
        let vectors = embed::vectors(&mut load::engine(&model, &options).unwrap(), &texts).unwrap();
        for (vector, expected) in vectors.iter().zip(&expected) {
            assert!(dot(vector, expected) > 0.999, "{}", dot(vector, expected));
        }
    }
}

#[test]
fn conversions_keep_the_model() {
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("out.gguf");
    let model = model();
    convert(&model, Target::GgufI2S, &path).unwrap();
    let converted = Model::open(&path).unwrap();
    assert_eq!(converted.config(), model.config());
    assert_eq!(converted.fingerprint().unwrap(), model.fingerprint().unwrap());
    let error = convert(&model, Target::Folder, &out.path().join("never")).unwrap_err();
    assert!(error.to_string().contains("embedding models"), "{error}");
}

#[test]
fn every_batch_of_texts_is_measured_and_computed_as_a_whole() {
    let mut engine = load::engine(&model(), &EngineOptions::default()).unwrap();
    let workload = Workload {
        batches: vec![1, 5],
        prompt_tokens: 40,
        shared_tokens: 0,
        generate_tokens: 7,
        logits: LogitsFor::Last,
        repetitions: 2,
    };
    let mut repetitions = Vec::new();
    let speeds = measure::texts(&mut engine, &workload, |number| repetitions.push(number)).unwrap();
    let cases: Vec<_> = speeds.iter().map(|speed| (speed.phase, speed.batch)).collect();
    assert_eq!(cases, [(Phase::Embed, 1), (Phase::Embed, 5)]);
    assert!(speeds.iter().all(|s| 0.0 < s.lowest && s.lowest <= s.median && s.median <= s.highest));
    assert_eq!(repetitions, [0, 1]);
    // With the warm-up, and without keys and values of other texts.
    let stats = engine.stats();
    assert_eq!((stats.prefill_tokens, stats.prefix_hit_tokens), (40 * (1 + 2 * 6), 0));
    assert_eq!((stats.decode_tokens, stats.generated_tokens), (0, 0));
    let too_long = Workload { prompt_tokens: 513, ..workload };
    assert!(measure::texts(&mut engine, &too_long, |_| {}).is_err());
}
