//! Workers that read each other's KV blocks.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    fleet::eventually,
    rig::{Admin, Caller},
    standalone::alone,
};

const SHARED: u64 = 160;

/// A model with recurrent layers, under the name of the prompts' model.
const RECURRENT: &str =
    concat!("demo=", env!("CARGO_MANIFEST_DIR"), "/engine/tests/golden/qwen35-tiny");

/// Starts a process whose KV blocks are in a folder.
fn start(folder: &Path, words: &[&str]) -> Admin {
    let mut command = alone(folder, &["standalone", "--json", "--threads", "1"]);
    command.args(["--api", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--kv-cache-dir"]);
    command.arg(folder.join("kv")).args(words);
    Admin::run(command)
}

/// Returns the names and sizes in bytes of the blocks and states in the folder of a process.
fn files(folder: &Path) -> Vec<(String, u64)> {
    let folders = fs::read_dir(folder.join("kv")).unwrap().flatten();
    let inside = folders.filter(|one| one.path().is_dir()).flat_map(|folder| {
        let name = folder.file_name().into_string().unwrap();
        let files = fs::read_dir(folder.path()).unwrap().flatten();
        files.map(move |file| {
            let name = name.clone() + &file.file_name().into_string().unwrap();
            (name.replace(".kv", ""), file.metadata().unwrap().len())
        })
    });
    inside.collect()
}

/// A prompt that begins like the others.
fn prompt(last: u64) -> Value {
    let begin = (0..SHARED).map(|at| (at * 37 + 5) % 250);
    let prompt: Vec<u64> = begin.chain([last; 8]).collect();
    json!({ "model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true })
}

/// Returns the text of the answer to a prompt, and its cached tokens.
fn answer(caller: &Caller, last: u64) -> (Value, Value) {
    let answer = caller.post("/v1/completions", &prompt(last)).json();
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert!(answer["choices"][0]["text"].is_string(), "{answer}");
    (answer["choices"][0]["text"].clone(), cached)
}

#[test]
fn blocks_are_read_from_another_worker_that_has_the_same_key() {
    let places: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
    let start = |place: usize, words: &[&str]| start(places[place].path(), words);
    let first = start(0, &["--kv-peer-key", "secret"]);
    let caller = first.first();
    let expected: Vec<Value> = (1..4).map(|last| answer(&caller, last).0).collect();
    let files =
        || -> Vec<String> { files(places[0].path()).into_iter().map(|(name, _)| name).collect() };
    eventually("the blocks are written", || files().len() as u64 >= SHARED / 16);

    let pages = first.ready("listen");
    let peers = format!("http://{pages}");
    let second = start(1, &["--kv-peers", &peers, "--kv-peer-key", "secret"]);
    assert_eq!(answer(&second.first(), 1), (expected[0].clone(), json!(SHARED)));
    let third = start(2, &["--kv-peers", &peers, "--kv-peer-key", "other"]);
    assert_eq!(answer(&third.first(), 2), (expected[1].clone(), json!(0)), "another key");
    // No worker listens there.
    let fourth = start(3, &["--kv-peers", "http://127.0.0.1:1", "--kv-peer-key", "secret"]);
    assert_eq!(answer(&fourth.first(), 3), (expected[2].clone(), json!(0)));

    let hash = &files()[0];
    let status =
        |path: &str, key: &str| Caller::new(pages.clone(), key.to_owned()).get(path).status;
    assert_eq!(status(&format!("/kv/{hash}"), "secret"), 200);
    assert_eq!(status(&format!("/kv/{hash}"), ""), 401);
    assert_eq!(status(&format!("/kv/{}", "0".repeat(64)), "secret"), 404);
    assert_eq!(status("/kv/..%2f..%2fstore", "secret"), 404);
    let find = |names: Value, key: &str| {
        let answer = Caller::new(pages.clone(), key.to_owned()).post("/kv/find", &names);
        (answer.status, if answer.status == 200 { answer.json() } else { Value::Null })
    };
    let names = json!(["0".repeat(64), hash, "../store", files()[1]]);
    assert_eq!(find(names.clone(), "secret"), (200, json!([1, 3])));
    assert_eq!(find(names, "other").0, 401);
    assert_eq!(find(json!(vec![hash; 8193]), "secret").0, 413);
}

#[test]
fn states_of_recurrent_layers_are_read_from_another_worker() {
    let places: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let words = ["--model", RECURRENT, "--kv-peer-key", "secret"];
    let first = start(places[0].path(), &words);
    let caller = first.first();
    let expected: Vec<Value> = (1..4).map(|last| answer(&caller, last).0).collect();
    // A state is a hundred times as large as a block of the attention layers.
    let is_state = |(_, bytes): &(String, u64)| *bytes > 100_000;
    eventually("the state is written", || files(places[0].path()).iter().any(is_state));
    let peers = format!("http://{}", first.ready("listen"));
    let second = start(places[1].path(), &[&words[..], &["--kv-peers", &peers]].concat());
    let caller = second.first();
    for (last, expected) in (1..).zip(expected) {
        assert_eq!(answer(&caller, last), (expected, json!(SHARED)));
    }
}
