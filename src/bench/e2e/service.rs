//! The service that `bench e2e` measures: `tritmill standalone` in a process of its own, over a file in a temporary
//! folder or on servers.

use std::{
    io::Write as _,
    process::Stdio,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
};
use tritmill_client::{
    http::{AddressPolicy, HttpClient},
    remote::{Api, NewBatch, RemoteBatch},
};
use tritmill_engine::{backend::cuda, load::DeviceChoice};

use super::Arguments;
use crate::servers::ServerUrls;

/// Completion window and priority of a batch that comes after everything else.
pub(super) const PATIENT: (&str, &str) = ("24h", "low");
/// Time limit of a request.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// How the service differs from one over a file with the usual options.
#[derive(Default)]
pub(super) struct Setup<'a> {
    /// Further words of its command line.
    pub words: Vec<String>,
    /// The servers it uses.
    pub servers: Option<ServerUrls<'a>>,
    /// Another step target than the command line's, in milliseconds.
    pub step_target: Option<u32>,
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
    pub memory: Memory,
}

/// Memory of a service to measure.
pub(super) enum Memory {
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
    pub fn used_bytes(&self, process: &Child) -> anyhow::Result<u64> {
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
    let device = cuda::devices()?.devices.into_iter().nth(ordinal);
    Ok(device.context("the GPU is gone")??.memory_free_bytes)
}

impl Service {
    /// Starts a service over a file.
    pub async fn start(arguments: &Arguments) -> anyhow::Result<Self> {
        Self::start_with(arguments, Setup::default()).await
    }

    /// Starts a service over a file, with another step target, in milliseconds.
    pub async fn start_stepping(arguments: &Arguments, step_target: u32) -> anyhow::Result<Self> {
        let setup = Setup { step_target: Some(step_target), ..Setup::default() };
        Self::start_with(arguments, setup).await
    }

    /// Starts a service.
    pub async fn start_with(arguments: &Arguments, setup: Setup<'_>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["standalone", "--json", "--api", "127.0.0.1:0", "--store"]);
        command.arg(folder.path().join("store")).args(["--model", &arguments.model.model]);
        command.args(["--max-batch-lines", "1000000", "--max-sequences"]);
        command.arg(arguments.batch().to_string()).args(arguments.run.words());
        let step_target = setup.step_target.unwrap_or(arguments.step_target);
        command.args(["--step-target", &step_target.to_string()]);
        if let Some(mib) = arguments.kv_memory {
            command.args(["--kv-memory", &mib.to_string()]);
        }
        command.args(setup.words).env_remove("REDIS_URL").env_remove("DATABASE_URL");
        if let Some(servers) = setup.servers {
            // Not as words, which every user of the machine can read.
            command.env("REDIS_URL", servers.redis_url());
            command.env("DATABASE_URL", servers.database_url());
        }
        let memory = Memory::before(arguments.run.engine_on_one()?.device)?;
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let stdout = process.stdout.take().context("the service has no output")?;
        let mut lines = BufReader::new(stdout).lines();
        let ready = lines.next_line().await?.context("the service did not start")?;
        let ready: Value = serde_json::from_str(&ready).context("the service printed no JSON")?;
        let text = |name: &str| ready[name].as_str().map(str::to_owned);
        let url = format!("http://{}", text("api").context("the service has no address")?);
        // Servers that were used before have keys already.
        let key = text("first_key").or(setup.servers.map(|_| String::new()));
        let key = key.context("the service has no key")?;
        let listen = text("listen").context("the worker has no address")?;
        let client = HttpClient::new(AddressPolicy::Any, None)?;
        let api = Api::new(client.clone(), &url, &key)?;
        Ok(Self { process, url, key, client, api, listen, folder, memory })
    }

    /// Starts a batch of lines with these bodies, with a completion window and a priority.
    pub async fn submit_batch(
        &self,
        bodies: impl Iterator<Item = Value>,
        endpoint: &str,
        (window, priority): (&str, &str),
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
            window,
            priority,
            escalation: None,
            idempotency_key: "bench",
        };
        Ok(self.api.create(&batch).await?)
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
}
