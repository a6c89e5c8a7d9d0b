//! From an opened model to a running engine: the options a person may set, the defaults for those
//! they did not, and the sizes that follow from them.

use std::{num::NonZeroUsize, sync::Arc};

use crate::{
    Engine, EngineConfig,
    backend::{
        Backend,
        cpu::{self, CpuOptions, HeadMode, KvType, LoadError},
    },
    files::Model,
    formats::Format,
    kernels::Isa,
    kv::blocks_for,
    text::TokenText,
};

/// KV memory when none is asked for, unless the sequences need less.
const KV_BYTES_DEFAULT: u64 = 1 << 30;

/// How a model is run. Nothing but `kv` and `head` changes a token.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Kernels; `None` takes the fastest this machine has.
    pub isa: Option<Isa>,
    /// Threads of a step; `None` takes every core this process may use.
    pub threads: Option<NonZeroUsize>,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// Memory of the KV cache; `None` takes what `max_sequences` full contexts need, up to 1 GiB.
    pub kv_bytes: Option<u64>,
    /// Sequences that run at once.
    pub max_sequences: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
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
    /// The ISA that will be used.
    pub fn isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::detect)
    }

    /// The threads that will be used.
    pub fn threads(&self) -> usize {
        let available = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        self.threads.map_or_else(available, NonZeroUsize::get)
    }

    /// KV blocks for a model under these options; at least one.
    pub fn block_count(&self, model: &Model) -> usize {
        let block_bytes = cpu::kv_block_bytes(model, self.kv) as u64;
        let wanted = blocks_for(model.config().context_length)
            .saturating_mul(self.max_sequences)
            .min(u32::MAX as usize);
        let affordable = self.kv_bytes.unwrap_or(KV_BYTES_DEFAULT) / block_bytes.max(1);
        wanted.min(usize::try_from(affordable).unwrap_or(usize::MAX)).max(1)
    }
}

/// Loads a model's weights for single steps, with `block_count` KV blocks.
///
/// # Errors
/// As [`cpu::load`].
pub fn backend(
    model: &Arc<Model>,
    options: &EngineOptions,
    block_count: usize,
) -> Result<Box<dyn Backend>, LoadError> {
    let options = CpuOptions {
        format: options.format,
        isa: options.isa(),
        threads: options.threads(),
        kv: options.kv,
        head: options.head,
        block_count,
    };
    cpu::load(Arc::clone(model), options)
}

/// Loads a model's weights and joins them with a scheduler.
///
/// # Errors
/// As [`cpu::load`].
pub fn engine(model: &Arc<Model>, options: &EngineOptions) -> Result<Engine, LoadError> {
    let block_count = options.block_count(model);
    let backend = backend(model, options, block_count)?;
    let context_length = model.config().context_length;
    let config =
        EngineConfig { max_sequences: options.max_sequences, ..EngineConfig::new(context_length) };
    let eos_tokens = model.config().eos_tokens.clone();
    Ok(Engine::new(backend, model.clone(), eos_tokens, config))
}

impl TokenText for Model {
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer().token_bytes(token).unwrap_or_default()
    }

    fn is_special(&self, token: u32) -> bool {
        self.tokenizer().is_special(token)
    }
}
