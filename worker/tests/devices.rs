//! A worker of several devices: one pull loop, an engine for each.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use rig::{engine_on, eventually, gauge, hang, job, rig};
use tokio::sync::watch;
use tritmill_engine::backend::StepError;
use tritmill_queue::{Job, JobState, Prompt, Store};
use tritmill_worker::{Device, Mode, Stop, WorkerError};

/// Returns a device scripted by the test, and the number of its steps.
fn device(
    name: &str,
    mut step: impl FnMut(u32) -> Result<(), StepError> + Send + 'static,
) -> (Device, Arc<AtomicU32>) {
    let steps = Arc::new(AtomicU32::new(0));
    let counted = steps.clone();
    let engine = engine_on(move || {
        // Slow enough that every device gets jobs.
        std::thread::sleep(Duration::from_millis(1));
        step(counted.fetch_add(1, Ordering::SeqCst) + 1)
    });
    (Device { name: name.to_owned(), engine }, steps)
}

fn jobs(count: usize, max_tokens: u32) -> Vec<Job> {
    let one = || Job { attempts_max: 8, ..job(Prompt::Tokens(vec![1, 2, 3]), max_tokens) };
    (0..count).map(|_| one()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_share_the_jobs_of_a_worker() {
    let rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let ((a, steps_a), (b, steps_b)) = (device("cuda:0", |_| Ok(())), device("cuda:1", |_| Ok(())));
    let all = jobs(60, 20);
    rig.store.submit(&all).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(vec![a, b], stopped));
    eventually("more is held than one device has slots for", || {
        gauge(&metrics, "jobs_running") > 5
    })
    .await;
    eventually("all are answered", || gauge(&metrics, "jobs_completed_total") == 60).await;
    // Each job takes 20 steps of its sequence, of five at most in a step.
    let least = 60 * 20 / 5 / 3;
    for steps in [&steps_a, &steps_b] {
        let steps = steps.load(Ordering::SeqCst);
        assert!(steps > least, "a device ran {steps} steps");
    }
    let metrics = metrics.encode();
    for (device, steps) in [("cuda:0", &steps_a), ("cuda:1", &steps_b)] {
        let steps = steps.load(Ordering::SeqCst);
        let line = format!("tritmill_engine_steps_total{{device=\"{device}\"}} {steps}");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
    for job in &all {
        let record = rig.store.job(job.id).await.unwrap().unwrap();
        assert_eq!((record.state, record.attempts, record.epoch), (JobState::Completed, 0, 1));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn embedded_worker_with_several_devices_ends_when_all_is_answered() {
    let rig = rig(Mode::Embedded, Duration::ZERO).await;
    let (a, b) = (device("a", |_| Ok(())).0, device("b", |_| Ok(())).0);
    rig.store.submit(&jobs(50, 3)).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    rig.worker.run(vec![a, b], stopped).await.unwrap();
    assert_eq!(rig.store.progress(None).await.unwrap().completed, 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_device_is_suspended_while_others_work() {
    let rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let broken = Arc::new(AtomicBool::new(true));
    let fails = broken.clone();
    let (bad, tried) = device("bad", move |_| match fails.load(Ordering::SeqCst) {
        true => Err(StepError::Device("off the bus".into())),
        false => Ok(()),
    });
    let (good, _) = device("good", |_| Ok(()));
    rig.store.submit(&jobs(60, 10)).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(vec![bad, good], stopped));
    eventually("one rests", || gauge(&metrics, "device_rests") == 1).await;
    assert_eq!(metrics.not_ready_reason(), None, "the other works");
    eventually("all are answered", || gauge(&metrics, "jobs_completed_total") == 60).await;
    broken.store(false, Ordering::SeqCst);
    let tried_before = tried.load(Ordering::SeqCst);
    let mut more = 0;
    while gauge(&metrics, "device_rests") == 1 {
        // The device gets its next job when its wait is over, although the other device has room.
        rig.store.submit(&jobs(1, 2)).await.unwrap();
        more += 1;
        assert!(more < 300, "it is not tried again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tried.load(Ordering::SeqCst) > tried_before);
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_device_ends_worker_and_hands_back_jobs_of_all_devices() {
    let rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let (good, _) = device("cuda:0", |_| Ok(()));
    let (bad, _) = device("cuda:1", |step| match step {
        ..40 => Ok(()),
        _ => Err(StepError::DeviceLost("an illegal address".into())),
    });
    let all = jobs(10, 90_000);
    rig.store.submit(&all).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = rig.worker.run(vec![good, bad], stopped).await.unwrap_err();
    let WorkerError::DeviceLost { device, .. } = &error else { panic!("{error}") };
    assert_eq!(device, "cuda:1");
    assert!(error.to_string().contains("cuda:1: device lost: an illegal address"), "{error}");
    let (mut attempts, mut saved) = (0, 0);
    for job in &all {
        let record = rig.store.job(job.id).await.unwrap().unwrap();
        assert!(!record.state.is_terminal(), "{:?}", record.state);
        assert_ne!(record.state, JobState::Running, "nothing is left to expire");
        attempts += record.attempts;
        let by = tritmill_queue::Claimant::new("next", Duration::from_secs(60));
        let claims = rig.store.claim(&[job.id], by).await.unwrap();
        saved += claims.iter().filter(|claim| claim.checkpoint.is_some()).count();
    }
    assert!((1..=5).contains(&attempts), "only jobs of the lost device: {attempts}");
    assert!(saved > 0, "jobs of the other device can be continued");
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_step_on_one_device_ends_worker() {
    let mut rig = rig(Mode::Service, Duration::from_secs(60)).await;
    rig.worker.config.step_limit = Duration::from_millis(300);
    let (good, _) = device("good", |_| Ok(()));
    let (bad, _) = device("bad", |_| hang());
    rig.store.submit(&jobs(10, 90_000)).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = rig.worker.run(vec![good, bad], stopped).await.unwrap_err();
    assert!(
        matches!(&error, WorkerError::EngineHangs { device, .. } if device == "bad"),
        "{error}"
    );
    let progress = rig.store.progress(None).await.unwrap();
    assert_eq!((progress.queued, progress.running), (10, 0));
}
