//! Damaged files: an error or a model, never a panic, and never more memory than the file justifies (a
//! header with larger counts is refused before the allocation; see the refusal tests).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use support::{Folder, Random, golden, messages, open};
use tempfile::TempDir;
use tritmill_engine::{
    chat::{ChatTemplate, SpecialTokens},
    config::LayerTensor,
    files::{
        Model, Target, convert, gguf,
        hugging_face::{config as hf_config, safetensors},
        shape, shard_names, synth,
    },
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// Returns a model of about 100 KB, in a folder.
fn small(dir: &TempDir) -> Model {
    let mut config = shape("bitnet-2b").unwrap();
    config.hidden_size = 256;
    config.head_count = 2;
    config.kv_head_count = 1;
    config.head_dim = 128;
    config.intermediate_size = 256;
    config.layer_count = 1;
    config.vocab_size = 260;
    synth(&config, &dir.path().join("folder"), 7).unwrap();
    Model::open(&dir.path().join("folder")).unwrap()
}

/// Reads everything a loader would read.
fn read_all(model: &Model) {
    for layer in 0..model.config().layer_count {
        for &linear in model.config().linears(layer) {
            let _ = model.ternary(layer, linear);
            let _ = model.bias(layer, linear);
        }
        for tensor in LayerTensor::OF_DELTA_NET.into_iter().chain([LayerTensor::Router]) {
            let _ = model.layer_tensor(layer, tensor);
        }
    }
    for norm in model.norms() {
        let _ = model.norm(norm);
    }
    let mut row = vec![0.0; model.config().hidden_size];
    model.embedding().row(model.config().vocab_size - 1, &mut row);
    model.head().row(0, &mut row);
    let ids = model.tokenizer().encode("Hello, wörld 12345 <|eot_id|>", true).unwrap_or_default();
    model.tokenizer().decode(&ids, false);
}

#[test]
fn damaged_gguf_files_are_refused_or_read() {
    let dir = TempDir::new().unwrap();
    let model = small(&dir);
    let mut opened = 0;
    for (seed, target) in [(1, Target::GgufI2S), (2, Target::GgufTq2_0)] {
        let path = dir.path().join("small.gguf");
        convert(&model, target, &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let header = gguf::parse("small", &bytes).unwrap().data_start as usize;
        let mut random = Random(seed);
        for round in 0..200 {
            let mut damaged = bytes.clone();
            // Every fourth round mutates any byte, the others mutate the header.
            let within = if round % 4 == 0 { bytes.len() } else { header };
            random.mutate(&mut damaged, within);
            if let Ok(model) = Model::open_gguf_bytes("damaged", damaged) {
                read_all(&model);
                opened += 1;
            }
        }
    }
    assert!(opened > 10 && opened < 350, "{opened} of 400 opened");
}

#[test]
fn damaged_gguf_directories_and_metadata_are_refused_or_read() {
    // The part between the vocabulary and the data has most counts, types and offsets.
    let bytes = std::fs::read(golden("gguf/synth-TQ1_0.gguf")).unwrap();
    let header = gguf::parse("synth", &bytes).unwrap().data_start as usize;
    let mut random = Random(3);
    for _ in 0..150 {
        let mut damaged = bytes.clone();
        let at = header - 2000 + random.below(1990);
        damaged[at] = random.below(256) as u8;
        if let Ok(model) = Model::open_gguf_bytes("damaged", damaged) {
            read_all(&model);
        }
        let mut damaged = bytes[..header].to_vec();
        random.mutate(&mut damaged, 900);
        let _ = gguf::parse("damaged", &damaged);
    }
}

#[test]
fn damaged_files_of_every_kind_are_refused_or_read() {
    for (seed, file) in [
        (8, "group-linears/minicpm-tq2_0"),
        (9, "group-linears/minicpm-tq1_0"),
        (10, "group-linears/llama-tq2_0"),
        (11, "qwen35-tiny/qwen35-tiny-ptq1_0"),
        (12, "qwen35-rotated-tiny/qwen35-rotated-tiny-q2_0"),
        (13, "maple-tiny/maple-tiny-tq1_0"),
        (14, "bitnet-embedding-tiny/bitnet-embedding-tiny-i2_s"),
    ] {
        let bytes = std::fs::read(golden(&format!("{file}.gguf"))).unwrap();
        let header = gguf::parse(file, &bytes).unwrap().data_start as usize;
        let mut random = Random(seed);
        let mut opened = 0;
        for round in 0..120 {
            let mut damaged = bytes.clone();
            // The vocabulary is the larger part of the header: half of the rounds spare it.
            match round % 4 {
                0 => random.mutate(&mut damaged, bytes.len()),
                1 => random.mutate(&mut damaged, header),
                _ => damaged[random.below(1200)] = random.below(256) as u8,
            }
            if let Ok(model) = Model::open_gguf_bytes("damaged", damaged) {
                read_all(&model);
                opened += 1;
            }
        }
        assert!((5..115).contains(&opened), "{file}: {opened} of 120 opened");
    }
}

#[test]
fn damaged_safetensors_headers_are_refused_or_parsed() {
    let bytes = std::fs::read(golden("bitnet-tiny/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut random = Random(4);
    for _ in 0..600 {
        let mut damaged = bytes.clone();
        random.mutate(&mut damaged, header);
        if let Ok(tensors) = safetensors::parse("damaged", &damaged) {
            assert!(tensors.iter().all(|tensor| tensor.range.end <= damaged.len()));
        }
    }
}

#[test]
fn damaged_folders_are_refused_or_read() {
    let dir = TempDir::new().unwrap();
    small(&dir);
    let folder = dir.path().join("folder");
    let mut random = Random(5);
    let mut opened = 0;
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        let intact = std::fs::read(folder.join(file)).unwrap();
        for _ in 0..60 {
            let mut damaged = intact.clone();
            random.mutate(&mut damaged, intact.len().min(8000));
            std::fs::write(folder.join(file), damaged).unwrap();
            if let Ok(model) = Model::open(&folder) {
                read_all(&model);
                opened += 1;
            }
        }
        std::fs::write(folder.join(file), intact).unwrap();
    }
    assert!(Model::open(&folder).is_ok() && opened > 0);
}

#[test]
fn damaged_json_is_refused_or_parsed() {
    let folder = Folder::copy("llama-norm-tiny");
    let mut random = Random(6);
    let index = br#"{"metadata":{"total_size":1},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}}"#;
    let config = std::fs::read(folder.path().join("config.json")).unwrap();
    let tokenizer_config = std::fs::read(folder.path().join("tokenizer_config.json")).unwrap();
    let mut parsed = 0;
    for _ in 0..600 {
        let damage = |bytes: &[u8], random: &mut Random| {
            let mut bytes = bytes.to_vec();
            random.mutate(&mut bytes, usize::MAX);
            bytes
        };
        parsed += usize::from(hf_config::parse(&damage(&config, &mut random)).is_ok());
        let _ = hf_config::parse_generation_eos(&damage(&config, &mut random), 1024);
        let _ = TokenizerConfig::parse(Some(&damage(&tokenizer_config, &mut random)), None);
        let _ = shard_names("index", &damage(index, &mut random));
    }
    assert!(parsed > 0 && parsed < 600, "{parsed}");
}

#[test]
fn damaged_tokenizers_are_refused_or_usable() {
    let bytes = std::fs::read(golden("bitnet-tiny/tokenizer.json")).unwrap();
    let mut random = Random(8);
    for _ in 0..200 {
        let mut damaged = bytes.clone();
        random.mutate(&mut damaged, bytes.len());
        if let Ok(tokenizer) = Tokenizer::from_json(&damaged) {
            let ids = tokenizer.encode("Hello, wörld 12345", true).unwrap_or_default();
            tokenizer.decode(&ids, true);
        }
    }
}

#[test]
fn damaged_templates_are_refused_or_render() {
    let model = open("llama-tiny");
    let source = model.chat_template().unwrap().source().as_bytes().to_vec();
    let mut random = Random(9);
    for _ in 0..400 {
        let mut damaged = source.clone();
        random.mutate(&mut damaged, source.len());
        let damaged = String::from_utf8_lossy(&damaged).into_owned();
        let _ = ChatTemplate::new(damaged, SpecialTokens::new()).render(&messages("hi"), true);
    }
}
