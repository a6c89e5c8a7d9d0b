//! Measures steps with other values of the [constants](super::tuning) that change their speed.

use std::time::Instant;

use super::{
    CudaOptions, GpuKernels, KvBlocks,
    backend::CudaBackend,
    buffers::Limits,
    device::Properties,
    driver,
    load::start,
    roofline::RooflineError,
    tuning::{NEVER, Tuning},
};
use crate::{
    backend::{Backend as _, Chunk, Logits, cpu::KvType},
    files::Model,
    measure::{PREFILL_ROWS, Phase, Sequences, Workload},
};

/// One constant with one value, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// Name of the constant: a field of [`Tuning`], or `step_rows`, the rows of a prefill step.
    pub constant: &'static str,
    /// The value.
    pub value: usize,
    /// Whether it is the default.
    pub is_default: bool,
    /// Kind of the measured steps.
    pub phase: Phase,
    /// Rows of a step.
    pub rows: usize,
    /// Tokens before those of a decode; 0 for prefill.
    pub context: usize,
    /// Tokens per second of all sequences.
    pub tokens_per_s: f64,
}

/// A device and what was measured on it.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The device.
    pub device: Properties,
    /// The measurements, by constant.
    pub trials: Vec<Trial>,
}

/// Rows of prefill steps to measure.
const STEP_ROWS: [usize; 5] = [256, 512, 1024, 2048, 4096];
/// Rows of prefill steps on which kernels for few rows and tiles are compared.
const TILE_ROWS: [usize; 5] = [48, 64, 128, 384, 1024];

/// Values of a constant to measure, and how to set them.
struct Constant {
    name: &'static str,
    values: &'static [usize],
    phase: Phase,
    /// Type of keys and values with which it matters; `None`: all.
    kv: Option<KvType>,
    /// Tokens before those of decodes, where the prompt has at least as many; empty: the prompt.
    contexts: &'static [usize],
    field: fn(&mut Tuning) -> &mut usize,
}

const CONSTANTS: [Constant; 10] = [
    Constant {
        name: "split_tasks",
        values: &[0, 2, 4, 8, 16, 32],
        phase: Phase::Decode,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.split_tasks,
    },
    Constant {
        name: "short_positions",
        values: &[0, 128, 256, 512],
        phase: Phase::Decode,
        kv: None,
        contexts: &[16, 120, 248, 448],
        field: |tuning| &mut tuning.short_positions,
    },
    Constant {
        name: "short_blocks",
        values: &[0, 1, 2, 4, 8],
        phase: Phase::Decode,
        kv: None,
        contexts: &[16, 120, 248],
        field: |tuning| &mut tuning.short_blocks,
    },
    Constant {
        name: "one_digit_rows",
        values: &[1, 9, 33, 65, NEVER],
        phase: Phase::Decode,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.one_digit_rows,
    },
    Constant {
        name: "few_rows",
        values: &[8, 16, 32, 64],
        phase: Phase::Prefill,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.few_rows,
    },
    Constant {
        name: "large_tile_rows",
        values: &[65, 256, 512, 1024, NEVER],
        phase: Phase::Prefill,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.large_tile_rows,
    },
    Constant {
        name: "wgmma_rows",
        values: &[128, 256, 512, 1024, NEVER],
        phase: Phase::Prefill,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.wgmma_rows,
    },
    Constant {
        name: "overlap_rows",
        values: &[0, 1, 8, 64, NEVER],
        phase: Phase::Decode,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.overlap_rows,
    },
    Constant {
        name: "attention_tile_rows",
        values: &[2, 16, 64, 256, NEVER],
        phase: Phase::Prefill,
        kv: Some(KvType::Q8),
        contexts: &[],
        field: |tuning| &mut tuning.attention_tile_rows,
    },
    Constant {
        name: "shared_percent",
        values: &[0, 50, 100],
        phase: Phase::Decode,
        kv: None,
        contexts: &[],
        field: |tuning| &mut tuning.shared_percent,
    },
];

/// Loads a model once and measures it with every value of every constant; `options.blocks` and `options.kernels` are ignored. With
/// `quick`, every measurement is one step.
///
/// # Errors
/// [`RooflineError`]: the model does not start, or a step failed.
pub fn sweep(
    model: &Model,
    options: CudaOptions,
    workload: &Workload,
    quick: bool,
) -> Result<Sweep, RooflineError> {
    let device = driver::open(options.ordinal, options.disabled)?;
    let blocks = KvBlocks::Exactly(workload.block_count());
    let options = CudaOptions { blocks, kernels: GpuKernels::Experimental, ..options };
    let rows_max = STEP_ROWS[STEP_ROWS.len() - 1];
    let limits = Limits { rows: rows_max, ..Limits::default() };
    let mut backend = start(model, Box::new(device), options, limits)?;
    let seconds = if quick { 0.0 } else { 0.1 };
    let trials = of_backend(&mut backend, workload, seconds)?;
    Ok(Sweep { device: backend.device.properties().clone(), trials })
}

/// As [`sweep`], on a backend with room for the workload; each measurement lasts at least `seconds`
/// seconds.
pub(super) fn of_backend(
    backend: &mut CudaBackend,
    workload: &Workload,
    seconds: f64,
) -> Result<Vec<Trial>, RooflineError> {
    backend.state.alone = true;
    let sequences = Sequences::new(workload, backend.vocab_size());
    let total = workload.batch_max() * workload.prompt_tokens;
    sequences.run_prompts(backend, workload.batch_max(), &mut Logits::default())?;
    let mut trials = Vec::new();
    let kv = backend.shape.kv;
    for constant in CONSTANTS.iter().filter(|constant| constant.kv.is_none_or(|of| of == kv)) {
        let default = *(constant.field)(&mut { Tuning::EXPERIMENTAL });
        for &value in constant.values {
            let mut tuning = Tuning::EXPERIMENTAL;
            match constant.name {
                // Larger tiles are for devices without products of warpgroups.
                "large_tile_rows" => tuning.wgmma_rows = NEVER,
                "split_tasks" => tuning.short_positions = 0,
                "short_positions" => tuning.short_blocks = NEVER,
                _ => {}
            }
            *(constant.field)(&mut tuning) = value;
            backend.set_tuning(tuning)?;
            for (rows, context, chunks) in steps(constant, workload, &sequences, total) {
                trials.push(Trial {
                    constant: constant.name,
                    value,
                    is_default: value == default,
                    phase: constant.phase,
                    rows,
                    context,
                    tokens_per_s: rate(backend, &chunks, seconds)?,
                });
            }
        }
    }
    backend.set_tuning(Tuning::EXPERIMENTAL)?;
    let rows_max = total.min(backend.limits.rows);
    for rows in STEP_ROWS.into_iter().filter(|rows| *rows <= rows_max) {
        let tokens_per_s = rate(backend, &sequences.prefill(0..rows), seconds)?;
        let (constant, is_default) = ("step_rows", rows == PREFILL_ROWS);
        let (phase, value, context) = (Phase::Prefill, rows, 0);
        trials.push(Trial { constant, value, is_default, phase, rows, context, tokens_per_s });
    }
    Ok(trials)
}

/// Steps to measure for a constant, with their rows and contexts.
fn steps<'a>(
    constant: &Constant,
    workload: &Workload,
    sequences: &'a Sequences,
    total: usize,
) -> Vec<(usize, usize, Vec<Chunk<'a>>)> {
    let prompt = workload.prompt_tokens;
    let contexts = if constant.contexts.is_empty() { &[prompt] } else { constant.contexts };
    let contexts = contexts.iter().copied().filter(|context| *context <= prompt);
    let decode = |context, batch: usize| (batch, context, sequences.decode(batch, context));
    let prefill = |rows: usize| (rows, 0, sequences.prefill(0..rows));
    match constant.phase {
        Phase::Decode => contexts
            .flat_map(|context| workload.batches.iter().map(move |batch| decode(context, *batch)))
            .collect(),
        Phase::Prefill => {
            TILE_ROWS.into_iter().filter(|rows| *rows <= total).map(prefill).collect()
        }
    }
}

/// Measures the tokens per second of a step, repeated.
fn rate(
    backend: &mut CudaBackend,
    chunks: &[Chunk<'_>],
    seconds: f64,
) -> Result<f64, RooflineError> {
    let mut logits = Logits::default();
    // The first records the launches.
    backend.step(chunks, &mut logits)?;
    let (start, mut steps) = (Instant::now(), 0.0);
    while steps == 0.0 || start.elapsed().as_secs_f64() < seconds {
        backend.step(chunks, &mut logits)?;
        steps += 1.0;
    }
    let rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
    Ok(steps * rows as f64 / start.elapsed().as_secs_f64())
}
