//! Log lines about a job name it, its attempt and its trace, and nothing of its prompt.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

mod rig;

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use rig::{alone, job, rig};
use tokio::sync::watch;
use tritmill_queue::{Job, Prompt, Store};
use tritmill_worker::{Mode, Stop};

/// A log in memory.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn job_is_logged_with_its_attempt_and_trace() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_env_filter("tritmill_worker=debug")
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();
    let rig = rig(Mode::Embedded, Duration::ZERO).await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let traceparent = Some(format!("00-{trace}-00f067aa0ba902b7-01").parse().unwrap());
    let traced = Job { traceparent, ..job(Prompt::Text("a secret".into()), 2) };
    let refused = job(Prompt::Tokens(vec![u32::MAX]), 2);
    rig.store.submit(&[traced.clone(), refused.clone()]).await.unwrap();
    let (_stop, stopped) = watch::channel(Stop::No);
    rig.worker.run(alone(rig.engine), stopped).await.unwrap();
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let line = |job: &Job, what: &str| {
        let id = format!("job={} ", job.id);
        let found = log.lines().find(|line| line.contains(&id) && line.contains(what));
        found.unwrap_or_else(|| panic!("no {what} of {}: {log}", job.id))
    };
    for what in ["claimed", "how=\"completed\""] {
        let logged = line(&traced, what);
        let all = ["queue=tiny@i2_s", "attempt=1", trace, "parent_id=\"00f067aa0ba902b7\""];
        assert!(all.iter().all(|part| logged.contains(part)), "{logged}");
    }
    let logged = line(&refused, "how=\"error\"");
    assert!(logged.contains("attempt=1") && !logged.contains("trace_id"), "{logged}");
    assert!(!log.contains("a secret"), "{log}");
}
