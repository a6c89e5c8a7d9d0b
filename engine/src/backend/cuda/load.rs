//! Loads a model onto a device.

use std::sync::Arc;

use super::{
    KvBlocks,
    backend::{CudaBackend, State},
    buffers::{Buffers, Limits},
    choices,
    device::Device,
    driver,
    error::CudaLoadError,
    experimental::GpuKernels,
    features::FeatureSet,
    memory, self_test,
    shape::{Arena, Shape},
    tuning::Tuning,
    weights::Weights,
};
use crate::{
    backend::{
        Backend,
        class::{self, Choices},
        cpu::{HeadMode, KvType},
    },
    files::Model,
    kernels::Digits,
};

/// Device, precisions and memory of a model.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Ordinal of the device.
    pub ordinal: usize,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// Precision of the head.
    pub head: HeadMode,
    /// Digits of activations, for models with scales of groups; `None`: two. Other models have one.
    pub activations: Option<Digits>,
    /// KV blocks (of 16 positions) in the pool.
    pub blocks: KvBlocks,
    /// The kernels that run.
    pub kernels: GpuKernels,
    /// Features that are not used.
    pub disabled: FeatureSet,
}

/// Loads a model onto a device: repacks its weights, allocates the KV pool and the buffers of steps.
///
/// # Errors
/// [`CudaLoadError`]. Missing memory is reported before anything is loaded.
pub fn load(model: Arc<Model>, options: CudaOptions) -> Result<Box<dyn Backend>, CudaLoadError> {
    check_model(&model, options.activations)?;
    let device = driver::open(options.ordinal, options.disabled)?;
    let backend = start(&model, Box::new(device), options, Limits::default())?;
    Ok(Box::new(backend))
}

/// Returns the bytes of one KV block of a model on a device.
pub fn kv_block_bytes(model: &Model, kv: KvType) -> usize {
    Shape::from_config(model.config(), kv, None).kv_block_bytes()
}

/// Loads a model onto an open device.
pub(super) fn start(
    model: &Model,
    mut device: Box<dyn Device>,
    options: CudaOptions,
    limits: Limits,
) -> Result<CudaBackend, CudaLoadError> {
    let CudaOptions { kv, head, activations, .. } = options;
    check_model(model, activations)?;
    let config = model.config().clone();
    let shape = Shape::from_config(&config, kv, activations);
    let properties = device.properties().clone();
    check(&shape, device.as_ref())?;
    let place = |weights_at: u64, buffers_at: u64| {
        let (mut weights, mut buffers) = (Arena::at(weights_at), Arena::at(buffers_at));
        let placed = (
            Weights::place(model, &shape, head, &mut weights),
            Buffers::place(&shape, &limits, &properties, &mut buffers),
        );
        (placed, weights.size_bytes(), buffers.size_bytes())
    };
    let (_, weight_bytes, buffer_bytes) = place(0, 0);
    let block_bytes = shape.kv_block_bytes();
    let (fixed, free) = ((weight_bytes + buffer_bytes) as u64, properties.memory_free_bytes);
    let block_count = memory::block_count(fixed, block_bytes, options.blocks, free)?;
    let numerics_class = class::numerics_class(model, Choices { kv, head, activations }, "cuda")?;
    let (weights_at, buffers_at) = (device.allocate(weight_bytes)?, device.allocate(buffer_bytes)?);
    let kv_base = device.allocate(block_count * block_bytes)?;
    let ((mut weights, buffers), ..) = place(weights_at, buffers_at);
    weights.fill(model, &shape, device.as_mut())?;
    tracing::info!(
        model = model.name(),
        device = properties.name,
        weight_bytes,
        buffer_bytes,
        kv_blocks = block_count,
        numerics_class,
        "model loaded"
    );
    let mut backend = CudaBackend {
        device,
        weights,
        buffers,
        shape,
        config,
        limits,
        kv_base,
        block_count,
        numerics_class,
        tuning: Tuning::default(),
        state: State::default(),
    };
    self_test::run(&mut backend, model)?;
    choices::choose(&mut backend, options.kernels)?;
    for report in backend.device.features().report() {
        let why = report.given_up.as_deref().unwrap_or("used");
        tracing::debug!(feature = report.feature.name(), state = why, "feature of the GPU");
    }
    model.release_pages();
    Ok(backend)
}

/// Rejects two digits for a model that was trained with one.
fn check_model(model: &Model, activations: Option<Digits>) -> Result<(), CudaLoadError> {
    if activations == Some(Digits::Two) && !model.config().group_scales {
        return Err(CudaLoadError::ActivationsOfTraining);
    }
    Ok(())
}

/// Rejects shapes that the kernels do not support.
fn check(shape: &Shape, device: &dyn Device) -> Result<(), CudaLoadError> {
    let quantize = if shape.group_scales { "group_quantize" } else { "norm_quantize" };
    if shape.stride_max * 4 > device.shared_bytes(quantize) as usize {
        return Err(CudaLoadError::Unsupported("rows wider than a block's shared memory"));
    }
    if shape.padded_dim > 256 {
        return Err(CudaLoadError::Unsupported("heads of more than 256 elements"));
    }
    Ok(())
}
