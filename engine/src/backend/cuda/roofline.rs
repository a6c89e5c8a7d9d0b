//! How long each kernel of a step takes, beside the least that the device could take for its bytes and
//! operations: the launches of real steps, each kernel's by themselves.
//!
//! A kernel's launches are those of all layers, in their order, so that weights come from memory as they
//! do in a step. What they read is restored by a step before each kernel's turn.

use super::{
    CudaLoadError, CudaOptions, KvBlocks,
    cost::{self, Cost, Load},
    device::{DeviceError, Launch, Properties},
    driver,
    peaks::{Peaks, Timing, seconds_of},
    start,
    step::CudaBackend,
};
use crate::{
    backend::{Backend as _, Chunk, Logits, PositionLogits, StepError},
    files::Model,
    measure::{PREFILL_ROWS, Phase, Sequences, Workload},
};

/// Why there is no measurement.
#[derive(Debug, thiserror::Error)]
pub enum RooflineError {
    /// The model does not start.
    #[error(transparent)]
    Load(#[from] CudaLoadError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A kernel by itself failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// All launches of a kernel in one kind of step.
#[derive(Debug, Clone)]
pub struct KernelTime {
    /// Its name.
    pub kernel: &'static str,
    /// For linears, features by columns.
    pub of: String,
    /// Launches in a step.
    pub launches: usize,
    /// Seconds of one launch.
    pub seconds: f64,
    /// What one launch must do.
    pub cost: Cost,
}

impl KernelTime {
    /// What bounds it, and the seconds that this takes at the least.
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
    /// Prompts or decodes.
    pub phase: Phase,
    /// Rows.
    pub rows: usize,
    /// Seconds of all its launches, one after another.
    pub seconds: f64,
    /// By kernel, in the order of the step.
    pub kernels: Vec<KernelTime>,
}

/// A device's ceilings, and the kernels of steps beside them.
#[derive(Debug, Clone)]
pub struct Rooflines {
    /// The device.
    pub device: Properties,
    /// Its ceilings.
    pub peaks: Peaks,
    /// A decode for each batch of the workload, then a prefill.
    pub steps: Vec<StepTimes>,
}

/// Measures every kernel of a prefill step and of a decode step at each batch; `blocks` is not looked at.
///
/// # Errors
/// [`RooflineError`]
pub fn measure(
    model: &Model,
    options: CudaOptions,
    workload: &Workload,
) -> Result<Rooflines, RooflineError> {
    let device = driver::open(options.ordinal).map_err(RooflineError::Load)?;
    let options = CudaOptions { blocks: KvBlocks::Exactly(workload.block_count()), ..options };
    let mut backend = start(model, Box::new(device), options, super::Limits::default())?;
    of_backend(&mut backend, workload, &Timing::default())
}

/// As [`measure`], on a backend with room for the workload.
pub(super) fn of_backend(
    backend: &mut CudaBackend,
    workload: &Workload,
    timing: &Timing,
) -> Result<Rooflines, RooflineError> {
    let device = backend.device.properties().clone();
    let peaks = Peaks::measure(backend.device.as_mut(), timing)?;
    let sequences = Sequences::new(workload, backend.vocab_size());
    let total = workload.batches.iter().max().copied().unwrap_or(0) * workload.prompt_tokens;
    let mut logits = Logits::default();
    for first in (0..total).step_by(PREFILL_ROWS) {
        let rows = first..total.min(first + PREFILL_ROWS);
        backend.step(&sequences.prefill(rows), &mut logits)?;
    }
    let mut steps = Vec::new();
    for &batch in &workload.batches {
        let chunks = sequences.decode(batch, workload.prompt_tokens);
        steps.push(step(backend, Phase::Decode, &chunks, timing)?);
    }
    let chunks = sequences.prefill(0..total.min(PREFILL_ROWS));
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
    // The first may find that one digit is too few for the screen.
    backend.step(chunks, &mut logits)?;
    backend.step(chunks, &mut logits)?;
    let load = load(backend, chunks, &mut logits);
    let launches = backend.launches(chunks);
    let waits_at = backend.kv_base;
    let mut kernels: Vec<(KernelTime, Vec<Launch>)> = Vec::new();
    for launch in &launches {
        let (cost, of) = cost::of(launch, &load);
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

/// What the step was that just ran.
fn load(backend: &CudaBackend, chunks: &[Chunk<'_>], logits: &mut Logits) -> Load {
    let (mut whole, mut screened, mut found) = (0, 0, 0);
    for position in 0..logits.len() {
        match logits.position(position) {
            PositionLogits::All(_) => whole += 1,
            PositionLogits::Largest(some) => {
                screened += 1;
                found += some.len();
            }
        }
    }
    let rows = chunks.iter().flat_map(|c| c.position..c.position + c.tokens.len());
    Load {
        shape: backend.shape,
        rows: chunks.iter().map(|chunk| chunk.tokens.len()).sum(),
        whole,
        screened,
        positions: chunks.iter().map(|chunk| chunk.position + chunk.tokens.len()).sum(),
        seen: rows.map(|position| position + 1).sum(),
        found,
    }
}
