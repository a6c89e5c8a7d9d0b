//! A worker with a real store, dispatcher and engine.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rig::{alone, engine_on, hang, job, queue, rig as setup};
use tokio::sync::watch;
use tritmill_queue::{Dispatcher, ErrorKind, Job, JobState, Outcome, Prompt, Store};
use tritmill_worker::{Mode, Stop, WorkerError};

#[tokio::test(flavor = "multi_thread")]
async fn embedded_worker_answers_everything_and_ends() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    let mut jobs: Vec<Job> =
        (0..20).map(|i| job(Prompt::Question(format!("question {i}")), 3)).collect();
    jobs.push(job(Prompt::Text("word ".repeat(20_000)), 3));
    jobs.push(job(Prompt::Tokens(vec![u32::MAX]), 3));
    setup.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    setup.worker.run(alone(setup.engine), stopped).await.unwrap();
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
        tokens += committed.usage.completion_tokens;
    }
    assert_eq!((settled, tokens), (22, 60));
    assert_eq!(setup.dispatcher.depth(&queue()).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn feeding_and_committing_share_one_connection() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    setup.engine = engine_on(|| Ok(()));
    let jobs: Vec<Job> = (0..3000).map(|_| job(Prompt::Tokens(vec![1, 2]), 1)).collect();
    setup.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    // If one waited for the other, it would wait for the connection timeout of half a minute.
    let running = setup.worker.run(alone(setup.engine), stopped);
    tokio::time::timeout(Duration::from_secs(25), running).await.unwrap().unwrap();
    assert_eq!(setup.store.progress(None).await.unwrap().completed, 3000);
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_worker_hands_back_unfinished_jobs() {
    let setup = setup(Mode::Embedded, Duration::ZERO).await;
    let jobs: Vec<Job> = (0..8).map(|_| job(Prompt::Question("why".into()), 100_000)).collect();
    setup.store.submit(&jobs).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(alone(setup.engine), stopped));
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
async fn service_skips_cancelled_job_and_runs_until_stopped() {
    let mut setup = setup(Mode::Service, Duration::from_secs(60)).await;
    let (cancelled, wanted) = (job(Prompt::Text("a".into()), 2), job(Prompt::Text("b".into()), 2));
    setup.store.submit(&[cancelled.clone(), wanted.clone()]).await.unwrap();
    setup.store.cancel(&[cancelled.id]).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(alone(setup.engine), stopped));
    setup.dispatcher.enqueue(&[cancelled.entry(), wanted.entry()]).await.unwrap();
    let committed = setup.commits.recv().await.unwrap();
    assert_eq!(committed.settled, [(wanted.id, JobState::Completed)]);
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let record = setup.store.job(cancelled.id).await.unwrap().unwrap();
    assert_eq!(record.state, JobState::Cancelled);
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_store_ends_embedded_worker_with_its_error() {
    let setup = setup(Mode::Embedded, Duration::ZERO).await;
    setup.store.close().await;
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = setup.worker.run(alone(setup.engine), stopped).await.unwrap_err();
    assert!(matches!(error, WorkerError::Store(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_step_ends_worker_and_hands_back_its_jobs() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    setup.worker.config.step_limit = Duration::from_millis(200);
    let engine = engine_on(hang);
    let jobs: Vec<Job> = (0..3).map(|_| job(Prompt::Tokens(vec![1, 2]), 4)).collect();
    setup.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = setup.worker.run(alone(engine), stopped).await.unwrap_err();
    assert!(matches!(error, WorkerError::EngineHangs { .. }), "{error}");
    let progress = setup.store.progress(None).await.unwrap();
    assert_eq!((progress.queued, progress.running), (3, 0));
    for job in &jobs {
        assert_eq!(setup.store.job(job.id).await.unwrap().unwrap().attempts, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_worker_saves_tokens_of_unfinished_job() {
    let mut setup = setup(Mode::Embedded, Duration::ZERO).await;
    let steps = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&steps);
    // Fast until there are tokens to save, then too slow to finish.
    setup.engine = engine_on(move || {
        if counted.fetch_add(1, Ordering::Relaxed) > 64 {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    });
    let long = job(Prompt::Tokens(vec![1, 2]), 400);
    setup.store.submit(std::slice::from_ref(&long)).await.unwrap();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(setup.worker.run(alone(setup.engine), stopped));
    while steps.load(Ordering::Relaxed) <= 64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    let by = tritmill_queue::Claimant::new("next", Duration::from_secs(60));
    let claims = setup.store.claim(&[long.id], by).await.unwrap();
    let saved = claims[0].checkpoint.as_ref().expect("64 tokens are enough for a checkpoint");
    let saved: serde_json::Value = tritmill_queue::wire::decode(saved).unwrap();
    let tokens = saved["tokens"].as_array().unwrap();
    assert!((64..400).contains(&tokens.len()), "{} tokens", tokens.len());
}
