//! Models with recurrent layers (Qwen3.5 in the structure of Ternary Bonsai 27B): logits and greedy answers are those of
//! `transformers`, in one step, in pieces, token by token and beside others. golden/README.md explains the permitted differences.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::{
    collections::BTreeMap,
    ops::Range,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use support::{
    RawGguf, all_logits, cases, config_refusal, differences,
    forward::{
        BLOCKS, Tolerance, check_bits, check_greedy, check_logits, open_shared, options, prompts_of,
    },
    golden, numbers, parsed,
};
use tritmill_engine::{
    Engine, Event, Fork, Request, SamplingParams,
    backend::{
        Chunk, Logits, LogitsFor, StateSlots, StepError,
        cpu::{self, KvType},
    },
    config::LayerTensor,
    files::{Model, ModelError, Target, convert},
    kernels::Digits,
    kv::{
        BlockId,
        disk::{BlockTiers, FolderLimits, TierOptions},
    },
    load::{self, DeviceChoice, EngineOptions, LoadError},
};

const FILES: [&str; 2] =
    ["qwen35-tiny/qwen35-tiny-pq2_0.gguf", "qwen35-tiny/qwen35-tiny-ptq1_0.gguf"];
/// Files in a rotated basis, as Ternary Bonsai 2.
const ROTATED: [&str; 3] = [
    "qwen35-rotated-tiny/qwen35-rotated-tiny-pq2_0.gguf",
    "qwen35-rotated-tiny/qwen35-rotated-tiny-ptq1_0.gguf",
    "qwen35-rotated-tiny/qwen35-rotated-tiny-q2_0.gguf",
];

/// See golden/README.md.
const TOLERANCE: Tolerance = Tolerance { exact: 3, int8: 0.05, int16: 2e-3, margin: 0.02 };

#[test]
fn logits_are_those_of_the_reference() {
    for file in FILES.into_iter().chain(ROTATED) {
        check_logits(file, TOLERANCE);
    }
}

#[test]
fn greedy_answers_are_those_of_the_reference() {
    for file in [FILES[0], ROTATED[0]] {
        check_greedy(file, TOLERANCE);
    }
}

#[test]
fn bits_do_not_depend_on_pieces_neighbours_threads_isas_or_formats() {
    for file in [FILES[0], ROTATED[0]] {
        let prompts = prompts_of(file);
        let longest = prompts.iter().max_by_key(|prompt| prompt.ids.len()).unwrap();
        check_bits(&open_shared(file), KvType::F32, &longest.ids[..130], &prompts[2].ids);
    }
}

#[test]
fn a_state_belongs_to_one_chunk() {
    let mut backend = cpu::load(open_shared(FILES[0]), options(Digits::Two)).unwrap();
    let blocks: Vec<BlockId> = (0..2).map(BlockId).collect();
    let of = |block: usize, slot: u32| Chunk {
        tokens: &[1],
        position: 0,
        blocks: &blocks[block..=block],
        logits: LogitsFor::Last,
        state: slot.into(),
        windows: &[],
    };
    let mut logits = Logits::default();
    let same = backend.step(&[of(0, 2), of(1, 2)], &mut logits);
    assert!(matches!(same, Err(StepError::BadSlot { slot: 2, .. })), "{same:?}");
    let none = backend.step(&[of(0, 16)], &mut logits);
    assert!(matches!(none, Err(StepError::BadSlot { slot: 16, slots: 16 })), "{none:?}");
}

#[test]
fn kept_states_continue_with_the_same_bits() {
    for file in [FILES[0], ROTATED[0]] {
        let prompts = prompts_of(file);
        let tokens = &prompts.iter().max_by_key(|prompt| prompt.ids.len()).unwrap().ids[..100];
        let mut backend = cpu::load(open_shared(file), options(Digits::Two)).unwrap();
        let blocks: Vec<BlockId> = (0..7).map(BlockId).collect();
        let mut run = |positions: Range<usize>, state: StateSlots<'_>| {
            let mut logits = Logits::default();
            let tokens = &tokens[positions.clone()];
            let (position, blocks) = (positions.start, &blocks[..]);
            let chunk =
                Chunk { tokens, position, blocks, logits: LogitsFor::Last, state, windows: &[] };
            backend.step(&[chunk], &mut logits).unwrap();
            logits.all().to_vec()
        };
        let saves = [(1, 5), (2, 6), (48, 7), (100, 8)];
        let expected = run(0..100, StateSlots { own: 0, from: None, saves: &saves });
        for (after, slot) in saves.into_iter().take(3) {
            // Twice, and in the slot of the first sequence, too: what is kept stays.
            for own in [1, 0] {
                let state = StateSlots { own, from: Some(slot), saves: &[] };
                assert!(expected == run(after..100, state), "{file}: after {after}, in {own}");
            }
        }
        // Kept again by a chunk that begins with a kept state.
        let state = StateSlots { own: 2, from: Some(5), saves: &[(1, 9), (59, 10)] };
        run(1..60, state);
        for (after, slot) in [(2, 9), (60, 10)] {
            let state = StateSlots { own: 3, from: Some(slot), saves: &[] };
            assert!(expected == run(after..100, state), "{file}: after {after}");
        }
    }
}

#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let prompts = prompts_of(FILES[0]);
    let shared = &prompts.iter().max_by_key(|prompt| prompt.ids.len()).unwrap().ids[..70];
    let sampling = SamplingParams { max_tokens: 6, ignore_eos: true, ..Default::default() };
    let request = |tail: u32, length: usize| {
        let prompt = [shared, &vec![tail; length][..]].concat();
        Request { prompt, sampling: sampling.clone(), ..Request::default() }
    };
    let requests = (1..9).map(|tail| request(tail, 5 + tail as usize)).collect::<Vec<_>>();
    let answers = |engine: &mut Engine, requests: &[Request]| {
        let ids: Vec<_> =
            requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        let mut outputs = BTreeMap::new();
        while !engine.is_idle() {
            for event in engine.step(Instant::now()).events {
                if let Event::Finished { id, output } = event {
                    outputs.insert(id, (output.choices[0].tokens.clone(), output.cached_tokens));
                }
            }
        }
        ids.into_iter().map(|id| outputs.remove(&id).unwrap()).collect::<Vec<_>>()
    };
    let model = open_shared(FILES[0]);
    let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
    assert!(options.kept_states(&model) >= 4);
    let mut engine = load::engine(&model, &options).unwrap();
    let together = answers(&mut engine, &requests);
    // The first one computes the four blocks that all have, and keeps the state there.
    let cached: Vec<usize> = together.iter().map(|(_, cached)| *cached).collect();
    assert_eq!(cached, [0, 64, 64, 64, 64, 64, 64, 64]);
    // Of prompts that are longer than a step, too, the others wait for the state.
    let long: Vec<u32> = (0..700).map(|i| 3 + i * 7 % 400).collect();
    let beyond = (0..3).map(|tail| {
        let prompt = [&long[..], &[tail; 9]].concat();
        Request { prompt, sampling: sampling.clone(), ..Request::default() }
    });
    let beyond = beyond.collect::<Vec<_>>();
    let cached: Vec<usize> = answers(&mut engine, &beyond).iter().map(|(_, c)| *c).collect();
    assert_eq!(cached, [0, 688, 688]);
    // A text that continues a prompt goes on after its last whole block.
    let longer = [request(7, 40)];
    let [(tokens, cached)] = &answers(&mut engine, &longer)[..] else { panic!("one answer") };
    assert_eq!(*cached, 80);
    let alone = |request: &Request| {
        let mut engine = load::engine(&model, &options).unwrap();
        answers(&mut engine, std::slice::from_ref(request)).remove(0).0
    };
    assert_eq!(*tokens, alone(&longer[0]));
    for (request, (tokens, _)) in requests.iter().zip(&together) {
        assert_eq!(*tokens, alone(request));
    }
}

/// Runs an engine until it is idle; returns the tokens of the answers in the order of the requests.
fn finished(engine: &mut Engine) -> Vec<Vec<u32>> {
    let mut answers = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step(Instant::now()).events {
            match event {
                Event::Finished { id, output } => {
                    let tokens = output.choices.into_iter().map(|choice| choice.tokens);
                    answers.insert(id, tokens.collect::<Vec<_>>());
                }
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Delta { .. } => {}
            }
        }
    }
    answers.into_values().flatten().collect()
}

#[test]
fn forks_have_the_same_answers_and_compute_no_token_again() {
    let model = open_shared(FILES[0]);
    let mut engine = load::engine(&model, &EngineOptions::default()).unwrap();
    let sampling = SamplingParams { max_tokens: 12, ignore_eos: true, ..Default::default() };
    let prompt = (0..40).collect();
    let id = engine.submit(Request { prompt, sampling, ..Request::default() }).unwrap();
    for _ in 0..5 {
        engine.step(Instant::now());
    }
    for kind in [Fork::Shared, Fork::Deep] {
        engine.fork_request(id, kind).unwrap();
    }
    let mut fork = engine.fork(Fork::Deep).unwrap();
    let mut shared = engine.fork(Fork::Shared).unwrap();
    // In turns, then after the end of the one that had the slots first.
    shared.step(Instant::now());
    engine.step(Instant::now());
    let mut of_shared = shared.fork(Fork::Shared).unwrap();
    drop(engine.fork(Fork::Shared).unwrap());
    let (of_original, of_fork) = (finished(&mut engine), finished(&mut fork));
    let prefilled = engine.stats().prefill_tokens;
    drop(engine);
    assert_eq!(of_original, finished(&mut shared));
    assert_eq!(of_original, finished(&mut of_shared));
    assert_eq!((shared.stats().prefill_tokens, shared.stats().blocks_used), (0, 0));
    assert!(of_original.len() == 3 && of_original.iter().all(|tokens| *tokens == of_original[0]));
    assert_eq!(of_original, of_fork);
    assert_eq!(prefilled, 40, "of the first request alone");
    assert_eq!(fork.stats().prefill_tokens, 0);
}

#[test]
fn choices_go_on_from_the_state_after_their_prompt() {
    let model = open_shared(FILES[0]);
    let mut engine = load::engine(&model, &EngineOptions::default()).unwrap();
    let mut answers = |n| {
        let sampling = SamplingParams {
            max_tokens: 12,
            ignore_eos: true,
            temperature: 0.8,
            seed: 5,
            n,
            ..Default::default()
        };
        let prompt = (0..40).collect();
        engine.submit(Request { prompt, sampling, ..Request::default() }).unwrap();
        let before = engine.stats().prefill_tokens;
        let answers = finished(&mut engine);
        (answers, engine.stats().prefill_tokens - before)
    };
    let ((three, computed), (one, _)) = (answers(3), answers(1));
    assert_eq!(computed, 40, "the prompt is computed once");
    assert!(three[0] == one[0] && three[1] != three[0], "{three:?}");
}

#[test]
fn states_are_read_from_disk_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let model = open_shared(FILES[0]);
    let start = || {
        let limits = FolderLimits { bytes_max: 1 << 30, free_min: 0 };
        let tiers = BlockTiers::open(TierOptions::folder(folder.path(), limits)).unwrap();
        let mut engine = load::engine(&model, &EngineOptions::default()).unwrap();
        engine.use_disk(tiers);
        engine
    };
    let answer = |engine: &mut Engine, last: u32| {
        let sampling = SamplingParams { max_tokens: 9, ignore_eos: true, ..Default::default() };
        let prompt = (0..100).chain([last; 5]).collect();
        engine.submit(Request { prompt, sampling, ..Request::default() }).unwrap();
        let before = engine.stats().prefill_tokens;
        (finished(engine), engine.stats().prefill_tokens - before)
    };
    let mut first = start();
    let (expected, computed) = answer(&mut first, 7);
    assert_eq!(computed, 105);
    assert_eq!(answer(&mut first, 7), (expected.clone(), 9));
    // Six blocks and a state, which is behind the last whole block.
    let started = Instant::now();
    while first.disk_stats().unwrap().written < 7 {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", first.disk_stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(first);
    assert_eq!(answer(&mut start(), 7), (expected, 9), "the rest is read");
}

#[test]
fn drafts_change_no_answer_and_save_steps() {
    let model = open_shared(FILES[0]);
    // The second answer is equal to the first one, which its drafts are from; of those of the others some are wrong.
    let samplings =
        [(0.0, 1), (0.0, 1), (0.05, 2), (0.3, 3), (0.0, 1)].map(|(temperature, seed)| {
            SamplingParams {
                max_tokens: 60,
                temperature,
                seed,
                ignore_eos: true,
                ..Default::default()
            }
        });
    let run = |draft_tokens: usize| {
        let options = EngineOptions { draft_tokens, ..EngineOptions::default() };
        let mut engine = load::engine(&model, &options).unwrap();
        let mut answers = Vec::new();
        for sampling in &samplings {
            let (prompt, sampling) = ((0..40).collect(), sampling.clone());
            engine.submit(Request { prompt, sampling, ..Request::default() }).unwrap();
            while !engine.is_idle() {
                let report = engine.step(Instant::now());
                // As if more rows cost nothing.
                engine.record_time(&report, Duration::from_millis(10));
                for event in report.events {
                    match event {
                        Event::Finished { output, .. } => {
                            answers.push(output.choices[0].tokens.clone());
                        }
                        Event::Failed { error, .. } => panic!("{error}"),
                        Event::Delta { .. } => {}
                    }
                }
            }
        }
        (answers, engine.stats())
    };
    let ((plain, without), (drafted, with)) = (run(0), run(8));
    assert_eq!(plain, drafted);
    assert!(with.steps < without.steps * 4 / 5, "{} of {} steps", with.steps, without.steps);
    assert!(with.decode_tokens > without.decode_tokens, "some drafts are wrong");
}

#[test]
fn states_are_counted_and_gpus_refuse() {
    let model = open_shared(FILES[0]);
    let state = 3 * (3 * 1024 + 4 * 128 * 128) * 4;
    let kv_bytes = Some(8 * state);
    let options = EngineOptions { kv_bytes, ..EngineOptions::default() };
    assert_eq!(options.slots(&model), 3, "in half of the memory");
    assert_eq!(options.kept_states(&model), 1);
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
        assert!(engine.stats().running <= 3);
    }
}

#[test]
fn folder_and_files_are_the_same_model() {
    let folder = open_shared("qwen35-tiny");
    let delta = folder.config().delta_net.unwrap();
    assert_eq!((delta.attention_interval, delta.key_heads, delta.value_heads), (4, 2, 4));
    assert!(!delta.dense_rates && folder.config().rotary_dim == Some(16));
    for file in FILES {
        let model = open_shared(file);
        for layer in 0..4 {
            for linear in folder.config().linears(layer) {
                let [a, b] = [&folder, &model].map(|m| m.ternary(layer, *linear).unwrap());
                assert!(a.trits == b.trits && a.groups == b.groups, "{layer} {linear:?}");
            }
            let tensors =
                LayerTensor::OF_DELTA_NET.into_iter().take(if layer == 3 { 0 } else { 3 });
            for tensor in tensors {
                let [a, b] = [&folder, &model].map(|m| m.layer_tensor(layer, tensor).unwrap());
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
    for prompt in prompts_of("qwen35-tiny") {
        let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
        let (_, relative) = differences(logits.last().unwrap(), &prompt.full_logits);
        assert!(relative < 2e-3, "{}: {relative}", prompt.name);
    }
}

#[test]
fn conversions_keep_the_model() {
    let out = tempfile::tempdir().unwrap();
    for source in ["qwen35-tiny", FILES[1], ROTATED[0]] {
        let model = open_shared(source);
        for target in [Target::GgufPq2_0, Target::GgufPtq1_0, Target::GgufQ2_0] {
            let has_small_matrices = model.config().rotation.is_none();
            if target == Target::GgufQ2_0 && has_small_matrices {
                let error = convert(&model, target, &out.path().join("never.gguf")).unwrap_err();
                assert!(error.to_string().contains("two layouts"), "{error}");
                continue;
            }
            let path = out.path().join(format!("{target}.gguf"));
            convert(&model, target, &path).unwrap();
            let converted = Model::open(&path).unwrap();
            assert_eq!(converted.config().rotation, model.config().rotation);
            assert_eq!(converted.fingerprint().unwrap(), model.fingerprint().unwrap(), "{source}");
        }
        let error = convert(&model, Target::GgufI2S, &out.path().join("never.gguf")).unwrap_err();
        assert!(matches!(error, ModelError::Unconvertible { .. }), "{error}");
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
        ("qwen35.nextn_predict_layers", 8),
    ] {
        let mut file = RawGguf::read(&golden(FILES[0]));
        file.set_u32(key, value);
        let error = Model::open_gguf_bytes("changed", file.bytes(32)).unwrap_err().to_string();
        let named = if key.ends_with("group_count") { "time_step_rank" } else { key };
        assert!(error.contains(named), "{key}: {error}");
    }
}

#[test]
fn sections_of_rope_are_counts_and_change_nothing_for_text() {
    const KEY: &str = "qwen35.rope.dimension_sections";
    let file = || RawGguf::read(&golden(FILES[0]));
    let open = |file: &RawGguf| Model::open_gguf_bytes("changed", file.bytes(32));
    let plain = open(&file()).unwrap().fingerprint().unwrap();
    for sections in [&[3, 3, 2, 0][..], &[11, 11, 10], &[0; 4], &[]] {
        let mut file = file();
        file.set_i32s(KEY, sections);
        assert_eq!(open(&file).unwrap().fingerprint().unwrap(), plain, "{sections:?}");
    }
    let refused = |edit: &dyn Fn(&mut RawGguf)| {
        let mut file = file();
        edit(&mut file);
        let error = open(&file).unwrap_err();
        assert!(matches!(&error, ModelError::BadKey { key, .. } if key == KEY), "{error}");
    };
    refused(&|file| file.set_text(KEY, "abc"));
    refused(&|file| file.set_u32(KEY, 3));
    refused(&|file| file.set_f32s(KEY, &[3.0, 3.0, 2.0, 0.0]));
    refused(&|file| file.set_texts(KEY, &["3", "3"]));
    refused(&|file| file.set_i32s(KEY, &[-3, 3, 2, 0]));
    refused(&|file| file.set_i32s(KEY, &[3, 3, 2, 0, 0]));
}

#[test]
fn positive_rates_of_a_decay_are_refused_as_such() {
    let mut file = RawGguf::read(&golden(FILES[0]));
    file.tensor("blk.0.ssm_a").bytes[4..8].copy_from_slice(&5f32.to_le_bytes());
    let model = Model::open_gguf_bytes("grows", file.bytes(32)).unwrap();
    let error = model.fingerprint().unwrap_err().to_string();
    assert!(
        error.contains("blk.0.ssm_a") && error.ends_with("rate 5 of a decay is above 0"),
        "{error}"
    );
}

#[test]
fn share_that_rope_turns_is_named_where_it_is() {
    const KEY: &str = "partial_rotary_factor";
    let in_block = |value: Value| {
        config_refusal("qwen35-tiny", |config| config["rope_parameters"][KEY] = value)
    };
    for value in [json!(1.5), json!("half"), json!(0.0)] {
        let message = in_block(value.clone());
        assert!(message.contains(&format!("rope_parameters.{KEY} is {value}")), "{message}");
    }
    let beside = config_refusal("qwen35-tiny", |config| {
        config.as_object_mut().unwrap().remove("rope_parameters");
        config["rope_theta"] = json!(1e7);
        config[KEY] = json!(1.5);
    });
    assert!(beside.contains(&format!("key {KEY} is 1.5")), "{beside}");
}

#[test]
fn files_in_a_rotated_basis_are_one_model_and_other_bases_are_refused() {
    let [first, second, third] = ROTATED.map(|file| open_shared(file).fingerprint().unwrap());
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
