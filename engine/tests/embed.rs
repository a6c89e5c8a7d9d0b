//! Vectors of texts compared with those of transformers, which are in `golden/bitnet-embedding-tiny`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{fs, sync::Arc};

use safetensors::SafeTensors;
use support::{RawGguf, cases, golden, numbers};
use tritmill_engine::{
    Request, SubmitError,
    backend::cpu::KvType,
    embed::{self, EmbedError},
    files::Model,
    formats::Format,
    kernels::Isa,
    load::{self, DeviceChoice, EngineOptions, LoadError},
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
