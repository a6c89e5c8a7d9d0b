//! Makes an engine from an opened model: options, their defaults, and the sizes that follow from them.

mod devices;
mod memory;

use std::{num::NonZeroUsize, sync::Arc, time::Duration};

pub use devices::{DeviceChoice, Devices, DevicesError};
pub use memory::{
    ExpertBytes, ExpertsInFile, MemoryNeed, OverBudget, expert_bytes, experts_in_file,
    kv_bytes_min, memory_needed, numerics_class,
};

use tritmill_grammar::{Compiler, GrammarError, Word};

use crate::{
    Engine, EngineConfig, RowTarget,
    backend::{
        Backend, STEP_ROWS, class,
        cpu::{self, CpuOptions, HeadMode, KvType, PackedCache, topology},
        cuda::{self, CudaLoadError, CudaOptions, FeatureSet, GpuKernels, KvBlocks},
    },
    files::Model,
    formats::Format,
    kernels::{Digits, Isa},
    kv::LayerGroups,
    text::TokenText,
};

/// Default limit of KV memory on the processor, in bytes, of models without recurrent layers.
const KV_BYTES_DEFAULT: u64 = 1 << 30;
/// States of recurrent layers that half of the KV memory has room for by default: a step with a few sequences takes hardly longer than
/// with one.
const STATES_DEFAULT: u64 = 16;
/// Most states of recurrent layers that are kept where prefixes end.
const KEPT_STATES_MAX: usize = 64;
/// Most states of recurrent layers that may be after drafts in a step.
const SPARE_STATES_MAX: usize = 4;

/// A model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Loading on the processor failed.
    #[error(transparent)]
    Cpu(#[from] cpu::LoadError),
    /// Loading on a GPU failed.
    #[error(transparent)]
    Cuda(#[from] CudaLoadError),
    /// The model embeds texts and generates none.
    #[error("{model} is an embedding model: it generates no text (see `tritmill model embed`)")]
    Embeds {
        /// Name of the model.
        model: String,
    },
    /// GPUs have no models with recurrent layers.
    #[error("models with recurrent layers run on the processor only, not on cuda:{ordinal}")]
    RecurrentOnGpu {
        /// The GPU.
        ordinal: usize,
    },
    /// GPUs have no mixtures of experts.
    #[error("mixtures of experts run on the processor only, not on cuda:{ordinal}")]
    ExpertsOnGpu {
        /// The GPU.
        ordinal: usize,
    },
    /// GPUs have no embedding models.
    #[error("embedding models run on the processor only, not on cuda:{ordinal}")]
    EmbedsOnGpu {
        /// The GPU.
        ordinal: usize,
    },
}

/// Options of an engine. Only `kv`, `head`, `activations` and `device` can change a token; each combination has its own
/// numerics class.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Device that runs the steps.
    pub device: DeviceChoice,
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Instruction set of the kernels; `None` selects the fastest of this machine.
    pub isa: Option<Isa>,
    /// Threads of a step; `None` uses every core of the device that the process may use.
    pub threads: Option<NonZeroUsize>,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// Digits of activations, for models with a scale for each group of inputs; `None`: two. Other models have one.
    pub activations: Option<Digits>,
    /// Kernels of a GPU.
    pub gpu_kernels: GpuKernels,
    /// What a GPU does without: to find the cause of a fault.
    pub gpu_disabled: FeatureSet,
    /// Memory of the KV cache in bytes. `None` takes as much as `max_sequences` full contexts need, up to
    /// 1 GiB, or on a GPU up to nine tenths of the memory that the weights leave free.
    pub kv_bytes: Option<u64>,
    /// Most sequences that hold KV blocks at once.
    pub max_sequences: usize,
    /// Time of a step while a request of the highest priority is decoded; `None`: steps are always full.
    pub step_target: Option<Duration>,
    /// Longest wait of an idle engine for further requests. See [`EngineConfig::wait_limit`].
    pub wait_limit: Duration,
    /// Most drafts of a sequence in a step; 0 for none. See [`EngineConfig::draft_tokens`].
    pub draft_tokens: usize,
    /// What is done with packed weights in a file beside the model. On the processor only.
    pub packed_cache: PackedCache,
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
            activations: None,
            gpu_kernels: GpuKernels::default(),
            gpu_disabled: FeatureSet::default(),
            kv_bytes: None,
            max_sequences: 64,
            step_target: EngineConfig::new(0).step_target,
            wait_limit: EngineConfig::new(0).wait_limit,
            draft_tokens: EngineConfig::new(0).draft_tokens,
            packed_cache: PackedCache::Off,
        }
    }
}

impl EngineOptions {
    /// Returns the instruction set, with the default resolved.
    pub fn isa(&self) -> Isa {
        self.isa.unwrap_or_else(Isa::detect)
    }

    /// Returns the number of threads, with the default resolved.
    pub fn threads(&self) -> usize {
        let cores = || {
            let of_node = self.device.memory_node().and_then(topology::cores_of);
            of_node.map_or(usize::MAX, <[usize]>::len).min(topology::core_limit())
        };
        self.threads.map_or_else(cores, NonZeroUsize::get)
    }

    /// Returns the digits of a model's activations, with the default resolved.
    pub fn activations(&self, model: &Model) -> Digits {
        class::digits(model.config(), self.activations)
    }

    /// Returns the name of the kernels' target: an ISA of the processor, or a GPU.
    pub fn kernels(&self) -> String {
        match self.device.resolved() {
            DeviceChoice::Cuda(ordinal) => format!("cuda:{ordinal}"),
            _ => self.isa().to_string(),
        }
    }

    /// Returns the number of KV blocks for a model on the processor; at least one.
    pub fn block_count(&self, model: &Model) -> usize {
        let block_bytes = cpu::kv_block_bytes(model, self.kv);
        let states = (self.all_states(model) * state_bytes(model)) as u64;
        let bytes = self.kv_bytes(model).saturating_sub(states);
        let groups = cpu::layer_groups(model);
        self.blocks_within(model, bytes, (block_bytes, groups))
    }

    /// Returns the number of sequences that may run at once; at least one. Half of the memory of the KV cache is for states of
    /// recurrent layers, and a quarter of those for states that are kept or are after drafts.
    pub fn slots(&self, model: &Model) -> usize {
        let fitting = self.fitting_states(model);
        let kept = if fitting < 4 { fitting / 2 } else { fitting / 4 };
        self.max_sequences.min(fitting - kept).max(1)
    }

    /// Returns the number of states that may be after drafts in a step, of models with recurrent layers: drafts pay for few sequences.
    pub fn spare_states(&self, model: &Model) -> usize {
        match (state_bytes(model), self.draft_tokens) {
            (0, _) | (_, 0) => 0,
            _ => (self.fitting_states(model).saturating_sub(self.slots(model)) / 2)
                .min(SPARE_STATES_MAX),
        }
    }

    /// Returns the number of states that the backend has room for.
    pub fn all_states(&self, model: &Model) -> usize {
        self.slots(model) + self.kept_states(model) + self.spare_states(model)
    }

    /// Returns the number of states that are kept where prefixes end, of models with recurrent layers: what the states of running
    /// sequences leave of half of the memory of the KV cache.
    pub fn kept_states(&self, model: &Model) -> usize {
        match state_bytes(model) {
            0 => 0,
            _ => {
                let others = self.slots(model) + self.spare_states(model);
                self.fitting_states(model).saturating_sub(others).min(KEPT_STATES_MAX)
            }
        }
    }

    /// Returns the memory of the KV cache on the processor, with the default resolved.
    fn kv_bytes(&self, model: &Model) -> u64 {
        self.kv_bytes.unwrap_or_else(|| kv_bytes_default(model))
    }

    fn fitting_states(&self, model: &Model) -> usize {
        let half = self.kv_bytes(model) / 2;
        half.checked_div(state_bytes(model) as u64).map_or(usize::MAX, |count| count as usize)
    }

    /// KV blocks for a model on a GPU: as many as the sequences can use, limited by memory.
    fn blocks_on_gpu(&self, model: &Model) -> KvBlocks {
        let block = (cuda::kv_block_bytes(model, self.kv), LayerGroups::ONE);
        match self.kv_bytes {
            Some(bytes) => KvBlocks::Exactly(self.blocks_within(model, bytes, block)),
            None => KvBlocks::UpTo(self.blocks_within(model, u64::MAX, block)),
        }
    }

    /// As many blocks as the sequences can use and these bytes have room for.
    fn blocks_within(
        &self,
        model: &Model,
        bytes: u64,
        (block_bytes, groups): (usize, LayerGroups),
    ) -> usize {
        let wanted = groups
            .blocks_for(model.config().context_length, STEP_ROWS)
            .saturating_mul(self.max_sequences)
            .min(u32::MAX as usize);
        let affordable = bytes / block_bytes.max(1) as u64;
        wanted.min(usize::try_from(affordable).unwrap_or(usize::MAX)).max(1)
    }
}

/// Returns the default limit of a model's KV memory on the processor, in bytes.
pub fn kv_bytes_default(model: &Model) -> u64 {
    KV_BYTES_DEFAULT.max(2 * STATES_DEFAULT * state_bytes(model) as u64)
}

/// Returns the bytes of a sequence's state in the recurrent layers of a model.
pub(crate) fn state_bytes(model: &Model) -> usize {
    size_of::<f32>() * model.config().state_len()
}

/// Loads a model's weights on the device of the options, with places for the states of so many sequences; only the closure of that
/// device is called.
fn load(
    model: &Arc<Model>,
    options: &EngineOptions,
    slots: usize,
    of_cpu: impl FnOnce() -> usize,
    of_gpu: impl FnOnce() -> KvBlocks,
) -> Result<Box<dyn Backend>, LoadError> {
    let model = Arc::clone(model);
    let EngineOptions { kv, head, format, activations, packed_cache, .. } = *options;
    if let DeviceChoice::Cuda(ordinal) = options.device.resolved() {
        if model.config().delta_net.is_some() {
            return Err(LoadError::RecurrentOnGpu { ordinal });
        }
        if model.config().experts.is_some() {
            return Err(LoadError::ExpertsOnGpu { ordinal });
        }
        let (blocks, kernels, disabled) = (of_gpu(), options.gpu_kernels, options.gpu_disabled);
        let options = CudaOptions { ordinal, kv, head, activations, blocks, kernels, disabled };
        return Ok(cuda::load(model, options)?);
    }
    let (isa, threads, block_count) = (options.isa(), options.threads(), of_cpu());
    let node = options.device.memory_node();
    let options = CpuOptions {
        format,
        isa,
        threads,
        kv,
        head,
        activations,
        node,
        block_count,
        slots,
        packed_cache,
    };
    Ok(cpu::load(model, options)?)
}

/// Loads a model's weights for single steps, with `block_count` KV blocks for each group of layers, and places for the states of `max_sequences`.
///
/// # Errors
/// As [`cpu::load`] and [`cuda::load`], or the model embeds texts.
pub fn backend(
    model: &Arc<Model>,
    options: &EngineOptions,
    block_count: usize,
) -> Result<Box<dyn Backend>, LoadError> {
    if model.config().pooling.is_some() {
        return Err(LoadError::Embeds { model: model.name().to_owned() });
    }
    let slots = options.max_sequences;
    let of_cpu = || block_count * cpu::layer_groups(model).count();
    load(model, options, slots, of_cpu, || KvBlocks::Exactly(block_count))
}

/// Makes an engine: loads a model's weights and adds a scheduler. The engine of an embedding model answers
/// [`Request::embeds`](crate::Request::embeds) alone, that of another model all other requests.
///
/// # Errors
/// As [`cpu::load`] and [`cuda::load`], or the device is a GPU and the model embeds texts.
pub fn engine(model: &Arc<Model>, options: &EngineOptions) -> Result<Engine, LoadError> {
    let embeds = model.config().pooling.is_some();
    if let (true, DeviceChoice::Cuda(ordinal)) = (embeds, options.device.resolved()) {
        return Err(LoadError::EmbedsOnGpu { ordinal });
    }
    let of_cpu = || options.block_count(model);
    let (max_sequences, slots) = (options.slots(model), options.all_states(model));
    let backend = load(model, options, slots, of_cpu, || options.blocks_on_gpu(model))?;
    let context_length = model.config().context_length;
    if model.config().delta_net.is_some()
        && options.draft_tokens > 0
        && options.spare_states(model) == 0
    {
        tracing::warn!("no drafts: the KV memory has no room for the states after them");
    }
    let EngineOptions { step_target, wait_limit, .. } = *options;
    let draft_tokens = if embeds { 0 } else { options.draft_tokens };
    let config = EngineConfig {
        max_sequences,
        step_target,
        rows: RowTarget::for_format(options.format),
        wait_limit,
        draft_tokens,
        token_budget: backend.step_rows(),
        embeds,
        recurrent: model.config().delta_net.is_some(),
        kept_states: options.kept_states(model),
        spare_states: options.spare_states(model),
        ..EngineConfig::new(context_length)
    };
    let eos_tokens = model.config().eos_tokens.clone();
    Ok(Engine::new(backend, model.clone(), eos_tokens, config))
}

/// Makes an engine on each of several devices.
///
/// # Errors
/// As [`engine`], for the first device where it fails.
pub fn engines(
    model: &Arc<Model>,
    options: &EngineOptions,
    devices: &Devices,
) -> Result<Vec<(DeviceChoice, Engine)>, LoadError> {
    let load = |device| {
        let options = EngineOptions { device, ..*options };
        Ok((device, engine(model, &options)?))
    };
    devices.resolved(options.threads)?.into_iter().map(load).collect()
}

/// Returns the compiler of grammars for a model's tokens.
///
/// # Errors
/// The model has no end-of-text token.
pub fn grammars(model: &Model) -> Result<Compiler, GrammarError> {
    let config = model.config();
    let word = |token| match model.is_special(token) {
        true => Word::Special,
        false => Word::Text(model.bytes(token)),
    };
    Compiler::new((0..config.vocab_size as u32).map(word), &config.eos_tokens)
}

impl TokenText for Model {
    fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer().token_bytes(token).unwrap_or_default()
    }

    fn is_special(&self, token: u32) -> bool {
        self.tokenizer().is_special(token)
    }

    fn strips_leading_space(&self) -> bool {
        self.tokenizer().strips_leading_space()
    }
}
