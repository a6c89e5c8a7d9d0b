//! SentencePiece vocabularies give the tokens and the text that SentencePiece itself gives, from `tokenizer.model`
//! and from GGUF metadata. `data/make_sentencepiece.py` trained the models and recorded the cases.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{path::PathBuf, sync::Arc, time::Instant};

use serde_json::{Value, json};
use support::{Folder, Random, RawGguf, golden};
use tritmill_engine::{
    Engine, EngineConfig, Event, Request, SamplingParams, TokenText,
    backend::cpu::{self, CpuOptions},
    files::{Model, ModelError, Target, convert},
    tokenizer::Tokenizer,
};

/// Models with their settings: whether a text gets a space, and whether other spaces are reduced.
const MODELS: [(&str, bool, bool); 4] = [
    ("spm-bpe-bytes", true, false),
    ("spm-bpe-rules", true, true),
    ("spm-unigram-rules", true, true),
    ("spm-unigram-bytes", false, false),
];

fn data(name: &str) -> PathBuf {
    golden("../data").join(name)
}

fn recorded(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(data(&format!("{name}.json"))).unwrap()).unwrap()
}

/// Returns a folder with this SentencePiece file and `tokenizer_config.json`.
fn folder(name: &str, config: &Value) -> Folder {
    let folder = Folder::copy("llama-tiny");
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    std::fs::copy(data(&format!("{name}.model")), folder.path().join("tokenizer.model")).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn open(name: &str, config: &Value) -> Model {
    Model::open(folder(name, config).path()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Checks ids and decoded text of all cases. SentencePiece shows an unknown piece as ` ⁇ `.
fn check_cases(tokenizer: &Tokenizer, name: &str) {
    for case in recorded(name)["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name}: {text:?}");
        let decoded = tokenizer.decode(&expected, false).replace("<unk>", " ⁇ ");
        assert_eq!(decoded, case["decoded"], "{name}: {text:?}");
    }
}

#[test]
fn tokenizer_model_gives_the_tokens_and_text_of_sentencepiece() {
    for (name, ..) in MODELS {
        for config in [json!({}), json!({ "legacy": true })] {
            check_cases(open(name, &config).tokenizer(), name);
        }
    }
}

#[test]
fn spaces_after_special_tokens_follow_the_key_legacy() {
    for (name, ..) in MODELS {
        for (key, config) in [("legacy", json!({})), ("first", json!({ "legacy": false }))] {
            let model = open(name, &config);
            for case in recorded(name)["parts"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let found = model.tokenizer().encode(text, false).unwrap();
                assert_eq!(found, ids(&case[key]), "{name}, {key}: {text:?}");
            }
        }
    }
}

#[test]
fn tokens_around_a_prompt_and_added_tokens_are_those_of_the_configuration() {
    let framed =
        |config: Value| open("spm-bpe-bytes", &config).tokenizer().encode("", true).unwrap();
    assert_eq!(framed(json!({})), [1], "BOS, as transformers' Llama tokenizer");
    assert_eq!(framed(json!({ "add_bos_token": false })), [0u32; 0]);
    assert_eq!(framed(json!({ "add_eos_token": true })), [1, 2]);
    assert_eq!(framed(json!({ "bos_token": "</s>" })), [2]);

    let added = json!({ "added_tokens_decoder": { "700": {
        "content": "<|user|>", "special": true, "normalized": false, "lstrip": false, "rstrip": true,
    } } });
    let model = open("spm-bpe-bytes", &added);
    let tokens = model.tokenizer().encode("<|user|>  <|user|>", false).unwrap();
    assert_eq!(tokens, [700, 700], "the token takes the spaces after it");
    assert!(model.tokenizer().is_special(700));

    let older = folder("spm-bpe-bytes", &json!({}));
    std::fs::write(older.path().join("added_tokens.json"), r#"{"<pad>": 700}"#).unwrap();
    assert_eq!(Model::open(older.path()).unwrap().tokenizer().token_id("<pad>"), Some(700));

    let no_prefix = open("spm-bpe-bytes", &json!({ "add_prefix_space": false }));
    assert!(!no_prefix.tokenizer().strips_leading_space());
    let text = "a b";
    let tokens = no_prefix.tokenizer().encode(text, false).unwrap();
    assert_eq!(no_prefix.tokenizer().token_bytes(tokens[0]), Some(&b"a"[..]));
    assert_eq!(no_prefix.tokenizer().decode(&tokens, false), text);
}

#[test]
fn tokenizer_json_of_transformers_gives_its_tokens_and_text() {
    let json = std::fs::read(data("spm-bpe-bytes.tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_json(&json).unwrap();
    for case in recorded("spm-bpe-bytes.transformers")["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&case["ids"]), "{text:?}");
        assert_eq!(tokenizer.decode(&ids(&case["ids"]), false), case["decoded"], "{text:?}");
    }
}

#[test]
fn pieces_with_another_decoder_or_without_unknown_token_are_refused_by_key() {
    let json = std::fs::read(data("spm-bpe-bytes.tokenizer.json")).unwrap();
    let refused = |name: &str, edit: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_slice(&json).unwrap();
        edit(&mut json);
        let message = Tokenizer::from_json(json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(message.contains(name), "{name}: {message}");
    };
    refused("decoder", &|json| json["decoder"] = json!({ "type": "WordPiece" }));
    refused("decoder", &|json| json["decoder"] = Value::Null);
    refused("decoder", &|json| drop(json["decoder"]["decoders"].as_array_mut().unwrap().remove(1)));
    refused("model.unk_token", &|json| json["model"]["byte_fallback"] = json!(false));
    refused("model.unk_token", &|json| {
        json["model"]["vocab"].as_object_mut().unwrap().shift_remove("<0x41>");
    });
    refused("model.type", &|json| json["model"]["type"] = json!("WordPiece"));
    refused("model.dropout", &|json| json["model"]["dropout"] = json!(0.1));
}

#[test]
fn ids_outside_the_order_of_the_vocabulary_are_refused() {
    for (id, content) in [("702", "<gap>"), ("1", "<other>"), ("1024", "<far>")] {
        let config = json!({ "added_tokens_decoder": { id: { "content": content } } });
        let error = Model::open(folder("spm-bpe-bytes", &config).path()).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(content) || message.contains("two tokens"), "{message}");
    }
}

/// Returns an engine of the model on the CPU.
fn engine(model: &Arc<Model>) -> Engine {
    let backend = cpu::load(Arc::clone(model), CpuOptions::new(64)).unwrap();
    let vocabulary: Arc<dyn TokenText> = Arc::clone(model) as _;
    Engine::new(backend, vocabulary, Vec::new(), EngineConfig::new(model.config().context_length))
}

/// Returns the text that a resumed answer begins with, and the text of the whole answer. Four more tokens follow.
fn streamed(engine: &mut Engine, prompt: &[u32], answer: &[u32]) -> (String, String, Vec<u32>) {
    let sampling = SamplingParams { max_tokens: answer.len() + 4, ..SamplingParams::default() };
    let (prompt, resume) = (prompt.to_vec(), answer.to_vec());
    engine.submit(Request { prompt, sampling, resume, ..Request::default() }).unwrap();
    let mut deltas: Vec<String> = Vec::new();
    loop {
        for event in engine.step(Instant::now()).events {
            match event {
                Event::Delta { text, .. } => deltas.push(text),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Finished { output, .. } => {
                    let choice = &output.choices[0];
                    assert_eq!(deltas.concat(), choice.text);
                    return (deltas[0].clone(), choice.text.clone(), choice.tokens.clone());
                }
            }
        }
    }
}

#[test]
fn streamed_answers_have_the_text_of_sentencepiece() {
    for (name, prefix, reduces) in MODELS {
        let model = Arc::new(open(name, &json!({})));
        assert_eq!(model.tokenizer().strips_leading_space(), prefix || reduces, "{name}");
        let mut engine = engine(&model);
        for case in recorded(name)["cases"].as_array().unwrap() {
            let (tokens, decoded) = (ids(&case["ids"]), case["decoded"].as_str().unwrap());
            if tokens.is_empty() || tokens.contains(&0) {
                continue; // An unknown piece is not part of an answer.
            }
            // After BOS alone the answer begins the text, after a word it goes on.
            let (first, whole, all) = streamed(&mut engine, &[1], &tokens);
            assert_eq!(first, decoded, "{name}");
            assert_eq!(whole, model.tokenizer().decode(&all, true), "{name}: {decoded:?}");
            let (first, whole, all) = streamed(&mut engine, &[1, tokens[0]], &tokens);
            let bytes = |ids: &[u32]| -> String {
                let bytes = ids.iter().filter(|&&id| !model.is_special(id));
                let bytes: Vec<u8> = bytes.flat_map(|&id| model.bytes(id).to_vec()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            assert_eq!(first, bytes(&tokens), "{name}");
            assert_eq!(whole, bytes(&all), "{name}: {decoded:?}");
        }
    }
}

/// Returns a GGUF file with the vocabulary of a model, as llama.cpp's converter writes it.
fn gguf(name: &str, (prefix, reduces): (bool, bool)) -> RawGguf {
    let mut file = RawGguf::read(&golden("gguf/bitnet-tiny-i2_s.gguf"));
    let recorded = recorded(name);
    let pieces: Vec<(String, f32, i32)> =
        serde_json::from_value(recorded["pieces"].clone()).unwrap();
    let texts: Vec<&str> = pieces.iter().map(|piece| piece.0.as_str()).collect();
    let family = if name.contains("bpe") { "llama" } else { "t5" };
    file.set_text("tokenizer.ggml.model", family);
    file.set_texts("tokenizer.ggml.tokens", &texts);
    file.set_f32s("tokenizer.ggml.scores", &pieces.iter().map(|p| p.1).collect::<Vec<_>>());
    file.set_i32s("tokenizer.ggml.token_type", &pieces.iter().map(|p| p.2).collect::<Vec<_>>());
    for key in ["pre", "merges", "add_bos_token", "add_eos_token"] {
        file.remove(&format!("tokenizer.ggml.{key}"));
    }
    file.remove("tritmill.eos_token_ids");
    file.set_u32("tokenizer.ggml.bos_token_id", 1);
    file.set_u32("tokenizer.ggml.eos_token_id", 2);
    file.set_bool("tokenizer.ggml.add_space_prefix", prefix);
    file.set_bool("tokenizer.ggml.remove_extra_whitespaces", reduces);
    let map = charsmap(name);
    if !map.is_empty() {
        file.set_bytes("tokenizer.ggml.precompiled_charsmap", &map);
    }
    file
}

/// Returns the character map of a model: field 2 of field 3 of the file.
fn charsmap(name: &str) -> Vec<u8> {
    let folder = folder(name, &json!({}));
    let out = tempfile::TempDir::new().unwrap();
    convert(&Model::open(folder.path()).unwrap(), Target::Folder, out.path()).unwrap();
    let json: Value =
        serde_json::from_slice(&std::fs::read(out.path().join("tokenizer.json")).unwrap()).unwrap();
    let steps = json["normalizer"]["normalizers"].as_array().cloned().unwrap_or_default();
    let map = steps.iter().find_map(|step| step["precompiled_charsmap"].as_str());
    map.map(base64_decoded).unwrap_or_default()
}

fn base64_decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for group in text.as_bytes().chunks(4) {
        let used = group.iter().filter(|&&byte| byte != b'=').count();
        let bits =
            group[..used].iter().fold(0u32, |bits, &byte| bits << 6 | u32::from(digit(byte)));
        let bits = bits << (6 * (4 - used));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..used]);
    }
    bytes
}

fn open_gguf(file: &RawGguf) -> Result<Model, ModelError> {
    Model::open_gguf_bytes("pieces", file.bytes(32))
}

#[test]
fn gguf_vocabularies_give_the_tokens_of_sentencepiece() {
    for (name, prefix, reduces) in MODELS {
        let model = open_gguf(&gguf(name, (prefix, reduces))).unwrap();
        check_cases(model.tokenizer(), name);
        for case in recorded(name)["parts"].as_array().unwrap() {
            let found = model.tokenizer().encode(case["text"].as_str().unwrap(), false).unwrap();
            assert_eq!(found, ids(&case["legacy"]), "{name}: {case}");
        }
        let framed = model.tokenizer().encode("", true).unwrap();
        assert_eq!(framed, if name.contains("bpe") { [1] } else { [2] }, "{name}");
    }
}

#[test]
fn padding_of_gguf_vocabularies_is_no_token() {
    let mut file = gguf("spm-bpe-bytes", (true, false));
    let pieces = recorded("spm-bpe-bytes")["pieces"].as_array().unwrap().clone();
    let mut texts: Vec<&str> = pieces.iter().map(|piece| piece[0].as_str().unwrap()).collect();
    let mut scores: Vec<f32> = pieces.iter().map(|p| p[1].as_f64().unwrap() as f32).collect();
    let mut kinds: Vec<i32> = pieces.iter().map(|p| p[2].as_i64().unwrap() as i32).collect();
    texts.extend(["[PAD700]", "[PAD701]"]);
    scores.extend([-1000.0; 2]);
    kinds.extend([5; 2]);
    file.set_texts("tokenizer.ggml.tokens", &texts);
    file.set_f32s("tokenizer.ggml.scores", &scores);
    file.set_i32s("tokenizer.ggml.token_type", &kinds);
    let model = open_gguf(&file).unwrap();
    check_cases(model.tokenizer(), "spm-bpe-bytes");
    assert_eq!(model.tokenizer().token_bytes(700), None);
}

/// Some converters write the tokens of bytes as normal ones (llama.cpp #4622).
#[test]
fn bytes_of_gguf_vocabularies_are_found_by_their_text() {
    let mut file = gguf("spm-bpe-bytes", (true, false));
    let pieces = recorded("spm-bpe-bytes")["pieces"].as_array().unwrap().clone();
    let kind = |piece: &Value| match piece[2].as_i64().unwrap() as i32 {
        6 => 1,
        kind => kind,
    };
    file.set_i32s("tokenizer.ggml.token_type", &pieces.iter().map(kind).collect::<Vec<_>>());
    check_cases(open_gguf(&file).unwrap().tokenizer(), "spm-bpe-bytes");
}

#[test]
fn damaged_gguf_vocabularies_are_refused_by_key() {
    let refused = |name: &str, edit: &dyn Fn(&mut RawGguf)| {
        let mut file = gguf("spm-unigram-rules", (true, true));
        edit(&mut file);
        let message = open_gguf(&file).unwrap_err().to_string();
        assert!(message.contains(name), "{name}: {message}");
    };
    refused("tokenizer.ggml.scores", &|file| file.remove("tokenizer.ggml.scores"));
    refused("tokenizer.ggml.scores", &|file| file.set_f32s("tokenizer.ggml.scores", &[1.0]));
    refused("tokenizer.ggml.token_type", &|file| file.remove("tokenizer.ggml.token_type"));
    refused("tokenizer.ggml.token_type", &|file| {
        file.set_i32s("tokenizer.ggml.token_type", &[9; 400]);
    });
    refused("precompiled_charsmap at byte 0", &|file| {
        file.set_bytes("tokenizer.ggml.precompiled_charsmap", &[1, 0, 0]);
    });
    refused("piece 0", &|file| {
        file.set_f32s("tokenizer.ggml.scores", &[f32::NAN; 400]);
    });
    refused("add_space_prefix", &|file| file.set_u32("tokenizer.ggml.add_space_prefix", 1));
}

#[test]
fn converted_folders_keep_the_tokenizer() {
    for (name, ..) in MODELS {
        let source = folder(name, &json!({}));
        let model = Model::open(source.path()).unwrap();
        let out = tempfile::TempDir::new().unwrap();
        convert(&model, Target::Folder, &out.path().join("copy")).unwrap();
        let copy = Model::open(&out.path().join("copy")).unwrap();
        check_cases(copy.tokenizer(), name);
        assert_eq!(copy.fingerprint().unwrap(), model.fingerprint().unwrap());
    }
}

#[test]
fn damaged_sentencepiece_files_are_refused_or_usable() {
    let mut random = Random(11);
    let mut opened = 0;
    for (name, ..) in MODELS {
        let folder = folder(name, &json!({}));
        let intact = std::fs::read(data(&format!("{name}.model"))).unwrap();
        for _ in 0..150 {
            let mut damaged = intact.clone();
            random.mutate(&mut damaged, intact.len());
            std::fs::write(folder.path().join("tokenizer.model"), damaged).unwrap();
            if let Ok(model) = Model::open(folder.path()) {
                let text = "Hello, wörld 12345 ｶﾞ \u{200b}ﬁ <|im_end|>  <0x41>";
                let ids = model.tokenizer().encode(text, true).unwrap_or_default();
                model.tokenizer().decode(&ids, false);
                opened += 1;
            }
        }
    }
    assert!(opened > 20 && opened < 580, "{opened} of 600 opened");
}

#[test]
fn damaged_tokenizer_json_of_pieces_is_refused_or_usable() {
    let mut random = Random(12);
    for (name, ..) in MODELS {
        let out = tempfile::TempDir::new().unwrap();
        convert(&open(name, &json!({})), Target::Folder, out.path()).unwrap();
        let intact = std::fs::read(out.path().join("tokenizer.json")).unwrap();
        for _ in 0..150 {
            let mut damaged = intact.clone();
            random.mutate(&mut damaged, intact.len());
            if let Ok(tokenizer) = Tokenizer::from_json(&damaged) {
                let text = "Hello, wörld ｶﾞ \u{200b}ﬁ <|im_end|>  <0x41>";
                let ids = tokenizer.encode(text, true).unwrap_or_default();
                tokenizer.decode(&ids, true);
            }
        }
    }
}
