//! The CPU backend: packed weights, KV storage and a pool of threads.
//!
//! `step` reads top to bottom like the paper's figure; each named part is one or a few parallel
//! regions. What a row computes is fixed by the row alone: integer sums are exact, every float
//! reduction has one order (see [`crate::kernels::float`]), and threads only choose who computes a
//! part, never how.

mod attend;
mod disjoint;
mod forward;
pub(super) mod head;
mod kv_store;
mod linears;
mod pool;
pub(super) mod screen;
mod self_test;
mod weights;

use std::sync::Arc;

use half::f16;

pub use head::HeadMode;
pub use self_test::SelfTestError;

use crate::{
    backend::Backend,
    files::{Model, ModelError},
    formats::Format,
    kernels::{Isa, float::FloatKernels},
    names::names,
};
use forward::CpuBackend;
use kv_store::KvShape;
use weights::Weights;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half precision, saturating.
    #[default]
    F16,
    /// Single precision, for comparison with references.
    F32,
    /// Int8 with an f32 scale for each position and KV head, of keys and of values: half of f16's memory.
    Q8,
}

impl KvType {
    /// Bytes per element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
            Self::Q8 => 1,
        }
    }

    /// Bytes of the scale of a position's keys, or values, of one KV head.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::F16 | Self::F32 => 0,
            Self::Q8 => size_of::<f32>(),
        }
    }
}

names!(KvType, "KV type", F16 = "f16", F32 = "f32", Q8 = "q8");

/// How a model is held and run.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Packing of the ternary matrices.
    pub format: Format,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Threads of a step, at least 1.
    pub threads: usize,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// KV blocks (of 16 positions) in the pool.
    pub block_count: usize,
}

/// Why a backend did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The machine lacks the ISA that was asked for.
    #[error("this machine cannot run {isa} kernels")]
    IsaUnavailable {
        /// The ISA asked for.
        isa: Isa,
    },
    /// A kernel disagrees with its scalar definition on this machine.
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
}

/// Loads a model: decodes and repacks its weights, tests the kernels on them, makes the KV pool.
///
/// # Errors
/// [`LoadError`]: nothing is started that could answer wrongly.
pub fn load(model: Arc<Model>, options: CpuOptions) -> Result<Box<dyn Backend>, LoadError> {
    let kernels =
        FloatKernels::of(options.isa).ok_or(LoadError::IsaUnavailable { isa: options.isa })?;
    let class_prefix = model.fingerprint()?;
    let weights = Weights::load(model, options.format, options.head)?;
    self_test::run(&weights, options.isa, kernels)?;
    let numerics_class =
        format!("{class_prefix}/kv-{}/head-{}/cpu", options.kv.name(), weights.head.precision());
    tracing::info!(
        model = weights.model.name(),
        format = %options.format,
        isa = %options.isa,
        threads = options.threads,
        weight_bytes = weights.size_bytes(),
        kv_blocks = options.block_count,
        numerics_class,
        "model loaded"
    );
    let weights = Arc::new(weights);
    Ok(match options.kv {
        KvType::F16 => Box::new(CpuBackend::<f16>::new(weights, kernels, options, numerics_class)),
        KvType::F32 => Box::new(CpuBackend::<f32>::new(weights, kernels, options, numerics_class)),
        KvType::Q8 => Box::new(CpuBackend::<i8>::new(weights, kernels, options, numerics_class)),
    })
}

/// Bytes of one KV block of a model.
pub fn kv_block_bytes(model: &Model, kv: KvType) -> usize {
    KvShape::of(model.config()).block_bytes(kv)
}
