//! `tritmill bench e2e --http`: interactive requests through the HTTP API, alone or during a batch.
//!
//! The service is a separate process, `tritmill standalone` over a file in a temporary folder.

use std::{
    io::Write as _,
    process::{ExitCode, Stdio},
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    task::JoinSet,
    time::{sleep, timeout},
};
use tritmill_client::{
    http::{AddressPolicy, HttpClient},
    remote::{Api, NewBatch, RemoteBatch},
};
use tritmill_engine::{backend::cuda, load::DeviceChoice};

use super::Arguments;
use crate::{bench::queue::percentile, block_on, output};

/// Measured bursts of requests, after one for warm-up.
const ROUNDS: usize = 5;
/// Time between two bursts.
const PAUSE: Duration = Duration::from_millis(500);
/// Time limit of a request.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(60);
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

/// A service under test.
pub(super) struct Service {
    pub process: Child,
    pub url: String,
    pub key: String,
    pub client: HttpClient,
    pub api: Api,
    /// Address of the worker's metrics.
    listen: String,
    /// Folder of its store.
    folder: tempfile::TempDir,
    memory: Memory,
}

/// Memory of a service to measure.
enum Memory {
    /// Memory of a GPU, with its free bytes before the start.
    Gpu { ordinal: usize, free: u64 },
    /// Resident memory of the process.
    Resident,
}

impl Memory {
    fn before(device: DeviceChoice) -> anyhow::Result<Self> {
        let DeviceChoice::Cuda(ordinal) = device.resolved() else { return Ok(Self::Resident) };
        Ok(Self::Gpu { ordinal, free: gpu_free_bytes(ordinal)? })
    }

    /// Returns the bytes that the service uses.
    fn used_bytes(&self, process: &Child) -> anyhow::Result<u64> {
        match *self {
            Self::Gpu { ordinal, free } => Ok(free.saturating_sub(gpu_free_bytes(ordinal)?)),
            Self::Resident => {
                let id = process.id().context("the service ended")?;
                let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
                let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
                let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
                Ok(kib.map_or(0, |kib: u64| kib << 10))
            }
        }
    }
}

fn gpu_free_bytes(ordinal: usize) -> anyhow::Result<u64> {
    let devices = cuda::devices()?.devices;
    Ok(devices.get(ordinal).context("the GPU is gone")?.memory_free_bytes)
}

impl Service {
    pub async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["standalone", "--json", "--api", "127.0.0.1:0", "--store"]);
        command.arg(folder.path().join("store")).args(["--model", &arguments.model.model]);
        command.args(["--max-batch-lines", "1000000", "--max-sequences"]);
        command.arg(arguments.batch().to_string()).args(arguments.run.words());
        command.args(["--step-target", &arguments.step_target.to_string()]);
        if let Some(mib) = arguments.kv_memory {
            command.args(["--kv-memory", &mib.to_string()]);
        }
        command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
        let memory = Memory::before(arguments.run.engine_on_one()?.device)?;
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let stdout = process.stdout.take().context("the service has no output")?;
        let mut lines = BufReader::new(stdout).lines();
        let ready = lines.next_line().await?.context("the service did not start")?;
        let ready: Value = serde_json::from_str(&ready).context("the service printed no JSON")?;
        let text = |name: &str| ready[name].as_str().map(str::to_owned);
        let url = format!("http://{}", text("api").context("the service has no address")?);
        let key = text("first_key").context("the service has no key")?;
        let listen = text("listen").context("the worker has no address")?;
        let client = HttpClient::new(AddressPolicy::Any, None)?;
        let api = Api::new(client.clone(), &url, &key)?;
        Ok(Self { process, url, key, client, api, listen, folder, memory })
    }

    /// Starts the batch, at priority low.
    async fn batch(&self, arguments: &Arguments, model: &str) -> anyhow::Result<RemoteBatch> {
        let body = |line| body(model, &format!("Paid on day {line} of the year"), arguments);
        self.submit_batch((0..arguments.batch_lines()).map(body), "/v1/chat/completions").await
    }

    /// Starts a batch of lines with these bodies, at priority low.
    pub async fn submit_batch(
        &self,
        bodies: impl Iterator<Item = Value>,
        endpoint: &str,
    ) -> anyhow::Result<RemoteBatch> {
        let path = self.folder.path().join("batch.jsonl");
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
        for (line, body) in bodies.enumerate() {
            let line = json!({
                "custom_id": format!("line-{line}"),
                "method": "POST",
                "url": endpoint,
                "body": body,
            });
            writeln!(file, "{line}")?;
        }
        file.flush()?;
        drop(file);
        let uploaded = self.api.upload(&path, "bench.jsonl", Arc::new(AtomicU64::new(0))).await?;
        let batch = NewBatch {
            file: &uploaded,
            endpoint,
            window: "24h",
            priority: "low",
            idempotency_key: "bench",
        };
        Ok(self.api.create(&batch).await?)
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

    /// Returns the number of tokens that the engine has computed, of prompts and answers.
    pub async fn tokens(&self) -> anyhow::Result<u64> {
        let url = format!("http://{}/metrics", self.listen);
        let answer = self.client.send(self.client.request(Method::GET, &url)?, ANSWER_WITHIN);
        let text = answer.await?.text().await?;
        let mut tokens = 0;
        for name in ["tritmill_prefill_tokens_total", "tritmill_generation_tokens_total"] {
            let of_devices = text.lines().filter(|line| line.starts_with(name));
            let values: Vec<u64> =
                of_devices.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
            ensure!(!values.is_empty(), "the worker has no {name}");
            tokens += values.into_iter().sum::<u64>();
        }
        Ok(tokens)
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
        eprintln!("burst {round} of {ROUNDS}");
        for answer in burst(service, arguments, &model, round).await? {
            match answer {
                Ok(latency) => measured.latencies.push(latency),
                Err(error) => {
                    measured.errors += 1;
                    eprintln!("request failed: {error:#}");
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
        let body = body(model, &format!("Due in week {number} of round {round}"), arguments);
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
