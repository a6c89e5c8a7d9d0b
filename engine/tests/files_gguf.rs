//! GGUF files written by the encoders of bitnet.cpp and llama.cpp.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::path::{Path, PathBuf};

use serde_json::Value;
use support::{RawGguf, cases, check_same_weights, golden, open, sha256, sha256_of};
use tritmill_engine::{
    config::{Activation, Linear, Norm},
    files::{DenseType, Model},
    formats::Scale,
};

#[test]
fn i2_s_file_has_the_weights_of_its_source_folder() {
    let folder = open("bitnet-tiny");
    let gguf = open("gguf/bitnet-tiny-i2_s.gguf");
    check_same_weights(&folder, &gguf);
    for (layer, linear) in
        (0..4).flat_map(|layer| Linear::OF_ATTENTION.map(|linear| (layer, linear)))
    {
        let scale = |model: &Model| model.ternary(layer, linear).unwrap().scale;
        assert_eq!(scale(&folder), scale(&gguf), "{layer} {linear:?}");
    }
}

#[test]
fn fingerprint_does_not_depend_on_the_container() {
    let folder = open("bitnet-tiny");
    let gguf = open("gguf/bitnet-tiny-i2_s.gguf");
    assert_eq!(folder.fingerprint().unwrap(), gguf.fingerprint().unwrap());
    let other = open("llama-tiny");
    assert_ne!(folder.fingerprint().unwrap(), other.fingerprint().unwrap());
}

#[test]
fn tokenizer_rebuilt_from_metadata_encodes_like_the_folders() {
    let gguf = open("gguf/bitnet-tiny-i2_s.gguf");
    let cases = cases("bitnet-tiny");
    for case in cases["tokenizer"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = |key: &str| -> Vec<u32> { serde_json::from_value(case[key].clone()).unwrap() };
        assert_eq!(gguf.tokenizer().encode(text, true).unwrap(), ids("ids"), "{text:?}");
        assert_eq!(
            gguf.tokenizer().encode(text, false).unwrap(),
            ids("ids_no_special"),
            "{text:?}"
        );
        assert_eq!(gguf.tokenizer().decode(&ids("ids"), true), case["decoded_skip_special"]);
    }
    for case in cases["chat"].as_array().unwrap() {
        let messages: Vec<_> = serde_json::from_value(case["messages"].clone()).unwrap();
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        let text = gguf.chat_template().unwrap().render(&messages, prompt).unwrap();
        assert_eq!(case["rendered"], text);
    }
}

/// Four packings of the same random weights.
const SYNTHETIC: [&str; 4] =
    ["synth-TQ1_0.gguf", "synth-TQ2_0.gguf", "synth-i2_s.gguf", "synth-i2_s-q6k.gguf"];

#[test]
fn every_packing_decodes_to_the_same_trits_and_scale() {
    let expected = std::fs::read(golden("gguf/synth-trits.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    for file in SYNTHETIC {
        let model = Model::open(&golden("gguf").join(file)).unwrap();
        assert_eq!(expected.as_object().unwrap().len(), model.config().layer_count * 7);
        for layer in 0..model.config().layer_count {
            for linear in Linear::OF_ATTENTION {
                let name = model.ternary_name(layer, linear);
                let matrix = model.ternary(layer, linear).unwrap();
                let expected = &expected[name];
                assert_eq!(expected["shape_rows_cols"][0], matrix.rows, "{file} {name}");
                assert_eq!(expected["sha256_of_row_major_int8"], sha256(&matrix), "{file} {name}");
                let scale = expected["scale"].as_f64().unwrap() as f32;
                assert_eq!(Scale::Multiply(scale), matrix.scale, "{file} {name}");
            }
        }
    }
}

#[test]
fn architecture_selects_the_gate() {
    let gate = |file| Model::open(&golden("gguf").join(file)).unwrap().config().activation;
    assert_eq!(gate("synth-TQ1_0.gguf"), Activation::Silu); // arch bitnet
    assert_eq!(gate("synth-i2_s.gguf"), Activation::SquaredRelu); // arch bitnet-b1.58
}

#[test]
fn q6_k_embedding_is_close_to_its_f16_source() {
    let (exact, quantized) = (open("gguf/synth-i2_s.gguf"), open("gguf/synth-i2_s-q6k.gguf"));
    let (exact, quantized) = (exact.embedding(), quantized.embedding());
    assert_eq!((exact.dtype, quantized.dtype), (DenseType::F16, DenseType::Q6K));
    let (mut a, mut b) = (vec![0.0; exact.cols], vec![0.0; exact.cols]);
    let (mut error, mut power) = (0.0, 0.0);
    for row in 0..exact.rows {
        exact.row(row, &mut a);
        quantized.row(row, &mut b);
        for (x, y) in a.iter().zip(&b) {
            error += f64::from(x - y).powi(2);
            power += f64::from(*x).powi(2);
        }
    }
    assert!(error / power < 1e-3, "relative error {}", error / power);
}

#[test]
fn sub_norms_and_final_norm_are_found() {
    let model = open("gguf/synth-TQ2_0.gguf");
    assert_eq!(model.norm(Norm::AttentionSub(1)).unwrap().len(), 256);
    assert_eq!(model.norm(Norm::FeedForwardSub(0)).unwrap().len(), 768);
    assert_eq!(model.norm(Norm::Final).unwrap().len(), 256);
    assert!(model.norm(Norm::Linear(0, Linear::Q)).is_err());
}

/// Files of an independent encoder (`tests/data/make_gguf.py`).
fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn f32_sha256(values: &[f32]) -> String {
    sha256_of(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

fn widened(matrix: tritmill_engine::files::Dense<'_>) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.cols];
    values.chunks_mut(matrix.cols).enumerate().for_each(|(row, out)| matrix.row(row, out));
    values
}

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(data("expected.json")).unwrap()).unwrap()
}

fn check_independent(file: &str, dtype: DenseType) {
    let model = Model::open(&data(file)).unwrap();
    let expected = &expected()[file];
    assert_eq!(model.embedding().dtype, dtype);
    let embedding = f32_sha256(&widened(model.embedding()));
    assert_eq!(expected["token_embd.weight"]["sha256_of_f32"], embedding);
    let head = if model.config().tied_head { "token_embd.weight" } else { "output.weight" };
    assert_eq!(expected[head]["sha256_of_f32"], f32_sha256(&widened(model.head())));
    let norm = f32_sha256(&model.norm(Norm::FeedForward(0)).unwrap());
    assert_eq!(expected["blk.0.ffn_norm.weight"]["sha256_of_f32"], norm);
    for linear in Linear::OF_ATTENTION {
        let name = model.ternary_name(0, linear);
        let matrix = model.ternary(0, linear).unwrap();
        assert_eq!(expected[name]["sha256_of_row_major_int8"], sha256(&matrix), "{name}");
        let scale = expected[name]["scale"].as_f64().unwrap() as f32;
        assert_eq!(matrix.scale, Scale::Multiply(scale), "{name}");
    }
}

#[test]
fn llama_query_and_key_rows_are_in_half_split_order() {
    check_independent("llama-tq2_0-q8_0.gguf", DenseType::Q8_0);
}

#[test]
fn tq1_0_and_bf16_of_an_independent_encoder_decode_exactly() {
    check_independent("bitnet-tq1_0-bf16.gguf", DenseType::Bf16);
}

#[test]
fn q6_k_dequantizes_as_the_independent_decoder_does() {
    let model = open("gguf/synth-TQ1_0.gguf");
    assert_eq!(model.embedding().dtype, DenseType::Q6K);
    let expected = &expected()["golden/synth-TQ1_0.gguf"];
    assert_eq!(expected["sha256_of_f32"], f32_sha256(&widened(model.embedding())));
}

#[test]
fn token_types_mark_special_and_padding_tokens() {
    let model = Model::open(&data("llama-tq2_0-q8_0.gguf")).unwrap();
    let tokenizer = model.tokenizer();
    assert_eq!(tokenizer.encode("é<tag>", true).unwrap(), [256, 0xc3, 0xa9, 258]);
    assert_eq!((tokenizer.is_special(257), tokenizer.is_special(258)), (true, false));
    assert_eq!(tokenizer.token_bytes(0xc3), Some(&[0xc3][..]));
    assert_eq!(tokenizer.token_bytes(259), None);
    assert_eq!(model.config().eos_tokens, [257]);
}

/// Some converters write control tokens as normal ones: their text would become other tokens, and answers would not end.
#[test]
fn control_tokens_are_found_by_their_text_and_by_their_keys() {
    let tokens = |kind: i32, text: Option<&str>| {
        let mut file = RawGguf::read(&golden("gguf/bitnet-tiny-i2_s.gguf"));
        let mut kinds = [1; 1024];
        kinds[1019..1023].fill(3);
        kinds[1023] = kind;
        file.set_i32s("tokenizer.ggml.token_type", &kinds);
        file.set_u32("tokenizer.ggml.eos_token_id", 1020);
        file.remove("tritmill.eos_token_ids");
        if let Some(text) = text {
            let mut texts = file.texts("tokenizer.ggml.tokens");
            texts[1023] = text.to_owned();
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            file.set_texts("tokenizer.ggml.tokens", &texts);
        }
        let model = Model::open_gguf_bytes("edited", file.bytes(32)).unwrap();
        let text = text.unwrap_or("<|eot_id|>");
        let ids = model.tokenizer().encode(text, false).unwrap();
        (ids, model.tokenizer().is_special(1023), model.config().eos_tokens.clone())
    };
    assert_eq!(tokens(1, None), (vec![1023], true, vec![1020, 1023]));
    assert_eq!(tokens(4, Some("<end_of_turn>")), (vec![1023], true, vec![1020, 1023]));
    assert_eq!(tokens(1, Some("<|tool_response|>")), (vec![1023], true, vec![1020]));
    // A tag that a converter marked as text stays text.
    assert_eq!(tokens(4, Some("<tool_call>")), (vec![1023], false, vec![1020]));
}
