//! SentencePiece vocabularies written as GGUF files: they read back as the same model, and what llama.cpp would encode
//! otherwise is refused by name. `golden/group-linears/witness.py` shows llama.cpp's tokens.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{path::Path, sync::Arc};

use serde_json::{Value, json};
use support::{RawGguf, all_logits, golden};
use tempfile::TempDir;
use tritmill_engine::{
    backend::cpu::{self, CpuOptions},
    files::{Model, ModelError, Target, convert, shape, synth},
};

/// Vocabularies that GGUF files can hold, with their settings.
const GOOD: [(&str, &str); 3] = [
    ("spm-bpe-bytes", "{}"),
    (
        "spm-bpe-bytes",
        r#"{ "add_prefix_space": false, "add_bos_token": false, "add_eos_token": true }"#,
    ),
    ("spm-unigram-rules", r#"{ "add_bos_token": false, "add_eos_token": true }"#),
];

/// Writes a random folder with this SentencePiece file and `tokenizer_config.json`.
fn folder(name: &str, config: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let mut small = shape("falcon3-1b").unwrap();
    (small.hidden_size, small.intermediate_size, small.layer_count) = (256, 512, 2);
    (small.head_count, small.kv_head_count, small.head_dim) = (4, 2, 64);
    small.vocab_size = 720;
    synth(&small, dir.path(), 5).unwrap();
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let data = golden("../data").join(format!("{name}.model"));
    std::fs::copy(data, dir.path().join("tokenizer.model")).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    for file in ["config.json", "generation_config.json"] {
        edit_json(&dir.path().join(file), |json| {
            json["bos_token_id"] = json!(1);
            json["eos_token_id"] = json!(2);
        });
    }
    dir
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    std::fs::write(path, json.to_string()).unwrap();
}

/// Replaces `tokenizer.model` by the `tokenizer.json` that the engine makes of it, and edits that.
fn with_json(name: &str, edit: impl FnOnce(&mut Value)) -> Model {
    let source = folder(name, "{}");
    let model = Model::open(source.path()).unwrap();
    let packed = TempDir::new().unwrap();
    convert(&model, Target::Folder, packed.path()).unwrap();
    edit_json(&packed.path().join("tokenizer.json"), edit);
    Model::open(packed.path()).unwrap()
}

/// Returns the recorded texts, and longer ones of all of them.
fn texts(name: &str) -> Vec<String> {
    let path = golden("../data").join(format!("{name}.json"));
    let json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = json["cases"].as_array().unwrap().iter().chain(json["parts"].as_array().unwrap());
    let mut texts: Vec<String> =
        cases.map(|case| case["text"].as_str().unwrap().to_owned()).collect();
    texts.extend([texts.concat(), texts.join(" "), texts.iter().rev().cloned().collect()]);
    texts
}

fn check_same_tokens(a: &Model, b: &Model, name: &str) {
    for text in texts(name) {
        for around in [false, true] {
            let tokens = a.tokenizer().encode(&text, around).unwrap();
            assert_eq!(b.tokenizer().encode(&text, around).unwrap(), tokens, "{name}: {text:?}");
            assert_eq!(b.tokenizer().decode(&tokens, true), a.tokenizer().decode(&tokens, true));
        }
    }
}

#[test]
fn converted_files_are_the_same_model_to_the_bit() {
    for (name, config) in GOOD {
        let source = folder(name, config);
        let model = Arc::new(Model::open(source.path()).unwrap());
        let out = TempDir::new().unwrap();
        let logits = |model: &Arc<Model>| {
            let mut backend = cpu::load(Arc::clone(model), CpuOptions::new(16)).unwrap();
            let tokens = model.tokenizer().encode("The scheduler's queue", true).unwrap();
            all_logits(backend.as_mut(), 16, &tokens)
        };
        let file = out.path().join("a.gguf");
        convert(&model, Target::GgufI2S, &file).unwrap();
        let copy = Arc::new(Model::open(&file).unwrap());
        assert_eq!(copy.fingerprint().unwrap(), model.fingerprint().unwrap(), "{name}");
        support::check_same_weights(&model, &copy);
        check_same_tokens(&model, &copy, name);
        assert!(logits(&copy) == logits(&model), "{name}");
        let raw = RawGguf::read(&file);
        assert!(raw.value("tritmill.merges").is_none(), "the order follows from the scores");
        let kind = if name.contains("bpe") { b"llama".as_slice() } else { b"t5" };
        assert!(raw.value("tokenizer.ggml.model").unwrap().ends_with(kind));
        // And again, from the file.
        convert(&copy, Target::GgufTq2_0, &out.path().join("b.gguf")).unwrap();
        let again = Model::open(&out.path().join("b.gguf")).unwrap();
        check_same_tokens(&model, &again, name);
    }
}

/// The merges of one piece have one score, and transformers writes them in other orders.
#[test]
fn merges_in_another_order_are_kept() {
    let model = with_json("spm-bpe-bytes", |json| {
        let merges = json["model"]["merges"].as_array_mut().unwrap();
        let text = |merge: &Value| [0, 1].map(|at| merge[at].as_str().unwrap()).concat();
        let pairs = |at: &usize| text(&merges[*at]) == text(&merges[at + 1]);
        let at = (0..merges.len() - 1).find(pairs).unwrap();
        merges.swap(at, at + 1);
    });
    let out = TempDir::new().unwrap();
    let file = out.path().join("a.gguf");
    convert(&model, Target::GgufI2S, &file).unwrap();
    let copy = Model::open(&file).unwrap();
    assert_eq!(copy.fingerprint().unwrap(), model.fingerprint().unwrap());
    check_same_tokens(&model, &copy, "spm-bpe-bytes");

    let edited = |edit: &dyn Fn(&mut RawGguf)| -> Result<Model, ModelError> {
        let mut raw = RawGguf::read(&file);
        edit(&mut raw);
        Model::open_gguf_bytes("edited", raw.bytes(32))
    };
    let without = edited(&|raw| raw.remove("tritmill.merges")).unwrap();
    assert_ne!(without.fingerprint().unwrap(), model.fingerprint().unwrap());
    for wrong in [&["ab"][..], &["never seen"]] {
        assert!(edited(&|raw| raw.set_texts("tritmill.merges", wrong)).is_err(), "{wrong:?}");
    }
    let error = edited(&|raw| raw.set_u32("tritmill.merges", 1)).unwrap_err().to_string();
    assert!(error.contains("tritmill.merges"), "{error}");
}

#[test]
fn what_llama_cpp_would_encode_otherwise_is_refused_by_name() {
    let out = TempDir::new().unwrap();
    let refused = |model: &Model, why: &str| {
        let error = convert(model, Target::GgufI2S, &out.path().join("a.gguf")).unwrap_err();
        assert!(matches!(error, ModelError::Unconvertible { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains("tokenizer.json") && error.contains(why), "{why}: {error}");
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "no file remains");
    };
    let of = |name: &str, config: &str| Model::open(folder(name, config).path()).unwrap();
    refused(&of("spm-bpe-bytes", r#"{ "legacy": false }"#), "only before the text");
    refused(&of("spm-bpe-rules", "{}"), "before BPE");
    refused(&of("spm-unigram-bytes", r#"{ "add_prefix_space": false }"#), "not for Unigram");
    refused(&of("spm-unigram-rules", r#"{ "add_prefix_space": false }"#), "or the reverse");

    let bpe = |edit: fn(&mut Value)| with_json("spm-bpe-bytes", edit);
    refused(&bpe(|json| drop(json["model"]["merges"].as_array_mut().unwrap().pop())), "leave out");
    refused(
        &bpe(|json| {
            let merges = json["model"]["merges"].as_array_mut().unwrap();
            let first = merges.remove(0);
            let text = |merge: &Value| [0, 1].map(|at| merge[at].as_str().unwrap()).concat();
            let pairs = |at: &usize| text(&merges[*at]) == text(&merges[at + 1]);
            let at = (0..merges.len() - 1).find(pairs).unwrap();
            merges.insert(at + 1, first);
        }),
        "not in the order",
    );
    refused(&bpe(|json| json["added_tokens"][3]["lstrip"] = json!(true)), "takes spaces");
    refused(&bpe(|json| json["added_tokens"][3]["normalized"] = json!(true)), "changed text");
    refused(&bpe(|json| json["model"]["fuse_unk"] = json!(false)), "no keys in the format");
    refused(&bpe(|json| json["model"]["byte_fallback"] = json!(false)), "needs for BPE");
    let unscored = with_json("spm-unigram-rules", |json| {
        let token = json!({ "id": json["model"]["vocab"].as_array().unwrap().len(), "content": "<new>", "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false });
        json["added_tokens"].as_array_mut().unwrap().push(token);
    });
    refused(&unscored, "without a score");
}
