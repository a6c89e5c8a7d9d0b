//! The output file as a view of the store, with lines that need no model.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{fs, path::Path, time::Duration};

use tritmill_client::{BatchFile, Identity, Notice, Settings};
use tritmill_queue::{
    Claimant, ErrorKind, FinishedAttempt, JobError, Outcome, QueueName, Store as _,
};

fn settings(folder: &Path) -> Settings {
    Settings {
        input: folder.join("in.jsonl"),
        output: folder.join("out.jsonl"),
        state: None,
        ordered: false,
        restart: false,
        retry_failed: false,
        identity: Identity {
            model: "tiny".into(),
            numerics_class: "class".into(),
            limits: "none".into(),
        },
        queue: QueueName { model: "tiny".into(), format: "i2_s".into() },
    }
}

async fn run(folder: &Path, ordered: bool) -> Vec<Notice> {
    let settings = Settings { ordered, ..settings(folder) };
    let mut file = BatchFile::open(settings).await.unwrap();
    file.read(|_, _| true).await.unwrap().unwrap();
    file.catch_up().await.unwrap();
    let mut notices = file.take_notices();
    notices.extend(file.close().await.unwrap());
    notices
}

#[tokio::test]
async fn complete_output_is_kept_and_a_torn_one_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out.jsonl");
    fs::write(folder.path().join("in.jsonl"), "oops\n".repeat(200)).unwrap();
    for ordered in [false, true] {
        run(folder.path(), ordered).await;
        let whole = fs::read(&output).unwrap();
        assert_eq!(whole.iter().filter(|byte| **byte == b'\n').count(), 200);
        assert_eq!(run(folder.path(), ordered).await, []);

        let cut = whole.len() - 7;
        fs::write(&output, &whole[..cut]).unwrap();
        assert!(matches!(run(folder.path(), ordered).await[..], [Notice::OutputTorn { .. }]));
        assert_eq!(fs::read(&output).unwrap(), whole);

        fs::write(&output, [&whole[..], b"torn"].concat()).unwrap();
        let notices = run(folder.path(), ordered).await;
        assert_eq!(notices, [Notice::OutputTorn { bytes: 4 }]);
        assert_eq!(fs::read(&output).unwrap(), whole);

        fs::write(&output, [&whole[..], b"{}\n"].concat()).unwrap();
        assert_eq!(run(folder.path(), ordered).await, [Notice::OutputRewritten]);
        assert_eq!(fs::read(&output).unwrap(), whole);
    }
}

#[tokio::test]
async fn only_server_failures_run_again() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"prompt\": \"cancelled\"}\n{\"prompt\": \"refused\"}\noops\n";
    fs::write(folder.path().join("in.jsonl"), lines).unwrap();
    let settings = settings(folder.path());
    let mut file = BatchFile::open(settings.clone()).await.unwrap();
    file.read(|_, _| true).await.unwrap().unwrap();
    let store = file.store();
    let queued = store.queued(&settings.queue, None, 9).await.unwrap();
    let [first, second] = [queued[0].id, queued[1].id];
    let by = Claimant::new("test", Duration::from_secs(60));
    let held = store.claim(&[second], by).await.unwrap()[0].claim_ref();
    let error = JobError {
        kind: ErrorKind::InvalidRequest,
        code: "context_length_exceeded".into(),
        message: "too long".into(),
        param: None,
    };
    store
        .finish(&[FinishedAttempt {
            claim: held,
            outcome: Outcome::Error(error),
            first_token: None,
        }])
        .await
        .unwrap();
    assert_eq!(store.cancel(&[first]).await.unwrap(), [first]);
    file.catch_up().await.unwrap();
    file.close().await.unwrap();

    let again = Settings { retry_failed: true, ..settings.clone() };
    let mut file = BatchFile::open(again).await.unwrap();
    let counts = file.read(|_, _| true).await.unwrap().unwrap();
    assert_eq!(file.take_notices(), [Notice::Retried { lines: 1 }]);
    assert_eq!((counts.lines, counts.refused, counts.resumed), (3, 1, 1));
    let queued = file.store().queued(&settings.queue, None, 9).await.unwrap();
    assert_eq!(queued.len(), 1);
    assert_ne!(queued[0].id, first, "a finished job stays finished");
}

#[tokio::test]
async fn lines_that_begin_alike_follow_each_other() {
    const ABOUT: usize = 5;
    let folder = tempfile::tempdir().unwrap();
    let line = |n: usize| match n {
        0..3 => format!("{{\"prompt\": \"short {n}\"}}\n"),
        _ => format!("{{\"prompt\": \"{} {n}\"}}\n", format!("about {} ", n % ABOUT).repeat(60)),
    };
    fs::write(folder.path().join("in.jsonl"), (0..103).map(line).collect::<String>()).unwrap();
    let settings = settings(folder.path());
    let mut file = BatchFile::open(settings.clone()).await.unwrap();
    file.read(|_, _| true).await.unwrap().unwrap();
    let (store, mut ids) = (file.store(), Vec::new());
    loop {
        let page = store.queued(&settings.queue, ids.last().copied(), 8).await.unwrap();
        ids.extend(page.iter().map(|entry| entry.id));
        if page.is_empty() {
            break;
        }
    }
    // Ids are in the order of the file.
    let mut sorted = ids.clone();
    sorted.sort_unstable();
    let lines: Vec<usize> = ids.iter().map(|id| sorted.binary_search(id).unwrap()).collect();
    assert_eq!(lines.len(), 103);
    assert_eq!(lines[..3], [0, 1, 2], "short prompts, in the order of the file");
    let mut groups: Vec<usize> = lines[3..].iter().map(|line| line % ABOUT).collect();
    groups.dedup();
    assert_eq!(groups.len(), ABOUT, "each begin once: {groups:?}");
}
