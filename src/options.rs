//! Options of several commands: the model, and how to run it.

use std::{num::NonZeroUsize, path::Path, str::FromStr, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use tritmill_engine::{
    backend::{
        cpu::{HeadMode, KvType, PackedCache},
        cuda::{FeatureSet, GpuKernels},
    },
    files::{Model, ModelError},
    formats::Format,
    kernels::{Digits, Isa},
    load::{Devices, EngineOptions},
};
use tritmill_worker::ServedLimits;

use tritmill_queue::QueueName;

use crate::{byte_sizes, demo_model, kv_tiers::TierArguments, pulling};

/// The model to run.
#[derive(Debug, Clone, Args)]
pub struct ModelOption {
    /// Model: a Hugging Face folder, a .gguf file, hf:ORG/NAME[@REVISION][:FILE] on the Hugging Face Hub, which is pulled
    /// first, or `demo`, which is built in
    #[arg(long, value_name = "PATH", default_value = demo_model::NAME)]
    pub model: String,
}

impl ModelOption {
    /// Opens the model.
    pub fn open(&self) -> anyhow::Result<Arc<Model>> {
        open(&self.model)
    }
}

/// Opens a model by its path, from the hub by `hf:…`, or the built-in one by its name.
pub fn open(model: &str) -> anyhow::Result<Arc<Model>> {
    let opened = match (model, pulling::open(model)?) {
        (_, Some(opened)) => opened,
        (demo_model::NAME, None) => demo_model::open(),
        (path, None) => Model::open(Path::new(path)),
    };
    let opened = opened.map_err(|error| match error {
        // These begin with the path.
        ModelError::Io { .. } | ModelError::NotAModel { .. } => {
            anyhow::Error::from(error).context("cannot open the model")
        }
        _ => anyhow::Error::from(error).context(format!("cannot open model {model}")),
    });
    Ok(Arc::new(opened?))
}

/// A model of a worker, and its name if that is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedModel {
    pub name: Option<String>,
    /// As in [`ModelOption`].
    pub model: String,
}

/// Parses `PATH` or `NAME=PATH`, with `hf:…` as a path too. A path with `=` in its first part is written as `./a=b`.
pub fn named_model(text: &str) -> Result<NamedModel, String> {
    match text.split_once('=') {
        Some((name, model)) if !name.contains('/') => {
            let name = Some(model_name(name)?);
            Ok(NamedModel { name, model: model.to_owned() })
        }
        _ => Ok(NamedModel { name: None, model: text.to_owned() }),
    }
}

/// The memory budget of a process.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct MemoryOption {
    /// Most memory for weights, KV caches and buffers of all models together, without memory of GPUs: a number, or
    /// with K, M, G or T [default: 15/16 of what the machine or its control group has available at the start]
    #[arg(long, value_name = "BYTES", value_parser = byte_sizes::parse)]
    pub memory: Option<u64>,
}

/// How to run a model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct RunOptions {
    /// Device: cpu, cuda:0 (or another GPU), several GPUs as in cuda:0,cuda:1, cuda:all, or auto: the
    /// first usable GPU, else the CPU. A worker may use both kinds, as in cpu,cuda:0. On a machine with several memory
    /// nodes (NUMA), cpu is an engine with its own weights on each, or one engine if --threads is given; cpu:0 is
    /// the first node alone
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Devices,
    /// Packing of the ternary weights; all give the same answers
    #[arg(long, default_value = "i2_s", value_parser = one_of::<Format>(&["i2_s", "tl1", "tl2"]))]
    pub format: Format,
    /// Threads of a step [default: one per core of the device]
    #[arg(long, value_name = "N", value_parser = up_to::<1024>)]
    pub threads: Option<NonZeroUsize>,
    /// Instruction set of the kernels [default: the fastest of this machine]
    #[arg(
        long,
        env = "TRITMILL_ISA",
        value_parser = one_of::<Isa>(&["scalar", "neon", "avx2", "avx512", "amx"])
    )]
    pub isa: Option<Isa>,
    /// Element type of the KV cache: f16; q8, in 8 bits (about half the memory, changes answers); f32, for
    /// comparison with references
    #[arg(long, default_value = "f16", value_parser = one_of::<KvType>(&["f16", "f32", "q8"]))]
    pub kv: KvType,
    /// Head: exact, as in the file; full, the same without the 8-bit copy that preselects rows (slower, a
    /// third less memory); q8, in 8 bits (changes answers)
    #[arg(
        long,
        default_value = "exact",
        value_parser = one_of::<HeadMode>(&["exact", "full", "q8"])
    )]
    pub head: HeadMode,
    /// Activations of models with a scale for each group of inputs, such as Ternary Bonsai: int16, two int8 digits
    /// (default); int8, one digit (faster, changes answers). Other models have int8 only
    #[arg(long, value_parser = one_of::<Digits>(&["int8", "int16"]))]
    pub activations: Option<Digits>,
    /// Kernels of GPUs; all give the same answers. experimental: also those that no GPU has shown to be faster yet, after a test at
    /// the start
    #[arg(
        long,
        env = "TRITMILL_GPU_KERNELS",
        default_value = "standard",
        value_parser = one_of::<GpuKernels>(&["standard", "experimental"])
    )]
    pub gpu_kernels: GpuKernels,
    /// What a GPU does without, to find the cause of a fault: names of cubin, graphs, pdl, wgmma, tiles and ahead, with commas between
    /// them. Answers stay the same
    #[arg(
        long,
        env = "TRITMILL_CUDA_DISABLE",
        value_name = "FEATURE,…",
        default_value_t,
        hide_default_value = true
    )]
    pub gpu_disable: FeatureSet,
    /// Packed weights beside the model, in the folder .tritmill: written at the first start, read at the next ones, which
    /// are several times as fast. They take as much of the disk as of the memory, and can be deleted at any time. The experts of a
    /// mixture stay in that file where they do not fit in memory, and always with mapped: the system keeps in memory what it has room
    /// for
    #[arg(long, default_value = "on", value_parser = one_of::<PackedCache>(&["on", "off", "mapped"]))]
    pub packed_cache: PackedCache,
}

impl RunOptions {
    /// As [`Self::engine`], on the one chosen device.
    pub fn engine_on_one(&self) -> anyhow::Result<EngineOptions> {
        let device = self.device.one().context("--device")?;
        Ok(EngineOptions { device, ..self.engine() })
    }

    /// Returns the options of an engine, with defaults for the rest.
    pub fn engine(&self) -> EngineOptions {
        EngineOptions {
            format: self.format,
            isa: self.isa,
            threads: self.threads,
            kv: self.kv,
            head: self.head,
            activations: self.activations,
            gpu_kernels: self.gpu_kernels,
            gpu_disabled: self.gpu_disable,
            packed_cache: self.packed_cache,
            ..EngineOptions::default()
        }
    }

    /// Returns the options as words of a command line.
    pub fn words(&self) -> Vec<String> {
        let Self { device, format, threads, isa, kv, head, activations, .. } = self;
        let Self { gpu_kernels, gpu_disable, packed_cache, .. } = self;
        let mut words = vec![
            format!("--device={device}"),
            format!("--format={format}"),
            format!("--kv={}", kv.name()),
            format!("--head={}", head.name()),
            format!("--gpu-kernels={gpu_kernels}"),
            format!("--gpu-disable={gpu_disable}"),
            format!("--packed-cache={packed_cache}"),
        ];
        words.extend(threads.map(|threads| format!("--threads={threads}")));
        words.extend(isa.map(|isa| format!("--isa={isa}")));
        words.extend(activations.map(|digits| format!("--activations={digits}")));
        words
    }
}

/// Default of `--batch-wait`.
pub const BATCH_WAIT_MS: u32 = 10;

/// Number of concurrent sequences and their memory.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct CapacityOptions {
    /// Concurrent sequences per device
    #[arg(long, value_name = "N", default_value = "64", value_parser = up_to::<65536>)]
    pub max_sequences: NonZeroUsize,
    /// Memory of the KV cache per model and device, in MiB [default: as much as the sequences need, up to 1024 (more
    /// for models with recurrent layers), or to what --memory leaves; on a GPU up to nine tenths of the memory that the
    /// weights leave free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub kv_memory: Option<u64>,
    /// Milliseconds that a step may take while a job of priority high is decoded: less of other jobs' prompts is
    /// computed per step then, and the text arrives evenly. Other steps are as short as they can be without a slower batch, so
    /// that such a job starts soon. 0: steps are always full
    #[arg(long, value_name = "MS", default_value = "150")]
    pub step_target: u32,
    /// Milliseconds that an idle engine waits for further jobs while those it has make a step with few rows (below 32 with
    /// i2_s, 16 with tl1 and tl2), unless one is of priority high. 0: no wait
    #[arg(long, value_name = "MS", default_value_t = BATCH_WAIT_MS)]
    pub batch_wait: u32,
    /// Most drafts of a sequence per step: tokens that followed the newest ones earlier, in the same prompt and answer or
    /// in other answers to the same tenant, or that such an answer has in the same place. They are computed together
    /// where that is expected to be faster, and never change an answer. 0: none
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(..=64))]
    pub draft_tokens: u16,
    /// Most tokens of an answer to a request without max_tokens [default: up to the end of the model's context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub answer_tokens_max: Option<u32>,
    /// Read the names of control tokens, such as <|eot_id|>, in the messages of users as these tokens; they are text
    /// otherwise
    #[arg(long)]
    pub control_tokens: bool,
    #[command(flatten)]
    pub tiers: TierArguments,
}

impl CapacityOptions {
    /// Returns what the operator set for prompts and answers.
    pub fn limits(&self) -> ServedLimits {
        let allow_control_tokens = self.control_tokens;
        ServedLimits { allow_control_tokens, answer_tokens_max: self.answer_tokens_max }
    }

    /// Returns `options` with this capacity.
    pub fn apply(&self, options: EngineOptions) -> EngineOptions {
        EngineOptions {
            max_sequences: self.max_sequences.get(),
            kv_bytes: self.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
            step_target: (self.step_target > 0)
                .then(|| Duration::from_millis(self.step_target.into())),
            wait_limit: Duration::from_millis(self.batch_wait.into()),
            draft_tokens: self.draft_tokens.into(),
            ..options
        }
    }
}

/// Parses a count from 1 to `MAX`.
pub fn up_to<const MAX: usize>(text: &str) -> Result<NonZeroUsize, String> {
    let count = text.parse::<usize>().ok().filter(|count| *count <= MAX);
    count.and_then(NonZeroUsize::new).ok_or_else(|| format!("expected a number from 1 to {MAX}"))
}

/// Parses the name of a model, as part of a queue name.
pub fn model_name(text: &str) -> Result<String, String> {
    QueueName::check_part(text).map_err(|problem| problem.to_string())?;
    Ok(text.to_owned())
}

/// Returns a parser of names that lists them in help and errors.
pub fn one_of<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_may_have_a_name() {
        let named = |name: Option<&str>, model: &str| {
            Ok(NamedModel { name: name.map(str::to_owned), model: model.to_owned() })
        };
        assert_eq!(named_model("demo"), named(None, "demo"));
        assert_eq!(named_model("a=/m/b=c.gguf"), named(Some("a"), "/m/b=c.gguf"));
        assert_eq!(named_model("./a=b"), named(None, "./a=b"));
        assert_eq!(named_model("a=hf:o/n@v=1:f"), named(Some("a"), "hf:o/n@v=1:f"));
        assert_eq!(named_model("hf:o/n:f=1.gguf"), named(None, "hf:o/n:f=1.gguf"));
        assert!(named_model("=x").is_err() && named_model("a b\n=x").is_err());
    }
}
