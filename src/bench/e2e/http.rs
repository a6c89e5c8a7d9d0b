//! `tritmill bench e2e --http`: interactive requests through the HTTP API, alone or during a batch.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tritmill_client::remote::RemoteBatch;

use super::{
    Arguments,
    service::{ANSWER_WITHIN, PATIENT, Service},
};
use crate::{bench::queue::percentile, block_on, output};

/// Measured bursts of requests, after one for warm-up.
const ROUNDS: usize = 5;
/// Time between two bursts.
const PAUSE: Duration = Duration::from_millis(500);
/// Time limit for the start of the batch.
const BATCH_WITHIN: Duration = Duration::from_secs(120);
/// Lines of the batch that must be answered before the first burst.
const WARM_LINES: u64 = 64;

/// Measures and prints.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    block_on(async {
        let mut service = Service::start(arguments).await?;
        let measured = tokio::select! {
            measured = measure(&service, arguments) => measured,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        // Fails if the process has ended.
        let _ = service.process.kill().await;
        print(arguments, &measured?)
    })
}

impl Service {
    /// Starts the batch, at priority low.
    async fn batch(&self, arguments: &Arguments, model: &str) -> anyhow::Result<RemoteBatch> {
        let body = |line| body(model, &format!("Paid on day {line} of the year"), arguments);
        let lines = (0..arguments.batch_lines()).map(body);
        self.submit_batch(lines, "/v1/chat/completions", PATIENT).await
    }

    /// Starts the batch and waits until some lines are answered.
    async fn started_batch(
        &self,
        arguments: &Arguments,
        model: &str,
    ) -> anyhow::Result<RemoteBatch> {
        let batch = self.batch(arguments, model).await?;
        let started = Instant::now();
        while self.answered(&batch).await? < WARM_LINES.min(arguments.batch_lines() as u64) {
            ensure!(started.elapsed() < BATCH_WITHIN, "the batch does not start");
            sleep(Duration::from_millis(200)).await;
        }
        Ok(batch)
    }

    /// Returns the number of answered lines of the batch.
    async fn answered(&self, batch: &RemoteBatch) -> anyhow::Result<u64> {
        let now = self.api.batch(&batch.id).await?;
        ensure!(now.request_counts.failed == 0, "lines of the batch failed");
        ensure!(now.status != "failed", "the service refused the batch: {:?}", now.errors);
        Ok(now.request_counts.completed)
    }
}

/// Returns the body of a request, in the batch or interactive.
fn body(model: &str, question: &str, arguments: &Arguments) -> Value {
    json!({
        "model": model,
        "messages": [{ "role": "user", "content": question }],
        "max_tokens": arguments.generate(),
        "ignore_eos": true,
        "temperature": 0,
    })
}

/// Returns a format with many items of eight fields.
fn endless_format() -> Value {
    let fields = json!({
        "name": { "type": "string" }, "city": { "type": "string" }, "age": { "type": "integer" },
        "score": { "type": "number" }, "active": { "type": "boolean" }, "level": { "enum": ["low", "high"] },
        "tags": { "type": "array", "items": { "type": "string" }, "maxItems": 3 }, "note": { "type": "string" },
    });
    let required: Vec<&String> =
        fields.as_object().into_iter().flatten().map(|(name, _)| name).collect();
    let item = json!({
        "type": "object", "properties": fields, "required": required, "additionalProperties": false,
    });
    let schema = json!({ "type": "array", "items": item, "minItems": 50 });
    json!({ "type": "json_schema", "json_schema": { "name": "people", "schema": schema } })
}

/// Measurements.
struct Measured {
    /// Latency of every answer, sorted.
    latencies: Vec<Duration>,
    errors: usize,
    /// Maximum memory of the service.
    memory_bytes: u64,
    /// Progress of the batch, if there was one.
    batch: Option<BatchLines>,
}

/// Answered lines of the batch before and after the bursts, and the time between.
#[derive(Clone, Copy)]
struct BatchLines {
    before: u64,
    after: u64,
    elapsed: Duration,
}

impl BatchLines {
    fn lines_per_s(&self) -> f64 {
        (self.after - self.before) as f64 / self.elapsed.as_secs_f64()
    }
}

async fn measure(service: &Service, arguments: &Arguments) -> anyhow::Result<Measured> {
    let model = service.api.models().await?.into_iter().next().context("nothing is served")?;
    let batch = match arguments.batch_lines() {
        0 => None,
        _ => Some(service.started_batch(arguments, &model).await?),
    };
    burst(service, arguments, &model, 0).await?;
    let before = match &batch {
        Some(batch) => service.answered(batch).await?,
        None => 0,
    };
    let started = Instant::now();
    let mut measured = Measured { latencies: Vec::new(), errors: 0, memory_bytes: 0, batch: None };
    for round in 1..=ROUNDS {
        note!("burst {round} of {ROUNDS}");
        for answer in burst(service, arguments, &model, round).await? {
            match answer {
                Ok(latency) => measured.latencies.push(latency),
                Err(error) => {
                    measured.errors += 1;
                    note!("request failed: {error:#}");
                }
            }
        }
        let used = service.memory.used_bytes(&service.process)?;
        measured.memory_bytes = measured.memory_bytes.max(used);
        sleep(PAUSE).await;
    }
    measured.latencies.sort_unstable();
    if let Some(batch) = batch {
        let after = service.answered(&batch).await?;
        if after == arguments.batch_lines() as u64 {
            bail!("the batch finished before the measurement: increase --batch-lines");
        }
        measured.batch = Some(BatchLines { before, after, elapsed: started.elapsed() });
    }
    Ok(measured)
}

/// Sends all requests at once. Each has a latency or an error.
async fn burst(
    service: &Service,
    arguments: &Arguments,
    model: &str,
    round: usize,
) -> anyhow::Result<Vec<anyhow::Result<Duration>>> {
    let mut requests = JoinSet::new();
    for number in 0..arguments.callers.get() {
        let mut body = body(model, &format!("Due in week {number} of round {round}"), arguments);
        if arguments.schema {
            body["response_format"] = endless_format();
        }
        let url = format!("{}/v1/chat/completions", service.url);
        let request = service.client.request(Method::POST, &url)?.bearer_auth(&service.key);
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        let (client, tokens) = (service.client.clone(), arguments.generate().get());
        requests.spawn(async move {
            let started = Instant::now();
            let answer = timeout(ANSWER_WITHIN, async {
                let answer = client.send(request, ANSWER_WITHIN).await?;
                let status = answer.status();
                let body = answer.bytes().await?;
                ensure!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&body));
                let body: Value = serde_json::from_slice(&body)?;
                let generated = body["usage"]["completion_tokens"].as_u64();
                ensure!(generated == Some(tokens as u64), "{generated:?} tokens, not {tokens}");
                Ok(started.elapsed())
            });
            answer.await.unwrap_or_else(|_| bail!("no answer within {ANSWER_WITHIN:?}"))
        });
    }
    let mut answers = Vec::new();
    while let Some(answer) = requests.join_next().await {
        answers.push(answer.context("a caller panicked")?);
    }
    Ok(answers)
}

fn print(arguments: &Arguments, measured: &Measured) -> anyhow::Result<ExitCode> {
    let Measured { latencies, errors, memory_bytes, batch } = measured;
    let [Some(p50), Some(p90), Some(p99)] = [50, 90, 99]
        .map(|percent| percentile(latencies, percent).map(|latency| latency.as_secs_f64()))
    else {
        bail!("no request was answered");
    };
    let requests = latencies.len() + errors;
    let share = 100.0 * *errors as f64 / requests as f64;
    if arguments.json {
        let mut figures = json!({
            "device": arguments.run.engine_on_one()?.device.resolved().to_string(),
            "callers": arguments.callers, "generate": arguments.generate(), "requests": requests,
            "errors": errors, "p50_s": p50, "p90_s": p90, "p99_s": p99, "memory_bytes": memory_bytes,
        });
        if let Some(batch) = batch {
            figures["batch_lines"] = json!(arguments.batch_lines());
            figures["batch_lines_before"] = json!(batch.before);
            figures["batch_lines_after"] = json!(batch.after);
            figures["batch_lines_per_s"] = json!(batch.lines_per_s());
        }
        output::line(figures)?;
        return Ok(ExitCode::SUCCESS);
    }
    output::line(format_args!(
        "{requests} requests of {} tokens, {} at once: p50 {p50:.2} s, p90 {p90:.2} s, p99 {p99:.2} s, \
         {share:.1} % errors; {} of memory",
        arguments.generate(),
        arguments.callers,
        output::bytes(*memory_bytes)
    ))?;
    if let Some(batch @ BatchLines { before, after, .. }) = batch {
        output::line(format_args!(
            "the batch: {before} lines answered before, {after} after, of {} ({:.1} a second)",
            arguments.batch_lines(),
            batch.lines_per_s()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
