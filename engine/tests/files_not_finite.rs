//! Values that are infinite or not a number: those of a file are refused before its model runs, and logits that have become such are
//! no result.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;

use support::{Folder, RawGguf, golden};
use tritmill_engine::{
    backend::{Backend, StepError},
    files::{Model, ModelError, Problem, Target, convert},
    load::{self, EngineOptions},
    logits::{self, NotFinite},
};

/// Checks that a model opens, but does not run, has no fingerprint and is not converted, because of this byte of this tensor.
fn refused(model: Model, tensor: &str, offset: u64) {
    let problem = Problem::NotFinite;
    let is_named = |error: &ModelError| match error {
        ModelError::BadTensor { tensor: t, offset: o, problem: p } => {
            (t.as_str(), *o, p) == (tensor, offset, &problem)
        }
        _ => false,
    };
    let error = model.fingerprint().unwrap_err();
    assert!(is_named(&error), "{error}, and not {tensor} at byte {offset}");
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("never.gguf");
    let error = convert(&model, Target::GgufTq2_0, &out).unwrap_err();
    assert!(is_named(&error) && !out.exists(), "{error}");
    let error = load::engine(&Arc::new(model), &EngineOptions::default()).err().unwrap();
    assert_eq!(error.to_string(), format!("tensor {tensor} at byte {offset}: {problem}"));
}

#[test]
fn tables_of_files_are_refused_by_tensor_and_byte() {
    let (nan, infinite) = ([0x00, 0x7e], [0x00, 0xfc]);
    for (path, tensor, at, wrong, element) in [
        ("gguf/synth-i2_s.gguf", "token_embd.weight", 2 * 1000, &nan[..], 0),
        ("gguf/synth-i2_s.gguf", "token_embd.weight", 2 * (1024 * 256 - 1), &infinite, 0),
        ("maple-tiny/maple-tiny-tq2_0.gguf", "output.weight", 512, &nan, 0),
        ("bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s.gguf", "token_embd.weight", 0, &nan, 0),
        ("gguf/bitnet-tiny-i2_s.gguf", "token_embd.weight", 4 * 77, &[0, 0, 0xc0, 0x7f], 0),
        ("../data/bitnet-tq1_0-bf16.gguf", "token_embd.weight", 2 * 511, &[0x80, 0x7f], 0),
        // Of blocks, the scales.
        ("../data/llama-tq2_0-q8_0.gguf", "token_embd.weight", 34 * 9, &nan, 0),
        ("../data/llama-tq2_0-q8_0.gguf", "output.weight", 34 * 2079, &infinite, 0),
        ("gguf/synth-i2_s-q6k.gguf", "token_embd.weight", 210 * 5, &nan, 208),
        ("group-linears/llama-tq2_0.gguf", "token_embd.weight", 144 * 3, &infinite, 2),
    ] {
        let mut file = RawGguf::read(&golden(path));
        let bytes = &mut file.tensor(tensor).bytes[at + element..];
        bytes[..wrong.len()].copy_from_slice(wrong);
        let bytes = file.bytes(32);
        let data = bytes.len()
            - file.tensors.iter().map(|t| t.bytes.len().next_multiple_of(32)).sum::<usize>();
        let before = file.tensors.iter().take_while(|t| t.name != tensor);
        let start = data + before.map(|t| t.bytes.len().next_multiple_of(32)).sum::<usize>();
        let model = Model::open_gguf_bytes("edited", bytes).unwrap();
        refused(model, tensor, (start + at) as u64);
    }
}

#[test]
fn tables_of_folders_are_refused_by_tensor_and_byte() {
    for (name, tensor) in [
        ("bitnet-tiny", "model.embed_tokens.weight"),
        ("llama-tiny", "model.embed_tokens.weight"),
        ("llama-tiny", "lm_head.weight"),
    ] {
        let folder = Folder::copy(name);
        let mut offset = 0;
        folder.edit_weights(|header, data| {
            let start = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
            data[start + 2 * 333..][..2].copy_from_slice(&[0x80, 0xff]);
            let header = serde_json::Value::Object(header.clone()).to_string();
            offset = (8 + header.len() + start + 2 * 333) as u64;
        });
        refused(Model::open(folder.path()).unwrap(), tensor, offset);
    }
}

#[test]
fn errors_of_a_file_on_disk_name_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("edited.gguf");
    for (tensor, nan) in
        [("token_embd.weight", &[0x00, 0x7e][..]), ("output_norm.weight", &[0, 0, 0xc0, 0x7f])]
    {
        let mut file = RawGguf::read(&golden("gguf/synth-i2_s.gguf"));
        file.tensor(tensor).bytes[..nan.len()].copy_from_slice(nan);
        std::fs::write(&path, file.bytes(32)).unwrap();
        let model = Arc::new(Model::open(&path).unwrap());
        let begin = format!("{}: tensor {tensor} at byte ", path.display());
        let error = load::engine(&model, &EngineOptions::default()).err().unwrap().to_string();
        assert!(error.starts_with(&begin) && error.ends_with("not a number"), "{error}");
        let error = model.fingerprint().unwrap_err().to_string();
        assert!(error.starts_with(&begin), "{error}");
    }
}

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
}

#[test]
fn logits_that_became_infinite_are_an_error_of_their_position() {
    // Finite weights, of which the products are not.
    let mut file = RawGguf::read(&golden("maple-tiny/maple-tiny-tq2_0.gguf"));
    let router = file.tensor("blk.0.ffn_gate_inp.weight");
    router.bytes.chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&3.4e38f32.to_le_bytes()));
    let model = Arc::new(Model::open_gguf_bytes("large", file.bytes(32)).unwrap());
    let mut backend = load::backend(&model, &EngineOptions::default(), 1).unwrap();
    let mut seen = 0;
    let result =
        logits::each_position(backend.as_mut() as &mut dyn Backend, &[5, 6, 7], |logits| {
            seen += logits.len();
            Ok::<_, Failed>(())
        });
    let error = result.expect_err("no numbers");
    assert!(matches!(error, Failed::NotFinite(NotFinite { position: 0, .. })), "{error}");
    assert_eq!(seen, 0, "no logits of a step with such a logit");
}
