//! `tritmill batch run` from and to an object store, as a process.

#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a failed step of a test is a failed test")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use tritmill_servers::Moto;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/engine/tests/golden/bitnet-tiny");
const WITNESS: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/producer/data/tests/golden/pyarrow.parquet");

fn run(folder: &Path, moto: Option<&Moto>, input: &str, output: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tritmill"))
        .current_dir(folder)
        .args(["batch", "run", input, "-o", output, "--model", MODEL])
        .args(["--body", r#"{"max_tokens": 3, "ignore_eos": true}"#])
        .args(more)
        .env_remove("REDIS_URL")
        .env_remove("DATABASE_URL")
        .envs(moto.map(Moto::variables).into_iter().flatten())
        .output()
        .unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn rows_of_a_bucket_are_answered_into_a_bucket_and_kept_rights_are_named() {
    if Moto::program().is_none() {
        return tritmill_servers::skip("moto_server (cargo xtask test installs it)");
    }
    let moto = Moto::start(&["data"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let go = |input: &str, output: &str, more: &[&str]| {
        run(folder.path(), Some(&moto), input, output, more)
    };
    // To the bucket, as a table of answers of the witness; one row has no question.
    let options = ["--prompt-column", "question", "--id-column", "id", "--json"];
    let first = go(WITNESS, "s3://data/set/train-0.parquet", &options);
    assert_eq!(first.status.code(), Some(2), "{}", stderr(&first));
    let again = go(WITNESS, "s3://data/set/train-0.parquet", &options);
    let summary: serde_json::Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!((&summary["resumed"], &summary["tokens"]), (&5.into(), &0.into()), "{summary}");

    // From the folder of the bucket, to a local file.
    let options = ["--prompt-column", "content", "--id-column", "custom_id"];
    let second = go("s3://data/set/", "out.csv", &options);
    assert_eq!(second.status.code(), Some(2), "{}", stderr(&second));
    let text = fs::read_to_string(folder.path().join("out.csv")).unwrap();
    assert_eq!(text.lines().count(), 7, "{text}");
    let fourth = text.lines().nth(4).unwrap();
    assert!(fourth.starts_with("3,") && fourth.contains(",0.75,"), "{fourth}");

    let missing = go("s3://data/none.csv", "none.jsonl", &[]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("nothing is at s3://data/none.csv"), "{}", stderr(&missing));
    moto.require_rights().unwrap();
    let refused = go("s3://data/set/", "refused.jsonl", &[]);
    let message = stderr(&refused);
    assert!(message.contains("no right to use s3://data/set/"), "{message}");
    assert!(message.contains("AWS_ACCESS_KEY_ID"), "{message}");
}

#[test]
fn lines_go_in_and_out_compressed_and_schemes_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let line =
        |id| format!("{{\"custom_id\": \"{id}\", \"prompt\": \"hi {id}\", \"max_tokens\": 2}}\n");
    fs::write(folder.path().join("in.jsonl"), line("a") + &line("b")).unwrap();
    let plain = Command::new(env!("CARGO_BIN_EXE_tritmill"))
        .current_dir(folder.path())
        .args(["batch", "run", "in.jsonl", "-o", "out.jsonl.zst", "--model", MODEL])
        .output()
        .unwrap();
    assert_eq!(plain.status.code(), Some(0), "{}", stderr(&plain));
    let read = run(folder.path(), None, "out.jsonl.zst", "-", &["--prompt-column", "custom_id"]);
    assert_eq!(read.status.code(), Some(0), "{}", stderr(&read));
    let answers = String::from_utf8(read.stdout).unwrap();
    assert_eq!(answers.lines().count(), 2, "{answers}");
    assert!(answers.contains("\"row\":{\"id\":\"batch_req_"), "{answers}");

    let unknown = run(folder.path(), None, "ftp://h/in.csv", "out.jsonl", &[]);
    assert!(stderr(&unknown).contains("unknown scheme 'ftp'"), "{}", stderr(&unknown));
}

#[test]
fn options_that_would_have_no_effect_are_refused_and_an_empty_archive_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.jsonl"), "{\"prompt\": \"hi\"}\n").unwrap();
    fs::write(folder.path().join("cut.jsonl.gz"), "").unwrap();
    for (input, more, problem) in [
        ("in.jsonl", ["--split", "train"], "in.jsonl is one file: only a folder has splits"),
        ("in.jsonl", ["--priority", "low"], "--priority needs --server"),
        ("in.jsonl", ["--ca", "/nope"], "--ca needs --server"),
        ("cut.jsonl.gz", ["--endpoint", "chat"], "its content is missing"),
    ] {
        let refused = run(folder.path(), None, input, "out.jsonl", &more);
        assert_eq!(refused.status.code(), Some(1), "{input}: {}", stderr(&refused));
        assert!(stderr(&refused).contains(problem), "{}", stderr(&refused));
    }
    // An endpoint makes rows of plain lines.
    let more = ["--endpoint", "completions"];
    let answered = run(folder.path(), None, "in.jsonl", "out.jsonl", &more);
    assert_eq!(answered.status.code(), Some(0), "{}", stderr(&answered));
    let answers = fs::read_to_string(folder.path().join("out.jsonl")).unwrap();
    assert!(answers.contains("\"object\":\"text_completion\""), "{answers}");
}

#[test]
fn an_output_in_a_folder_that_is_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.jsonl"), "{\"prompt\": \"hi\"}\n").unwrap();
    for output in ["missing/out.jsonl", "missing/out.csv", "missing/out.parquet"] {
        let refused = run(folder.path(), None, "in.jsonl", output, &[]);
        assert_eq!(refused.status.code(), Some(1), "{output}: {}", stderr(&refused));
        let problem = format!("cannot write {output}.tritmill");
        assert!(stderr(&refused).contains(&problem), "{}", stderr(&refused));
        assert!(!folder.path().join("missing").exists(), "{output}");
    }
}

#[test]
fn an_output_may_not_be_a_file_of_the_input_folder() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    for name in ["a.csv", "b.csv"] {
        fs::write(data.join(name), "prompt\nhi\n").unwrap();
    }
    let refused = run(folder.path(), None, "data", "data/b.csv", &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("data/b.csv: it is a file of IN"), "{}", stderr(&refused));
    assert_eq!(fs::read_to_string(data.join("b.csv")).unwrap(), "prompt\nhi\n");
    // A new file there is not read by later runs to it.
    for more in [&[][..], &[], &["--restart"], &[]] {
        let output = run(folder.path(), None, "data", "data/out.csv", more);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains("2 of 2"), "{}", stderr(&output));
    }
}

#[test]
fn a_damaged_record_of_an_earlier_run_is_named_with_its_remedy() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.csv"), "prompt\nhi\n").unwrap();
    let again = |more: &[&str]| run(folder.path(), None, "in.csv", "out.csv", more);
    assert_eq!(again(&[]).status.code(), Some(0));
    fs::write(folder.path().join("out.csv.tritmill-data/run.json"), "").unwrap();
    let refused = again(&[]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    let problem = "cannot read out.csv.tritmill-data/run.json: EOF";
    assert!(stderr(&refused).contains(problem), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--restart begins anew"), "{}", stderr(&refused));
    assert_eq!(again(&["--restart"]).status.code(), Some(0));
}

#[test]
fn a_source_that_cannot_be_read_to_its_end_is_not_called_cut() {
    let folder = tempfile::tempdir().unwrap();
    let row = "z".repeat(5_000_000);
    fs::write(folder.path().join("in.csv"), format!("prompt,x\nhi,1\nhi,{row}\nhi,1\n")).unwrap();
    fs::write(folder.path().join("in.parquet"), "no such thing").unwrap();
    let refused = run(folder.path(), None, "in.csv", "out.csv", &[]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    let problem = "IN cannot be read to its end: its first 1 rows are answered, mend it";
    assert!(stderr(&refused).contains(problem), "{}", stderr(&refused));
    let refused = run(folder.path(), None, "in.parquet", "other.csv", &[]);
    assert!(stderr(&refused).contains("Corrupt footer"), "{}", stderr(&refused));
}

#[test]
fn an_output_that_was_changed_since_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.csv"), "prompt\nhi\n").unwrap();
    let again = || {
        let output = run(folder.path(), None, "in.csv", "out.csv", &[]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stderr(&output)
    };
    again();
    assert!(!again().contains("is kept as"), "its own output");
    fs::write(folder.path().join("out.csv"), "notes").unwrap();
    let said = again();
    assert!(said.contains("the old output is kept as out.csv.old"), "{said}");
    assert_eq!(fs::read_to_string(folder.path().join("out.csv.old")).unwrap(), "notes");
}
