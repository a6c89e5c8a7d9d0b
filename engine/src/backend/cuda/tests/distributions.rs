//! Distributions that the device computes, compared with those of the CPU's logits, to the bit.

use super::{
    Backend, HeadMode, KvType, Limits, LogitsFor, Part, device, draws, equality::on_cpu, load,
    model, options, part, run, small, tokens_of,
};
use crate::{
    backend::PositionLogits,
    sampling::{Distribution, RowMetadata, SamplingParams, row::every},
};

/// Parameters of several kinds in turn; all but some report their distribution.
fn params(row: usize) -> SamplingParams {
    let logprobs = (!row.is_multiple_of(5)).then_some([0, 1, 5, 20][row / 4 % 4]);
    let base =
        SamplingParams { seed: row as u64, temperature: 0.8, logprobs, ..Default::default() };
    match row % 4 {
        0 => SamplingParams { temperature: 0.0, ..base },
        1 => base,
        2 => SamplingParams { top_p: 0.9, ..base },
        _ => SamplingParams { top_k: 1 + row % 3, ..base },
    }
}

/// A draw of each kind; the last one is of several choices, which draw on the host.
fn draw(row: usize, position: usize) -> LogitsFor<'static> {
    let LogitsFor::Draws(&[metadata]) = draws([params(row)], position) else { unreachable!() };
    let choices = if row % 4 == 3 { 2 } else { 1 };
    LogitsFor::Draws(vec![RowMetadata { choices, ..metadata }].leak())
}

fn of_all(all: &[f32], top: usize) -> Distribution {
    let largest = all.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    Distribution::from_logits(every(all), largest, top)
}

/// Runs some steps of sequences that start with different prompts; returns the number of rows that were begun early.
fn check_steps(
    name: &str,
    count: usize,
    steps: usize,
    limits: Limits,
    kind: impl Fn(usize) -> usize,
) {
    let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
    let Some(mut cuda) = load(&model, options, limits) else { return };
    assert!(cuda.draws_tokens());
    let mut cpu = on_cpu(&model, options);
    let mut sequences: Vec<Vec<u32>> =
        (0..count).map(|row| tokens_of(&model, 3, row as u32 % 7)).collect();
    let mut undecided = 0;
    for step in 0..steps {
        let parts = |logits: &dyn Fn(usize, usize) -> LogitsFor<'static>| -> Vec<Part> {
            let part = |(row, tokens): (usize, &Vec<u32>)| {
                let computed = if step == 0 { 0 } else { tokens.len() - 1 };
                part(&tokens[computed..], computed, row as u32, logits(row, tokens.len()))
            };
            sequences.iter().enumerate().map(part).collect()
        };
        let on_device = parts(&|row, end| draw(kind(row), end));
        let mut got = run(&mut cuda, &on_device);
        let mut want = run(cpu.as_mut(), &parts(&|_, _| LogitsFor::Last));
        for (row, tokens) in sequences.iter_mut().enumerate() {
            let PositionLogits::All(all) = want.position(row) else { panic!("all logits") };
            let what = format!("{name}: row {row} of step {step}");
            let report = params(kind(row)).logprobs;
            let distribution = got.take_distribution(row);
            let next = match got.position(row) {
                PositionLogits::Drawn(drawn) => drawn,
                PositionLogits::Largest(found) => found[0],
                // Bounds do not decide each draw with top-p.
                PositionLogits::All(_) => {
                    assert_eq!(kind(row) % 4, 2, "{what}");
                    undecided += 1;
                    tokens.push(0);
                    continue;
                }
            };
            assert_eq!(next.logit, all[next.id as usize], "{what}");
            assert_eq!(distribution, report.map(|top| of_all(all, top)), "{what}");
            tokens.push(next.id);
        }
    }
    assert!(undecided * 20 <= count * steps, "{undecided} rows were not decided");
    let begun = cuda.state.ahead.taken;
    let singles = (0..count).all(|row| kind(row) % 4 < 3);
    let one_pass = count <= limits.whole.min(limits.screened);
    assert_eq!(begun > 0, singles && one_pass, "{begun} rows were begun early");
}

#[test]
fn distributions_equal_the_cpus() {
    for name in ["bitnet-tiny", "llama-tiny", "qwen3-group-tiny"] {
        // Rows that need a list of tokens, too, and more rows with distributions than a pass has.
        check_steps(name, 40, 2, small(), |row| row);
        check_steps(name, 13, 5, small(), |row| row * 4 + row % 3);
    }
}

/// Vocabularies may have fewer tokens than are asked for, or logits of which no distribution follows.
#[test]
fn rows_without_a_distribution_get_all_logits() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let Some(device) = device() else { return };
    let mut cuda = super::start(&model, device, options, small()).expect("the model fits");
    let norm = cuda.weights.final_norm;
    let hidden = model.config().hidden_size;
    cuda.device.write(norm, &f32::NAN.to_le_bytes().repeat(hidden)).expect("the device works");
    let greedy = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy(1) };
    let parts: Vec<Part> =
        (0..3).map(|row| part(&[5, 6, 7], 0, row, draws([greedy.clone()], 3))).collect();
    let mut logits = run(&mut cuda, &parts);
    for row in 0..3 {
        assert_eq!(logits.take_distribution(row), None);
        let PositionLogits::All(all) = logits.position(row) else { panic!("all logits") };
        assert!(all.iter().all(|logit| logit.is_nan()) && all.len() == cuda.vocab_size());
    }
}
