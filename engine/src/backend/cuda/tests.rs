//! Tests on the emulated device or, with `TRITMILL_TEST_DEVICE=cuda:N`, on a real one.

mod checks;
mod equality;
mod launches;
mod roofline;

use std::{path::PathBuf, sync::Arc};

use super::{
    CudaLoadError, CudaOptions, KvBlocks, args, buffers::Limits, device::Device, driver,
    emulated::Emulated, start, step::CudaBackend,
};
use crate::{
    backend::{
        Backend, Chunk, Logits, LogitsFor, StepError,
        cpu::{HeadMode, KvType},
    },
    files::Model,
    kv::BlockId,
};

const BLOCKS: usize = 90;

/// Where the package's sources are now: the program may have come from another machine.
pub fn package() -> PathBuf {
    let folder = std::env::var_os("CARGO_MANIFEST_DIR");
    folder.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

fn model(name: &str) -> Arc<Model> {
    let path = package().join("tests/golden").join(name);
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

#[test]
fn structs_are_those_of_the_kernels() {
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
fn a_step_that_does_not_fit_is_refused_and_the_backend_goes_on() {
    let model = model("bitnet-tiny");
    let Some(mut cuda) = load(&model, options(KvType::F16, HeadMode::Exact), small()) else {
        return;
    };
    let mut step = |tokens: &[u32], position, blocks: &[BlockId]| {
        let chunk = Chunk { tokens, position, blocks, logits: LogitsFor::Largest(1) };
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
fn too_little_memory_is_said_before_anything_is_loaded() {
    let model = model("bitnet-tiny");
    let exactly = options(KvType::F16, HeadMode::Exact);
    let begin = |memory: u64, blocks| {
        let device = Emulated::with_memory(memory)?;
        Some(start(&model, Box::new(device), CudaOptions { blocks, ..exactly }, small()))
    };
    let Some(result) = begin(1 << 30, KvBlocks::Exactly(1 << 20)) else { return };
    let Err(error) = result else { panic!("a million blocks do not fit a gibibyte") };
    let CudaLoadError::OutOfMemory { needed_bytes, free_bytes } = &error else {
        panic!("it is memory that is missing: {error}")
    };
    assert!(*free_bytes == 1 << 30 && *needed_bytes > 16 << 30, "{error}");
    assert!(error.to_string().contains("are missing"), "{error}");
    let few = begin(1 << 30, KvBlocks::UpTo(1 << 20)).expect("it was there before");
    let few = few.unwrap_or_else(|error| panic!("some blocks fit: {error}"));
    assert!((1000..1 << 20).contains(&few.block_count()), "{}", few.block_count());
    let none = begin(1 << 20, KvBlocks::UpTo(9)).expect("it was there before");
    assert!(matches!(none, Err(CudaLoadError::OutOfMemory { .. })));
}

#[test]
fn a_machine_without_the_driver_says_so() {
    match driver::open(usize::MAX) {
        Err(CudaLoadError::NoDriver | CudaLoadError::NoDevice { .. }) => {}
        Err(CudaLoadError::DriverTooOld { .. }) => {}
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("there is no such device"),
    }
}
