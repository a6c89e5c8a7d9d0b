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
    kv::LayerGroups,
    measure::{Phase, Sequences, Workload},
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

/// Tokens per second of one kind of step, measured in turns: medians.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Kind of the steps.
    pub phase: Phase,
    /// Rows of a step.
    pub rows: usize,
    /// Tokens before those of a decode; 0 for prefill.
    pub context: usize,
    /// With [`GpuKernels::Standard`].
    pub standard: f64,
    /// With [`GpuKernels::Experimental`].
    pub experimental: f64,
    /// With the best value of every constant.
    pub best: f64,
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The measurements, by constant.
    pub trials: Vec<Trial>,
    /// Constants for which another value than the default was faster on average, and that value.
    pub best: Vec<(&'static str, usize)>,
    /// These values together, and the defaults.
    pub comparisons: Vec<Comparison>,
}

/// A device and what was measured on it.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The device.
    pub device: Properties,
    /// The measurements.
    pub measured: Measured,
}

/// Gain from which another value than the default is better: less is noise.
const GAIN_MIN: f64 = 1.01;
/// Turns of a comparison.
const TURNS: usize = 3;

/// Rows of prefill steps to measure.
const STEP_ROWS: [usize; 5] = [256, 512, 1024, 2048, 4096];
/// Rows of prefill steps on which kernels for few rows and tiles are compared.
const TILE_ROWS: [usize; 6] = [48, 64, 128, 384, 1024, 4096];

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
        values: &[65, 512, 1024, 2048, NEVER],
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
    let measured = of_backend(&mut backend, workload, seconds)?;
    Ok(Sweep { device: backend.device.properties().clone(), measured })
}

/// As [`sweep`], on a backend with room for the workload; each measurement lasts at least `seconds`
/// seconds.
pub(super) fn of_backend(
    backend: &mut CudaBackend,
    workload: &Workload,
    seconds: f64,
) -> Result<Measured, RooflineError> {
    backend.state.alone = true;
    let sequences = Sequences::new(workload, backend.vocab_size(), LayerGroups::ONE);
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
        let (constant, is_default) = ("step_rows", rows == STEP_ROWS[STEP_ROWS.len() - 1]);
        let (phase, value, context) = (Phase::Prefill, rows, 0);
        trials.push(Trial { constant, value, is_default, phase, rows, context, tokens_per_s });
    }
    let best = best_values(&trials);
    let comparisons = compare(backend, workload, &sequences, total, tuning_of(&best), seconds)?;
    Ok(Measured { trials, best, comparisons })
}

/// Returns the constants for which another value than the default is faster on average, and the fastest.
fn best_values(trials: &[Trial]) -> Vec<(&'static str, usize)> {
    let best_of = |constant: &Constant| {
        let of: Vec<&Trial> = trials.iter().filter(|t| t.constant == constant.name).collect();
        let gain = |value: usize| {
            let logs = of.iter().filter(|trial| trial.value == value).filter_map(|trial| {
                let is_same = |t: &&&Trial| (t.rows, t.context) == (trial.rows, trial.context);
                let default = of.iter().filter(is_same).find(|t| t.is_default)?;
                Some((trial.tokens_per_s / default.tokens_per_s).ln())
            });
            let (sum, count) = logs.fold((0.0, 0.0), |(sum, count), log| (sum + log, count + 1.0));
            if count == 0.0 { 1.0 } else { f64::exp(sum / count) }
        };
        let gains = constant.values.iter().map(|value| (gain(*value), *value));
        let (gain, value) = gains.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (gain > GAIN_MIN).then_some((constant.name, value))
    };
    CONSTANTS.iter().filter_map(best_of).collect()
}

/// Returns the experimental tuning with other values of some constants.
fn tuning_of(values: &[(&'static str, usize)]) -> Tuning {
    let mut tuning = Tuning::EXPERIMENTAL;
    for (name, value) in values {
        let constant = CONSTANTS.iter().find(|constant| constant.name == *name);
        *(constant.expect("a value of a constant").field)(&mut tuning) = *value;
    }
    tuning
}

/// Measures decodes and prefills with the defaults and the best values, in turns.
fn compare(
    backend: &mut CudaBackend,
    workload: &Workload,
    sequences: &Sequences,
    total: usize,
    best: Tuning,
    seconds: f64,
) -> Result<Vec<Comparison>, RooflineError> {
    let contexts = [16, workload.prompt_tokens];
    let decodes = contexts
        .into_iter()
        .filter(|context| *context <= workload.prompt_tokens)
        .flat_map(|context| {
            let decode =
                move |batch: &usize| (Phase::Decode, context, sequences.decode(*batch, context));
            workload.batches.iter().map(decode)
        });
    let rows_max = total.min(backend.limits.rows);
    let prefills = STEP_ROWS.into_iter().filter(|rows| *rows <= rows_max);
    let prefills = prefills.map(|rows| (Phase::Prefill, 0, sequences.prefill(0..rows)));
    let steps: Vec<_> = decodes.chain(prefills).collect();
    let tunings = [Tuning::default(), Tuning::EXPERIMENTAL, best];
    let mut comparisons = Vec::new();
    for (phase, context, chunks) in &steps {
        let mut rates = [(); 3].map(|()| Vec::new());
        for _ in 0..TURNS {
            for (tuning, rates) in tunings.into_iter().zip(&mut rates) {
                backend.set_tuning(tuning)?;
                rates.push(rate(backend, chunks, seconds)?);
            }
        }
        let [standard, experimental, best] = rates.map(|mut rates: Vec<f64>| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let rows = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        let (phase, context) = (*phase, *context);
        comparisons.push(Comparison { phase, rows, context, standard, experimental, best });
    }
    backend.set_tuning(Tuning::EXPERIMENTAL)?;
    Ok(comparisons)
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
        Phase::Prefill | Phase::Embed => {
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
