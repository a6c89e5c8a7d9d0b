//! The output file as a view of the store, on lines that need no model.

#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{fs, path::Path};

use tritmill_producer::{BatchFile, Identity, Notice, Settings};
use tritmill_queue::QueueName;

async fn run(folder: &Path, ordered: bool) -> Vec<Notice> {
    let settings = Settings {
        input: folder.join("in.jsonl"),
        output: folder.join("out.jsonl"),
        ordered,
        restart: false,
        identity: Identity { model: "tiny".into(), numerics_class: "class".into() },
        queue: QueueName { model: "tiny".into(), format: "i2_s".into() },
    };
    let mut file = BatchFile::open(settings).await.unwrap();
    file.read(|_, _| true).await.unwrap().unwrap();
    file.catch_up().await.unwrap();
    let mut notices = file.take_notices();
    notices.extend(file.close().await.unwrap());
    notices
}

#[tokio::test]
async fn a_whole_output_is_left_alone_and_a_torn_one_is_mended() {
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
