//! From an opened model to a running engine: options, their defaults, and the sizes that follow from
//! them.

mod devices;

use std::{num::NonZeroUsize, sync::Arc};

pub use devices::{DeviceChoice, Devices, DevicesError};

use crate::{
    Engine, EngineConfig,
    backend::{
        Backend,
        cpu::{self, CpuOptions, HeadMode, KvType},
        cuda::{self, CudaLoadError, CudaOptions, KvBlocks},
    },
    files::Model,
    formats::Format,
    kernels::Isa,
    kv::blocks_for,
    text::TokenText,
};

/// Default limit of KV memory on the CPU.
const KV_BYTES_DEFAULT: u64 = 1 << 30;

/// A model cannot be loaded on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Loading on the CPU failed.
    #[error(transparent)]
    Cpu(#[from] cpu::LoadError),
    /// Loading on a GPU failed.
    #[error(transparent)]
    Cuda(#[from] CudaLoadError),
}

/// Options for running a model. Only `kv`, `head` and the kind of `device` affect the generated tokens;
/// they are part of the numerics class.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Device that runs the model.
    pub device: DeviceChoice,
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Instruction set of the kernels; `None` selects the fastest available one.
    pub isa: Option<Isa>,
    /// Threads of a step; `None` uses every core available to the process.
    pub threads: Option<NonZeroUsize>,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// Bytes of the KV cache; `None` is what `max_sequences` full contexts need, limited to 1 GiB on a
    /// CPU and to nine tenths of the memory that the weights leave on a GPU.
    pub kv_bytes: Option<u64>,
    /// Largest number of sequences that run at once.
    pub max_sequences: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::default(),
            format: Format::I2S,
            isa: None,
            threads: None,
            kv: KvType::default(),
            head: HeadMode::default(),
            kv_bytes: None,
            max_sequences: 64,
        }
    }
}

impl EngineOptions {
    /// The instruction set: the given one or the detected one.
    pub fn isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::detect)
    }

    /// The number of threads: the given one or the available cores.
    pub fn threads(&self) -> usize {
        let available = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        self.threads.map_or_else(available, NonZeroUsize::get)
    }

    /// The target of the kernels: the name of an instruction set or of a GPU (`cuda:0`).
    pub fn kernels(&self) -> String {
        match self.device.resolved() {
            DeviceChoice::Cuda(ordinal) => format!("cuda:{ordinal}"),
            _ => self.isa().to_string(),
        }
    }

    /// KV blocks for a model on the CPU with these options; at least one.
    pub fn block_count(&self, model: &Model) -> usize {
        let block_bytes = cpu::kv_block_bytes(model, self.kv);
        self.blocks_within(model, self.kv_bytes.unwrap_or(KV_BYTES_DEFAULT), block_bytes)
    }

    /// KV blocks for a model on a GPU: as many as the sequences can use and memory allows.
    fn blocks_on_gpu(&self, model: &Model) -> KvBlocks {
        let block_bytes = cuda::kv_block_bytes(model, self.kv);
        match self.kv_bytes {
            Some(bytes) => KvBlocks::Exactly(self.blocks_within(model, bytes, block_bytes)),
            None => KvBlocks::UpTo(self.blocks_within(model, u64::MAX, block_bytes)),
        }
    }

    fn blocks_within(&self, model: &Model, bytes: u64, block_bytes: usize) -> usize {
        let wanted = blocks_for(model.config().context_length)
            .saturating_mul(self.max_sequences)
            .min(u32::MAX as usize);
        let affordable = bytes / block_bytes.max(1) as u64;
        wanted.min(usize::try_from(affordable).unwrap_or(usize::MAX)).max(1)
    }
}

/// Loads a model's weights on the device of the options, with the given number of KV blocks.
fn load(
    model: &Arc<Model>,
    options: &EngineOptions,
    cpu_blocks: impl FnOnce() -> usize,
    gpu_blocks: impl FnOnce() -> KvBlocks,
) -> Result<Box<dyn Backend>, LoadError> {
    let model = Arc::clone(model);
    let EngineOptions { kv, head, format, .. } = *options;
    if let DeviceChoice::Cuda(ordinal) = options.device.resolved() {
        let options = CudaOptions { ordinal, kv, head, blocks: gpu_blocks() };
        return Ok(cuda::load(model, options)?);
    }
    let (isa, threads, block_count) = (options.isa(), options.threads(), cpu_blocks());
    let options = CpuOptions { format, isa, threads, kv, head, block_count };
    Ok(cpu::load(model, options)?)
}

/// Loads a model on a device, without scheduler and sampler, with `block_count` KV blocks.
///
/// # Errors
/// As [`cpu::load`] and [`cuda::load`].
pub fn backend(
    model: &Arc<Model>,
    options: &EngineOptions,
    block_count: usize,
) -> Result<Box<dyn Backend>, LoadError> {
    load(model, options, || block_count, || KvBlocks::Exactly(block_count))
}

/// Loads a model on a device and builds an engine.
///
/// # Errors
/// As [`cpu::load`] and [`cuda::load`].
pub fn engine(model: &Arc<Model>, options: &EngineOptions) -> Result<Engine, LoadError> {
    let cpu_blocks = || options.block_count(model);
    let backend = load(model, options, cpu_blocks, || options.blocks_on_gpu(model))?;
    let context_length = model.config().context_length;
    let config =
        EngineConfig { max_sequences: options.max_sequences, ..EngineConfig::new(context_length) };
    let eos_tokens = model.config().eos_tokens.clone();
    Ok(Engine::new(backend, model.clone(), eos_tokens, config))
}

/// Loads a model on each of several devices and builds an engine for each.
///
/// # Errors
/// As [`engine`], for the first device that fails.
pub fn engines(
    model: &Arc<Model>,
    options: &EngineOptions,
    devices: &Devices,
) -> Result<Vec<(DeviceChoice, Engine)>, LoadError> {
    let load = |device| {
        let options = EngineOptions { device, ..*options };
        Ok((device, engine(model, &options)?))
    };
    devices.resolved()?.into_iter().map(load).collect()
}

impl TokenText for Model {
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer().token_bytes(token).unwrap_or_default()
    }

    fn is_special(&self, token: u32) -> bool {
        self.tokenizer().is_special(token)
    }
}
