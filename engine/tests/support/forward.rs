//! The forward pass of golden models, cut into steps in many ways, against their references.

use std::{sync::Arc, time::Instant};

use tritmill_engine::{
    Event, Request, SamplingParams,
    backend::{
        Backend, Chunk, Logits, LogitsFor,
        cpu::{self, CpuOptions, KvType},
    },
    files::Model,
    formats::Format,
    kernels::{Digits, Isa},
    load::{self, EngineOptions},
};

use super::{Prompt, all_logits, differences, golden, recorded_prompts};

/// Blocks of the backends here.
pub const BLOCKS: usize = 64;
/// Most groups of layers of these models, each with blocks of its own.
const GROUPS_MAX: usize = 4;

/// How far results may be from those of a reference; golden/README.md explains it.
#[derive(Clone, Copy)]
pub struct Tolerance {
    /// Prompts, the shortest ones, with equal logits with `int8`: they are free of values between two integers, which round one way or
    /// the other.
    pub exact: usize,
    /// Relative RMS of the logits of the other prompts with `int8`, and of all with `int16`.
    pub int8: f64,
    pub int16: f64,
    /// Least margin of a token that is certain in a greedy answer.
    pub margin: f64,
}

/// Opens a golden model.
pub fn open_shared(path: &str) -> Arc<Model> {
    Arc::new(Model::open(&golden(path)).unwrap())
}

/// Returns the prompts of the folder that a golden file is in, or of the folder itself.
pub fn prompts_of(file: &str) -> Vec<Prompt> {
    recorded_prompts(file.split_once('/').map_or(file, |(folder, _)| folder), "greedy_full")
}

pub fn options(activations: Digits) -> CpuOptions {
    let activations = Some(activations);
    CpuOptions { threads: 2, kv: KvType::F32, activations, ..CpuOptions::new(GROUPS_MAX * BLOCKS) }
}

/// Compares the last logits of every prompt with those of the reference.
pub fn check_logits(file: &str, tolerance: Tolerance) {
    let model = open_shared(file);
    for digits in Digits::ALL {
        let mut backend = cpu::load(Arc::clone(&model), options(digits)).unwrap();
        for (index, prompt) in prompts_of(file).iter().enumerate() {
            let logits = all_logits(backend.as_mut(), BLOCKS, &prompt.ids);
            let last = logits.last().unwrap();
            let name = format!("{file}, {}", prompt.name);
            let want = match digits {
                Digits::One => &prompt.int8_logits,
                Digits::Two => &prompt.full_logits,
            };
            let (largest, relative) = differences(last, want);
            match digits {
                Digits::One if index < tolerance.exact => {
                    assert!(largest < 1e-3, "{name}: {largest}")
                }
                Digits::One => assert!(relative < tolerance.int8, "{name}: {relative}"),
                Digits::Two => assert!(relative < tolerance.int16, "{name}: {relative}"),
            }
        }
    }
}

/// Compares greedy answers with those of the reference: all prompts at once, and two choices each.
pub fn check_greedy(file: &str, tolerance: Tolerance) {
    let options = EngineOptions { kv: KvType::F32, ..EngineOptions::default() };
    let mut engine = load::engine(&open_shared(file), &options).unwrap();
    let prompts = prompts_of(file);
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
            let margins = prompt.margins.iter();
            let sure = margins.take_while(|margin| **margin > tolerance.margin).count();
            let tokens: Vec<usize> =
                output.choices[0].tokens.iter().map(|token| *token as usize).collect();
            assert_eq!(tokens[..sure], prompt.greedy[..sure], "{}", prompt.name);
            answered += 1;
        }
    }
    assert_eq!(answered, prompts.len());
}

/// Computes a prompt in pieces of these lengths in the places of a slot, and returns the logits of every position.
pub fn in_pieces(
    backend: &mut dyn Backend,
    (slot, first_block): (u32, usize),
    tokens: &[u32],
    lengths: impl Iterator<Item = usize>,
) -> Vec<f32> {
    let (blocks, windows) = backend.layer_groups().tables(first_block, 16);
    let (mut position, mut all) = (0, Vec::new());
    for length in lengths {
        let end = (position + length).min(tokens.len());
        if position == end {
            break;
        }
        let mut logits = Logits::default();
        let tokens = &tokens[position..end];
        let chunk = Chunk {
            tokens,
            position,
            blocks: &blocks,
            windows: &windows,
            logits: LogitsFor::All,
            state: slot.into(),
        };
        backend.step(&[chunk], &mut logits).unwrap();
        all.extend_from_slice(logits.all());
        position = end;
    }
    all
}

/// Compares the bits of all logits of a text: whole, in pieces, token by token, beside another text, on 1 and 3 threads, on
/// every ISA and in every format.
pub fn check_bits(model: &Arc<Model>, kv: KvType, tokens: &[u32], other: &[u32]) {
    let options = CpuOptions { kv, ..options(Digits::Two) };
    let mut expected: Option<Vec<f32>> = None;
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    for (isa, format) in isas.flat_map(|isa| Format::ALL.map(|format| (isa, format))) {
        for threads in [1, 3] {
            let options = CpuOptions { isa, format, threads, ..options };
            let mut backend = cpu::load(Arc::clone(model), options).unwrap();
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
    let expected = expected.unwrap();
    let mut backend = cpu::load(Arc::clone(model), options).unwrap();
    let groups = backend.layer_groups();
    let tables = [0, 1].map(|text| groups.tables(text * 16 * groups.count(), 16));
    let of = |tokens, position, slot: u32| Chunk {
        tokens,
        position,
        blocks: &tables[slot as usize].0,
        windows: &tables[slot as usize].1,
        logits: LogitsFor::All,
        state: slot.into(),
    };
    let mut logits = Logits::default();
    let (begin, rest) = tokens.split_at(40);
    backend.step(&[of(other, 0, 1), of(begin, 0, 0)], &mut logits).unwrap();
    let vocab = backend.vocab_size();
    let skip = other.len() * vocab;
    let mut together = logits.all()[skip..].to_vec();
    backend.step(&[of(rest, 40, 0), of(&other[..3], 0, 1)], &mut logits).unwrap();
    together.extend_from_slice(&logits.all()[..rest.len() * vocab]);
    assert!(expected == together, "beside another text");
}
