//! Models with a scale for each group of inputs (Qwen3 in the structure of Ternary Bonsai): every file of a model is the
//! same model, and its logits are those of `transformers`. golden/README.md explains the permitted differences.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use serde_json::Value;
use support::{Prompt, all_logits, argmax, cases, differences, golden, numbers, recorded_prompts};
use tritmill_engine::{
    backend::{
        Backend,
        cpu::{self, CpuOptions, HeadMode, KvType},
        cuda::{self, CudaOptions, FeatureSet, GpuKernels, KvBlocks},
    },
    chat::Message,
    config::Linear,
    files::Model,
    formats::Format,
    kernels::{Digits, Isa},
};

const MODELS: [&str; 2] = ["qwen3-group-tiny", "qwen3-yarn-tiny"];
const BLOCKS: usize = 64;

/// The four GGUF files of a model.
fn gguf_files(model: &str) -> [String; 4] {
    ["q2_0", "pq2_0", "q2_0-g128-legacy", "ptq1_0"]
        .map(|encoding| format!("{model}/{model}-{encoding}.gguf"))
}

fn open(path: &str) -> Arc<Model> {
    Arc::new(Model::open(&golden(path)).unwrap())
}

fn options(format: Format, isa: Isa, activations: Digits) -> CpuOptions {
    let (kv, activations) = (KvType::F32, Some(activations));
    CpuOptions { format, isa, threads: 2, kv, activations, ..CpuOptions::new(BLOCKS) }
}

fn backend(path: &str, activations: Digits) -> Box<dyn Backend> {
    cpu::load(open(path), options(Format::I2S, Isa::detect(), activations)).unwrap()
}

/// Returns whether a prompt is short enough for the scalar kernels.
fn is_short(prompt: &Prompt) -> bool {
    prompt.ids.len() <= 64
}

fn margin(logits: &[f32]) -> f32 {
    let mut sorted = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted[0] - sorted[1]
}

#[test]
fn all_files_of_a_model_are_the_same_model() {
    for name in MODELS {
        let folder = open(name);
        let fingerprint = folder.fingerprint().unwrap();
        for file in gguf_files(name) {
            let model = open(&file);
            for layer in 0..folder.config().layer_count {
                for linear in Linear::OF_ATTENTION {
                    let (a, b) = (folder.ternary(layer, linear), model.ternary(layer, linear));
                    let (a, b) = (a.unwrap(), b.unwrap());
                    assert!(a.trits == b.trits, "{file} {layer} {linear:?}");
                    assert_eq!(a.groups, b.groups, "{file} {layer} {linear:?}");
                    assert_eq!(a.groups.unwrap().size, 128);
                }
            }
            for norm in folder.norms() {
                assert_eq!(folder.norm(norm).unwrap(), model.norm(norm).unwrap(), "{norm:?}");
            }
            let mut config = model.config().clone();
            config.architecture.clone_from(&folder.config().architecture);
            assert_eq!(&config, folder.config(), "{file}");
            assert_eq!(model.fingerprint().unwrap(), fingerprint, "{file}");
        }
    }
}

#[test]
fn embedding_rows_are_the_same_from_every_file() {
    for name in MODELS {
        let folder = open(name);
        let row = |model: &Model, token| {
            let mut row = vec![0f32; model.config().hidden_size];
            model.embedding().row(token, &mut row);
            row
        };
        for file in gguf_files(name) {
            let model = open(&file);
            for token in [0, 1, 333, folder.config().vocab_size - 1] {
                assert_eq!(row(&model, token), row(&folder, token), "{file} {token}");
            }
        }
    }
}

#[test]
fn every_file_format_isa_and_thread_count_gives_the_same_bits() {
    for name in MODELS {
        let prompts = recorded_prompts(name, "greedy");
        for activations in Digits::ALL {
            let mut first = backend(name, activations);
            let want: Vec<_> =
                prompts.iter().map(|p| all_logits(first.as_mut(), BLOCKS, &p.ids)).collect();
            let check = |what: &str, mut backend: Box<dyn Backend>| {
                assert_eq!(backend.numerics_class(), first.numerics_class(), "{what}");
                for (prompt, want) in prompts.iter().zip(&want).filter(|(p, _)| is_short(p)) {
                    let got = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
                    assert!(got == *want, "{what} {activations} {}", prompt.name);
                }
            };
            for file in gguf_files(name) {
                check(&file, backend(&file, activations));
            }
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                for format in Format::ALL {
                    let options = CpuOptions { threads: 3, ..options(format, isa, activations) };
                    check(
                        &format!("{name} {format} {isa}"),
                        cpu::load(open(name), options).unwrap(),
                    );
                }
            }
        }
    }
}

/// The prompts are so short that no activation rounds to another integer.
#[test]
fn int8_activations_match_transformers() {
    for name in MODELS {
        let mut backend = backend(name, Digits::One);
        for prompt in recorded_prompts(name, "greedy") {
            let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
            let last = logits.last().unwrap();
            let (absolute, rms) = differences(last, &prompt.int8_logits);
            eprintln!(
                "{name} {} of {} tokens: {absolute:.2e} {rms:.2e}",
                prompt.name,
                prompt.ids.len()
            );
            assert!(rms <= 0.05, "{name} {}: {rms}", prompt.name);
            if matches!(&*prompt.name, "p0" | "p1" | "p2") {
                assert!(absolute <= 1e-3, "{name} {}: {absolute}", prompt.name);
                assert_eq!(argmax(last), argmax(&prompt.int8_logits), "{name} {}", prompt.name);
            }
        }
    }
}

#[test]
fn int16_activations_match_transformers_without_rounding() {
    for name in MODELS {
        let mut backend = backend(name, Digits::Two);
        for prompt in recorded_prompts(name, "greedy") {
            let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
            let last = logits.last().unwrap();
            let (absolute, rms) = differences(last, &prompt.full_logits);
            eprintln!(
                "{name} {} of {} tokens: {absolute:.2e} {rms:.2e}",
                prompt.name,
                prompt.ids.len()
            );
            assert!(rms <= 2e-3, "{name} {}: {rms}", prompt.name);
            if margin(&prompt.full_logits) > 0.02 {
                assert_eq!(argmax(last), argmax(&prompt.full_logits), "{name} {}", prompt.name);
            }
        }
    }
}

/// Teacher-forced: after each golden token, the next token is the same wherever the golden margin is clear of the
/// difference that other roundings make.
#[test]
fn greedy_continuations_follow_the_golden_ones() {
    for name in MODELS {
        let mut backend = backend(name, Digits::One);
        for prompt in recorded_prompts(name, "greedy") {
            let greedy = prompt.greedy.iter().map(|&id| id as u32);
            let all: Vec<u32> = prompt.ids.iter().copied().chain(greedy).collect();
            let logits = all_logits(backend.as_mut(), BLOCKS, &all);
            for (step, want) in prompt.greedy.iter().enumerate() {
                let got = argmax(&logits[prompt.ids.len() - 1 + step]);
                if prompt.margins[step] > 0.2 {
                    assert_eq!(got, *want, "{name} {} step {step}", prompt.name);
                }
            }
        }
    }
}

#[test]
fn tokenizers_of_folder_and_file_split_as_recorded() {
    for name in MODELS {
        for path in [name.to_owned(), gguf_files(name)[0].clone()] {
            let model = open(&path);
            for case in cases(name)["tokenizer"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let want: Vec<u32> =
                    numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
                let got = model.tokenizer().encode(text, true).unwrap();
                assert_eq!(got, want, "{path}: {text:?}");
            }
            for case in cases(name)["chat"].as_array().unwrap() {
                let message = |m: &Value| {
                    Message::new(m["role"].as_str().unwrap(), m["content"].as_str().unwrap())
                };
                let messages: Vec<_> =
                    case["messages"].as_array().unwrap().iter().map(message).collect();
                let generates = case["add_generation_prompt"].as_bool().unwrap();
                let rendered = model.chat_template().unwrap().render(&messages, generates).unwrap();
                assert_eq!(rendered, case["rendered"].as_str().unwrap(), "{path}");
            }
        }
    }
}

#[test]
fn class_names_the_activations_and_the_head() {
    let class = |activations| {
        let options = CpuOptions { activations, ..options(Format::I2S, Isa::Scalar, Digits::One) };
        cpu::load(open("qwen3-yarn-tiny"), options).unwrap().numerics_class().to_owned()
    };
    let (int8, int16) = (class(Some(Digits::One)), class(Some(Digits::Two)));
    assert!(int8.contains("/head-ternary/activations-int8-1/"), "{int8}");
    assert!(int16.contains("/head-ternary/activations-int16-1/"), "{int16}");
    assert_eq!(class(None), int16, "two digits are the default");
}

#[test]
fn choices_that_a_model_does_not_have_are_refused() {
    let two = options(Format::I2S, Isa::detect(), Digits::Two);
    let error = cpu::load(open("bitnet-tiny"), two).err().unwrap().to_string();
    assert!(error.contains("trained with int8 activations"), "{error}");
    let (kv, head, activations) = (KvType::F16, HeadMode::Exact, Some(Digits::Two));
    let (blocks, kernels) = (KvBlocks::Exactly(1), GpuKernels::Standard);
    let disabled = FeatureSet::default();
    let gpu = CudaOptions { ordinal: 0, kv, head, activations, blocks, kernels, disabled };
    let error = cuda::load(open("bitnet-tiny"), gpu).err().unwrap().to_string();
    assert!(error.contains("trained with int8 activations"), "{error}");
}
