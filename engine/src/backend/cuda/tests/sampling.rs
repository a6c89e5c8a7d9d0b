//! Largest logits with noise, and whole answers, compared with the CPU's.

use std::{ops::RangeInclusive, sync::LazyLock};

use super::{
    Backend, Engine, EngineConfig, Event, HeadMode, KvType, Limits, LogitsFor, Part, Request,
    SamplingParams,
    equality::{check, on_cpu},
    load, model, options, part, row, run, small, tokens_of,
};
use crate::{
    Grammar,
    backend::PositionLogits,
    sampling::{self, AllowedTokens, GumbelNoise, Largest, RowMetadata, Scratch, TokenCounts},
};

/// A model with factors of embedding, blocks and logits.
const MINICPM: &str = "group-linears/minicpm-tq2_0.gguf";
/// A model with biases of all linears.
const BIASED: &str = "group-linears/llama-tq2_0.gguf";

/// Every kind of question that the screen answers, in turn.
fn largest(index: u64) -> Largest {
    let noise = Some(GumbelNoise::new(7, 0, index, [0.2, 1.0, 2.0][index as usize % 3]));
    match index % 5 {
        0 => Largest::logits(1),
        1 | 2 => Largest { noise, ..Largest::logits(1) },
        3 => Largest { noise, ..Largest::logits(2 + index as usize % 9) },
        _ => Largest { within: 0.4, ..Largest::logits(1) },
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
                    let largest = largest(round * 100 + i);
                    let block = i as u32;
                    let prompt = tokens_of(&model, 3, i as u32 % 4);
                    part(&prompt, 0, block, LogitsFor::Largest(largest))
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

/// Sampling parameters that change logits, without and with filters: bias, penalties that lower or raise, and masks, which
/// `min_tokens` stands for.
fn changes() -> Vec<SamplingParams> {
    let all = SamplingParams::default();
    let repeated = SamplingParams { repetition_penalty: 1.3, ..all.clone() };
    let biased = SamplingParams { logit_bias: [(5, 4.0), (9, -100.0)].into(), ..all.clone() };
    let counted = SamplingParams { presence_penalty: 0.4, frequency_penalty: 0.3, ..all.clone() };
    let raised = SamplingParams { repetition_penalty: 0.8, presence_penalty: -0.5, ..all.clone() };
    vec![
        repeated.clone(),
        SamplingParams { temperature: 0.0, ..repeated.clone() },
        SamplingParams { top_p: 0.9, temperature: 0.5, ..repeated.clone() },
        SamplingParams { top_k: 8, top_p: 0.7, ..repeated },
        SamplingParams { top_p: 0.8, ..biased.clone() },
        SamplingParams { temperature: 0.0, min_tokens: 1, ..biased },
        SamplingParams { top_p: 0.5, ..counted.clone() },
        SamplingParams { min_p: 0.2, ..counted },
        SamplingParams { top_p: 0.6, ..raised.clone() },
        SamplingParams { top_k: 5, min_tokens: 1, ..raised },
        SamplingParams { min_tokens: 1, ..all },
    ]
}

/// Draws with filters are made on the device, which then begins the decodes after them; the CPU draws the same tokens from all
/// logits.
#[test]
fn tokens_drawn_with_filters_equal_the_cpus() {
    check_drawn(&MODELS, &filters(), 50..=100);
}

/// Models with a dense and with a ternary head.
const MODELS: [&str; 3] = ["bitnet-tiny", "llama-tiny", "qwen3-group-tiny"];

/// So are draws after changes of logits. Changes that do not depend on the drawn token let decodes begin.
#[test]
fn tokens_drawn_after_changes_equal_the_cpus() {
    let changes = changes();
    let is_lasting = |params: &&SamplingParams| {
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            == (1.0, 0.0, 0.0)
    };
    let lasting: Vec<SamplingParams> = changes.iter().filter(is_lasting).cloned().collect();
    assert_eq!(lasting.len(), 3);
    check_drawn(&["bitnet-tiny"], &lasting, 50..=100);
    check_drawn(&MODELS, &changes, 0..=0);
}

/// The changes before a draw after drafts include those of the drafts.
#[test]
fn tokens_drawn_after_drafts_and_changes_equal_the_cpus() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let (mut drawn, mut all) = (0, 0);
    for (params, row) in changes().iter().zip(0u32..) {
        let tokens = tokens_of(&model, 6, row);
        // The last two are drafts.
        let counts: Vec<TokenCounts> = (0..3)
            .map(|draft| {
                let mut counts = TokenCounts::new(params, &tokens[..3]);
                tokens[3..4 + draft].iter().for_each(|token| counts.add(*token));
                counts
            })
            .collect();
        let position = |draft: usize| {
            let part = part(&tokens[..4 + draft], 0, 0, LogitsFor::Last);
            DrawOf { part, params, counts: &counts[draft] }
        };
        let rows: Vec<RowMetadata<'static>> =
            (0..3).map(|draft| position(draft).kept_metadata()).collect();
        let each = LogitsFor::Draws(rows.leak());
        let mut got = run(&mut cuda, &[part(&tokens, 0, row, each)]);
        for draft in 0..3 {
            let draw = position(draft);
            let mut want = run(cpu.as_mut(), &[draw.part_for(LogitsFor::Last)]);
            let (_, of_device) = compare(&draw, got.position(draft), want.position(0));
            (drawn, all) = (drawn + usize::from(of_device), all + 1);
        }
    }
    assert!(drawn * 100 > all * 85, "{drawn} of {all} draws");
}

/// Compares drawn tokens. So many percent of the decodes must have been begun early.
fn check_drawn(names: &[&str], params: &[SamplingParams], early: RangeInclusive<usize>) {
    for name in names {
        let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
        let Some(mut cuda) = load(&model, options, small()) else { return };
        let mut cpu = on_cpu(&model, options);
        let sequence = |(params, row): (&SamplingParams, u32)| {
            let tokens = tokens_of(&model, 3, row);
            let params = SamplingParams { seed: u64::from(row), ..params.clone() };
            (TokenCounts::new(&params, &tokens), params, tokens)
        };
        let mut sequences: Vec<(TokenCounts, SamplingParams, Vec<u32>)> =
            params.iter().cycle().take(22).zip(0u32..).map(sequence).collect();
        let (mut drawn, mut all) = (0, 0);
        for step in 0..8 {
            let draws: Vec<DrawOf<'_>> = (0..)
                .zip(&sequences)
                .map(|(row, (counts, params, tokens))| {
                    let computed = if step == 0 { 0 } else { tokens.len() - 1 };
                    let part = part(&tokens[computed..], computed, row, LogitsFor::Last);
                    DrawOf { part, params, counts }
                })
                .collect();
            let (tokens, of_device) = draw_on_both(cpu.as_mut(), &mut cuda, &draws);
            (drawn, all) = (drawn + of_device, all + tokens.len());
            for (token, (counts, _, tokens)) in tokens.into_iter().zip(&mut sequences) {
                tokens.push(token);
                counts.add(token);
            }
        }
        assert!(drawn * 100 > all * 85, "{name}: {drawn} of {all} draws");
        let taken = cuda.state.ahead.taken;
        assert!(early.contains(&(taken * 100 / all)), "{name}: {taken} of {all} decodes");
    }
}

/// A sequence's part of a step that ends with a draw.
pub struct DrawOf<'a> {
    pub part: Part,
    pub params: &'a SamplingParams,
    pub counts: &'a TokenCounts,
}

/// What may be drawn with `min_tokens`.
static ALLOWED: LazyLock<AllowedTokens> = LazyLock::new(|| AllowedTokens::all_but(64, [3, 9, 40]));

impl<'a> DrawOf<'a> {
    fn metadata(&self) -> RowMetadata<'a> {
        let position = self.part.position + self.part.tokens.len();
        let allowed = (self.params.min_tokens > 0).then_some(&*ALLOWED);
        RowMetadata { allowed, ..row(self.params, self.counts, position) }
    }

    /// Returns the metadata for a part, which borrows nothing.
    fn kept_metadata(&self) -> RowMetadata<'static> {
        let params = Box::leak(Box::new(self.params.clone()));
        let counts = Box::leak(Box::new(self.counts.clone()));
        DrawOf { part: self.part.clone(), params, counts }.metadata()
    }

    fn part_for(&self, logits: LogitsFor<'static>) -> Part {
        Part { logits, ..self.part.clone() }
    }
}

/// Has the device draw tokens, which must be those that the CPU's logits give. Returns them and how many the device has drawn.
pub fn draw_on_both(
    cpu: &mut dyn Backend,
    cuda: &mut dyn Backend,
    draws: &[DrawOf<'_>],
) -> (Vec<u32>, usize) {
    let on_device: Vec<Part> = draws
        .iter()
        .map(|draw| draw.part_for(LogitsFor::Draws(vec![draw.kept_metadata()].leak())))
        .collect();
    let on_host: Vec<Part> = draws.iter().map(|draw| draw.part_for(LogitsFor::Last)).collect();
    let (mut want, mut got) = (run(cpu, &on_host), run(cuda, &on_device));
    let mut of_device = 0;
    let of_row = |(row, draw): (usize, &DrawOf<'_>)| {
        let (token, is_drawn) = compare(draw, got.position(row), want.position(row));
        of_device += usize::from(is_drawn);
        token
    };
    (draws.iter().enumerate().map(of_row).collect(), of_device)
}

/// Compares the device's draw with that from the CPU's logits. Returns the token and whether the device has drawn it.
fn compare(draw: &DrawOf<'_>, got: PositionLogits<'_>, want: PositionLogits<'_>) -> (u32, bool) {
    let PositionLogits::All(logits) = want else { panic!("all were requested") };
    let of_model = logits.to_vec();
    let drawn = sampling::sample(logits, &draw.metadata(), None, &mut Scratch::default());
    let token = drawn.expect("the logits are finite").token;
    match got {
        PositionLogits::Drawn(drawn) => {
            assert_eq!(drawn.id, token, "{:?}", draw.params);
            assert_eq!(drawn.logit.to_bits(), of_model[token as usize].to_bits());
            return (token, true);
        }
        PositionLogits::All(all) => assert_eq!(all, of_model),
        // Neither filters nor changes.
        PositionLogits::Largest(some) => assert_eq!(some[0].id, token),
    }
    (token, false)
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

/// Answers that must match a grammar are equal, too.
#[test]
fn constrained_answers_equal_the_cpus() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let Some(cuda) = load(&model, options, small()) else { return };
    let grammars = crate::load::grammars(&model).expect("the model has an end");
    let answers = |backend: Box<dyn Backend>| {
        let config = EngineConfig::new(model.config().context_length);
        let eos = model.config().eos_tokens.clone();
        let mut engine = Engine::new(backend, model.clone(), eos, config);
        for (seed, regex) in ["[0-9]{3}-[a-z]{2,9}", "(left|right)+", "[^x]{4}"].iter().enumerate()
        {
            let grammar = Grammar::Regex((*regex).to_owned());
            let constraint = Some(grammars.compile(&grammar).expect("it can be used"));
            let seed = seed as u64;
            let sampling = SamplingParams { max_tokens: 12, seed, ..SamplingParams::default() };
            let prompt = tokens_of(&model, 5, seed as u32);
            let request = Request { prompt, sampling, constraint, ..Request::default() };
            engine.submit(request).expect("the request is valid");
        }
        let mut outputs = Vec::new();
        while !engine.is_idle() {
            let events = engine.step(std::time::Instant::now()).events;
            outputs.extend(events.into_iter().filter_map(|event| match event {
                Event::Finished { id, output } => Some((id, output)),
                Event::Failed { error, .. } => panic!("{error}"),
                Event::Delta { .. } => None,
            }));
        }
        outputs.sort_by_key(|(id, _)| *id);
        outputs
    };
    let (want, got) = (answers(on_cpu(&model, options)), answers(Box::new(cuda)));
    assert_eq!(want, got);
    assert!(want[0].1.choices[0].text.as_bytes()[..3].iter().all(u8::is_ascii_digit), "{want:?}");
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
        SamplingParams { top_p: 0.8, repetition_penalty: 1.3, ..base.clone() },
        SamplingParams { top_p: 0.7, presence_penalty: -0.6, min_tokens: 5, ..base.clone() },
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
