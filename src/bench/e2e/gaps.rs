//! `tritmill bench e2e --gaps`: the time between two tokens of an interactive answer, alone and during a batch
//! with long prompts, and what the batch loses by it.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{
    Arguments, Work,
    service::{ANSWER_WITHIN, PATIENT, Service},
};
use crate::{bench::queue::percentile, block_on, output};

/// Endpoint of all requests: prompts are tokens.
pub(super) const ENDPOINT: &str = "/v1/completions";
/// Time over which the batch is measured, alone and beside requests.
const SPAN: Duration = Duration::from_secs(40);
/// Interactive answers without a batch.
const ALONE: usize = 3;
/// Time limit for the start of the batch.
pub(super) const BATCH_WITHIN: Duration = Duration::from_secs(120);
/// The letter a in byte-level tokenizers.
const LETTER: &str = "97";
/// Tokens of an answer in the batch.
const BATCH_TOKENS: usize = 32;

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let bodies = Bodies::new(arguments)?;
    block_on(async {
        let mut service = Service::start(arguments).await?;
        let measured = tokio::select! {
            measured = measure(&service, arguments, &bodies) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        // Fails if the process has ended.
        let _ = service.process.kill().await;
        print(arguments, &measured?)
    })
}

/// Interactive answers of one phase.
#[derive(Default)]
pub(super) struct Answers {
    /// Times to the first token.
    pub first: Vec<Duration>,
    /// Times between tokens.
    pub gaps: Vec<Duration>,
    tokens: u64,
}

impl Answers {
    pub fn sort(&mut self) {
        self.first.sort_unstable();
        self.gaps.sort_unstable();
    }

    pub fn add(&mut self, other: Self) {
        self.first.extend(other.first);
        self.gaps.extend(other.gaps);
        self.tokens += other.tokens;
    }

    /// Returns the tokens computed for them, with their prompts.
    pub fn computed(&self, arguments: &Arguments) -> u64 {
        self.tokens + (self.first.len() * arguments.prompt.get()) as u64
    }
}

/// Makes the requests of callers and of work beside them.
#[derive(Clone)]
pub(super) struct Bodies {
    model: String,
    vocab_size: usize,
    prompt: usize,
    batch_prompt: usize,
    generate: usize,
}

impl Bodies {
    pub fn new(arguments: &Arguments) -> anyhow::Result<Self> {
        let context = arguments.model.open()?.config().clone();
        let (prompt, batch_prompt) = (arguments.prompt.get(), arguments.batch_prompt.get());
        let generate = arguments.generate().get();
        let needed = prompt.max(batch_prompt) + generate.max(BATCH_TOKENS);
        let has_room = needed <= context.context_length;
        ensure!(has_room, "the model's context has fewer than {needed} tokens");
        let vocab_size = context.vocab_size;
        Ok(Self { model: String::new(), vocab_size, prompt, batch_prompt, generate })
    }

    /// The same for a model of the service.
    pub fn of(&self, model: &str) -> Self {
        Self { model: model.to_owned(), ..self.clone() }
    }

    fn body(&self, prompt: usize, round: usize, index: usize, tokens: usize) -> Value {
        let work = Work { jobs: 1 << 20, prompt, generate: 0, vocab_size: self.vocab_size };
        json!({
            "model": self.model,
            "prompt": work.prompt(round, index),
            "max_tokens": tokens,
            "ignore_eos": true,
            "temperature": 0,
        })
    }

    /// Returns a caller's request. Every token is a letter, so that each one arrives as text: few tokens of a random model have
    /// any.
    pub fn interactive(&self, round: usize, index: usize) -> Value {
        let mut body = self.body(self.prompt, round, index, self.generate);
        body["logit_bias"] = json!({ LETTER: 100 });
        body
    }

    /// Returns a line of the batch.
    pub fn batch(&self, line: usize) -> Value {
        self.body(self.batch_prompt, 1, line, BATCH_TOKENS)
    }
}

struct Measured {
    alone: Answers,
    beside: Answers,
    /// Tokens of the batch, of prompts and answers, computed per second: alone and beside requests.
    batch_alone: f64,
    batch_beside: f64,
}

async fn measure(
    service: &Service,
    arguments: &Arguments,
    bodies: &Bodies,
) -> anyhow::Result<Measured> {
    let model = service.api.models().await?.into_iter().next().context("nothing is served")?;
    let bodies = bodies.of(&model);
    let mut alone = Answers::default();
    // The first answer warms up.
    for index in 0..=ALONE {
        let mut answer = Answers::default();
        ask(service, bodies.interactive(0, index), &mut answer).await?;
        if index > 0 {
            alone.add(answer);
        }
    }
    let lines = (0..arguments.batch_lines()).map(|line| bodies.batch(line));
    let id = service.submit_batch(lines, ENDPOINT, PATIENT).await?.id;
    let (started, before) = (Instant::now(), service.tokens().await?);
    while service.tokens().await? < before + 2 * arguments.batch_prompt.get() as u64 {
        ensure!(started.elapsed() < BATCH_WITHIN, "the batch does not start");
        sleep(Duration::from_millis(200)).await;
    }
    note!("the batch alone");
    let (started, before) = (Instant::now(), service.tokens().await?);
    sleep(SPAN).await;
    let done = service.tokens().await? - before;
    let batch_alone = done as f64 / started.elapsed().as_secs_f64();
    note!("the batch beside requests");
    let mut beside = Answers::default();
    let (started, before) = (Instant::now(), service.tokens().await?);
    for index in 0.. {
        if started.elapsed() >= SPAN {
            break;
        }
        ask(service, bodies.interactive(2, index), &mut beside).await?;
    }
    let own = beside.computed(arguments);
    let done = (service.tokens().await? - before).saturating_sub(own);
    let batch_beside = done as f64 / started.elapsed().as_secs_f64();
    let status = service.api.batch(&id).await?.status;
    ensure!(status == "in_progress", "the batch is {status}: increase --batch-lines");
    alone.sort();
    beside.sort();
    Ok(Measured { alone, beside, batch_alone, batch_beside })
}

/// Streams an answer and records the times of its tokens.
pub(super) async fn ask(
    service: &Service,
    mut body: Value,
    answers: &mut Answers,
) -> anyhow::Result<()> {
    body["stream"] = json!(true);
    let url = format!("{}{ENDPOINT}", service.url);
    let request = service.client.request(Method::POST, &url)?.bearer_auth(&service.key);
    let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
    let started = Instant::now();
    let mut answer = service.client.send(request, ANSWER_WITHIN).await?;
    ensure!(answer.status().is_success(), "the service answered {}", answer.status());
    let mut last: Option<Instant> = None;
    while let Some(part) = answer.chunk().await? {
        let text = String::from_utf8_lossy(&part);
        let tokens = text.matches("\"text\":").count() as u64;
        if tokens == 0 {
            continue;
        }
        let now = Instant::now();
        match last {
            None => answers.first.push(now - started),
            Some(last) => answers.gaps.push(now - last),
        }
        last = Some(now);
        answers.tokens += tokens;
    }
    ensure!(last.is_some(), "an answer without tokens");
    Ok(())
}

fn print(arguments: &Arguments, measured: &Measured) -> anyhow::Result<ExitCode> {
    let Measured { alone, beside, batch_alone, batch_beside } = measured;
    let seconds = |times: &[Duration], percent| {
        percentile(times, percent).map(|time| time.as_secs_f64()).context("no token arrived")
    };
    let [alone_p50, alone_p99] = [50, 99].map(|percent| seconds(&alone.gaps, percent));
    let [beside_p50, beside_p99] = [50, 99].map(|percent| seconds(&beside.gaps, percent));
    let (alone_p50, alone_p99) = (alone_p50?, alone_p99?);
    let (beside_p50, beside_p99) = (beside_p50?, beside_p99?);
    let (alone_first, beside_first) = (seconds(&alone.first, 50)?, seconds(&beside.first, 50)?);
    if *batch_alone <= 0.0 {
        bail!("the batch did not run");
    }
    if arguments.json {
        output::line(json!({
            "step_target_ms": arguments.step_target, "batch_prompt": arguments.batch_prompt,
            "alone": { "first_p50_s": alone_first, "gap_p50_s": alone_p50, "gap_p99_s": alone_p99 },
            "beside": { "first_p50_s": beside_first, "gap_p50_s": beside_p50, "gap_p99_s": beside_p99 },
            "answers_beside": beside.first.len(),
            "batch_alone_tokens_per_s": batch_alone, "batch_beside_tokens_per_s": batch_beside,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let line = |what: &str, answers: &Answers, first: f64, p50: f64, p99: f64| {
        output::line(format_args!(
            "{what}: {} answers, first token p50 {:.0} ms, between tokens p50 {:.0} ms, p99 {:.0} ms",
            answers.first.len(),
            1e3 * first,
            1e3 * p50,
            1e3 * p99
        ))
    };
    line("alone", alone, alone_first, alone_p50, alone_p99)?;
    line("beside the batch", beside, beside_first, beside_p50, beside_p99)?;
    output::line(format_args!(
        "the batch: {batch_alone:.0} tokens/s alone, {batch_beside:.0} beside requests ({:.0} %)",
        100.0 * batch_beside / batch_alone
    ))?;
    Ok(ExitCode::SUCCESS)
}
