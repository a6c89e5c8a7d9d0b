//! Tests on the emulated driver or, with `TRITMILL_TEST_DEVICE=cuda:N`, on a real device.

mod ahead;
mod attention;
mod biases;
mod checks;
mod choices;
mod distributions;
mod equality;
mod experimental;
mod faulty;
mod groups;
mod limits;
mod overlap;
mod recordings;
mod roofline;
mod sampling;

use std::{path::PathBuf, sync::Arc};

use super::{
    CudaLoadError, CudaOptions, FeatureSet, GpuKernels, KvBlocks, args, backend::CudaBackend,
    buffers::Limits, device::Device, driver, emulated, load::start,
};
use crate::{
    Engine, EngineConfig, Event, Fork, ForkError, Request, SamplingParams,
    backend::{
        Backend, Chunk, CopyError, Logits, LogitsFor, StepError,
        cpu::{HeadMode, KvType},
    },
    files::Model,
    kv::BlockId,
    sampling::{RowMetadata, TokenCounts},
};

const BLOCKS: usize = 90;

/// Returns the folder of the package's sources; the program may come from another machine.
pub fn package() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    folder.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

fn model(name: &str) -> Arc<Model> {
    let path = package().join("tests/golden").join(name);
    Arc::new(Model::open(&path).expect("a golden model opens"))
}

fn options(kv: KvType, head: HeadMode) -> CudaOptions {
    let (blocks, kernels) = (KvBlocks::Exactly(BLOCKS), GpuKernels::Standard);
    let disabled = FeatureSet::default();
    CudaOptions { ordinal: 0, kv, head, activations: None, blocks, kernels, disabled }
}

/// Options with experimental kernels.
fn experimental(kv: KvType, head: HeadMode) -> CudaOptions {
    CudaOptions { kernels: GpuKernels::Experimental, ..options(kv, head) }
}

/// Names a real device to test, as in `cuda:0`; without it, the emulated one is tested.
const DEVICE: &str = "TRITMILL_TEST_DEVICE";

/// Features that tests on a real device do without.
const DISABLED: &str = "TRITMILL_CUDA_DISABLE";

fn is_emulated() -> bool {
    std::env::var_os(DEVICE).is_none()
}

/// Opens the device to test; `None` without a device.
fn device() -> Option<Box<dyn Device>> {
    match std::env::var(DEVICE) {
        Ok(name) => {
            let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok());
            let ordinal = ordinal.expect("TRITMILL_TEST_DEVICE is cuda:N");
            let disabled = std::env::var(DISABLED).unwrap_or_default();
            let disabled = disabled.parse().expect("TRITMILL_CUDA_DISABLE has names of features");
            Some(Box::new(driver::open(ordinal, disabled).expect("the device asked for opens")))
        }
        Err(_) => Some(Box::new(emulated_device(ordinals::SM_90)?)),
    }
}

/// Ordinals of the emulated driver's devices: `DEVICES` in `kernels/cuda/emulate/state.h`.
mod ordinals {
    pub const SM_90: usize = 0;
    pub const SM_80: usize = 1;
    pub const WITHOUT_CUBINS: usize = 2;
    pub const GIBIBYTE: usize = 3;
    pub const MEBIBYTE: usize = 4;
    pub const SM_75: usize = 5;
    pub const MISALIGNED: usize = 6;
    pub const OUT_OF_BOUNDS: usize = 7;
    pub const RELEASED: usize = 8;
    pub const CHECKS_WAITS: usize = 9;
    pub const EARLY_ACCESS: usize = 10;
    pub const LARGE: usize = 11;
}

/// Opens an emulated device; `None` where the driver cannot be emulated, and in runs on a real device, because a
/// process has only one driver.
fn emulated_device(ordinal: usize) -> Option<driver::Driver> {
    (is_emulated() && emulated::load())
        .then(|| driver::open(ordinal, FeatureSet::default()).expect("emulated devices open"))
}

fn load(model: &Model, options: CudaOptions, limits: Limits) -> Option<CudaBackend> {
    Some(start(model, device()?, options, limits).expect("the model fits"))
}

fn small() -> Limits {
    Limits { rows: 256, whole: 16, screened: 48, ..Limits::default() }
}

fn tokens(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7919 + seed * 104_729 + i * i * 31) % 1000).collect()
}

/// Returns tokens of a model's vocabulary.
fn tokens_of(model: &Model, count: usize, seed: u32) -> Vec<u32> {
    let vocab = model.config().vocab_size as u32;
    tokens(count, seed).into_iter().map(|token| token % vocab).collect()
}

/// A draw with filters, after a change of a logit, with a distribution.
fn changed_draw() -> LogitsFor<'static> {
    let (logprobs, logit_bias) = (Some(2), [(7, -0.5)].into());
    let params = SamplingParams { seed: 1, top_p: 0.9, logprobs, logit_bias, ..Default::default() };
    draws([params], 1)
}

/// Draws at consecutive positions; none counts tokens.
fn draws<const N: usize>(params: [SamplingParams; N], first: usize) -> LogitsFor<'static> {
    let none: &'static TokenCounts = Box::leak(Box::default());
    let draw = |(params, position)| row(Box::leak(Box::new(params)), none, position);
    LogitsFor::Draws(params.into_iter().zip(first..).map(draw).collect::<Vec<_>>().leak())
}

/// What a draw depends on besides the logits.
fn row<'a>(
    params: &'a SamplingParams,
    counts: &'a TokenCounts,
    position: usize,
) -> RowMetadata<'a> {
    RowMetadata { params, counts, drafts: &[], allowed: None, choice: 0, position, choices: 1 }
}

/// A sequence's part of a step.
#[derive(Clone)]
struct Part {
    tokens: Vec<u32>,
    position: usize,
    blocks: Vec<BlockId>,
    logits: LogitsFor<'static>,
}

impl Part {
    fn chunk(&self) -> Chunk<'_> {
        let Self { tokens, position, blocks, logits } = self;
        Chunk {
            tokens,
            position: *position,
            blocks,
            logits: *logits,
            state: 0.into(),
            windows: &[],
        }
    }
}

fn part(tokens: &[u32], position: usize, first_block: u32, logits: LogitsFor<'static>) -> Part {
    let count = (position + tokens.len()).div_ceil(16) as u32;
    let blocks = (first_block..first_block + count).map(BlockId).collect();
    Part { tokens: tokens.to_vec(), position, blocks, logits }
}

fn run(backend: &mut dyn Backend, parts: &[Part]) -> Logits {
    let mut logits = Logits::default();
    let chunks: Vec<Chunk<'_>> = parts.iter().map(Part::chunk).collect();
    backend.step(&chunks, &mut logits).expect("the step runs");
    logits
}

#[test]
fn structs_match_the_kernels_header() {
    let header = include_str!("../../kernels/cuda/args.cuh");
    for (name, size, fields) in args::LAYOUTS {
        let at = header.find(&format!("struct {name} {{"));
        let at = at.unwrap_or_else(|| panic!("{name} is in no header"));
        let body = &header[at..at + header[at..].find("};").expect("a struct ends")];
        let declared: Vec<&str> = body
            .lines()
            .skip(1)
            .filter_map(|line| line.split("//").next()?.trim().strip_suffix(';'))
            .map(|field| {
                field.rsplit(' ').next().expect("a name").split('[').next().expect("a name")
            })
            .collect();
        let mirrored: Vec<&str> = fields.iter().map(|(field, _)| *field).collect();
        assert_eq!(declared, mirrored, "{name} of {size} bytes");
    }
}

#[test]
fn invalid_steps_are_refused_and_the_backend_keeps_working() {
    let model = model("bitnet-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    let mut step = |tokens: &[u32], position, blocks: &[BlockId]| {
        let chunk = Chunk {
            tokens,
            position,
            blocks,
            logits: LogitsFor::largest(1),
            state: 0.into(),
            windows: &[],
        };
        cuda.step(&[chunk], &mut Logits::default())
    };
    let block = [BlockId(0)];
    assert!(matches!(step(&[1024], 0, &block), Err(StepError::TokenOutOfRange { .. })));
    assert!(matches!(step(&[], 0, &block), Err(StepError::BadChunk { .. })));
    assert!(matches!(step(&[1], 16, &block), Err(StepError::BadChunk { .. })));
    assert!(matches!(step(&[1], 0, &[BlockId(BLOCKS as u32)]), Err(StepError::BadChunk { .. })));
    assert!(step(&[1], 0, &block).is_ok());
}

#[test]
fn missing_memory_is_reported_before_anything_is_loaded() {
    let model = model("bitnet-tiny");
    let exactly = options(KvType::F16, HeadMode::Exact);
    let begin = |ordinal, blocks| {
        let device = emulated_device(ordinal)?;
        Some(start(&model, Box::new(device), CudaOptions { blocks, ..exactly }, small()))
    };
    let Some(result) = begin(ordinals::GIBIBYTE, KvBlocks::Exactly(1 << 20)) else { return };
    let Err(error) = result else { panic!("a million blocks do not fit a gibibyte") };
    let CudaLoadError::OutOfMemory { needed_bytes, free_bytes } = &error else {
        panic!("the missing memory is the error: {error}")
    };
    assert!(*free_bytes == 1 << 30 && *needed_bytes > 16 << 30, "{error}");
    assert!(error.to_string().contains("are missing"), "{error}");
    let few = begin(ordinals::GIBIBYTE, KvBlocks::UpTo(1 << 20)).expect("it was there before");
    let few = few.unwrap_or_else(|error| panic!("some blocks fit: {error}"));
    assert!((1000..1 << 20).contains(&few.block_count()), "{}", few.block_count());
    let none = begin(ordinals::MEBIBYTE, KvBlocks::UpTo(9)).expect("it was there before");
    assert!(matches!(none, Err(CudaLoadError::OutOfMemory { .. })));
}

#[test]
fn missing_driver_or_device_is_an_error() {
    match driver::open(usize::MAX, FeatureSet::default()) {
        Err(CudaLoadError::NoDriver | CudaLoadError::NoDevice { .. }) => {}
        Err(CudaLoadError::DriverTooOld { .. }) => {}
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("there is no such device"),
    }
}

#[test]
fn engines_share_a_device_but_it_has_one_storage() {
    let model = model("bitnet-tiny");
    let Some(cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else { return };
    let config = EngineConfig::new(model.config().context_length);
    let mut original = Engine::new(Box::new(cuda), model, vec![], config);
    for seed in 0..3 {
        let prompt = tokens(20 + 9 * seed, seed as u32);
        let sampling = SamplingParams::greedy(12);
        let request = Request { prompt, sampling, ..Request::default() };
        original.submit(request).expect("the request is valid");
    }
    let step = |engine: &mut Engine| engine.step(std::time::Instant::now()).events;
    (0..4).for_each(|_| drop(step(&mut original)));
    let error = original.fork(Fork::Deep).expect_err("a GPU has one storage");
    assert!(matches!(error, ForkError::Copy(CopyError::Unsupported)), "{error}");
    let mut fork = original.fork(Fork::Shared).expect("no storage is needed");
    let mut outputs = [Vec::new(), Vec::new()];
    while !original.is_idle() || !fork.is_idle() {
        for (engine, outputs) in [&mut original, &mut fork].into_iter().zip(&mut outputs) {
            outputs.extend(step(engine).into_iter().filter_map(|event| match event {
                Event::Finished { id, output } => Some((id, output)),
                _ => None,
            }));
        }
    }
    assert_eq!(outputs[0].len(), 3);
    assert_eq!(outputs[0], outputs[1]);
    assert_eq!(fork.stats().blocks_used, 0);
}
