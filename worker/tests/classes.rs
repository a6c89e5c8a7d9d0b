//! Two numerics classes on one queue: every answer is computed by a single class.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{path::Path, sync::Arc, time::Duration};

use rig::{eventually, job, queue, rig};
use tokio::sync::watch;
use tritmill_engine::{
    Engine, EngineConfig,
    backend::{Backend, Chunk, Logits, StepError, cpu::KvType},
    files::Model,
    kv::{BlockId, blocks_for},
    load::{self, EngineOptions},
};
use tritmill_queue::store::NumericsClasses as _;
use tritmill_queue::{
    Claimant, Completion, Job, JobId, JobState, Outcome, Prompt, Store,
    store::{SqliteStore, classes::ClassError},
    wire,
};
use tritmill_worker::{Device, Metrics, Mode, ServedModel, Stop, Worker};

/// Tokens of the job: several checkpoints' worth.
const TOKENS: u32 = 150;

/// A slow backend.
struct Slow(Box<dyn Backend>);

impl Backend for Slow {
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn block_count(&self) -> usize {
        self.0.block_count()
    }
    fn numerics_class(&self) -> &str {
        self.0.numerics_class()
    }
    fn step(&mut self, chunks: &[Chunk<'_>], logits: &mut Logits) -> Result<(), StepError> {
        std::thread::sleep(Duration::from_millis(5));
        self.0.step(chunks, logits)
    }
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), StepError> {
        self.0.copy_block(from, to)
    }
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }
    fn read_block(&mut self, block: BlockId, content: &mut Vec<u8>) -> Result<(), StepError> {
        self.0.read_block(block, content)
    }
    fn write_block(&mut self, block: BlockId, content: &[u8]) -> Result<(), StepError> {
        self.0.write_block(block, content)
    }
}

/// A numerics class.
#[derive(Clone, Copy)]
struct Kind(KvType);

impl Kind {
    fn device(self, model: &Arc<Model>) -> Device {
        let options = EngineOptions { kv: self.0, ..EngineOptions::default() };
        let backend = load::backend(model, &options, 4 * blocks_for(1024)).unwrap();
        let config = EngineConfig::new(model.config().context_length);
        let engine = Engine::new(Box::new(Slow(backend)), model.clone(), vec![], config);
        Device { name: "cpu".to_owned(), engine }
    }
}

/// Workers of any class on one store.
struct Queue {
    rig: rig::Rig,
    model: Arc<Model>,
}

impl Queue {
    async fn open() -> Self {
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/bitnet-tiny");
        let model = Arc::new(Model::open(&golden).unwrap());
        Self { rig: rig(Mode::Embedded, Duration::ZERO).await, model }
    }

    fn store(&self) -> Arc<SqliteStore> {
        self.rig.store.clone()
    }

    fn class(&self, kind: Kind) -> String {
        kind.device(&self.model).engine.backend().numerics_class().to_owned()
    }

    /// Starts a worker in the same way as the program.
    async fn worker(&self, kind: Kind) -> Result<Running, ClassError> {
        let device = kind.device(&self.model);
        let class = device.engine.backend().numerics_class().to_owned();
        self.rig.store.register_class(&queue(), &class).await?;
        let metrics: Arc<Metrics> = Arc::default();
        let worker = Worker {
            store: self.rig.store.clone(),
            dispatcher: self.rig.dispatcher.clone(),
            operations: None,
            events: None,
            served: Arc::new(ServedModel::new(self.model.clone(), "tiny".into(), class)),
            config: self.rig.worker.config.clone(),
            committed: None,
            metrics: metrics.clone(),
        };
        let (stop, stopped) = watch::channel(Stop::No);
        Ok(Running { task: tokio::spawn(worker.run(vec![device], stopped)), stop, metrics })
    }
}

struct Running {
    task: tokio::task::JoinHandle<Result<(), tritmill_worker::WorkerError>>,
    stop: watch::Sender<Stop>,
    metrics: Arc<Metrics>,
}

impl Running {
    /// Returns the number of tokens it has generated.
    fn drawn(&self) -> u32 {
        let metrics = self.metrics.encode();
        let name = "tritmill_generation_tokens_total{device=\"cpu\"} ";
        let value = metrics.lines().find_map(|line| line.strip_prefix(name));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Stops it in the middle of the job; its tokens are saved.
    async fn stop_after(self, tokens: u32) {
        eventually("some tokens are drawn", || self.drawn() >= tokens).await;
        self.stop.send(Stop::Drain).unwrap();
        self.task.await.unwrap().unwrap();
    }

    /// Waits until it ends; returns the number of tokens it generated.
    async fn end(self) -> u32 {
        let Self { task, metrics, stop } = self;
        task.await.unwrap().unwrap();
        Self { task: tokio::spawn(async { Ok(()) }), metrics, stop }.drawn()
    }
}

async fn answer(store: &SqliteStore, id: JobId) -> Completion {
    let record = store.job(id).await.unwrap().unwrap();
    assert_eq!(record.state, JobState::Completed);
    let Some(Outcome::Completed(completion)) = record.outcome else { panic!("no answer") };
    completion
}

fn long() -> Job {
    let mut long = job(Prompt::Question("why".into()), TOKENS);
    (long.sampling.temperature, long.seed) = (1.0, 7);
    long
}

/// Returns the answer of a class without interruption.
async fn alone(kind: Kind) -> Completion {
    let queue = Queue::open().await;
    let job = long();
    queue.store().submit(std::slice::from_ref(&job)).await.unwrap();
    assert_eq!(queue.worker(kind).await.unwrap().end().await, TOKENS);
    answer(&queue.store(), job.id).await
}

#[tokio::test(flavor = "multi_thread")]
async fn class_continues_own_checkpoints_and_restarts_other_jobs() {
    let (f16, f32) = (Kind(KvType::F16), Kind(KvType::F32));
    let queue = Queue::open().await;
    let store = queue.store();
    let (of_f16, of_f32) = (long(), long());
    // One after the other, so that each worker has one job.
    store.submit(std::slice::from_ref(&of_f16)).await.unwrap();
    queue.worker(f16).await.unwrap().stop_after(70).await;
    let refused = queue.worker(f32).await.err().expect("another class");
    assert!(matches!(refused, ClassError::Mismatch { .. }), "{refused}");
    store.allow_class(&rig::queue(), &queue.class(f32)).await.unwrap();

    // The checkpoint names its class.
    let by = || Claimant::new("a look", Duration::from_secs(60));
    let look = store.claim(&[of_f16.id], by()).await.unwrap().remove(0);
    let saved: serde_json::Value = wire::decode(look.checkpoint.as_ref().unwrap()).unwrap();
    assert_eq!(saved["numerics_class"], queue.class(f16));
    assert!(saved["tokens"].as_array().unwrap().len() >= 64, "{saved}");
    store.hand_back(&[look.claim_ref()]).await.unwrap();

    // The same class continues.
    let drawn = queue.worker(f16).await.unwrap().end().await;
    assert!(drawn <= TOKENS - 64, "it generated {drawn} tokens");
    let own = answer(&store, of_f16.id).await;
    assert_eq!(own, alone(f16).await);

    // The other class restarts.
    store.submit(std::slice::from_ref(&of_f32)).await.unwrap();
    queue.worker(f16).await.unwrap().stop_after(70).await;
    assert_eq!(queue.worker(f32).await.unwrap().end().await, TOKENS);
    let other = answer(&store, of_f32.id).await;
    assert_eq!(other, alone(f32).await);
    assert_eq!(other.fingerprint, queue.class(f32));
    assert_ne!(other.fingerprint, own.fingerprint);
    assert_eq!(store.job(of_f32.id).await.unwrap().unwrap().attempts, 0);

    store.withdraw_class(&rig::queue(), &queue.class(f32)).await.unwrap();
    queue.worker(f32).await.err().expect("it is withdrawn");
}
