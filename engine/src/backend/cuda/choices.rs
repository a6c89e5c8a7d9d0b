//! Tests at load of what a device may go without: kernels that overlap and, of the experimental ones, products of warpgroups
//! ([`warpgroups`]) and attention in tiles. Steps of the model are compared with steps that the [`self_test`]'s kernels compute one after another. What
//! gives another bit, or is refused, is not used.
//!
//! [`self_test`]: super::self_test

use super::{
    attention::has_tile_kernels,
    backend::CudaBackend,
    device::DeviceError,
    error::CudaLoadError,
    experimental::{GpuKernels, warpgroups},
    features::Feature,
    tuning::Tuning,
};
use crate::{
    backend::{Chunk, Logits, LogitsFor},
    kv::{BLOCK_TOKENS, BlockId, blocks_for},
};

/// Rows of a sequence whose attention is tested in tiles, and the positions before them: more than a segment, and a part of a
/// block.
const TILE_ROWS: usize = 40;
const TILE_START: usize = 120;

/// Chooses the kernels of later steps.
pub fn choose(backend: &mut CudaBackend, kernels: GpuKernels) -> Result<(), CudaLoadError> {
    let tuning = Tuning::of(kernels);
    backend.set_tuning(tuning)?;
    if kernels == GpuKernels::Standard {
        for feature in [Feature::Warpgroups, Feature::Tiles] {
            backend.device.features_mut().turn_off(feature, "off: an experimental kernel");
        }
    }
    let warpgroups = match kernels {
        GpuKernels::Standard => Ok(()),
        GpuKernels::Experimental => warpgroups::choose(backend),
    };
    let tested = warpgroups.and_then(|()| choose_by_steps(backend, kernels));
    tested.map_err(|error| match error {
        DeviceError::Sticky { .. } => CudaLoadError::KernelFault(error),
        error => error.into(),
    })
}

fn choose_by_steps(backend: &mut CudaBackend, kernels: GpuKernels) -> Result<(), DeviceError> {
    backend.state.alone = true;
    let tiles = match kernels {
        GpuKernels::Standard => Ok(()),
        GpuKernels::Experimental => choose_tiles(backend),
    };
    let chosen = tiles.and_then(|()| choose_overlap(backend, Tuning::of(kernels)));
    backend.state.alone = false;
    chosen
}

/// Tests attention in tiles, which only int8 keys and values have.
fn choose_tiles(backend: &mut CudaBackend) -> Result<(), DeviceError> {
    let end = TILE_START + TILE_ROWS;
    let has_room = end <= backend.config.context_length.min(backend.block_count * BLOCK_TOKENS);
    let is_allowed = backend.device.features().allows(Feature::Tiles);
    if !has_tile_kernels(&backend.shape, backend.device.as_ref()) || !has_room || !is_allowed {
        backend
            .device
            .features_mut()
            .turn_off(Feature::Tiles, "off: only for int8 keys and values");
        return Ok(());
    }
    let tokens: Vec<u32> = (0..end).map(|i| (i * 7919 % backend.shape.vocab) as u32).collect();
    let with = |backend: &mut CudaBackend, attention_tile_rows| {
        backend.set_tuning(Tuning { attention_tile_rows, ..Tuning::EXPERIMENTAL })?;
        logits_of(backend, &tokens[TILE_START..], TILE_START, LogitsFor::All)
    };
    let start = |backend: &mut CudaBackend| {
        backend.set_tuning(Tuning { attention_tile_rows: end, ..Tuning::EXPERIMENTAL })?;
        logits_of(backend, &tokens[..TILE_START], 0, LogitsFor::Nothing)
    };
    backend.state.has_tiles = true;
    let equal = start(backend)
        .and_then(|_| with(backend, 1))
        .and_then(|tiles| Ok(tiles == with(backend, end)?));
    backend.set_tuning(Tuning::EXPERIMENTAL)?;
    backend.state.has_tiles = is_usable(backend, Feature::Tiles, equal)?;
    Ok(())
}

/// Tests decodes whose kernels overlap: launched, recorded and replayed.
fn choose_overlap(backend: &mut CudaBackend, base: Tuning) -> Result<(), DeviceError> {
    if !backend.device.overlaps() || backend.block_count == 0 {
        return Ok(());
    }
    let decode = |backend: &mut CudaBackend, recorded| {
        backend.limits.recorded = recorded;
        logits_of(backend, &[1], 0, LogitsFor::All)
    };
    let recorded = backend.limits.recorded;
    // With two kernels of attention, and with one.
    let mut test = || {
        for short_blocks in [0, usize::MAX] {
            let tuning = Tuning { short_blocks, ..base };
            backend.set_tuning(tuning)?;
            let overlapped = [decode(backend, 0)?, decode(backend, 1)?, decode(backend, 1)?];
            backend.set_tuning(Tuning { overlap_rows: 0, ..tuning })?;
            let expected = decode(backend, 1)?;
            if overlapped.iter().any(|logits| *logits != expected) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let equal = test();
    backend.limits.recorded = recorded;
    backend.set_tuning(base)?;
    if !is_usable(backend, Feature::Overlap, equal)? {
        backend.device.end_overlap();
    }
    Ok(())
}

/// Returns whether a feature can be used after its test.
fn is_usable(
    backend: &mut CudaBackend,
    tested: Feature,
    equal: Result<bool, DeviceError>,
) -> Result<bool, DeviceError> {
    let features = backend.device.features_mut();
    match equal {
        Ok(true) => return Ok(true),
        Ok(false) => features.give_up(tested, "other results in its test"),
        Err(error @ (DeviceError::Sticky { .. } | DeviceError::Lost { .. })) => return Err(error),
        Err(error) => features.give_up(tested, error),
    }
    Ok(false)
}

/// Computes tokens of a sequence in the first blocks; returns the bits of the requested logits.
fn logits_of(
    backend: &mut CudaBackend,
    tokens: &[u32],
    position: usize,
    logits: LogitsFor<'_>,
) -> Result<Vec<u32>, DeviceError> {
    let blocks: Vec<BlockId> =
        (0..blocks_for(position + tokens.len()) as u32).map(BlockId).collect();
    let chunk = Chunk { tokens, position, blocks: &blocks, logits, state: 0.into(), windows: &[] };
    let mut logits = Logits::default();
    backend.run_step(&[chunk], &mut logits)?;
    Ok(logits.all().iter().map(|logit| logit.to_bits()).collect())
}
