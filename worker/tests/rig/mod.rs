//! A worker with a real store, dispatcher and engine, and scripted devices.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tritmill_engine::{
    Engine, EngineConfig, TokenText,
    backend::{Backend, Chunk, Logits, LogitsFor, StepError},
    files::Model,
    kv::BlockId,
    load::{self, EngineOptions},
};
use tritmill_queue::{
    Job, JobId, Priority, Prompt, QueueName, Sampling, Tenant, dispatch::MemoryDispatcher,
    store::SqliteStore,
};
use tritmill_worker::{Committed, Device, Metrics, Mode, ServedModel, Worker, WorkerConfig};

/// A worker that is not running yet, and what it needs.
#[allow(dead_code, reason = "not every test looks at everything")]
pub struct Rig {
    pub store: Arc<SqliteStore>,
    pub dispatcher: Arc<MemoryDispatcher>,
    pub commits: mpsc::Receiver<Committed>,
    pub worker: Worker,
    pub engine: Engine,
    _folder: tempfile::TempDir,
}

pub fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

pub fn job(prompt: Prompt, max_tokens: u32) -> Job {
    let max_tokens = Some(max_tokens);
    let sampling = Sampling { max_tokens, ignore_eos: true, ..Sampling::default() };
    Job {
        id: JobId::generate(),
        tenant: Tenant::default(),
        queue: queue(),
        priority: Priority::Normal,
        prompt,
        sampling,
        seed: 1,
        attempts_max: 3,
        run_at: None,
        expires_at: None,
        stream: false,
        traceparent: None,
        task: tritmill_queue::Task::Generate,
        echo: serde_json::Map::new(),
        line_key: None,
        billing: tritmill_queue::Billing::default(),
        line_shape: None,
        custom_id: None,
    }
}

pub async fn rig(mode: Mode, drain: Duration) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/bitnet-tiny");
    let model = Arc::new(Model::open(&golden).unwrap());
    let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
    let engine = load::engine(&model, &options).unwrap();
    let class = engine.backend().numerics_class().to_owned();
    let store = Arc::new(SqliteStore::open(&folder.path().join("jobs")).await.unwrap());
    let dispatcher = Arc::new(MemoryDispatcher::new(1000));
    let (committed, commits) = mpsc::channel(4096);
    let config = WorkerConfig {
        isa: "scalar".to_owned(),
        queue: queue(),
        owner: "w".into(),
        slots: 5,
        lease: Duration::from_secs(60),
        drain,
        step_limit: Duration::from_secs(600),
        mode,
    };
    let worker = Worker {
        store: store.clone(),
        dispatcher: dispatcher.clone(),
        operations: None,
        events: None,
        served: Arc::new(ServedModel::new(model, "tiny".into(), class)),
        config,
        committed: Some(committed),
        metrics: Arc::default(),
    };
    Rig { store, dispatcher, commits, worker, engine, _folder: folder }
}

/// A device that runs a function of the test in each step; every sequence gets token 0.
pub struct Scripted<F>(F);

impl<F: FnMut() -> Result<(), StepError> + Send> Backend for Scripted<F> {
    fn vocab_size(&self) -> usize {
        1000
    }
    fn block_count(&self) -> usize {
        20_000
    }
    fn numerics_class(&self) -> &str {
        "device"
    }
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        (self.0)()?;
        logits.clear(1000);
        let rows = |chunk: &Chunk<'_>| match chunk.logits {
            LogitsFor::Nothing => 0,
            LogitsFor::Last | LogitsFor::Largest(_) => 1,
            LogitsFor::All => chunk.tokens.len(),
            LogitsFor::Draws(draws) => draws.len(),
        };
        logits.extend(vec![0.0; chunks.iter().map(rows).sum::<usize>() * 1000]);
        Ok(())
    }
    fn copy_block(&mut self, _: BlockId, _: BlockId) -> Result<(), StepError> {
        Ok(())
    }
    fn block_bytes(&self) -> usize {
        0
    }
    fn read_block(&mut self, _: BlockId, _: &mut Vec<u8>) -> Result<(), StepError> {
        Ok(())
    }
    fn write_block(&mut self, _: BlockId, _: &[u8]) -> Result<(), StepError> {
        Ok(())
    }
}

/// An engine on a [`Scripted`] device.
#[allow(dead_code, reason = "not every test misuses a device")]
pub fn engine_on(step: impl FnMut() -> Result<(), StepError> + Send + 'static) -> Engine {
    // Without drafts a step computes one token of each sequence.
    let config = EngineConfig { draft_tokens: 0, ..EngineConfig::new(100_000) };
    Engine::new(Box::new(Scripted(step)), Arc::new(NoText), vec![2], config)
}

/// Returns a worker's only device.
#[allow(dead_code, reason = "some workers have several")]
pub fn alone(engine: Engine) -> Vec<Device> {
    vec![Device { name: "cpu".to_owned(), engine }]
}

/// A step that never ends.
#[allow(dead_code, reason = "not every test misuses a device")]
pub fn hang() -> Result<(), StepError> {
    loop {
        std::thread::park();
    }
}

/// Tokens without text.
struct NoText;

impl TokenText for NoText {
    fn bytes(&self, _: u32) -> &[u8] {
        b""
    }
    fn is_special(&self, _: u32) -> bool {
        false
    }
}

/// The value of a metric of the worker; zero if it is not exported yet.
#[allow(dead_code, reason = "not every test looks at metrics")]
pub fn gauge(metrics: &Metrics, name: &str) -> i64 {
    let (metrics, name) = (metrics.encode(), format!("tritmill_worker_{name} "));
    let value = metrics.lines().find_map(|line| line.strip_prefix(&name));
    value.map_or(0, |value| value.parse().unwrap())
}

/// Waits until a condition holds.
#[allow(dead_code, reason = "not every test waits")]
pub async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
