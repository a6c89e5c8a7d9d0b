//! A device that fails repeatedly does not use up the attempts of a whole queue.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use rig::{alone, engine_on, eventually, gauge, job, rig};
use tokio::sync::watch;
use tritmill_engine::backend::StepError;
use tritmill_queue::{Job, JobState, Prompt, Store};
use tritmill_worker::{Mode, Stop, WorkerError};

#[tokio::test(flavor = "multi_thread")]
async fn failing_device_is_suspended_and_probed_with_one_job() {
    let mut rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let broken = Arc::new(AtomicBool::new(true));
    let steps = Arc::new(AtomicU32::new(0));
    let (fails, failed) = (broken.clone(), steps.clone());
    rig.engine = engine_on(move || {
        if fails.load(Ordering::SeqCst) {
            failed.fetch_add(1, Ordering::SeqCst);
            return Err(StepError::Device("off the bus".into()));
        }
        Ok(())
    });
    // A step runs at most five jobs, and at most five are held when the third failure is reported: half of
    // these jobs are never touched.
    let jobs: Vec<Job> =
        (0..30).map(|_| Job { attempts_max: 8, ..job(Prompt::Tokens(vec![1, 2, 3]), 3) }).collect();
    rig.store.submit(&jobs).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    eventually("it is not ready", || {
        metrics.not_ready_reason().is_some_and(|why| why.contains("off the bus"))
    })
    .await;
    assert_eq!(gauge(&metrics, "device_rests"), 1);
    eventually("nothing is held", || {
        gauge(&metrics, "jobs_running") + gauge(&metrics, "results_waiting") == 0
    })
    .await;
    // Jobs reach the engine one by one, so a step may run one or all.
    let opened_after = steps.load(Ordering::SeqCst);
    assert!((3..=15).contains(&opened_after), "{opened_after} steps");
    assert_eq!(gauge(&metrics, "device_failures_total"), i64::from(opened_after));
    let attempts = async || {
        let mut attempts = 0;
        for job in &jobs {
            attempts += rig.store.job(job.id).await.unwrap().unwrap().attempts;
        }
        attempts
    };
    assert!(attempts().await <= 15);
    // The first probe fails, which doubles the wait.
    eventually("it is tried once", || steps.load(Ordering::SeqCst) > opened_after).await;
    assert!(metrics.not_ready_reason().is_some());
    broken.store(false, Ordering::SeqCst);
    eventually("it is ready", || metrics.not_ready_reason().is_none()).await;
    assert_eq!(gauge(&metrics, "device_rests"), 0);
    eventually("all are answered", || gauge(&metrics, "jobs_completed_total") == 30).await;
    assert!(attempts().await <= 16, "one for the probe");
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_with_lost_device_hands_back_its_claims_and_ends() {
    let mut rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let mut steps = 0;
    rig.engine = engine_on(move || {
        steps += 1;
        match steps {
            1..3 => Ok(()),
            _ => Err(StepError::DeviceLost("an illegal address".into())),
        }
    });
    let jobs: Vec<Job> = (0..30).map(|_| job(Prompt::Tokens(vec![1, 2, 3]), 90)).collect();
    rig.store.submit(&jobs).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    let error = rig.worker.run(alone(rig.engine), stopped).await.unwrap_err();
    assert!(matches!(error, WorkerError::DeviceLost { .. }), "{error}");
    assert!(error.to_string().contains("an illegal address"), "{error}");
    let mut attempts = 0;
    for job in &jobs {
        let record = rig.store.job(job.id).await.unwrap().unwrap();
        assert!(!record.state.is_terminal(), "{:?}", record.state);
        assert_ne!(record.state, JobState::Running, "nothing is left to expire");
        attempts += record.attempts;
    }
    assert!((1..=5).contains(&attempts), "only the jobs of the step: {attempts}");
}
