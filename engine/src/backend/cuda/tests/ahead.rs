//! Decodes that the device computes before they are asked for: taken where they are what is asked for, forgotten otherwise.

use super::{
    Backend, HeadMode, KvType, Limits, LogitsFor, Part, SamplingParams, draws,
    equality::{check, on_cpu},
    load, model, options, part, row, run, small, tokens,
};
use crate::{
    backend::{Asynchronous, PositionLogits, cuda::backend::CudaBackend},
    kv::BlockId,
    sampling::{GumbelNoise, Largest, LogitsRow as _, TokenCounts, TokenLogit},
};

/// A sequence that draws with noise, or greedily.
struct Sequence {
    tokens: Vec<u32>,
    computed: usize,
    blocks: Vec<BlockId>,
    seed: Option<u64>,
}

impl Sequence {
    fn new(index: usize, length: usize) -> Self {
        let blocks = (0..6).map(|block| BlockId((index * 6 + block) as u32)).collect();
        let seed = (!index.is_multiple_of(3)).then_some(index as u64);
        Self { tokens: tokens(length, index as u32), computed: 0, blocks, seed }
    }

    fn largest(&self) -> Largest {
        let position = self.tokens.len() as u64;
        let noise = self.seed.map(|seed| GumbelNoise::new(seed, 0, position, 1.0));
        Largest { noise, ..Largest::logits(1) }
    }

    /// The next step's part: the tokens without keys, and a block for the position after them.
    fn part(&self) -> Part {
        Part {
            tokens: self.tokens[self.computed..].to_vec(),
            position: self.computed,
            blocks: self.blocks[..=self.tokens.len() / 16].to_vec(),
            logits: LogitsFor::Largest(self.largest()),
        }
    }

    fn push(&mut self, token: u32) {
        self.computed = self.tokens.len();
        self.tokens.push(token);
    }
}

/// Runs the next step of some sequences on both backends, compares it, and appends the drawn tokens.
fn step(
    what: &str,
    cpu: &mut dyn Backend,
    cuda: &mut CudaBackend,
    sequences: &mut [&mut Sequence],
) {
    let parts: Vec<Part> = sequences.iter().map(|sequence| sequence.part()).collect();
    check(what, cpu, cuda, &parts);
    // The CPU runs the step again, which changes nothing, for its tokens.
    let mut logits = run(cpu, &parts);
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let (largest, position) = (sequence.largest(), logits.position(index));
        let some = match position {
            PositionLogits::Largest(found) => found.to_vec(),
            PositionLogits::All(all) => {
                let mut found: Vec<TokenLogit> = Vec::new();
                let Ok(()) = all.largest(&largest, &mut found);
                found
            }
            PositionLogits::Drawn(_) => unreachable!("no draw has filters"),
        };
        let value = |token: &TokenLogit| match largest.noise {
            Some(noise) => noise.add_to(token.id, token.logit),
            None => f64::from(token.logit),
        };
        let best = some.iter().max_by(|a, b| value(a).total_cmp(&value(b)));
        sequence.push(best.expect("there is a token").id);
    }
}

fn all(sequences: &mut [Sequence]) -> Vec<&mut Sequence> {
    sequences.iter_mut().collect()
}

#[test]
fn decodes_that_were_begun_are_taken_and_equal_the_cpus() {
    ["bitnet-tiny", "qwen3-yarn-tiny"].into_iter().for_each(check_taken);
}

fn check_taken(name: &str) {
    let (model, options) = (model(name), options(KvType::F16, HeadMode::Exact));
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    // They cross blocks at different steps.
    let mut sequences: Vec<Sequence> =
        (0..5).map(|index| Sequence::new(index, 3 + 5 * index)).collect();
    for round in 0..24 {
        step(&format!("step {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequences));
    }
    assert_eq!(cuda.state.ahead.taken, 5 * 22, "all but the prompts and the first decodes");
}

#[test]
fn rows_that_were_begun_and_are_not_asked_for_change_nothing() {
    let (model, options) = (model("llama-tiny"), options(KvType::Q8, HeadMode::Exact));
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let mut sequences: Vec<Sequence> =
        (0..12).map(|index| Sequence::new(index, 9 + index)).collect();
    let taken = |cuda: &CudaBackend| cuda.state.ahead.taken;
    let mut next = |what: &str, cuda: &mut CudaBackend, sequences: &mut [Sequence]| {
        step(what, cpu.as_mut(), cuda, &mut all(sequences));
    };
    next("prompts", &mut cuda, &mut sequences[..10]);
    next("first decodes", &mut cuda, &mut sequences[..10]);
    assert_eq!(taken(&cuda), 0);
    next("decodes", &mut cuda, &mut sequences[..10]);
    assert_eq!(taken(&cuda), 10);
    next("one has ended", &mut cuda, &mut sequences[1..10]);
    assert_eq!(taken(&cuda), 19);
    next("two have come", &mut cuda, &mut sequences[1..]);
    assert_eq!(taken(&cuda), 28);
    sequences[1..].reverse();
    next("another order", &mut cuda, &mut sequences[1..]);
    assert_eq!(taken(&cuda), 39);
    // Another token than the drawn one, another seed, other blocks with the same contents.
    *sequences[3].tokens.last_mut().expect("it has tokens") ^= 1;
    sequences[4].seed = Some(99);
    let copied = sequences[5].computed / 16;
    let (from, to) = (sequences[5].blocks[copied], BlockId(80));
    cuda.copy_block(from, to).expect("it is copied");
    sequences[5].blocks[copied] = to;
    let mut parts: Vec<Part> = sequences[1..].iter().map(Sequence::part).collect();
    cpu.copy_block(from, to).expect("it is copied");
    check("other rows", cpu.as_mut(), &mut cuda, &parts);
    assert_eq!(taken(&cuda), 39 + 8);
    // The same step again: nothing of it was begun.
    check("again", cpu.as_mut(), &mut cuda, &parts);
    assert_eq!(taken(&cuda), 39 + 8);
    // A prompt, all logits and drafts beside decodes.
    parts.truncate(6);
    parts[0].logits = LogitsFor::Last;
    parts[1].logits = LogitsFor::largest(4);
    check("others", cpu.as_mut(), &mut cuda, &parts);
}

#[test]
fn steps_that_follow_nothing_begin_nothing() {
    let (model, options) = (model("bitnet-tiny"), options(KvType::F16, HeadMode::Exact));
    let limits = Limits { screened: 4, ..small() };
    let Some(mut cuda) = load(&model, options, limits) else { return };
    let mut cpu = on_cpu(&model, options);
    let mut sequences: Vec<Sequence> =
        (0..7).map(|index| Sequence::new(index, 4 + index)).collect();
    for round in 0..3 {
        step(&format!("few {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequences[..3]));
    }
    assert!(cuda.state.ahead.is_begun());
    // More rows than a pass takes: some of them are begun.
    for round in 0..2 {
        step(&format!("many {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequences));
    }
    for round in 0..3 {
        step(&format!("few again {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequences[..3]));
    }
    assert!(cuda.state.ahead.is_begun());
    // Prompts alone: their next decodes are never asked for, and after some steps no longer begun.
    for round in 0..12 {
        let mut sequence = [Sequence::new(8, 5 + round)];
        step(&format!("prompt {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequence));
    }
    assert!(!cuda.state.ahead.is_begun());
    let mut sequence = [Sequence::new(9, 5)];
    for round in 0..14 {
        step(&format!("decode {round}"), cpu.as_mut(), &mut cuda, &mut all(&mut sequence));
    }
    assert!(cuda.state.ahead.is_begun(), "decodes that follow one another are begun again");
}

/// Steps without logits return before the device has run them; those after them read what they wrote.
#[test]
fn steps_without_logits_do_not_wait() {
    let model = model("bitnet-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let prompt = tokens(40, 1);
    for (start, end) in [(0, 16), (16, 24), (24, 39)] {
        let parts = [part(&prompt[start..end], start, 0, LogitsFor::Nothing)];
        check("a part of the prompt", cpu.as_mut(), &mut cuda, &parts);
        assert!(Asynchronous::is_running(&mut cuda));
    }
    let last = [part(&prompt[39..], 39, 0, LogitsFor::Last)];
    check("the rest", cpu.as_mut(), &mut cuda, &last);
    assert!(!Asynchronous::is_running(&mut cuda));
    check("the rest again", cpu.as_mut(), &mut cuda, &last);
    run(&mut cuda, &[part(&prompt[..9], 0, 3, LogitsFor::Nothing)]);
    cuda.wait().expect("the device works");
    assert!(!Asynchronous::is_running(&mut cuda));
}

/// One sequence with penalties needs a pass in the next step, so that no decodes are begun, even of others.
#[test]
fn nothing_is_begun_beside_penalties() {
    let model = model("bitnet-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let draw = |position, frequency_penalty| {
        let params = SamplingParams { seed: 1, frequency_penalty, ..Default::default() };
        let params: &'static SamplingParams = Box::leak(Box::new(params));
        let mut counts = TokenCounts::new(params, &[]);
        counts.add(7);
        LogitsFor::Draws(vec![row(params, Box::leak(Box::new(counts)), position)].leak())
    };
    let mut run_steps = |has_penalties: bool| {
        let mut tokens: Vec<u32> = (0..12).collect();
        let before = cuda.state.ahead.taken;
        for position in 0..8 {
            let rows = 0u32..;
            let parts: Vec<Part> = rows
                .zip(&tokens)
                .map(|(row, token)| {
                    let penalty = if row == 5 && has_penalties { 0.5 } else { 0.0 };
                    part(&[*token], position, row, draw(position, penalty))
                })
                .collect();
            let mut logits = run(&mut cuda, &parts);
            for (row, token) in tokens.iter_mut().enumerate() {
                *token = match logits.position(row) {
                    PositionLogits::Drawn(drawn) => drawn.id,
                    PositionLogits::Largest(found) => found[0].id,
                    PositionLogits::All(_) => panic!("few are enough"),
                };
            }
        }
        cuda.state.ahead.taken - before
    };
    assert_eq!(run_steps(true), 0);
    assert!(run_steps(false) > 40, "the others' decodes are begun without it");
    assert_eq!(run_steps(true), 0, "however few were not asked for");
}

/// Sequences with drafts ask for several tokens in a step, others of the same step for one.
#[test]
fn drafts_beside_decodes_equal_the_cpus() {
    let model = model("bitnet-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    let greedy = || SamplingParams::greedy(1);
    let drawn = SamplingParams { seed: 3, ..Default::default() };
    let each = draws([greedy(), drawn, greedy()], 4);
    let prompt = |row: u32| part(&tokens(4, row), 0, row * 2, LogitsFor::largest(1));
    let with_drafts = |row: u32| part(&tokens(3, row + 9), 4, row * 2, each);
    let decode = |row: u32| part(&tokens(1, row + 5), 4, row * 2, LogitsFor::largest(1));
    let prompts: Vec<Part> = (0..4).map(prompt).collect();
    check("prompts", cpu.as_mut(), &mut cuda, &prompts);
    for parts in [
        vec![with_drafts(0), decode(1), with_drafts(2), decode(3)],
        vec![decode(1), with_drafts(0)],
        vec![with_drafts(2)],
    ] {
        for _ in 0..2 {
            check("drafts", cpu.as_mut(), &mut cuda, &parts);
        }
    }
}

/// A draw after a draft that the device does not decide gets all logits of its position.
#[test]
fn undecided_draws_after_drafts_get_all_logits() {
    let model = model("bitnet-tiny");
    let options = options(KvType::F16, HeadMode::Exact);
    let Some(mut cuda) = load(&model, options, small()) else { return };
    let mut cpu = on_cpu(&model, options);
    // At a high temperature, the tokens of top-p are more than the device lists.
    let of = |first| {
        let params =
            |temperature| SamplingParams { seed: 1, temperature, top_p: 0.6, ..Default::default() };
        draws([params(0.1), params(40.0), params(0.1)], first)
    };
    let mut undecided = 0;
    for row in 0..8u32 {
        let tokens = tokens(5, row);
        let got = [part(&tokens, 0, row, of(3 + 10 * row as usize))];
        let (mut got, want) =
            (run(&mut cuda, &got), { run(cpu.as_mut(), &[part(&tokens, 0, row, LogitsFor::All)]) });
        let want = want.all().chunks_exact(model.config().vocab_size).skip(2);
        for (index, want) in want.enumerate() {
            match got.position(index) {
                PositionLogits::All(all) => {
                    assert!(all == want, "row {row}, position {index}");
                    undecided += 1;
                }
                PositionLogits::Drawn(drawn) => assert_eq!(want[drawn.id as usize], drawn.logit),
                PositionLogits::Largest(_) => panic!("the device draws"),
            }
        }
    }
    assert!((2..=12).contains(&undecided), "{undecided} of 24");
}
