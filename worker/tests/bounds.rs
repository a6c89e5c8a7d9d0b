//! A listener that does not read the commits of a worker.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::time::Duration;

use rig::{alone, engine_on, eventually, gauge, job, rig};
use tokio::sync::{mpsc, watch};
use tritmill_queue::{Job, Prompt, Store};
use tritmill_worker::{Mode, Stop};

#[tokio::test(flavor = "multi_thread")]
async fn unread_commits_delay_further_commits_and_none_is_lost() {
    let mut rig = rig(Mode::Service, Duration::from_secs(60)).await;
    let (committed, mut commits) = mpsc::channel(1);
    rig.worker.committed = Some(committed);
    rig.engine = engine_on(|| Ok(()));
    let jobs: Vec<Job> = (0..300).map(|_| job(Prompt::Tokens(vec![1, 2]), 1)).collect();
    rig.store.submit(&jobs).await.unwrap();
    let metrics = rig.worker.metrics.clone();
    let (stop, stopped) = watch::channel(Stop::No);
    let running = tokio::spawn(rig.worker.run(alone(rig.engine), stopped));
    eventually("results wait for the listener", || {
        gauge(&metrics, "results_waiting") > 100 && gauge(&metrics, "jobs_running") == 0
    })
    .await;
    assert!(gauge(&metrics, "jobs_completed_total") < 300);
    let mut settled = 0;
    while settled < 300 {
        settled += commits.recv().await.unwrap().settled.len();
    }
    assert_eq!(rig.store.progress(None).await.unwrap().completed, 300);
    stop.send(Stop::Drain).unwrap();
    running.await.unwrap().unwrap();
}
