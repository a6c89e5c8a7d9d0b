//! `tritmill demo`: the whole embedded path with the built-in model, from batch lines through store,
//! dispatcher, worker and engine to answers, which are compared with the correct ones.

use std::{
    collections::HashMap,
    fs,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch;
use tritmill_client::{BatchProgress, Settings};
use tritmill_queue::QueueName;
use tritmill_worker::{ServedModel, Stop};

use crate::{
    answering::{self, Answerer, Update},
    block_on,
    demo_model::{self, HELD_OUT_LINES},
    engines::Engines,
    options::{self, CapacityOptions, RunOptions},
    output,
};

const EXAMPLES: &str = "\
Examples:
  tritmill demo
  tritmill demo --format tl2 --threads 1
  tritmill demo --schema
  tritmill demo --json | tail -1

Exit code 1 if a line has no answer, or if fewer answers are correct than expected of the model.";

/// Minimum share of correct answers; a lower one means a faulty program or machine. The model
/// gives 99.5 % of the dates alone and 99.2 % in JSON (src/demo_model/README.md).
const ACCURACY_MIN: f64 = 0.99;
/// Number of answers to print.
const SAMPLES: usize = 10;
/// Enough for a date, in JSON or alone, and the end of the answer.
const MAX_TOKENS: u32 = 32;

/// Arguments of `demo`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Ask for JSON that a schema describes, {"date": "…"}, instead of the date alone
    #[arg(long)]
    schema: bool,
    /// Print the results as JSON in the last line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    run: RunOptions,
    #[command(flatten)]
    capacity: CapacityOptions,
}

/// A line of text and the date in it.
#[derive(Debug, Deserialize)]
struct Question {
    text: String,
    date: String,
}

/// An answer that the schema describes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dated {
    date: String,
}

/// Runs the demo and prints answers and speed.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    arguments.run.device.one_kind().context("--device")?;
    let questions = questions()?;
    let folder = tempfile::Builder::new().prefix("tritmill-demo-").tempdir();
    let folder = folder.context("cannot make a temporary folder")?;
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    fs::write(&input, batch_lines(&questions, arguments.schema))
        .context("cannot write the batch lines")?;
    let count = questions.len();
    note!("The built-in model finds the date in a line of text. {count} lines from outside its");
    note!("training data run as jobs: batch file → SQLite → dispatcher → worker → engine.");
    if arguments.schema {
        note!("Each answer is JSON of the schema {}.", schema());
    }
    note!("");
    let (progress, elapsed) = answer(arguments, &input, &output)?;
    ensure!(progress.failed == 0, "{} of {count} lines have no answer", progress.failed);
    let answers = answers(&output)?;
    ensure!(answers.len() == count, "{} answers to {count} lines", answers.len());
    let date_of = |answer: &str| match arguments.schema {
        true => serde_json::from_str::<Dated>(answer).map(|dated| dated.date),
        false => Ok(answer.to_owned()),
    };
    for (id, answer) in &answers {
        date_of(answer).with_context(|| format!("{id}: {answer} is not of the schema"))?;
    }
    let is_correct = |(index, question): (usize, &Question)| {
        let date = answers.get(&custom_id(index)).and_then(|answer| date_of(answer).ok());
        date.is_some_and(|date| date == question.date)
    };
    let correct = questions.iter().enumerate().filter(|pair| is_correct(*pair)).count();
    print_samples(&questions, &answers, is_correct)?;
    print_figures(arguments, count, correct, &progress, elapsed)?;
    let enough = correct as f64 >= ACCURACY_MIN * count as f64;
    ensure!(enough, "only {correct} of {count} answers are correct: run tritmill doctor");
    Ok(ExitCode::SUCCESS)
}

fn questions() -> anyhow::Result<Vec<Question>> {
    let parse = |line| serde_json::from_str(line).context("the built-in lines are JSON");
    HELD_OUT_LINES.lines().map(parse).collect()
}

fn custom_id(index: usize) -> String {
    format!("line-{:04}", index + 1)
}

/// Returns the schema of answers in JSON.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": { "date": { "type": "string", "format": "date" } },
        "required": ["date"],
        "additionalProperties": false,
    })
}

/// Returns the lines as an input of `batch run`.
fn batch_lines(questions: &[Question], with_schema: bool) -> String {
    let line = |(index, question): (usize, &Question)| {
        let mut line = json!({
            "custom_id": custom_id(index),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": demo_model::NAME,
                "messages": [{ "role": "user", "content": question.text }],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            },
        });
        if with_schema {
            let described = json!({ "name": "dated", "schema": schema() });
            line["body"]["response_format"] =
                json!({ "type": "json_schema", "json_schema": described });
        }
        format!("{line}\n")
    };
    questions.iter().enumerate().map(line).collect()
}

/// Runs the batch file. Returns its progress and its time, without loading the model.
fn answer(
    arguments: &Arguments,
    input: &Path,
    output: &Path,
) -> anyhow::Result<(BatchProgress, Duration)> {
    let model = options::open(demo_model::NAME)?;
    let options = arguments.capacity.apply(arguments.run.engine());
    let engines = Engines::load(
        &model,
        &options,
        &arguments.run.device,
        arguments.capacity.tiers.open(0)?.as_ref(),
    )?;
    let Engines { devices, numerics_class, .. } = engines;
    let name = demo_model::NAME.to_owned();
    let queue = QueueName { model: name.clone(), format: options.format.to_string() };
    let answerer = Answerer::Local {
        served: ServedModel::new(model, name, numerics_class)
            .with_limits(arguments.capacity.limits()),
        devices,
        max_sequences: options.max_sequences,
    };
    let settings = Settings {
        state: None,
        input: input.to_owned(),
        output: output.to_owned(),
        ordered: false,
        restart: false,
        retry_failed: false,
        identity: answerer.identity(&queue),
        queue,
    };
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}")?);
    let started = Instant::now();
    // Only a signal stops the demo: it ends the process.
    let (_running, stop) = watch::channel(Stop::No);
    let progress = block_on(answering::answer(settings, answerer, stop, |update| {
        if let Update::Progress(progress) = update {
            bar.set_length(progress.lines);
            bar.set_position(progress.finished());
            let rate = progress.tokens as f64 / started.elapsed().as_secs_f64().max(1e-3);
            bar.set_message(format!("{rate:.0} tokens/s"));
        }
    }))?;
    let elapsed = started.elapsed();
    bar.finish_and_clear();
    Ok((progress, elapsed))
}

/// Reads the text of every answer, by `custom_id`.
fn answers(output: &Path) -> anyhow::Result<HashMap<String, String>> {
    let text = fs::read_to_string(output).context("cannot read the answers")?;
    let mut answers = HashMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).context("an answer is not JSON")?;
        let answer = &line["response"]["body"]["choices"][0]["message"]["content"];
        let (id, answer) = (line["custom_id"].as_str(), answer.as_str());
        let (id, answer) = id.zip(answer).with_context(|| format!("not an answer: {line}"))?;
        let earlier = answers.insert(id.to_owned(), answer.to_owned());
        ensure!(earlier.is_none(), "{id} is answered twice");
    }
    Ok(answers)
}

fn print_samples(
    questions: &[Question],
    answers: &HashMap<String, String>,
    is_correct: impl Fn((usize, &Question)) -> bool,
) -> anyhow::Result<()> {
    for index in (0..SAMPLES).map(|sample| sample * questions.len() / SAMPLES) {
        let Question { text, date } = &questions[index];
        let answer = answers.get(&custom_id(index)).map_or("", String::as_str);
        let verdict = match is_correct((index, &questions[index])) {
            true => String::new(),
            false => format!("  (correct: {date})"),
        };
        output::line(format_args!("  {text}\n    → {answer}{verdict}"))?;
    }
    Ok(())
}

fn print_figures(
    arguments: &Arguments,
    jobs: usize,
    correct: usize,
    progress: &BatchProgress,
    elapsed: Duration,
) -> anyhow::Result<()> {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let accuracy = correct as f64 / jobs as f64;
    let (jobs_per_s, tokens_per_s) = (jobs as f64 / seconds, progress.tokens as f64 / seconds);
    let percent = 100.0 * accuracy;
    output::line(format_args!("\n{correct} of {jobs} dates are correct ({percent:.1} %)"))?;
    output::line(format_args!(
        "{seconds:.1} s: {jobs_per_s:.0} jobs/s, {tokens_per_s:.0} generated tokens/s"
    ))?;
    output::line("\nNext, try your own file, with one {\"prompt\": \"…\"} per line:")?;
    output::line("  echo '{\"prompt\": \"Paid on the 3rd of March, 2024\"}' > in.jsonl")?;
    let program = std::env::args().next().unwrap_or_else(|| "tritmill".to_owned());
    output::line(format_args!("  {program} batch run in.jsonl -o out.jsonl"))?;
    if arguments.json {
        let round = |value: f64| (value * 1000.0).round() / 1000.0;
        output::json(json!({
            "jobs": jobs,
            "accuracy": accuracy,
            "tokens_per_s": round(tokens_per_s),
            "jobs_per_s": round(jobs_per_s),
            "correct": correct,
            "tokens": progress.tokens,
            "seconds": round(seconds),
        }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_lines_are_a_thousand_questions_with_dates() {
        let questions = questions().expect("they are JSON");
        assert_eq!(questions.len(), 1000);
        assert!(questions.iter().all(|question| question.date.len() == 10));
        let lines = batch_lines(&questions[..2], false);
        assert_eq!(lines.lines().count(), 2);
        assert!(lines.contains("\"custom_id\":\"line-0002\"") && !lines.contains("schema"));
        assert!(batch_lines(&questions[..1], true).contains("\"json_schema\""));
    }
}
