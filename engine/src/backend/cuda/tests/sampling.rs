//! Rankings with noise, and whole answers, compared with the CPU's.

use super::{
    Backend, Engine, EngineConfig, Event, HeadMode, KvType, Limits, LogitsFor, Part, Request,
    SamplingParams,
    equality::{check, on_cpu},
    load, model, options, part, run, small, tokens_of,
};
use crate::{
    backend::{Noise, PositionLogits, Ranking, ScaledNoise},
    sampler::{self, Context, Sampled, Scratch, TokenCounts},
};

/// A model with factors of embedding, blocks and logits.
const MINICPM: &str = "group-linears/minicpm-tq2_0.gguf";
/// A model with biases of all linears.
const BIASED: &str = "group-linears/llama-tq2_0.gguf";

/// Rankings of every kind that the screen serves, in turn.
fn ranking(index: u64) -> Ranking {
    let temperature = [0.2, 1.0, 2.0][index as usize % 3];
    let noise = ScaledNoise { noise: Noise::of(7, 0, index), temperature };
    match index % 5 {
        0 => Ranking::largest(1),
        1 | 2 => Ranking { noise: Some(noise), ..Ranking::largest(1) },
        3 => Ranking { noise: Some(noise), ..Ranking::largest(2 + index as usize % 9) },
        _ => Ranking { within: 0.4, ..Ranking::largest(1) },
    }
}

/// The first token by logit and noise, the only one that is downloaded, is the one that the CPU finds.
#[test]
fn tokens_with_the_largest_noise_equal_the_cpus() {
    for (name, count) in [
        ("bitnet-tiny", 70),
        ("llama-tiny", 9),
        ("bitnet-tiny", 1),
        ("qwen3-group-tiny", 70),
        ("qwen3-yarn-tiny", 1),
        (MINICPM, 70),
    ] {
        let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
        let limits = Limits { screened: 80, ..small() };
        let Some(mut cuda) = load(&model, options, limits) else { return };
        let mut cpu = on_cpu(&model, options);
        for round in 0..3 {
            // Few distinct prompts, so that positions differ in their noise alone.
            let parts: Vec<Part> = (0..count)
                .map(|i| {
                    let ranking = ranking(round * 100 + i);
                    let block = i as u32;
                    let prompt = tokens_of(&model, 3, i as u32 % 4);
                    part(&prompt, 0, block, LogitsFor::Largest(ranking))
                })
                .collect();
            check(&format!("{name}: {count} rows, round {round}"), cpu.as_mut(), &mut cuda, &parts);
            // A screen that finds every token is safe but useless.
            assert!(cuda.state.candidates < parts.len() * 60, "{}", cuda.state.candidates);
        }
    }
}

/// Sampling parameters with filters.
fn filters() -> Vec<SamplingParams> {
    let all = SamplingParams::default();
    vec![
        SamplingParams { top_p: 0.9, temperature: 0.5, ..all.clone() },
        SamplingParams { top_p: 0.5, ..all.clone() },
        SamplingParams { top_p: 0.05, temperature: 2.0, ..all.clone() },
        SamplingParams { top_k: 5, ..all.clone() },
        SamplingParams { top_k: 8, top_p: 0.7, temperature: 0.8, ..all.clone() },
        SamplingParams { min_p: 0.2, ..all.clone() },
        SamplingParams { top_p: 0.8, min_p: 0.3, temperature: 0.4, ..all.clone() },
        SamplingParams { top_k: 9, min_p: 0.4, ..all },
    ]
}

/// Draws with filters are made on the device, which then begins the decodes after them; the CPU draws the same tokens from all
/// logits.
#[test]
fn tokens_drawn_with_filters_equal_the_cpus() {
    for name in ["bitnet-tiny", "llama-tiny", "qwen3-group-tiny"] {
        let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let params = filters();
        let rows = || params.iter().cycle().take(20).zip(0u32..);
        let mut sequences: Vec<Vec<u32>> =
            rows().map(|(_, row)| tokens_of(&model, 3, row)).collect();
        let (mut drawn, mut all) = (0, 0);
        for step in 0..8 {
            let parts = |logits: &dyn Fn(Ranking) -> LogitsFor<'static>| -> Vec<Part> {
                let part = |((params, row), tokens): ((&SamplingParams, u32), &Vec<u32>)| {
                    let counts = TokenCounts::default();
                    let params = SamplingParams { seed: u64::from(row), ..params.clone() };
                    let needed = sampler::needed(&params, context(&counts, tokens));
                    let logits = logits(needed);
                    let computed = if step == 0 { 0 } else { tokens.len() - 1 };
                    part(&tokens[computed..], computed, row, logits)
                };
                rows().zip(&sequences).map(part).collect()
            };
            let (on_device, on_host) = (parts(&LogitsFor::Largest), parts(&|_| LogitsFor::Last));
            let (mut got, mut want) = (run(&mut cuda, &on_device), run(cpu.as_mut(), &on_host));
            for ((params, row), tokens) in rows().zip(&mut sequences) {
                let counts = TokenCounts::default();
                let params = SamplingParams { seed: u64::from(row), ..params.clone() };
                let draw = |logits: PositionLogits<'_>| match logits {
                    PositionLogits::Drawn(drawn) => drawn.id,
                    PositionLogits::Largest(_) => panic!("the device draws"),
                    PositionLogits::All(logits) => {
                        let context = context(&counts, tokens);
                        match sampler::sample(logits, &params, context, &mut Scratch::default()) {
                            Ok(Sampled::Drawn(drawn)) => drawn.token,
                            other => panic!("{other:?}"),
                        }
                    }
                };
                let expected = draw(want.position(row as usize));
                let position = got.position(row as usize);
                drawn += usize::from(matches!(position, PositionLogits::Drawn(_)));
                all += 1;
                assert_eq!(draw(position), expected, "{name}: {params:?} in step {step}");
                tokens.push(expected);
            }
        }
        assert!(drawn * 100 > all * 85, "{name}: {drawn} of {all} draws");
        assert!(cuda.state.ahead.taken * 2 > all, "{name}: {}", cuda.state.ahead.taken);
    }
}

fn context<'a>(counts: &'a TokenCounts, tokens: &[u32]) -> Context<'a> {
    Context {
        counts,
        masked: &[],
        choice: 0,
        position: tokens.len(),
        known: None,
        distribution: None,
    }
}

/// Whole answers of both backends are equal, whatever the sampling parameters. Models differ in how logits are computed, not in how tokens
/// are drawn from them, so that all but the first answer every other request.
#[test]
fn sampled_answers_equal_the_cpus() {
    check_sampled("bitnet-tiny", 1);
    for name in ["qwen3-group-tiny", "qwen3-yarn-tiny", MINICPM, BIASED] {
        check_sampled(name, 2);
    }
}

fn check_sampled(name: &str, step: usize) {
    let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
    let Some(cuda) = load(&model, options, small()) else { return };
    let base = SamplingParams { max_tokens: 12, ..SamplingParams::default() };
    let params = [
        base.clone(),
        SamplingParams { temperature: 0.0, ..base.clone() },
        SamplingParams { temperature: 0.4, min_p: 0.1, ..base.clone() },
        SamplingParams { top_k: 1, ..base.clone() },
        SamplingParams { top_k: 7, ..base.clone() },
        SamplingParams { top_p: 0.8, ..base.clone() },
        SamplingParams { frequency_penalty: 0.7, presence_penalty: 0.2, ..base.clone() },
        SamplingParams { repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { logit_bias: [(5, 4.0), (9, -100.0)].into(), ..base.clone() },
        SamplingParams { min_tokens: 9, ..base.clone() },
        SamplingParams { n: 3, ..base.clone() },
        SamplingParams { n: 2, top_k: 6, top_p: 0.9, ..base.clone() },
        SamplingParams { n: 2, top_p: 0.7, ..base.clone() },
        SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.05, ..base.clone() },
        SamplingParams { logprobs: Some(2), ..base.clone() },
        SamplingParams { logprobs: Some(20), temperature: 0.0, ..base.clone() },
        SamplingParams { logprobs: Some(0), top_p: 0.8, temperature: 0.7, ..base.clone() },
        SamplingParams { logprobs: Some(5), top_k: 7, repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { logprobs: Some(1), logit_bias: [(5, 4.0)].into(), ..base.clone() },
        SamplingParams { logprobs: Some(3), min_tokens: 9, n: 2, ..base },
    ];
    let answers = |backend: Box<dyn Backend>| {
        let config = EngineConfig::new(model.config().context_length);
        let mut engine = Engine::new(backend, model.clone(), vec![3], config);
        for (seed, sampling) in (0..).zip(params.iter().step_by(step)) {
            let sampling = SamplingParams { seed, ..sampling.clone() };
            let prompt = tokens_of(&model, 5, seed as u32);
            let request = Request { prompt, sampling, ..Request::default() };
            engine.submit(request).expect("the request is valid");
        }
        let mut outputs = Vec::new();
        while !engine.is_idle() {
            let events = engine.step(std::time::Instant::now()).events;
            outputs.extend(events.into_iter().filter_map(|event| match event {
                Event::Finished { id, output } => Some((id, output)),
                Event::Failed { error, .. } => panic!("{error}"),
                _ => None,
            }));
        }
        outputs.sort_by_key(|(id, _)| *id);
        outputs
    };
    let (want, got) = (answers(on_cpu(&model, options)), answers(Box::new(cuda)));
    assert_eq!(want.len(), params.len().div_ceil(step));
    for (index, (want, got)) in want.iter().zip(&got).enumerate() {
        assert_eq!(want, got, "{name}: {:?}", params[index * step]);
    }
}
