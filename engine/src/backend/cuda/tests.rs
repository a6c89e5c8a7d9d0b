//! Steps on the emulated device (or, with `TRITMILL_TEST_DEVICE=cuda:N`, on a real one) against the
//! CPU's, to the bit.

use std::{path::PathBuf, sync::Arc};

use super::{
    CudaLoadError, CudaOptions, KvBlocks, args, buffers::Limits, device::Device, driver,
    emulated::Emulated, start, step::CudaBackend,
};
use crate::{
    backend::{
        Backend, Chunk, Logits, LogitsFor, Position, StepError,
        cpu::{self, CpuOptions, HeadMode, KvType},
    },
    files::Model,
    formats::Format,
    kernels::Isa,
    kv::BlockId,
};

const MODELS: [&str; 4] = ["bitnet-tiny", "llama-tiny", "llama-norm-tiny", "bitnet-online-tiny"];
const BLOCKS: usize = 60;

fn model(name: &str) -> Arc<Model> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    Arc::new(Model::open(&path).expect("a golden model opens"))
}

fn options(kv: KvType, head: HeadMode) -> CudaOptions {
    CudaOptions { ordinal: 0, kv, head, blocks: KvBlocks::Exactly(BLOCKS) }
}

/// The device that is tested; `None` where there is none.
fn device() -> Option<Box<dyn Device>> {
    match std::env::var("TRITMILL_TEST_DEVICE") {
        Ok(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
            let ordinal = ordinal.expect("TRITMILL_TEST_DEVICE is cuda:N");
            Some(Box::new(driver::open(ordinal).expect("the device asked for opens")))
        }
        Err(_) => Some(Box::new(Emulated::new()?)),
    }
}

fn load(model: &Model, options: CudaOptions, limits: Limits) -> Option<CudaBackend> {
    Some(start(model, device()?, options, limits).expect("the model fits"))
}

fn on_cpu(model: &Arc<Model>, options: CudaOptions) -> Box<dyn Backend> {
    let CudaOptions { kv, head, .. } = options;
    let (format, isa) = (Format::I2S, Isa::detect());
    let options = CpuOptions { format, isa, threads: 1, kv, head, block_count: BLOCKS };
    cpu::load(Arc::clone(model), options).expect("the CPU runs it")
}

fn small() -> Limits {
    Limits { rows: 256, whole: 16, screened: 48, ..Limits::default() }
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7919 + seed * 104_729 + i * i * 31) % 1000).collect()
}

/// A sequence's part of a step.
struct Part {
    tokens: Vec<u32>,
    position: usize,
    blocks: Vec<BlockId>,
    logits: LogitsFor,
}

fn part(tokens: &[u32], position: usize, first_block: u32, logits: LogitsFor) -> Part {
    let count = (position + tokens.len()).div_ceil(16) as u32;
    let blocks = (first_block..first_block + count).map(BlockId).collect();
    Part { tokens: tokens.to_vec(), position, blocks, logits }
}

fn run(backend: &mut dyn Backend, parts: &[Part]) -> Logits {
    let mut logits = Logits::default();
    let chunk = |part: &'_ Part| -> (usize, LogitsFor) { (part.position, part.logits) };
    let chunks: Vec<Chunk<'_>> = parts
        .iter()
        .map(|part| {
            let (position, logits) = chunk(part);
            Chunk { tokens: &part.tokens, position, blocks: &part.blocks, logits }
        })
        .collect();
    backend.step(&chunks, &mut logits).expect("the step runs");
    logits
}

/// Runs a step on both; compares all logits, and the largest as far as both must have them.
fn check(what: &str, cpu: &mut dyn Backend, cuda: &mut dyn Backend, parts: &[Part]) {
    let (mut want, mut got) = (run(cpu, parts), run(cuda, parts));
    assert_eq!(want.len(), got.len(), "{what}: positions");
    let counts: Vec<usize> = parts
        .iter()
        .flat_map(|part| match part.logits {
            LogitsFor::Nothing => vec![],
            LogitsFor::Last => vec![usize::MAX],
            LogitsFor::All => vec![usize::MAX; part.tokens.len()],
            LogitsFor::Largest(count) => vec![count],
        })
        .collect();
    for (index, count) in counts.into_iter().enumerate() {
        let (want, got) = (pairs(want.position(index)), pairs(got.position(index)));
        if count == usize::MAX {
            let differing = want.iter().zip(&got).position(|(a, b)| a != b);
            assert_eq!((want.len(), differing), (got.len(), None), "{what}: position {index}");
            continue;
        }
        assert_eq!(largest(&want, count), largest(&got, count), "{what}: position {index}");
        assert!(got.is_sorted_by(|a, b| a.0 < b.0), "{what}: by ascending token");
    }
}

/// Tokens and the bits of their logits.
fn pairs(position: Position<'_>) -> Vec<(u32, u32)> {
    match position {
        Position::All(all) => all.iter().zip(0..).map(|(l, id)| (id, l.to_bits())).collect(),
        Position::Largest(some) => some.iter().map(|t| (t.id, t.logit.to_bits())).collect(),
    }
}

/// The largest, and all that equal the last of them.
fn largest(pairs: &[(u32, u32)], count: usize) -> Vec<(u32, u32)> {
    let mut logits: Vec<f32> = pairs.iter().map(|(_, bits)| f32::from_bits(*bits)).collect();
    logits.sort_by(|a, b| b.total_cmp(a));
    let least = logits[count.clamp(1, logits.len()) - 1];
    pairs.iter().copied().filter(|(_, bits)| f32::from_bits(*bits) >= least).collect()
}

#[test]
fn structs_are_those_of_the_kernels() {
    let header = include_str!("../../kernels/cuda/args.cuh");
    for (name, size, fields) in args::LAYOUTS {
        let Some(at) = header.find(&format!("struct {name} {{")) else {
            assert_eq!(*name, "ActivateArgs", "{name} is in no header");
            continue;
        };
        let body = &header[at..at + header[at..].find("};").expect("a struct ends")];
        let declared: Vec<&str> = body
            .lines()
            .skip(1)
            .filter_map(|line| line.split("//").next()?.trim().strip_suffix(';'))
            .map(|field| field.rsplit(' ').next().expect("a name").split('[').next().expect("a name"))
            .collect();
        let mirrored: Vec<&str> = fields.iter().map(|(field, _)| *field).collect();
        assert_eq!(declared, mirrored, "{name} of {size} bytes");
    }
}

#[test]
fn a_prompt_and_its_continuation_equal_the_cpus() {
    for name in MODELS {
        let model = model(name);
        let options = options(KvType::F16, HeadMode::Exact);
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let all = tokens(40, 1);
        for (range, logits) in
            [(0..19, LogitsFor::All), (19..20, LogitsFor::Last), (20..21, LogitsFor::Largest(3))]
        {
            let what = format!("{name}: {range:?}");
            let parts = [part(&all[range.clone()], range.start, 0, logits)];
            check(&what, cpu.as_mut(), &mut cuda, &parts);
        }
    }
}
