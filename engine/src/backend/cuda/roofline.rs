//! Measures each kernel of a step and compares its time with the least time that the device needs for its bytes and
//! operations. The launches are those of real steps, one kernel at a time.
//!
//! A kernel's launches are those of all layers, in their order, so weights come from memory as they do in a step. A
//! step before each kernel restores its inputs.

use super::{
    CudaLoadError, CudaOptions, KvBlocks,
    backend::CudaBackend,
    buffers::Limits,
    cost::{self, Cost, Load},
    device::{DeviceError, Launch, Properties},
    driver,
    load::start,
    peaks::{Peaks, Timing, seconds_of},
};
use crate::{
    backend::{Backend as _, Chunk, Logits, PositionLogits, StepError},
    files::Model,
    kv::LayerGroups,
    measure::{Phase, Sequences, Workload},
};

/// A measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum RooflineError {
    /// The model did not start.
    #[error(transparent)]
    Load(#[from] CudaLoadError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A kernel failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The launches of a kernel in one kind of step.
#[derive(Debug, Clone)]
pub struct KernelTime {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Shape of a linear, features × columns; empty for other kernels.
    pub of: String,
    /// Launches per step.
    pub launches: usize,
    /// Seconds per launch.
    pub seconds: f64,
    /// Cost of one launch.
    pub cost: Cost,
}

impl KernelTime {
    /// Returns the name of the rate that bounds the kernel, and the least seconds per launch.
    pub fn bound(&self, peaks: &Peaks) -> (&'static str, f64) {
        let bounds = [
            ("memory", self.cost.bytes as f64 / peaks.bytes()),
            ("int8", self.cost.int8 as f64 / peaks.int8),
            ("f32", self.cost.f32 as f64 / peaks.f32),
        ];
        bounds.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("three bounds")
    }
}

/// One kind of step.
#[derive(Debug, Clone)]
pub struct StepTimes {
    /// Prefill or decode.
    pub phase: Phase,
    /// Rows.
    pub rows: usize,
    /// Seconds of all launches, one after another.
    pub seconds: f64,
    /// The kernels, in the order of the step.
    pub kernels: Vec<KernelTime>,
}

/// A device's highest rates, and the times of kernels.
#[derive(Debug, Clone)]
pub struct Rooflines {
    /// The device.
    pub device: Properties,
    /// Its highest rates.
    pub peaks: Peaks,
    /// One decode per batch of the workload, then one prefill.
    pub steps: Vec<StepTimes>,
}

/// Measures every kernel of a prefill step and of a decode step at each batch; `options.blocks` is ignored. With
/// `quick`, every kernel runs once, on little data, to check that it works.
///
/// # Errors
/// [`RooflineError`]: the model does not start, or a step failed.
pub fn measure(
    model: &Model,
    options: CudaOptions,
    workload: &Workload,
    quick: bool,
) -> Result<Rooflines, RooflineError> {
    let device = driver::open(options.ordinal, options.disabled)?;
    let options = CudaOptions { blocks: KvBlocks::Exactly(workload.block_count()), ..options };
    let mut backend = start(model, Box::new(device), options, Limits::default())?;
    let timing = if quick { Timing::QUICK } else { Timing::default() };
    of_backend(&mut backend, workload, &timing)
}

/// As [`measure`], on a backend with room for the workload.
pub(super) fn of_backend(
    backend: &mut CudaBackend,
    workload: &Workload,
    timing: &Timing,
) -> Result<Rooflines, RooflineError> {
    backend.state.alone = true;
    let device = backend.device.properties().clone();
    let peaks = Peaks::measure(backend.device.as_mut(), timing)?;
    let sequences = Sequences::new(workload, backend.vocab_size(), LayerGroups::ONE);
    let total = workload.batch_max() * workload.prompt_tokens;
    sequences.run_prompts(backend, workload.batch_max(), &mut Logits::default())?;
    let mut steps = Vec::new();
    for &batch in &workload.batches {
        let chunks = sequences.decode(batch, workload.prompt_tokens);
        steps.push(step(backend, Phase::Decode, &chunks, timing)?);
    }
    let chunks = sequences.prefill(0..total.min(backend.step_rows()));
    steps.push(step(backend, Phase::Prefill, &chunks, timing)?);
    Ok(Rooflines { device, peaks, steps })
}

fn step(
    backend: &mut CudaBackend,
    phase: Phase,
    chunks: &[Chunk<'_>],
    timing: &Timing,
) -> Result<StepTimes, RooflineError> {
    let mut logits = Logits::default();
    // The first step may switch the screen from one digit to two.
    backend.step(chunks, &mut logits)?;
    backend.step(chunks, &mut logits)?;
    let load = load(backend, chunks, &mut logits);
    let launches = backend.launches(chunks);
    let waits_at = backend.kv_base;
    let mut kernels: Vec<(KernelTime, Vec<Launch>)> = Vec::new();
    for launch in &launches {
        let (cost, of) = cost::compute(launch, &load);
        match kernels.iter_mut().find(|(k, _)| k.kernel == launch.kernel && k.of == of) {
            Some((_, launches)) => launches.push(*launch),
            None => {
                let (kernel, launches) = (launch.kernel, 0);
                let time = KernelTime { kernel, of, launches, seconds: 0.0, cost };
                kernels.push((time, vec![*launch]));
            }
        }
    }
    backend.forget_recordings()?;
    let device = backend.device.as_mut();
    let seconds = launches.len() as f64 * seconds_of(device, &launches, waits_at, timing)?;
    for (time, launches) in &mut kernels {
        backend.step(chunks, &mut logits)?;
        backend.forget_recordings()?;
        time.launches = launches.len();
        time.seconds = seconds_of(backend.device.as_mut(), launches, waits_at, timing)?;
    }
    let kernels = kernels.into_iter().map(|(time, _)| time).collect();
    Ok(StepTimes { phase, rows: load.rows, seconds, kernels })
}

/// Returns the sizes of the step that just ran.
fn load(backend: &CudaBackend, chunks: &[Chunk<'_>], logits: &mut Logits) -> Load {
    let (mut whole, mut reported, mut screened) = (0, 0, 0);
    for position in 0..logits.len() {
        reported += usize::from(logits.take_distribution(position).is_some());
        match logits.position(position) {
            PositionLogits::All(_) => whole += 1,
            PositionLogits::Largest(_) | PositionLogits::Drawn(_) => screened += 1,
        }
    }
    let rows = chunks.iter().flat_map(|c| c.position..c.position + c.tokens.len());
    Load {
        shape: backend.shape,
        rows: chunks.iter().map(|chunk| chunk.tokens.len()).sum(),
        whole: whole + reported,
        reported,
        screened,
        positions: chunks.iter().map(|chunk| chunk.position + chunk.tokens.len()).sum(),
        seen: rows.map(|position| position + 1).sum(),
        found: backend.state.candidates,
    }
}
