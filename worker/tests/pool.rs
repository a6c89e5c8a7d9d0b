//! A pool of two models: failures to load, and workers that fail.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rig::{Rig, engine_on, eventually, gauge, hang, job, rig};
use tokio::{
    sync::{oneshot, watch},
    time::timeout,
};
use tritmill_engine::backend::StepError;
use tritmill_queue::{Job, JobState, Prompt, QueueName, Store};
use tritmill_worker::{Device, LoadFailure, Mode, Pool, PoolError, PoolUnit, Stop, WorkerError};

fn queue(model: &str) -> QueueName {
    QueueName { model: model.to_owned(), format: "i2_s".to_owned() }
}

/// Returns a worker of a model, with a store of its own.
async fn rig_of(model: &str, drain: Duration) -> Rig {
    let mut rig = rig(Mode::Service, drain).await;
    rig.worker.config.queue = queue(model);
    rig
}

async fn submit(rig: &Rig, max_tokens: u32) -> Job {
    let queue = rig.worker.config.queue.clone();
    let job = Job { queue, ..job(Prompt::Tokens(vec![1, 2, 3]), max_tokens) };
    rig.store.submit(std::slice::from_ref(&job)).await.unwrap();
    job
}

/// Returns a unit whose device `cpu` runs this function in each step.
fn unit(
    worker: tritmill_worker::Worker,
    load: impl Fn() -> Result<(), LoadFailure> + Send + Sync + 'static,
    step: impl Fn() -> Result<(), StepError> + Clone + Send + Sync + 'static,
) -> PoolUnit {
    let load = move || {
        load()?;
        Ok(vec![Device { name: "cpu".to_owned(), engine: engine_on(step.clone()) }])
    };
    PoolUnit { worker, kind: None, memory_bytes: 1, load: Arc::new(load) }
}

#[tokio::test(flavor = "multi_thread")]
async fn model_that_cannot_be_loaded_is_tried_again_while_another_is_served() {
    let (a, b) = (rig_of("a", Duration::ZERO).await, rig_of("b", Duration::ZERO).await);
    let (of_a, of_b) = (submit(&a, 3).await, submit(&b, 3).await);
    let metrics = [a.worker.metrics.clone(), b.worker.metrics.clone()];
    let is_broken = Arc::new(AtomicBool::new(true));
    let broken = is_broken.clone();
    let load = move || match broken.load(Ordering::SeqCst) {
        true => Err("the file is torn".into()),
        false => Ok(()),
    };
    let units = vec![unit(a.worker, load, || Ok(())), unit(b.worker, || Ok(()), || Ok(()))];
    let pool = Pool::new(units, Some(2));
    let pages = pool.pages();
    let (stop, stopped) = watch::channel(Stop::No);
    let (loaded, first) = oneshot::channel();
    let running = tokio::spawn(pool.run(stopped, loaded));
    first.await.unwrap();
    eventually("b is served", || gauge(&metrics[1], "jobs_completed_total") == 1).await;
    let reason = pages.not_ready_reason().unwrap();
    assert!(reason.contains("a@i2_s: cannot be loaded: the file is torn"), "{reason}");
    is_broken.store(false, Ordering::SeqCst);
    eventually("a is served", || gauge(&metrics[0], "jobs_completed_total") == 1).await;
    eventually("it is ready", || pages.not_ready_reason().is_none()).await;
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    for (store, job) in [(&a.store, of_a), (&b.store, of_b)] {
        let record = store.job(job.id).await.unwrap().unwrap();
        assert_eq!((record.state, record.epoch), (JobState::Completed, 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pool_without_any_model_ends_with_the_first_failure() {
    let (a, b) = (rig_of("a", Duration::ZERO).await, rig_of("b", Duration::ZERO).await);
    let failing = |why: &'static str| move || Err(why.into());
    let units = vec![
        unit(a.worker, failing("the first"), || Ok(())),
        unit(b.worker, || panic!("a bug"), || Ok(())),
    ];
    let (_stop, stopped) = watch::channel(Stop::No);
    let ended = Pool::new(units, None).run(stopped, oneshot::channel().0).await;
    let error = ended.expect_err("nothing is loaded");
    assert!(matches!(error, PoolError::Load(_)) && error.to_string() == "the first", "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_device_of_one_model_drains_the_others_and_ends_the_pool() {
    let (a, b) = (rig_of("a", Duration::ZERO).await, rig_of("b", Duration::ZERO).await);
    let (of_a, metrics) = (submit(&a, 50_000).await, a.worker.metrics.clone());
    let slow = || {
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    };
    let lost = || Err(StepError::DeviceLost("it burns".into()));
    let units = vec![unit(a.worker, || Ok(()), slow), unit(b.worker, || Ok(()), lost)];
    let (_stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(Pool::new(units, None).run(stopped, oneshot::channel().0));
    eventually("the job of a runs", || gauge(&metrics, "jobs_running") == 1).await;
    let queue = queue("b");
    b.store.submit(&[Job { queue, ..job(Prompt::Tokens(vec![1]), 3) }]).await.unwrap();
    let ended = timeout(Duration::from_secs(30), running).await.expect("it ends").unwrap();
    let error = ended.expect_err("a device is lost");
    let is_lost = matches!(&error, PoolError::Worker(WorkerError::DeviceLost { .. }));
    assert!(is_lost, "{error}");
    let record = a.store.job(of_a.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Queued, 0), "handed back");
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_step_ends_the_pool_though_it_has_the_turn_of_the_device() {
    let (mut a, b) = (rig_of("a", Duration::ZERO).await, rig_of("b", Duration::ZERO).await);
    a.worker.config.step_limit = Duration::from_millis(300);
    submit(&a, 3).await;
    let (of_b, metrics) = (submit(&b, 3).await, b.worker.metrics.clone());
    let (began, has_begun) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let first = {
        let began = began.clone();
        move || {
            began.store(true, Ordering::SeqCst);
            hang()
        }
    };
    let second = {
        let has_begun = has_begun.clone();
        move || {
            has_begun.store(true, Ordering::SeqCst);
            Ok(())
        }
    };
    let load = move || {
        while !began.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    let units = vec![unit(a.worker, || Ok(()), first), unit(b.worker, load, second)];
    let (_stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(Pool::new(units, None).run(stopped, oneshot::channel().0));
    let ended = timeout(Duration::from_secs(30), running).await.expect("it ends").unwrap();
    let error = ended.expect_err("a step hangs");
    let hangs = matches!(&error, PoolError::Worker(WorkerError::EngineHangs { .. }));
    assert!(hangs, "{error}");
    assert!(!has_begun.load(Ordering::SeqCst), "it waited for its turn");
    assert_eq!(gauge(&metrics, "jobs_completed_total"), 0);
    let record = b.store.job(of_b.id).await.unwrap().unwrap();
    assert_eq!((record.state, record.attempts), (JobState::Queued, 0), "handed back");
}
