//! `tritmill bench e2e --http`: people who wait for answers beside a batch that nobody waits for, all
//! through the HTTP API.
//!
//! The service is a process of its own, `tritmill standalone` over a file in a temporary folder, or
//! one that runs already.

use std::{
    io::Write as _,
    process::{ExitCode, Stdio},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    task::JoinSet,
    time::{sleep, timeout},
};
use tritmill_producer::{
    http::{HttpClient, Reach},
    remote::{Api, NewBatch, RemoteBatch},
};

use super::Arguments;
use crate::output;

/// Bursts of requests that are measured, after one that is not.
const ROUNDS: usize = 5;
/// Between two bursts: people do not come in step.
const PAUSE: Duration = Duration::from_millis(500);
/// How long a request may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// How long the batch may take to be under way.
const BATCH_WITHIN: Duration = Duration::from_secs(120);
/// Lines of the batch that must be answered before people come.
const WARM_LINES: u64 = 64;

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(async {
        let mut service = Service::start(arguments).await?;
        let measured = tokio::select! {
            measured = measure(&service, arguments) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        // It may have ended by itself.
        let _ = service.process.kill().await;
        print(arguments, &measured?)
    })
}

/// A service to be measured.
struct Service {
    process: Child,
    url: String,
    key: String,
    client: HttpClient,
    api: Api,
    /// Its file.
    folder: tempfile::TempDir,
}

impl Service {
    async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["standalone", "--json", "--api", "127.0.0.1:0", "--store"]);
        command.arg(folder.path().join("store")).args(["--model", &arguments.model.model]);
        command.args(["--max-batch-lines", "1000000", "--max-sequences"]);
        command.arg(arguments.batch().to_string()).args(["--format"]);
        command.arg(arguments.run.format.to_string());
        if let Some(threads) = arguments.run.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let said = process.stdout.take().context("the service has no output")?;
        let mut lines = BufReader::new(said).lines();
        let ready = lines.next_line().await?.context("the service did not start")?;
        let ready: Value = serde_json::from_str(&ready).context("the service said no JSON")?;
        let text = |name: &str| ready[name].as_str().map(str::to_owned);
        let url = format!("http://{}", text("api").context("the service has no address")?);
        let key = text("first_key").context("the service has no key")?;
        let client = HttpClient::new(Reach::Anywhere, None)?;
        let api = Api::new(client.clone(), &url, &key)?;
        Ok(Self { process, url, key, client, api, folder })
    }

    /// Starts the batch, at priority low.
    async fn batch(&self, arguments: &Arguments, model: &str) -> anyhow::Result<RemoteBatch> {
        let path = self.folder.path().join("batch.jsonl");
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
        for line in 0..arguments.batch_lines.get() {
            let body = body(model, &format!("Paid on day {line} of the year"), arguments);
            let line = json!({
                "custom_id": format!("line-{line}"),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            });
            writeln!(file, "{line}")?;
        }
        file.flush()?;
        drop(file);
        let uploaded = self.api.upload(&path, "bench.jsonl", Arc::new(AtomicU64::new(0))).await?;
        let batch = NewBatch {
            file: &uploaded,
            endpoint: "/v1/chat/completions",
            window: "24h",
            priority: "low",
            idempotency_key: "bench",
        };
        Ok(self.api.create(&batch).await?)
    }

    /// How many lines of the batch are answered.
    async fn answered(&self, batch: &RemoteBatch) -> anyhow::Result<u64> {
        let now = self.api.batch(&batch.id).await?;
        ensure!(now.request_counts.failed == 0, "lines of the batch failed");
        ensure!(now.status != "failed", "the service refused the batch: {:?}", now.errors);
        Ok(now.request_counts.completed)
    }
}

/// What is asked, in the batch and beside it.
fn body(model: &str, question: &str, arguments: &Arguments) -> Value {
    json!({
        "model": model,
        "messages": [{ "role": "user", "content": question }],
        "max_tokens": arguments.generate(),
        "ignore_eos": true,
        "temperature": 0,
    })
}

/// What was measured.
struct Measured {
    /// Of every answer, in order.
    latencies: Vec<Duration>,
    errors: usize,
    /// Lines of the batch that were answered before, and after, and how long that took.
    lines: (u64, u64),
    elapsed: Duration,
}

async fn measure(service: &Service, arguments: &Arguments) -> anyhow::Result<Measured> {
    let model = service.api.models().await?.into_iter().next().context("nothing is served")?;
    let batch = service.batch(arguments, &model).await?;
    let started = Instant::now();
    while service.answered(&batch).await? < WARM_LINES.min(arguments.batch_lines.get() as u64) {
        ensure!(started.elapsed() < BATCH_WITHIN, "the batch does not start");
        sleep(Duration::from_millis(200)).await;
    }
    burst(service, arguments, &model, 0).await?;
    let before = service.answered(&batch).await?;
    let started = Instant::now();
    let mut measured =
        Measured { latencies: Vec::new(), errors: 0, lines: (before, before), elapsed: PAUSE };
    for round in 1..=ROUNDS {
        eprintln!("burst {round} of {ROUNDS}");
        for answer in burst(service, arguments, &model, round).await? {
            match answer {
                Ok(latency) => measured.latencies.push(latency),
                Err(error) => {
                    measured.errors += 1;
                    eprintln!("no answer: {error:#}");
                }
            }
        }
        sleep(PAUSE).await;
    }
    measured.lines.1 = service.answered(&batch).await?;
    measured.elapsed = started.elapsed();
    measured.latencies.sort_unstable();
    if measured.lines.1 == arguments.batch_lines.get() as u64 {
        bail!("the batch was over before the measurement: give more --batch-lines");
    }
    Ok(measured)
}

/// All requests at once; each is answered, or not, in its time.
async fn burst(
    service: &Service,
    arguments: &Arguments,
    model: &str,
    round: usize,
) -> anyhow::Result<Vec<anyhow::Result<Duration>>> {
    let mut asked = JoinSet::new();
    for number in 0..arguments.callers.get() {
        let body = body(model, &format!("Due in week {number} of round {round}"), arguments);
        let request = Request::post(format!("{}/v1/chat/completions", service.url))
            .header(AUTHORIZATION, format!("Bearer {}", service.key))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))?;
        let (client, tokens) = (service.client.clone(), arguments.generate().get());
        asked.spawn(async move {
            let started = Instant::now();
            let answer = timeout(ANSWER_WITHIN, async {
                let answer = client.send(request, ANSWER_WITHIN).await?;
                let status = answer.status();
                let body = answer.into_body().collect().await?.to_bytes();
                ensure!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&body));
                let body: Value = serde_json::from_slice(&body)?;
                let generated = body["usage"]["completion_tokens"].as_u64();
                ensure!(generated == Some(tokens as u64), "{generated:?} tokens, not {tokens}");
                Ok(started.elapsed())
            });
            answer.await.unwrap_or_else(|_| bail!("none within {ANSWER_WITHIN:?}"))
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = asked.join_next().await {
        answers.push(answer.context("a caller panicked")?);
    }
    Ok(answers)
}

/// The latency that this share of all does not pass; sorted, and not empty.
fn percentile(latencies: &[Duration], share: f64) -> f64 {
    let rank = (latencies.len() as f64 * share).ceil() as usize;
    latencies[rank.clamp(1, latencies.len()) - 1].as_secs_f64()
}

fn print(arguments: &Arguments, measured: &Measured) -> anyhow::Result<ExitCode> {
    let Measured { latencies, errors, lines: (before, after), elapsed } = measured;
    ensure!(!latencies.is_empty(), "no request was answered");
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| percentile(latencies, share));
    let requests = latencies.len() + errors;
    let share = 100.0 * *errors as f64 / requests as f64;
    let rate = (after - before) as f64 / elapsed.as_secs_f64();
    if arguments.json {
        output::line(json!({
            "callers": arguments.callers, "generate": arguments.generate(), "requests": requests,
            "errors": errors, "p50_s": p50, "p90_s": p90, "p99_s": p99,
            "batch_lines": arguments.batch_lines, "batch_lines_before": before,
            "batch_lines_after": after, "batch_lines_per_s": rate,
        }))?;
    } else {
        output::line(format_args!(
            "{requests} requests of {} tokens, {} at once: p50 {p50:.2} s, p90 {p90:.2} s, p99 \
             {p99:.2} s, {share:.1} % errors\nthe batch beside them: {before} lines answered \
             before, {after} after, of {} ({rate:.1} a second)",
            arguments.generate(),
            arguments.callers,
            arguments.batch_lines
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
