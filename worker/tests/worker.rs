//! The worker's loop on a real store, dispatcher and engine.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{path::Path, sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};
use tritmill_engine::{
    Engine, EngineConfig, TokenText,
    backend::{Backend, Chunk, StepError},
    files::Model,
    kv::BlockId,
    load::{self, EngineOptions},
};
use tritmill_queue::{
    Dispatcher, ErrorKind, Job, JobId, JobState, Outcome, Priority, Prompt, QueueName, Sampling,
    Store, Tenant, dispatch::MemoryDispatcher, store::SqliteStore,
};
use tritmill_worker::{Committed, Mode, Served, Stop, Worker, WorkerConfig, WorkerError};

struct Setup {
    store: Arc<SqliteStore>,
    dispatcher: Arc<MemoryDispatcher>,
    commits: mpsc::UnboundedReceiver<Committed>,
    worker: Worker,
    engine: Engine,
    _folder: tempfile::TempDir,
}

fn queue() -> QueueName {
    QueueName { model: "tiny".into(), format: "i2_s".into() }
}

fn job(prompt: Prompt, max_tokens: u32) -> Job {
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
    }
}

async fn setup(mode: Mode, drain: Duration) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/golden/bitnet-tiny");
    let model = Arc::new(Model::open(&golden).unwrap());
    let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
    let engine = load::engine(&model, &options).unwrap();
    let class = engine.backend().numerics_class().to_owned();
    let store = Arc::new(SqliteStore::open(&folder.path().join("jobs")).await.unwrap());
    let dispatcher = Arc::new(MemoryDispatcher::new(1000));
    let (committed, commits) = mpsc::unbounded_channel();
    let config = WorkerConfig {
        queue: queue(),
        owner: "w".into(),
        slots: 5,
        lease: Duration::from_secs(60),
        drain,
        step_limit: Duration::from_secs(600),
        retention: Duration::MAX,
        mode,
    };
    let worker = Worker {
        store: store.clone(),
        dispatcher: dispatcher.clone(),
        operations: None,
        events: None,
        served: Arc::new(Served::new(model, "tiny".into(), class)),
        config,
        committed,
        vitals: Arc::default(),
    };
    Setup { store, dispatcher, commits, worker, engine, _folder: folder }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_worker_answers_everything_and_ends() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    let mut jobs: Vec<Job> =
        (0..20).map(|i| job(Prompt::Question(format!("question {i}")), 3)).collect();
    jobs.push(job(Prompt::Text("word ".repeat(20_000)), 3));
    jobs.push(job(Prompt::Tokens(vec![u32::MAX]), 3));
    setup.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    setup.worker.run(setup.engine, stopped).await.unwrap();
    let progress = setup.store.progress(None).await.unwrap();
    assert_eq!((progress.completed, progress.failed, progress.completion_tokens), (20, 2, 60));
    for (job, code) in jobs[20..].iter().zip(["context_length_exceeded", "invalid_value"]) {
        let record = setup.store.job(job.id).await.unwrap().unwrap();
        let Some(Outcome::Error(error)) = record.outcome else { panic!("{:?}", record.outcome) };
        assert_eq!((error.kind, error.code.as_str()), (ErrorKind::InvalidRequest, code));
        assert_eq!((error.param.as_deref(), record.attempts), (Some("prompt"), 1));
    }
    let (mut settled, mut tokens) = (0, 0);
    while let Some(committed) = setup.commits.recv().await {
        settled += committed.settled.len();
        tokens += committed.completion_tokens;
    }
    assert_eq!((settled, tokens), (22, 60));
    assert_eq!(setup.dispatcher.depth(&queue()).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_hands_back_what_it_cannot_finish() {
    let setup = setup(Mode::Embedded, Duration::ZERO).await;
    let jobs: Vec<Job> = (0..8).map(|_| job(Prompt::Question("why".into()), 100_000)).collect();
    setup.store.submit(&jobs).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(setup.engine, stopped));
    while setup.store.progress(None).await.unwrap().running == 0 {
        tokio::task::yield_now().await;
    }
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let progress = setup.store.progress(None).await.unwrap();
    assert_eq!((progress.running, progress.failed), (0, 0));
    assert_eq!(progress.queued + progress.completed, 8);
    for job in &jobs {
        assert_eq!(setup.store.job(job.id).await.unwrap().unwrap().attempts, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_skips_what_is_over_and_runs_until_told_to_stop() {
    let mut setup = setup(Mode::Service, Duration::from_secs(60)).await;
    let (withdrawn, wanted) = (job(Prompt::Text("a".into()), 2), job(Prompt::Text("b".into()), 2));
    setup.store.submit(&[withdrawn.clone(), wanted.clone()]).await.unwrap();
    setup.store.cancel(&[withdrawn.id]).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(setup.engine, stopped));
    setup.dispatcher.enqueue(&[withdrawn.entry(), wanted.entry()]).await.unwrap();
    let committed = setup.commits.recv().await.unwrap();
    assert_eq!(committed.settled, [(wanted.id, JobState::Completed)]);
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let record = setup.store.job(withdrawn.id).await.unwrap().unwrap();
    assert_eq!(record.state, JobState::Cancelled);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_gone_ends_the_worker_with_its_error() {
    let setup = setup(Mode::Embedded, Duration::ZERO).await;
    setup.store.close().await;
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = setup.worker.run(setup.engine, stopped).await.unwrap_err();
    assert!(matches!(error, WorkerError::Store(_)), "{error}");
}

/// A device whose steps never end.
struct Hung;

impl Backend for Hung {
    fn vocab_size(&self) -> usize {
        1000
    }
    fn block_count(&self) -> usize {
        64
    }
    fn numerics_class(&self) -> &str {
        "hung"
    }
    fn step(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<(), StepError> {
        loop {
            std::thread::park();
        }
    }
    fn copy_block(&mut self, _: BlockId, _: BlockId) {}
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

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_hangs_ends_the_worker_and_frees_its_jobs() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    setup.worker.config.step_limit = Duration::from_millis(200);
    let engine = Engine::new(Box::new(Hung), Arc::new(NoText), vec![2], EngineConfig::new(64));
    let jobs: Vec<Job> = (0..3).map(|_| job(Prompt::Tokens(vec![1, 2]), 4)).collect();
    setup.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = setup.worker.run(engine, stopped).await.unwrap_err();
    assert!(matches!(error, WorkerError::EngineHangs(_)), "{error}");
    let progress = setup.store.progress(None).await.unwrap();
    assert_eq!((progress.queued, progress.running), (3, 0));
    for job in &jobs {
        assert_eq!(setup.store.job(job.id).await.unwrap().unwrap().attempts, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drained_worker_had_generated_is_gone_on_with() {
    let setup = setup(Mode::Embedded, Duration::from_millis(300)).await;
    let long = job(Prompt::Question("why".into()), 100_000);
    setup.store.submit(std::slice::from_ref(&long)).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(setup.engine, stopped));
    while setup.store.progress(None).await.unwrap().running == 0 {
        tokio::task::yield_now().await;
    }
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let by = tritmill_queue::Claimant { owner: "next", lease: Duration::from_secs(60) };
    let claims = setup.store.claim(&[long.id], by).await.unwrap();
    // It may have been quick enough to end.
    if let Some(claim) = claims.first() {
        let saved = claim.checkpoint.as_ref().expect("300 ms are many tokens");
        let tokens: Vec<u32> = tritmill_queue::wire::decode(saved).unwrap();
        assert!(tokens.len() >= 32, "{} tokens", tokens.len());
    }
}
