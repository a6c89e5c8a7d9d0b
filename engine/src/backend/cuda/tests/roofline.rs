//! The measurement of kernels, on sizes that only show that it works.

use super::{HeadMode, KvType, Limits, LogitsFor, experimental, load, model};
use crate::{
    backend::cuda::{
        cost::Cost,
        peaks::Timing,
        roofline::{self, StepTimes},
        tuning::Tuning,
    },
    config::ModelConfig,
    measure::{Phase, Workload},
};

/// Measures steps whose attention is split over blocks.
fn measured(name: &str, kv: KvType, batches: &[usize], prompt: usize) -> Option<Vec<StepTimes>> {
    measured_with(0, name, kv, batches, prompt)
}

fn measured_with(
    short_blocks: usize,
    name: &str,
    kv: KvType,
    batches: &[usize],
    prompt: usize,
) -> Option<Vec<StepTimes>> {
    let options = experimental(kv, HeadMode::Exact);
    let limits = Limits { rows: 256, whole: 16, screened: 80, ..Limits::default() };
    let mut backend = load(&model(name), options, limits)?;
    // Whatever the device's number of multiprocessors.
    let tuning = Tuning { short_blocks, split_tasks: 1 << 20, ..Tuning::EXPERIMENTAL };
    backend.set_tuning(tuning).expect("the device works");
    let workload = Workload {
        batches: batches.to_vec(),
        prompt_tokens: prompt,
        shared_tokens: 0,
        generate_tokens: 1,
        logits: LogitsFor::largest(1),
        repetitions: 1,
    };
    let found = roofline::of_backend(&mut backend, &workload, &Timing::QUICK).expect("steps run");
    let peaks = found.peaks;
    for rate in [peaks.read_bytes, peaks.copy_bytes, peaks.int8, peaks.f32, peaks.launch] {
        assert!(rate.is_finite() && rate > 0.0, "{peaks:?}");
    }
    for step in &found.steps {
        assert!(step.seconds > 0.0);
        for kernel in &step.kernels {
            let (bound, least) = kernel.bound(&peaks);
            assert!(kernel.seconds > 0.0 && least > 0.0, "{kernel:?}: {bound}");
            assert!(kernel.launches > 0 && kernel.cost.bytes > 0, "{kernel:?}");
        }
    }
    Some(found.steps)
}

#[test]
fn every_kernel_of_a_step_is_measured() {
    for name in ["bitnet-tiny", "llama-norm-tiny", "qwen3-group-tiny"] {
        let Some(steps) = measured(name, KvType::F16, &[1, 3], 5) else { return };
        let kinds: Vec<_> = steps.iter().map(|step| (step.phase, step.rows)).collect();
        let decodes = [1, 3].map(|batch| (Phase::Decode, batch));
        assert_eq!(kinds, [&decodes[..], &[(Phase::Prefill, 15)]].concat(), "{name}");
        for step in steps {
            let layers = model(name).config().layer_count;
            let is_first =
                |name: &str| name.starts_with("rotate_") || name.starts_with("attend_short");
            let attention = step.kernels.iter().filter(|k| is_first(k.kernel));
            assert_eq!(attention.map(|k| k.launches).sum::<usize>(), layers, "{name}");
            assert!(step.kernels.iter().any(|k| k.kernel.starts_with("embed")), "{name}");
        }
    }
}

/// Expected costs are computed by hand, for a linear of several matrices and for attention.
#[test]
fn costs_match_those_computed_by_hand() {
    let Some(steps) = measured("bitnet-tiny", KvType::F16, &[3], 5) else { return };
    let model = model("bitnet-tiny");
    let config = model.config();
    let (width, keys) = (config.hidden_size, config.kv_head_count * config.head_dim);
    let queries = config.head_count * config.head_dim;
    let (features, cols) = (queries + 2 * keys, width.next_multiple_of(128));
    let of = format!("{features} × {cols}");
    let linear = steps[0].kernels.iter().find(|k| k.of == of && k.kernel == "linear_n8");
    let packed = [queries, keys, keys].map(|rows| rows.next_multiple_of(16) * cols / 4);
    let expected = Cost {
        bytes: packed.iter().sum::<usize>() + 3 * (cols + 8) + 3 * features * 4,
        int8: 2 * 3 * features * cols,
        f32: 0,
    };
    assert_eq!(linear.expect("three rows take the kernels for few").cost, expected);
    let values = steps[0].kernels.iter().find(|k| k.kernel.starts_with("attend_values"));
    // Three sequences of five tokens, and the decoded token of each.
    let (seen, heads) = (3 * 6, config.head_count);
    let expected = Cost {
        bytes: seen * keys * 2 + 3 * queries * 4 + seen * heads * 4,
        int8: 0,
        f32: 2 * seen * queries,
    };
    assert_eq!(values.expect("attention of few sequences is split").cost, expected);
    let steps = measured_with(1 << 20, "bitnet-tiny", KvType::F16, &[3], 5).expect("as before");
    let short = steps[0].kernels.iter().find(|k| k.kernel == "attend_short_f16");
    // Keys and values of the context; those of the decoded tokens, in f32 and stored; rotations; queries and outputs.
    let stored = 3 * (2 * (4 * keys + 2 * keys) + config.head_dim * 4);
    let expected = Cost {
        bytes: 2 * seen * keys * 2 + stored + 2 * 3 * queries * 4,
        int8: 0,
        f32: 2 * 2 * seen * queries,
    };
    assert_eq!(short.expect("contexts are short").cost, expected);
    let Some(steps) = measured("bitnet-tiny", KvType::Q8, &[3], 17) else { return };
    check_int8_attention(&steps, config);
}

/// Two digits, and a head that is such a linear: of the rows that need its logits.
#[test]
fn costs_with_scales_of_groups_match_those_computed_by_hand() {
    let Some(steps) = measured("qwen3-group-tiny", KvType::F16, &[3], 5) else { return };
    let model = model("qwen3-group-tiny");
    let config = model.config();
    let (cols, groups) = (config.hidden_size, config.hidden_size / 128);
    let kv = 2 * config.kv_head_count * config.head_dim;
    for features in [config.head_count * config.head_dim + kv, config.vocab_size] {
        let of = format!("{features} × {cols}");
        let linear = steps[0].kernels.iter().find(|k| k.of == of && k.kernel == "group_n8");
        let expected = Cost {
            bytes: features * (cols / 4 + groups * 2) + 3 * (2 * cols + groups * 16 + features * 4),
            int8: 2 * 2 * 3 * features * cols,
            f32: 0,
        };
        assert_eq!(linear.expect("three rows are six columns").cost, expected, "{of}");
    }
}

/// Three prompts of 17 tokens, and the decoded token of each.
fn check_int8_attention(steps: &[StepTimes], config: &ModelConfig) {
    let (queries, heads) = (config.head_count * config.head_dim, config.head_count);
    let keys = config.kv_head_count * config.head_dim;
    let of_position = keys + 4 * config.kv_head_count;
    let kernel = |step: usize, kernel| steps[step].kernels.iter().find(|k| k.kernel == kernel);
    let seen = 3 * 18;
    let expected = Cost {
        bytes: seen * of_position + 3 * queries * 4 + seen * heads * 4,
        int8: 2 * seen * queries,
        f32: 0,
    };
    let values = kernel(0, "attend_values_q8");
    assert_eq!(values.expect("attention of few sequences is split").cost, expected);
    let (rows, seen) = (3 * 17, 3 * (1..=17).sum::<usize>());
    let expected = Cost {
        bytes: 2 * rows * of_position + 2 * rows * queries * 4,
        int8: (2 + 2 * 2) * seen * queries,
        f32: 0,
    };
    let tiles = kernel(1, "attend_tile128_q8");
    assert_eq!(tiles.expect("a prompt of 17 tokens takes tiles").cost, expected);
}
