//! Options that several commands share: which model, and how to run it.

use std::{num::NonZeroUsize, path::Path, str::FromStr, sync::Arc};

use anyhow::Context as _;
use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use tritmill_engine::{
    backend::cpu::{HeadMode, KvType},
    files::Model,
    formats::Format,
    kernels::Isa,
    load::{Devices, EngineOptions},
};

use tritmill_queue::QueueName;

use crate::demo_model;

/// Which model to run.
#[derive(Debug, Clone, Args)]
pub struct ModelOption {
    /// Model to run: a Hugging Face folder, a .gguf file, or `demo`, which is built in
    #[arg(long, value_name = "PATH", default_value = demo_model::NAME)]
    pub model: String,
}

impl ModelOption {
    /// Opens the model.
    pub fn open(&self) -> anyhow::Result<Arc<Model>> {
        open(&self.model)
    }
}

/// Opens a model by its path, or the built-in one by its name.
pub fn open(model: &str) -> anyhow::Result<Arc<Model>> {
    let opened = match model {
        demo_model::NAME => demo_model::open(),
        path => Model::open(Path::new(path)),
    };
    Ok(Arc::new(opened.with_context(|| format!("cannot open model {model}"))?))
}

/// How to run a model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct RunOptions {
    /// Where to run: cpu, cuda:0 (or another GPU's number), several GPUs as in cuda:0,cuda:1, cuda:all,
    /// or auto: the first GPU if there is one that will do, else the CPU
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Devices,
    /// Packing of the ternary weights; the answers are the same for each
    #[arg(long, default_value = "i2_s", value_parser = one_of::<Format>(&["i2_s", "tl1", "tl2"]))]
    pub format: Format,
    /// Threads of a step [default: one for each core]
    #[arg(long, value_name = "N", value_parser = up_to::<1024>)]
    pub threads: Option<NonZeroUsize>,
    /// Kernels to use [default: the fastest this machine has]
    #[arg(
        long,
        env = "TRITMILL_ISA",
        value_parser = one_of::<Isa>(&["scalar", "avx2", "avx512", "amx"])
    )]
    pub isa: Option<Isa>,
    /// Element type of the KV cache: f16; q8, in 8 bits (about half the memory, changes answers); f32 to
    /// compare with references
    #[arg(long, default_value = "f16", value_parser = one_of::<KvType>(&["f16", "f32", "q8"]))]
    pub kv: KvType,
    /// Head: exact as in the file; full, the same without a copy that says which rows may matter
    /// (slower, a third less memory); q8, in 8 bits (changes answers)
    #[arg(
        long,
        default_value = "exact",
        value_parser = one_of::<HeadMode>(&["exact", "full", "q8"])
    )]
    pub head: HeadMode,
}

impl RunOptions {
    /// As [`Self::engine`], on the one device that is asked for.
    pub fn engine_on_one(&self) -> anyhow::Result<EngineOptions> {
        let device = self.device.one().context("--device")?;
        Ok(EngineOptions { device, ..self.engine() })
    }

    /// The options of an engine on any of the devices, with its own defaults for the rest.
    pub fn engine(&self) -> EngineOptions {
        EngineOptions {
            format: self.format,
            isa: self.isa,
            threads: self.threads,
            kv: self.kv,
            head: self.head,
            ..EngineOptions::default()
        }
    }

    /// The same options as words of a command line.
    pub fn words(&self) -> Vec<String> {
        let Self { device, format, threads, isa, kv, head } = self;
        let mut words = vec![
            format!("--device={device}"),
            format!("--format={format}"),
            format!("--kv={}", kv.name()),
            format!("--head={}", head.name()),
        ];
        words.extend(threads.map(|threads| format!("--threads={threads}")));
        words.extend(isa.map(|isa| format!("--isa={isa}")));
        words
    }
}

/// How many sequences to run at once, and the memory for them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct CapacityOptions {
    /// Sequences that run at once, on each device
    #[arg(long, value_name = "N", default_value = "64", value_parser = up_to::<65536>)]
    pub max_sequences: NonZeroUsize,
    /// Memory of the KV cache in MiB, on each device [default: what the sequences need, at most 1024; on
    /// a GPU at most nine tenths of what is free beside the weights]
    #[arg(long, value_name = "MIB")]
    pub kv_memory: Option<u64>,
}

impl CapacityOptions {
    /// `options` with this capacity.
    pub fn apply(&self, options: EngineOptions) -> EngineOptions {
        EngineOptions {
            max_sequences: self.max_sequences.get(),
            kv_bytes: self.kv_memory.map(|mib| mib.saturating_mul(1 << 20)),
            ..options
        }
    }
}

/// A count from 1 to `MAX`.
pub fn up_to<const MAX: usize>(text: &str) -> Result<NonZeroUsize, String> {
    let count = text.parse::<usize>().ok().filter(|count| *count <= MAX);
    count.and_then(NonZeroUsize::new).ok_or_else(|| format!("expected a number from 1 to {MAX}"))
}

/// The name of a model, as queues bear it.
pub fn model_name(text: &str) -> Result<String, String> {
    match QueueName::check_part(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(problem) => Err(problem.to_string()),
    }
}

/// A parser of names that lists them in help and errors.
fn one_of<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse::<T>())
}
