//! Loads an opened model file into a backend that can run steps.

use std::sync::Arc;

use half::f16;

use super::{
    CpuOptions, KvType, PackedCache, SelfTestError,
    backend::CpuBackend,
    kv_layers::KvLayers,
    kv_store::KvShape,
    packed_file::{self, Packing},
    self_test, topology,
    weights::Weights,
};
use crate::{
    backend::{
        Backend,
        class::{self, Choices},
    },
    files::{Model, ModelError},
    kernels::{Digits, Isa, float::FloatKernels},
    kv::LayerGroups,
};

/// An error that keeps the backend from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The model file has an error.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The machine lacks the requested ISA.
    #[error("this machine cannot run {isa} kernels")]
    IsaUnavailable {
        /// The requested ISA.
        isa: Isa,
    },
    /// The machine lacks the memory node, or the process may not use its cores.
    #[error("no core of memory node {node} can be used (there are: {})", names_of_nodes())]
    NodeUnavailable {
        /// The requested node.
        node: usize,
    },
    /// The system refuses the threads that load the weights.
    #[error("cannot start threads to load the weights")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// Two digits for a model that was trained with one.
    #[error(
        "the model was trained with int8 activations: int16 is for models with a scale for each group of inputs"
    )]
    ActivationsOfTraining,
    /// A kernel disagrees with its scalar definition on this machine.
    #[error(transparent)]
    SelfTest(#[from] SelfTestError),
}

fn names_of_nodes() -> String {
    let names: Vec<String> =
        topology::memory_nodes().iter().map(|node| format!("cpu:{}", node.number)).collect();
    names.join(", ")
}

/// Loads a model: decodes and repacks its weights, tests the kernels on them, makes the KV pool.
///
/// # Errors
/// [`LoadError`]: the machine lacks the ISA, a tensor cannot be decoded, or the kernels fail their
/// self-test.
pub fn load(model: Arc<Model>, options: CpuOptions) -> Result<Box<dyn Backend>, LoadError> {
    let kernels =
        FloatKernels::for_isa(options.isa).ok_or(LoadError::IsaUnavailable { isa: options.isa })?;
    if options.activations == Some(Digits::Two) && !model.config().group_scales {
        return Err(LoadError::ActivationsOfTraining);
    }
    let CpuOptions { format, kv, head, activations, packed_cache, .. } = options;
    if packed_cache != PackedCache::Off {
        packed_file::recall_fingerprint(&model, format, head);
    }
    let numerics_class = class::numerics_class(&model, Choices { kv, head, activations }, "cpu")?;
    let weights = load_weights(model, options)?;
    self_test::run(&weights, options.isa, kernels)?;
    tracing::info!(
        model = weights.model.name(),
        format = %options.format,
        isa = %options.isa,
        threads = options.threads,
        node = options.node,
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

/// Loads the weights, on threads of the memory node if there is one, so that the weights are in its memory.
fn load_weights(model: Arc<Model>, options: CpuOptions) -> Result<Weights, LoadError> {
    let CpuOptions { format, head, .. } = options;
    let load = || match options.packed_cache {
        PackedCache::Off => Weights::load(model, format, head),
        cache => {
            let maps_experts = cache == PackedCache::Mapped;
            packed_file::load(model, Packing { format, head, maps_experts })
        }
    };
    let Some(node) = options.node else { return Ok(load()?) };
    topology::cores_of(node).ok_or(LoadError::NodeUnavailable { node })?;
    let threads = rayon::ThreadPoolBuilder::new()
        .num_threads(options.threads)
        .start_handler(move |_| topology::stay_on(options.node))
        .build()?;
    Ok(threads.install(load)?)
}

/// Returns the groups of a model's layers that have KV blocks.
pub fn layer_groups(model: &Model) -> LayerGroups {
    KvLayers::of(model.config()).groups
}

/// Returns the number of bytes that one more KV block of a model takes.
pub fn kv_block_bytes(model: &Model, kv: KvType) -> usize {
    KvShape::from_config(model.config()).block_stride_bytes(kv)
}
