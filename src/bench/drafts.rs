//! `tritmill bench drafts`: tokens per second with and without drafts, by the kind of text.

use std::{num::NonZeroUsize, process::ExitCode, sync::Arc, time::Instant};

use anyhow::ensure;
use clap::Args;
use serde_json::json;
use tritmill_engine::{
    Engine, EngineConfig, Request, SamplingParams,
    kv::blocks_for,
    load::{self, EngineOptions},
    measure::{Script, Scripted},
};

use crate::{
    options::{ModelOption, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill bench drafts --model /tmp/bitnet-2b
  tritmill bench drafts --model /tmp/bitnet-2b --batch 1 --lines 40 --text dates --json

The steps are those of the model; which tokens it answers comes from a script, one word a token, so that a model with random
weights (`tritmill model synth`) takes the time that a trained one would. Decode steps only. Each round measures both ways,
one after the other, on an engine that starts without earlier answers; the medians of the rounds' ratios are printed.";

/// A kind of text: its name, and the prompt and answer of a line by its number.
type Task = (&'static str, fn(usize) -> (String, String));

const TASKS: [Task; 4] = [
    ("dates", dates),
    ("JSON", json_records),
    ("copied summary", copied_summary),
    ("random words", random_words),
];

const NAMES: [&str; 8] = ["Vogel", "Garcia", "Rossi", "Novak", "Dubois", "Kim", "Olsen", "Haddad"];
const PLACES: [&str; 8] = ["Lyon", "Oslo", "Graz", "Porto", "Brno", "Malmö", "Leeds", "Turin"];
const GOODS: [&str; 8] = ["chairs", "lamps", "desks", "shelves", "rugs", "beds", "ovens", "doors"];

/// Arguments of `bench drafts`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    model: ModelOption,
    /// Concurrent sequences; one measurement for each number
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values = ["1", "4", "16", "32"])]
    batch: Vec<NonZeroUsize>,
    /// Lines of a round for each concurrent sequence. With more, more of them have earlier answers
    #[arg(long, value_name = "N", default_value = "4")]
    lines: NonZeroUsize,
    /// Rounds
    #[arg(long, value_name = "N", default_value = "3")]
    rounds: NonZeroUsize,
    /// Most drafts of a sequence in a step
    #[arg(long, value_name = "N", default_value = "8")]
    draft_tokens: NonZeroUsize,
    /// Only this kind of text
    #[arg(long, value_name = "NAME", value_parser = TASKS.map(|(name, _)| name))]
    text: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
}

/// Decode steps of a run.
#[derive(Default)]
struct Run {
    tokens: f64,
    seconds: f64,
    drafted: u64,
    accepted: u64,
}

impl Run {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds
    }
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.model.open()?;
    let vocab_size = model.config().vocab_size;
    let one = arguments.run.engine_on_one()?;
    if !arguments.json {
        output::line(format_args!("{}, decode steps", model.name()))?;
        output::line(
            "text             batch   without   with drafts   ratio   accepted of drafts",
        )?;
    }
    let mut all = Vec::new();
    let is_asked = |name: &str| arguments.text.as_ref().is_none_or(|asked| asked == name);
    for (name, task) in TASKS.into_iter().filter(|(name, _)| is_asked(name)) {
        for batch in arguments.batch.iter().map(|batch| batch.get()) {
            let scripts: Vec<Script> = (0..arguments.lines.get() * batch)
                .map(|line| script(line, task, vocab_size))
                .collect();
            let longest = scripts.iter().map(|script| script.prompt.len() + script.answer.len());
            let blocks = blocks_for(longest.max().unwrap_or(0) + arguments.draft_tokens.get());
            let mut ratios = Vec::new();
            let (mut without, mut with) = (Run::default(), Run::default());
            for round in 0..arguments.rounds.get() {
                let mut rates = [0.0; 2];
                // Which way is measured first changes from round to round.
                for is_with in [round % 2 == 0, round % 2 == 1] {
                    let drafts = if is_with { arguments.draft_tokens.get() } else { 0 };
                    let options = EngineOptions { max_sequences: batch, ..one };
                    let backend = load::backend(&model, &options, (batch + 1) * blocks)?;
                    let backend = Box::new(Scripted::new(backend, &scripts));
                    let config = EngineConfig {
                        max_sequences: batch,
                        draft_tokens: drafts,
                        prefix_cache: false,
                        ..EngineConfig::new(model.config().context_length)
                    };
                    let mut engine = Engine::new(backend, Arc::clone(&model) as _, vec![], config);
                    let run = if is_with { &mut with } else { &mut without };
                    let before = (run.tokens, run.seconds);
                    measure(&mut engine, &scripts, batch, run)?;
                    let rate = (run.tokens - before.0) / (run.seconds - before.1);
                    rates[usize::from(is_with)] = rate;
                }
                ratios.push(rates[1] / rates[0]);
            }
            ratios.sort_by(f64::total_cmp);
            let ratio = ratios[ratios.len() / 2];
            let share = with.accepted as f64 / with.drafted.max(1) as f64;
            if arguments.json {
                all.push(json!({
                    "text": name, "batch": batch, "ratio": ratio,
                    "tokens_per_s": with.rate(), "tokens_per_s_without": without.rate(),
                    "accepted": with.accepted, "drafted": with.drafted,
                }));
            } else {
                let (without, with, share) = (without.rate(), with.rate(), 100.0 * share);
                output::line(format_args!(
                    "{name:<15} {batch:>6} {without:>9.1} {with:>13.1} {ratio:>7.2}   {share:.0} %"
                ))?;
            }
        }
    }
    if arguments.json {
        output::json(json!({ "model": model.name(), "rows": all }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the scripts, `batch` at a time, and adds up the decode steps.
fn measure(
    engine: &mut Engine,
    scripts: &[Script],
    batch: usize,
    run: &mut Run,
) -> anyhow::Result<()> {
    for scripts in scripts.chunks(batch) {
        for Script { prompt, answer } in scripts {
            let sampling =
                SamplingParams { ignore_eos: true, ..SamplingParams::greedy(answer.len()) };
            engine.submit(Request { prompt: prompt.clone(), sampling, ..Request::default() })?;
        }
        while !engine.is_idle() {
            let (began, before) = (Instant::now(), engine.stats().generated_tokens);
            let report = engine.step(began);
            ensure!(!report.failed, "a step failed");
            let time = began.elapsed();
            engine.record_time(&report, time);
            if report.prefill_tokens == 0 {
                run.tokens += (engine.stats().generated_tokens - before) as f64;
                run.seconds += time.as_secs_f64();
            }
        }
    }
    let stats = engine.stats();
    run.drafted += stats.drafted_tokens;
    run.accepted += stats.accepted_tokens;
    Ok(())
}

/// Returns a line of a task as tokens.
fn script(line: usize, task: fn(usize) -> (String, String), vocab_size: usize) -> Script {
    let (prompt, answer) = task(line);
    let token = |word: &str| {
        let hash = word.bytes().fold(5381u32, |hash, byte| hash.wrapping_mul(33) ^ u32::from(byte));
        hash % vocab_size as u32
    };
    let mut all = vec![line as u32 % vocab_size as u32, (line / vocab_size) as u32];
    all.extend(words(&prompt).map(token));
    Script { prompt: all, answer: words(&answer).map(token).collect() }
}

/// Splits a text into words, each with the space before it, numbers of up to two digits and single other characters, about
/// as tokenizers do.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let space = usize::from(first == ' ');
        let end = match rest[space..].find(|c: char| !c.is_alphabetic()) {
            None => rest.len(),
            Some(0) if first.is_ascii_digit() => {
                rest.bytes().take(2).take_while(u8::is_ascii_digit).count()
            }
            Some(0) => first.len_utf8(),
            Some(letters) => space + letters,
        };
        let (word, left) = rest.split_at(end);
        rest = left;
        Some(word)
    })
}

/// A number that depends on the line and a place, below `most`.
fn number(line: usize, place: usize, most: usize) -> usize {
    ((line * 31 + place * 7919 + 17).wrapping_mul(2_654_435_761) >> 16) % most
}

fn date(line: usize) -> (usize, usize, usize) {
    (1990 + number(line, 1, 40), 1 + number(line, 2, 12), 1 + number(line, 3, 28))
}

fn dates(line: usize) -> (String, String) {
    let (year, month, day) = date(line);
    let (name, goods) = (NAMES[number(line, 4, 8)], GOODS[number(line, 5, 8)]);
    let text = format!("{name} ordered {} {goods} on {day}.{month}.{year}", number(line, 6, 90));
    (text, format!("{{\"date\": \"{year}-{month:02}-{day:02}\"}}"))
}

fn json_records(line: usize) -> (String, String) {
    let (year, month, day) = date(line);
    let (name, place) = (NAMES[number(line, 4, 8)], PLACES[number(line, 5, 8)]);
    let (goods, count) = (GOODS[number(line, 6, 8)], number(line, 7, 90));
    let price = number(line, 8, 9000);
    let text = format!(
        "On {day}.{month}.{year} Mrs {name} of {place} bought {count} {goods} for {price} euros in all"
    );
    let answer = format!(
        "{{\"customer\": {{\"name\": \"{name}\", \"city\": \"{place}\"}}, \"items\": [{{\"goods\": \"{goods}\", \
         \"count\": {count}}}], \"total\": {{\"amount\": {price}, \"currency\": \"EUR\"}}, \"date\": \
         \"{day}.{month}.{year}\"}}"
    );
    (text, answer)
}

fn copied_summary(line: usize) -> (String, String) {
    let sentence = |place: usize| {
        let of = |list: [&'static str; 8], at: usize| list[number(line, 10 * place + at, 8)];
        let (count, share) = (number(line, 10 * place + 3, 900), number(line, 10 * place + 4, 99));
        format!(
            "The {} works in {} made {count} {} this year, {share} percent more than those of {}. ",
            of(NAMES, 1),
            of(PLACES, 2),
            of(GOODS, 5),
            of(PLACES, 6)
        )
    };
    let text: String = (0..8).map(sentence).collect();
    (text, format!("{}{}", sentence(1), sentence(5)))
}

fn random_words(line: usize) -> (String, String) {
    let word = |place: usize| {
        let letter = |at: usize| char::from(b'a' + number(line, 40 * place + at, 26) as u8);
        (0..6).map(letter).chain([' ']).collect::<String>()
    };
    ((0..20).map(word).collect(), (20..36).map(word).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_into_words_numbers_and_signs() {
        let cut: Vec<&str> = words("On 12.3.2006: {\"Malmö\" is}").collect();
        let expected = [
            "On", " ", "12", ".", "3", ".", "20", "06", ":", " ", "{", "\"", "Malmö", "\"", " is",
            "}",
        ];
        assert_eq!(cut, expected);
    }

    #[test]
    fn lines_differ_and_scripts_are_told_apart() {
        for (name, task) in TASKS {
            let scripts: Vec<Script> = (0..50).map(|line| script(line, task, 1000)).collect();
            for (a, b) in scripts.iter().zip(&scripts[1..]) {
                assert_ne!(a.answer, b.answer, "{name}");
                assert_ne!(a.prompt[..Scripted::KEY], b.prompt[..Scripted::KEY]);
            }
        }
    }
}
