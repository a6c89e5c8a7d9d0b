//! The same tokens give the same logits, to the bit, for any batch, chunking, thread count, packing and
//! ISA.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use proptest::prelude::*;
use support::MODELS;
use tritmill_engine::{
    backend::{
        Backend, Chunk, Logits, LogitsFor, PositionLogits,
        cpu::{self, CpuOptions, HeadMode, KvType},
    },
    files::Model,
    formats::Format,
    kernels::Isa,
    kv::BlockId,
};

const BLOCKS: usize = 400;
/// KV types for serving; f32 is for comparison with references.
const KV_TYPES: [KvType; 2] = [KvType::F16, KvType::Q8];

fn model(name: &str) -> Arc<Model> {
    Arc::new(support::open(name))
}

fn load(model: &Arc<Model>, options: CpuOptions) -> Box<dyn Backend> {
    cpu::load(Arc::clone(model), options).unwrap()
}

fn options(format: Format, isa: Isa, threads: usize) -> CpuOptions {
    CpuOptions { format, isa, threads, ..CpuOptions::new(BLOCKS) }
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7919 + seed * 104_729 + i * i * 31) % 1000).collect()
}

/// Runs one sequence in chunks of the given sizes, with a block table that starts at `first`. Returns the
/// logits. // (position, vocab)
fn run(backend: &mut dyn Backend, tokens: &[u32], sizes: &[usize], first: u32) -> Vec<f32> {
    let blocks: Vec<BlockId> = (0..20).map(|i| BlockId(first + i)).collect();
    let mut sizes = sizes.iter().copied().cycle();
    let (mut position, mut all, mut logits) = (0, Vec::new(), Logits::default());
    while position < tokens.len() {
        let end = (position + sizes.next().unwrap()).min(tokens.len());
        let chunk = Chunk {
            state: 0.into(),
            tokens: &tokens[position..end],
            position,
            blocks: &blocks,
            logits: LogitsFor::All,
            windows: &[],
        };
        backend.step(&[chunk], &mut logits).unwrap();
        all.extend_from_slice(logits.all());
        position = end;
    }
    all
}

/// Every model with every KV type.
fn kinds() -> impl Iterator<Item = (&'static str, KvType)> {
    MODELS.into_iter().flat_map(|name| KV_TYPES.map(|kv| (name, kv)))
}

#[test]
fn chunking_does_not_change_a_bit() {
    for (name, kv) in kinds() {
        let model = model(name);
        let of_kv = CpuOptions { kv, ..options(Format::I2S, Isa::detect(), 2) };
        let mut backend = load(&model, of_kv);
        let tokens = tokens(75, 1);
        let whole = run(backend.as_mut(), &tokens, &[75], 0);
        for sizes in [&[1][..], &[16], &[17, 3, 1], &[64], &[5, 31]] {
            let cut = run(backend.as_mut(), &tokens, sizes, 40);
            assert!(whole == cut, "{name}, {kv:?}: chunks of {sizes:?}");
        }
    }
}

#[test]
fn threads_formats_and_isas_do_not_change_a_bit() {
    for (name, kv) in kinds() {
        let model = model(name);
        let tokens = tokens(36, 2);
        let mut want = None;
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for format in Format::ALL {
                // Scalar is slow and runs the same thread code.
                let counts: &[usize] = if isa == Isa::Scalar { &[2] } else { &[1, 2, 3] };
                for &threads in counts {
                    let of_kv = CpuOptions { kv, ..options(format, isa, threads) };
                    let mut backend = load(&model, of_kv);
                    let got = run(backend.as_mut(), &tokens, &[23], 0);
                    let want = want.get_or_insert_with(|| got.clone());
                    assert!(*want == got, "{name}, {kv:?}: {format}, {isa}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn batch_mates_do_not_change_a_bit() {
    let strategy = (2usize..=24, any::<u32>(), proptest::collection::vec(1usize..40, 24));
    let backends: Vec<_> = kinds()
        .map(|(name, kv)| {
            let of_kv = CpuOptions { kv, ..options(Format::I2S, Isa::detect(), 2) };
            std::cell::RefCell::new(load(&model(name), of_kv))
        })
        .collect();
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { cases: 40, ..Default::default() });
    runner
        .run(&strategy, |(count, seed, lengths)| {
            let backend = &mut *backends[seed as usize % backends.len()].borrow_mut();
            let sequences: Vec<Vec<u32>> =
                (0..count).map(|i| tokens(lengths[i], seed % 1000 + i as u32)).collect();
            let tables: Vec<Vec<BlockId>> = (0..count as u32)
                .map(|i| (0..3).map(|b| BlockId(100 + i * 3 + b)).collect())
                .collect();
            let chunks: Vec<Chunk<'_>> = (0..count)
                .map(|i| Chunk {
                    state: 0.into(),
                    tokens: &sequences[i],
                    position: 0,
                    blocks: &tables[i],
                    logits: LogitsFor::Last,
                    windows: &[],
                })
                .collect();
            let mut together = Logits::default();
            backend.step(&chunks, &mut together).unwrap();
            let vocab = backend.vocab_size();
            for (i, sequence) in sequences.iter().enumerate() {
                let alone = run(backend.as_mut(), sequence, &[64], 0);
                let last = &alone[alone.len() - vocab..];
                prop_assert!(last == &together.all()[i * vocab..(i + 1) * vocab], "sequence {}", i);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn largest_logits_equal_those_of_the_whole_head() {
    for (name, isa) in MODELS.iter().flat_map(|name| Isa::ALL.map(|isa| (name, isa))) {
        if !isa.is_available() {
            continue;
        }
        let mut backend = load(&model(name), options(Format::I2S, isa, 2));
        let vocab = backend.vocab_size();
        let sequences: Vec<Vec<u32>> = (0..7).map(|i| tokens(3 + i, i as u32)).collect();
        let mut step = |count: usize, requested: &dyn Fn(usize) -> LogitsFor<'static>| {
            let tables: Vec<[BlockId; 1]> = (0..7).map(|i| [BlockId(i)]).collect();
            let chunk = |i: usize| {
                let (tokens, blocks) = (&sequences[i][..], &tables[i][..]);
                Chunk {
                    tokens,
                    position: 0,
                    blocks,
                    logits: requested(i),
                    state: 0.into(),
                    windows: &[],
                }
            };
            let chunks: Vec<Chunk<'_>> = (0..count).map(chunk).collect();
            let mut logits = Logits::default();
            backend.step(&chunks, &mut logits).unwrap();
            logits
        };
        let whole = step(7, &|_| LogitsFor::Last);
        for count in [1, 7] {
            // All logits of every third row, one or a few of the largest of the others.
            let requested =
                |i: usize| [LogitsFor::largest(1), LogitsFor::largest(5), LogitsFor::Last][i % 3];
            let mut some = step(count, &requested);
            assert_eq!(some.len(), count);
            let mut left_out = 0;
            for (i, whole) in whole.all().chunks(vocab).take(count).enumerate() {
                let mut sorted = whole.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                let least = match requested(i) {
                    LogitsFor::Largest(ranking) => sorted[ranking.count - 1],
                    _ => f32::NEG_INFINITY,
                };
                let some = match some.position(i) {
                    PositionLogits::All(logits) => {
                        assert!(logits == whole && requested(i) == LogitsFor::Last);
                        continue;
                    }
                    PositionLogits::Largest(some) => some,
                    PositionLogits::Drawn(_) => unreachable!("no draw has filters"),
                };
                assert!(some.is_sorted_by(|a, b| a.id < b.id));
                let found = |id| some.iter().find(|choice| choice.id == id);
                for (whole, id) in whole.iter().zip(0..) {
                    match found(id) {
                        Some(choice) => assert_eq!(choice.logit.to_bits(), whole.to_bits()),
                        None => assert!(*whole < least),
                    }
                }
                left_out += vocab - some.len();
            }
            assert!(left_out > vocab / 4, "{name}, {isa}: {left_out} of {count} rows left out");
        }
    }
}

#[test]
fn copied_block_gives_the_same_logits_as_its_original() {
    let model = model("bitnet-tiny");
    for kv in KV_TYPES {
        let of_kv = CpuOptions { kv, ..options(Format::I2S, Isa::detect(), 2) };
        let mut backend = load(&model, of_kv);
        let tokens = tokens(20, 3);
        let whole = run(backend.as_mut(), &tokens, &[20], 0);
        backend.copy_block(BlockId(0), BlockId(90)).unwrap();
        backend.copy_block(BlockId(1), BlockId(91)).unwrap();
        let chunk = Chunk {
            state: 0.into(),
            tokens: &tokens[18..],
            position: 18,
            blocks: &[BlockId(90), BlockId(91)],
            logits: LogitsFor::All,
            windows: &[],
        };
        let mut logits = Logits::default();
        backend.step(&[chunk], &mut logits).unwrap();
        assert!(*logits.all() == whole[18 * backend.vocab_size()..], "{kv:?}");
    }
}

#[test]
fn invalid_step_is_refused_and_the_backend_stays_usable() {
    let model = model("bitnet-tiny");
    let mut backend = load(&model, options(Format::I2S, Isa::detect(), 2));
    let step = |backend: &mut dyn Backend, tokens: &[u32], position, blocks: &[BlockId]| {
        let chunk = Chunk {
            tokens,
            position,
            blocks,
            logits: LogitsFor::Last,
            state: 0.into(),
            windows: &[],
        };
        backend.step(&[chunk], &mut Logits::default())
    };
    let backend = backend.as_mut();
    assert!(step(backend, &[1024], 0, &[BlockId(0)]).is_err());
    assert!(step(backend, &[], 0, &[BlockId(0)]).is_err());
    assert!(step(backend, &[1], 16, &[BlockId(0)]).is_err());
    assert!(step(backend, &[1], usize::MAX, &[BlockId(0)]).is_err());
    assert!(step(backend, &[1], 0, &[BlockId(BLOCKS as u32)]).is_err());
    assert!(step(backend, &[1], 512, &[BlockId(0); 40]).is_err());
    assert!(step(backend, &[1], 0, &[BlockId(0)]).is_ok());
}

#[test]
fn int8_head_or_cache_is_close_to_exact_and_has_its_own_numerics_class() {
    let model = model("bitnet-tiny");
    let exact = options(Format::I2S, Isa::detect(), 1);
    let tokens = tokens(9, 4);
    // The cache's rounding causes flips of int8 activations, as f16's does (golden/README.md).
    for (options, bound) in [
        (CpuOptions { head: HeadMode::Q8, ..exact }, 0.02),
        (CpuOptions { kv: KvType::Q8, ..exact }, 0.06),
    ] {
        let (mut a, mut b) = (load(&model, exact), load(&model, options));
        assert_ne!(a.numerics_class(), b.numerics_class());
        let (exact, int8) = (run(a.as_mut(), &tokens, &[9], 0), run(b.as_mut(), &tokens, &[9], 0));
        let power: f32 = exact.iter().map(|v| v * v).sum();
        let error: f32 = exact.iter().zip(&int8).map(|(a, b)| (a - b) * (a - b)).sum();
        let relative = (error / power).sqrt();
        assert!(relative > 0.0 && relative < bound, "{}: {relative}", b.numerics_class());
    }
}
