//! Models with recurrent layers (Qwen3.5 in the structure of Ternary Bonsai 27B): logits and greedy answers are those of
//! `transformers`, in one step, in pieces, token by token and beside others. golden/README.md explains the permitted differences.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{sync::Arc, time::Instant};

use serde_json::{Value, json};
use support::{
    Prompt, RawGguf, all_logits, cases, config_refusal, differences, golden, numbers, parsed,
    recorded_prompts,
};
use tritmill_engine::{
    Event, Request, SamplingParams,
    backend::{
        Backend, Chunk, Logits, LogitsFor, StepError,
        cpu::{self, CpuOptions, KvType},
    },
    config::DeltaTensor,
    files::Model,
    formats::Format,
    kernels::{Digits, Isa},
    kv::BlockId,
    load::{self, DeviceChoice, EngineOptions, LoadError},
};

const BLOCKS: usize = 64;
const FILES: [&str; 2] =
    ["qwen35-tiny/qwen35-tiny-pq2_0.gguf", "qwen35-tiny/qwen35-tiny-ptq1_0.gguf"];
/// Files in a rotated basis, as Ternary Bonsai 2.
const ROTATED: [&str; 3] = [
    "qwen35-rotated-tiny/qwen35-rotated-tiny-pq2_0.gguf",
    "qwen35-rotated-tiny/qwen35-rotated-tiny-ptq1_0.gguf",
    "qwen35-rotated-tiny/qwen35-rotated-tiny-q2_0.gguf",
];

fn open(path: &str) -> Arc<Model> {
    Arc::new(Model::open(&golden(path)).unwrap())
}

fn options(activations: Digits) -> CpuOptions {
    let activations = Some(activations);
    CpuOptions { threads: 2, kv: KvType::F32, activations, ..CpuOptions::new(BLOCKS) }
}

fn prompts(model: &str) -> Vec<Prompt> {
    recorded_prompts(model, "greedy_full")
}

#[test]
fn logits_are_those_of_the_reference() {
    for file in FILES.into_iter().chain(ROTATED) {
        let model = open(file);
        let (folder, _) = file.split_once('/').unwrap();
        for digits in Digits::ALL {
            let mut backend = cpu::load(Arc::clone(&model), options(digits)).unwrap();
            for (index, prompt) in prompts(folder).iter().enumerate() {
                let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
                let last = logits.last().unwrap();
                let name = format!("{file}, {}", prompt.name);
                let want = match digits {
                    Digits::One => &prompt.int8_logits,
                    Digits::Two => &prompt.full_logits,
                };
                let (largest, relative) = differences(last, want);
                match digits {
                    // Shorter prompts are free of values between two integers, which round one way or the other.
                    Digits::One if index < 3 => assert!(largest < 1e-3, "{name}: {largest}"),
                    Digits::One => assert!(relative < 0.05, "{name}: {relative}"),
                    Digits::Two => assert!(relative < 2e-3, "{name}: {relative}"),
                }
            }
        }
    }
}

#[test]
fn greedy_answers_are_those_of_the_reference() {
    for file in [FILES[0], ROTATED[0]] {
        check_greedy(file);
    }
}

fn check_greedy(file: &str) {
    let options = EngineOptions { kv: KvType::F32, ..EngineOptions::default() };
    let mut engine = load::engine(&open(file), &options).unwrap();
    let prompts = prompts(file.split_once('/').unwrap().0);
    // All at once, and two choices each: states beside each other, and one that is computed again.
    let sampling = SamplingParams {
        max_tokens: 32,
        temperature: 0.0,
        n: 2,
        ignore_eos: true,
        ..Default::default()
    };
    let submit = |prompt: &Prompt| Request {
        prompt: prompt.ids.clone(),
        sampling: sampling.clone(),
        ..Request::default()
    };
    let ids: Vec<_> = prompts.iter().map(|p| engine.submit(submit(p)).unwrap()).collect();
    let mut answered = 0;
    while !engine.is_idle() {
        for event in engine.step(Instant::now()).events {
            let (id, output) = match event {
                Event::Finished { id, output } => (id, output),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Delta { .. } => continue,
            };
            let prompt = &prompts[ids.iter().position(|of| *of == id).unwrap()];
            assert_eq!(output.choices[0].tokens, output.choices[1].tokens, "{}", prompt.name);
            let sure = prompt.margins.iter().take_while(|margin| **margin > 0.02).count();
            let tokens: Vec<usize> =
                output.choices[0].tokens.iter().map(|token| *token as usize).collect();
            assert_eq!(tokens[..sure], prompt.greedy[..sure], "{}", prompt.name);
            assert_eq!(output.cached_tokens, 0);
            answered += 1;
        }
    }
    assert_eq!(answered, prompts.len());
}

/// Computes a prompt in pieces of these lengths in the places of a slot, and returns the logits of every position.
fn in_pieces(
    backend: &mut dyn Backend,
    (slot, first_block): (u32, u32),
    tokens: &[u32],
    lengths: impl Iterator<Item = usize>,
) -> Vec<f32> {
    let blocks: Vec<BlockId> = (first_block..first_block + 16).map(BlockId).collect();
    let (mut position, mut all) = (0, Vec::new());
    for length in lengths {
        let end = (position + length).min(tokens.len());
        if position == end {
            break;
        }
        let mut logits = Logits::default();
        let tokens = &tokens[position..end];
        let chunk = Chunk { tokens, position, blocks: &blocks, logits: LogitsFor::All, slot };
        backend.step(&[chunk], &mut logits).unwrap();
        all.extend_from_slice(logits.all());
        position = end;
    }
    all
}

#[test]
fn bits_do_not_depend_on_pieces_neighbours_threads_isas_or_formats() {
    for file in [FILES[0], ROTATED[0]] {
        check_bits(file);
    }
}

fn check_bits(file: &str) {
    let model = open(file);
    let prompts = prompts(file.split_once('/').unwrap().0);
    let tokens = &prompts.iter().max_by_key(|prompt| prompt.ids.len()).unwrap().ids[..130];
    let other = &prompts[2].ids;
    let mut expected: Option<Vec<f32>> = None;
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    for (isa, format) in isas.flat_map(|isa| Format::ALL.map(|format| (isa, format))) {
        for threads in [1, 3] {
            let options = CpuOptions { isa, format, threads, ..options(Digits::Two) };
            let mut backend = cpu::load(Arc::clone(&model), options).unwrap();
            let whole = in_pieces(backend.as_mut(), (0, 0), tokens, [tokens.len()].into_iter());
            let expected = expected.get_or_insert_with(|| whole.clone());
            assert!(*expected == whole, "{isa} {format}, {threads} threads");
            if isa == Isa::Scalar {
                continue;
            }
            let pieces = in_pieces(
                backend.as_mut(),
                (3, 16),
                tokens,
                [1, 2, 5, 64, 1, 30].into_iter().cycle(),
            );
            assert!(*expected == pieces, "in pieces");
            let single = in_pieces(backend.as_mut(), (3, 16), tokens, std::iter::repeat(1));
            assert!(*expected == single, "token by token, in a slot that was used");
        }
    }
    // Beside another sequence.
    let expected = expected.unwrap();
    let mut backend = cpu::load(model, options(Digits::Two)).unwrap();
    let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
    let of = |tokens, position, first: usize, slot| Chunk {
        tokens,
        position,
        blocks: &blocks[first..first + 16],
        logits: LogitsFor::All,
        slot,
    };
    let mut logits = Logits::default();
    let (begin, rest) = tokens.split_at(40);
    backend.step(&[of(other, 0, 16, 1), of(begin, 0, 0, 0)], &mut logits).unwrap();
    let vocab = backend.vocab_size();
    let skip = other.len() * vocab;
    let mut together = logits.all()[skip..].to_vec();
    backend.step(&[of(rest, 40, 0, 0), of(&other[..3], 0, 16, 1)], &mut logits).unwrap();
    together.extend_from_slice(&logits.all()[..rest.len() * vocab]);
    assert!(expected == together);
    let same_slot = backend.step(&[of(begin, 0, 0, 2), of(other, 0, 16, 2)], &mut logits);
    assert!(matches!(same_slot, Err(StepError::BadSlot { slot: 2, .. })), "{same_slot:?}");
    let no_slot = backend.step(&[of(begin, 0, 0, 16)], &mut logits);
    assert!(matches!(no_slot, Err(StepError::BadSlot { slot: 16, slots: 16 })), "{no_slot:?}");
}

#[test]
fn states_are_counted_and_gpus_refuse() {
    let model = open(FILES[0]);
    let state = 3 * (3 * 1024 + 4 * 128 * 128) * 4;
    let kv_bytes = Some(8 * state);
    let options = EngineOptions { kv_bytes, ..EngineOptions::default() };
    assert_eq!(options.slots(&model), 4, "in half of the memory");
    let needed = load::memory_needed(&model, &options).kv;
    assert!(needed <= 8 * state && needed > 4 * state, "{needed}");
    let on_gpu = EngineOptions { device: DeviceChoice::Cuda(0), ..options };
    let refused = load::engine(&model, &on_gpu).err().unwrap();
    assert!(matches!(refused, LoadError::RecurrentOnGpu { .. }), "{refused}");
    // More sequences than states: some wait.
    let mut engine = load::engine(&model, &options).unwrap();
    let sampling = SamplingParams { max_tokens: 5, ignore_eos: true, ..Default::default() };
    for token in 0..10 {
        let prompt = vec![token; 20];
        engine
            .submit(Request { prompt, sampling: sampling.clone(), ..Request::default() })
            .unwrap();
    }
    while !engine.is_idle() {
        engine.step(Instant::now());
        assert!(engine.stats().running <= 4);
    }
}

#[test]
fn folder_and_files_are_the_same_model() {
    let folder = open("qwen35-tiny");
    let delta = folder.config().delta_net.unwrap();
    assert_eq!((delta.attention_interval, delta.key_heads, delta.value_heads), (4, 2, 4));
    assert!(!delta.dense_rates && folder.config().rotary_dim == Some(16));
    for file in FILES {
        let model = open(file);
        for layer in 0..4 {
            for linear in folder.config().linears(layer) {
                let [a, b] = [&folder, &model].map(|m| m.ternary(layer, *linear).unwrap());
                assert!(a.trits == b.trits && a.groups == b.groups, "{layer} {linear:?}");
            }
            let tensors = DeltaTensor::ALL.into_iter().take(if layer == 3 { 0 } else { 3 });
            for tensor in tensors {
                let [a, b] = [&folder, &model].map(|m| m.delta(layer, tensor).unwrap());
                let (largest, _) = differences(&a, &b);
                assert!(largest < 1e-6 && a.len() == b.len(), "{layer} {tensor:?}: {largest}");
            }
        }
        for norm in folder.norms() {
            let [a, b] = [&folder, &model].map(|m| m.norm(norm).unwrap());
            assert!(differences(&a, &b).0 < 1e-6, "{norm:?}");
        }
        for model in [&folder, &model] {
            for case in cases("qwen35-tiny")["tokenizer"].as_array().unwrap() {
                let ids: Vec<u32> = numbers(&case["ids"]).into_iter().map(|id| id as u32).collect();
                let text = case["text"].as_str().unwrap();
                assert_eq!(model.tokenizer().encode(text, true).unwrap(), ids, "{text:?}");
            }
        }
    }
    let mut backend = cpu::load(folder, options(Digits::Two)).unwrap();
    for prompt in prompts("qwen35-tiny") {
        let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
        let (_, relative) = differences(logits.last().unwrap(), &prompt.full_logits);
        assert!(relative < 2e-3, "{}: {relative}", prompt.name);
    }
}

#[test]
fn settings_of_text_may_be_apart_and_others_are_refused() {
    let plain = parsed("qwen35-tiny", |_| {}).unwrap().model;
    let nested = parsed("qwen35-tiny", |config| {
        let text = config.take();
        *config = json!({ "model_type": "qwen3_5", "text_config": text, "vision_config": { "depth": 2 } });
    });
    assert_eq!(nested.unwrap().model, plain);
    let refused =
        |key: &str, value: Value| config_refusal("qwen35-tiny", |config| config[key] = value);
    for (key, value) in [
        ("linear_conv_kernel_dim", json!(3)),
        ("linear_num_value_heads", json!(3)),
        ("linear_value_head_dim", json!(64)),
        ("linear_key_head_dim", json!(24)),
        ("attn_output_gate", json!(false)),
        ("full_attention_interval", json!(3)),
        ("layer_types", json!(["linear_attention"])),
        (
            "layer_types",
            json!(["full_attention", "full_attention", "full_attention", "linear_attention"]),
        ),
        ("num_experts", json!(8)),
    ] {
        let message = refused(key, value);
        let named = match key {
            "full_attention_interval" => "layer_types",
            "linear_key_head_dim" => "linear_value_head_dim",
            key => key,
        };
        assert!(message.contains(named), "{key}: {message}");
    }
    for (key, value) in [
        ("qwen35.ssm.conv_kernel", 3),
        ("qwen35.ssm.group_count", 3),
        ("qwen35.ssm.state_size", 24),
        ("qwen35.ssm.inner_size", 511),
        ("qwen35.full_attention_interval", 9),
        ("qwen35.rope.dimension_count", 15),
        ("qwen35.nextn_predict_layers", 1),
    ] {
        let mut file = RawGguf::read(&golden(FILES[0]));
        file.set_u32(key, value);
        let error = Model::open_gguf_bytes("changed", file.bytes(32)).unwrap_err().to_string();
        let named = if key.ends_with("group_count") { "time_step_rank" } else { key };
        assert!(error.contains(named), "{key}: {error}");
    }
}

#[test]
fn files_in_a_rotated_basis_are_one_model_and_other_bases_are_refused() {
    let [first, second, third] = ROTATED.map(|file| open(file).fingerprint().unwrap());
    assert!(first == second && second == third);
    let file = || RawGguf::read(&golden(ROTATED[0]));
    let refused = |file: &RawGguf, key: &str| {
        let error = Model::open_gguf_bytes("changed", file.bytes(32)).unwrap_err().to_string();
        assert!(error.contains(&format!("prism.hadamard.{key}")), "{key}: {error}");
    };
    for (key, value) in [("version", 2), ("block_size", 96), ("block_size", 512), ("rounds", 1)] {
        let mut file = file();
        file.set_u32(&format!("prism.hadamard.{key}"), value);
        refused(&file, key);
    }
    for (key, value) in [("transform", "hadamard"), ("axis", "output"), ("sign_mode", "random")] {
        let mut file = file();
        file.set_text(&format!("prism.hadamard.{key}"), value);
        refused(&file, key);
    }
    let mut tiled = file();
    tiled.set_bool("prism.hadamard.gdn_v_grouped", false);
    refused(&tiled, "gdn_v_grouped");
    for key in KEYS {
        let mut file = file();
        file.remove(&format!("prism.hadamard.{key}"));
        refused(&file, key);
    }
    // Without the keys the file looks as one in the plain basis, of which value heads as narrow as these cannot be put in order.
    let mut plain = file();
    for key in KEYS.into_iter().chain(["version"]) {
        plain.remove(&format!("prism.hadamard.{key}"));
    }
    let plain = Model::open_gguf_bytes("plain", plain.bytes(32)).unwrap();
    let error = plain.fingerprint().unwrap_err().to_string();
    assert!(plain.config().rotation.is_none() && error.contains("blk.0.ssm_out"), "{error}");
}

/// Keys of the basis that a file must have, but for the version.
const KEYS: [&str; 9] = [
    "block_size",
    "transform",
    "axis",
    "sign_mode",
    "sign_widths",
    "sign_values",
    "weight_names",
    "inverse_weight_names",
    "gdn_v_grouped",
];
