//! Steps of models with scales of groups (Qwen3 in the structure of Ternary Bonsai) compared with the CPU's, bit by bit.

use std::sync::Arc;

use super::{
    CudaOptions, HeadMode, KvType, Limits, LogitsFor, Part,
    equality::{check, on_cpu},
    load, model, options, package, part, small, tokens, tokens_of,
};
use crate::{
    backend::Backend as _,
    config::{Linear, Multipliers},
    files::{self, Model, gguf},
    kernels::Digits,
    sampling::{GumbelNoise, Largest},
};

/// A tied and an untied head; the second with YaRN and heads that are wider than hidden size / heads.
const MODELS: [&str; 2] = ["qwen3-group-tiny", "qwen3-yarn-tiny"];

pub fn with_digits(digits: Digits, kv: KvType) -> CudaOptions {
    CudaOptions { activations: Some(digits), ..options(kv, HeadMode::Exact) }
}

/// Runs a prompt in chunks, then decodes of several sequences, on both.
pub fn check_answers(what: &str, model: &Arc<Model>, options: CudaOptions) {
    let Some(mut cuda) = load(model, options, small()) else { return };
    let mut cpu = on_cpu(model, options);
    let tokens = |count, seed| tokens_of(model, count, seed);
    let all = tokens(60, 1);
    for (range, logits) in [
        (0..19, LogitsFor::All),
        (19..20, LogitsFor::Last),
        (20..21, LogitsFor::largest(3)),
        (21..59, LogitsFor::largest(1)),
    ] {
        let parts = [part(&all[range.clone()], range.start, 0, logits)];
        check(&format!("{what}: {range:?}"), cpu.as_mut(), &mut cuda, &parts);
    }
    let prompts: Vec<Part> = (0..9)
        .map(|i| part(&tokens(1 + i, i as u32), 0, 10 + i as u32, LogitsFor::Nothing))
        .collect();
    check(&format!("{what}: prompts"), cpu.as_mut(), &mut cuda, &prompts);
    for count in [2, 5, 9] {
        let decodes: Vec<Part> = (0..count)
            .map(|i| {
                let logits = if i % 3 == 1 { LogitsFor::Last } else { LogitsFor::largest(1 + i) };
                part(&[i as u32], 1 + i, 10 + i as u32, logits)
            })
            .collect();
        check(&format!("{what}: {count} decodes"), cpu.as_mut(), &mut cuda, &decodes);
    }
    let class = cuda.numerics_class().replace("/cuda", "/cpu");
    assert_eq!(class, cpu.numerics_class(), "{what}");
}

#[test]
fn answers_with_scales_of_groups_equal_the_cpus() {
    for name in MODELS {
        for digits in Digits::ALL {
            let what = format!("{name}, {digits}");
            check_answers(&what, &model(name), with_digits(digits, KvType::F16));
        }
    }
}

/// Linears with scales of groups, embedding and head without: TriLM, and BitCPM with its factors. The epsilon is large, so
/// that the residual factor changes every norm of the stream.
#[test]
fn scales_of_groups_beside_dense_tables_equal_the_cpus() {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let factors = Multipliers { embedding: 12.0, residual: 0.3, logit_divisor: 7.0 };
    for (architecture, multipliers) in [("llama", Multipliers::NONE), ("minicpm", factors)] {
        let path = folder.path().join(format!("{architecture}.gguf"));
        let mut config = files::shape("bitcpm-8b").expect("a known shape");
        config.architecture = architecture.to_owned();
        (config.multipliers, config.rms_norm_eps) = (multipliers, 0.01);
        (config.hidden_size, config.layer_count, config.intermediate_size) = (256, 2, 384);
        (config.head_count, config.kv_head_count, config.head_dim) = (4, 2, 64);
        (config.vocab_size, config.context_length) = (1000, 128);
        files::synth(&config, &path, 5).expect("the folder is writable");
        let model = Arc::new(Model::open(&path).expect("the model opens"));
        let config = model.config();
        assert!(config.group_scales && !config.ternary_tables);
        assert_eq!((config.multipliers, config.rms_norm_eps), (multipliers, 0.01));
        for digits in Digits::ALL {
            let what = format!("{architecture}, {digits}");
            check_answers(&what, &model, with_digits(digits, KvType::F16));
        }
    }
}

/// BitCPM with the divisors of LongRoPE, as llama.cpp reads it, with every cache and head.
#[test]
fn steps_of_bitcpm_equal_the_cpus() {
    let name = "group-linears/minicpm-tq2_0.gguf";
    for (kv, head) in
        [(KvType::F16, HeadMode::Exact), (KvType::F32, HeadMode::Full), (KvType::Q8, HeadMode::Q8)]
    {
        check_answers(&format!("{name}, {kv:?}, {head:?}"), &model(name), options(kv, head));
    }
}

#[test]
fn scales_of_groups_with_every_cache_and_head_equal_the_cpus() {
    for (name, kv, head) in [
        ("qwen3-group-tiny", KvType::F32, HeadMode::Full),
        ("qwen3-yarn-tiny/qwen3-yarn-tiny-q2_0.gguf", KvType::Q8, HeadMode::Q8),
        ("qwen3-group-tiny/qwen3-group-tiny-ptq1_0.gguf", KvType::Q8, HeadMode::Exact),
    ] {
        let what = format!("{name}, {kv:?}, {head:?}");
        check_answers(&what, &model(name), options(kv, head));
    }
}

/// Groups of 64 inputs with scales that do not pair up, in some matrices of a model.
#[test]
fn groups_of_64_equal_the_cpus() {
    let name = "qwen3-yarn-tiny-q2_0.gguf";
    let path = package().join("tests/golden/qwen3-yarn-tiny").join(name);
    let mut bytes = std::fs::read(path).expect("the golden file exists");
    let file = gguf::parse(name, &bytes).expect("it is a model");
    let tensors = [
        "blk.0.attn_k.weight",
        "blk.1.ffn_gate.weight",
        "blk.1.ffn_down.weight",
        "token_embd.weight",
        "output.weight",
    ];
    let offset = |name: &str| {
        let tensor = file.tensors.iter().find(|tensor| tensor.name == name);
        (file.data_start + tensor.expect("the model has it").offset) as usize
    };
    // A block of 64 has 18 bytes, its f16 scale first.
    for at in tensors.map(offset) {
        bytes[at + 18 * 5 + 1] ^= 4;
    }
    let model = Arc::new(Model::open_gguf_bytes(name, bytes).expect("it stays a model"));
    let size = |layer, linear| {
        let groups = model.ternary(layer, linear).expect("it decodes").groups;
        groups.expect("the model has scales of groups").size
    };
    assert_eq!((size(0, Linear::Q), size(0, Linear::K), size(1, Linear::Down)), (128, 64, 64));
    for digits in Digits::ALL {
        check_answers("groups of 64", &model, with_digits(digits, KvType::F16));
    }
}

/// Enough rows for the kernels of many rows, with widths that are not multiples of 128.
#[test]
fn many_rows_with_scales_of_groups_equal_the_cpus() {
    for (digits, name) in Digits::ALL.into_iter().zip(MODELS) {
        let (model, options) = (model(name), with_digits(digits, KvType::F16));
        let limits = Limits { rows: 300, whole: 16, screened: 80, ..Limits::default() };
        let Some(mut cuda) = load(&model, options, limits) else { return };
        let mut cpu = on_cpu(&model, options);
        let noise = Some(GumbelNoise::new(3, 0, 5, 1.5));
        let largest = Largest { noise, ..Largest::logits(1) };
        for (lengths, logits) in [
            (&[50, 20][..], LogitsFor::Last),
            (&[200, 99, 3], LogitsFor::largest(2)),
            (&[1; 70], LogitsFor::Largest(largest)),
        ] {
            let mut first_block = 0;
            let parts: Vec<Part> = lengths
                .iter()
                .enumerate()
                .map(|(i, &length)| {
                    let part = part(&tokens(length, i as u32), 0, first_block, logits);
                    first_block += length.div_ceil(16) as u32;
                    part
                })
                .collect();
            check(&format!("{name}: {lengths:?}"), cpu.as_mut(), &mut cuda, &parts);
        }
    }
}

/// One layer of the 1.7B model's widths: more k blocks than a round has sums of.
#[test]
fn steps_of_bonsais_widths_equal_the_cpus() {
    let folder = tempfile::tempdir().expect("a folder for a model");
    let path = folder.path().join("bonsai.gguf");
    let mut config = files::shape("bonsai-1.7b").expect("a known shape");
    (config.layer_count, config.vocab_size, config.context_length) = (1, 1000, 128);
    files::synth(&config, &path, 11).expect("the folder is writable");
    let model = Arc::new(Model::open(&path).expect("the model opens"));
    for digits in Digits::ALL {
        let options = with_digits(digits, KvType::F16);
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        for (range, logits) in [(0..34, LogitsFor::largest(1)), (34..35, LogitsFor::Last)] {
            let parts = [part(&tokens(35, 1)[range.clone()], range.start, 0, logits)];
            check(&format!("{digits}: {range:?}"), cpu.as_mut(), &mut cuda, &parts);
        }
        let prompts = [3, 4].map(|block| part(&[5, 6], 0, block, LogitsFor::largest(2)));
        check(&format!("{digits}: two prompts"), cpu.as_mut(), &mut cuda, &prompts);
    }
}
