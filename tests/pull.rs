//! `tritmill model pull`, `model list` and `--model hf:…`, with a server on this machine instead of the hub.

#[path = "../engine/hub/tests/fake_hub/mod.rs"]
#[allow(dead_code, reason = "the tests of the crate use the rest")]
mod fake_hub;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use fake_hub::{COMMIT, FakeHub, Faults, REPOSITORY};
use serde_json::{Value, json};
use tempfile::TempDir;
use tritmill_engine::files;

/// Returns the path of golden data.
fn golden(name: &str) -> String {
    format!("{}/engine/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A hub, and a home with an empty cache.
struct Rig {
    hub: FakeHub,
    home: TempDir,
}

impl Rig {
    /// With the golden files of these names, under these names.
    fn new(files: &[(&str, &str)], faults: Faults) -> Self {
        let read = |path: &str| fs::read(golden(path)).expect("the golden data is there");
        let contents: Vec<Vec<u8>> = files.iter().map(|(_, path)| read(path)).collect();
        let named = |((name, _), bytes): (&(_, _), _)| (*name, bytes);
        let files: Vec<(&str, &[u8])> =
            files.iter().zip(contents.iter().map(Vec::as_slice)).map(named).collect();
        let home = tempfile::tempdir().expect("a temporary folder");
        Self { hub: FakeHub::start(&files, faults), home }
    }

    fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tritmill"));
        let inherited = std::env::vars().map(|(name, _)| name);
        for name in inherited.filter(|name| name.starts_with("HF_") || name == "RUST_LOG") {
            command.env_remove(name);
        }
        command.args(arguments).current_dir(self.home.path());
        command.env("HF_HOME", self.home.path()).env("HF_ENDPOINT", &self.hub.endpoint);
        command.envs(variables.iter().copied()).output().expect("the program starts")
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run_with(arguments, &[]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        assert_eq!(stderr, "", "no progress beside JSON");
        serde_json::from_slice(&output.stdout).expect("one JSON value")
    }

    fn fails(&self, arguments: &[&str], variables: &[(&str, &str)]) -> String {
        let output = self.run_with(arguments, variables);
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        stderr
    }
}

const GGUF: [(&str, &str); 2] =
    [("synth-i2_s-q6k.gguf", "gguf/synth-i2_s-q6k.gguf"), ("README.md", "README.md")];

#[test]
fn pull_prints_where_the_model_is_and_what_to_do_next() {
    let rig = Rig::new(&GGUF, Faults::default());
    let output = rig.run_with(&["model", "pull", REPOSITORY], &[]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let path = Path::new(stdout.trim_end());
    let snapshot = rig.home.path().join("hub/models--tiny--model-1.58/snapshots").join(COMMIT);
    assert_eq!(path, snapshot.join("synth-i2_s-q6k.gguf"));
    let original = fs::read(golden("gguf/synth-i2_s-q6k.gguf")).expect("golden data");
    assert!(fs::read(path).expect("it is there") == original);
    assert!(stderr.contains("pulling synth-i2_s-q6k.gguf, "), "{stderr}");
    let next = "next: tritmill batch run in.jsonl -o out.jsonl --model hf:tiny/model-1.58\n";
    assert!(stderr.ends_with(next), "{stderr}");

    let again = rig.json(&["model", "pull", REPOSITORY, "--revision", COMMIT, "--json"]);
    assert_eq!(again["path"], path.to_str().expect("UTF-8"));
    assert_eq!((&again["commit"], &again["downloaded_bytes"]), (&json!(COMMIT), &json!(0)));
    assert_eq!(again["size_bytes"], original.len());
    assert_eq!(again["model"], format!("hf:{REPOSITORY}@{COMMIT}"));
}

#[test]
fn refusals_take_one_line_and_say_what_to_do() {
    let gate = Some("hf_right".to_owned());
    let rig = Rig::new(&GGUF, Faults { gate, cuts: vec![5000], ..Faults::default() });
    let pull = ["model", "pull", REPOSITORY, "--json"];
    let error = rig.fails(&pull, &[]);
    assert!(error.contains("is gated: accept its licence at http://127.0.0.1:"), "{error}");
    let error = rig.fails(&pull, &[("HF_HUB_OFFLINE", "1")]);
    assert!(error.contains("not completely in the cache"), "{error}");
    let error = rig.fails(&["model", "pull", REPOSITORY, "--file", "x.gguf"], &[]);
    assert!(error.contains("tiny/model-1.58 has no file x.gguf at revision main"), "{error}");
    let error = rig.fails(&pull, &[("HF_ENDPOINT", "mirror")]);
    assert!(error.contains("HF_ENDPOINT 'mirror' is not an http:// or https:// URL"), "{error}");
    let error = rig.fails(&["model", "inspect", "--model", "hf:name"], &[]);
    assert!(error.contains("--model hf:name: 'name' is not a repository"), "{error}");
    let output = rig.run_with(&pull, &[("HF_TOKEN", "hf_right")]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    // The connection was cut once.
    assert!(
        stderr.starts_with("note: synth-i2_s-q6k.gguf: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
    let inspect = ["model", "inspect", "--model", "hf:tiny/model-1.58", "--json"];
    let offline = rig.run_with(&inspect, &[("HF_HUB_OFFLINE", "1")]);
    let inspection: Value = serde_json::from_slice(&offline.stdout).expect("JSON");
    assert_eq!(inspection["name"], "model-1.58");
}

#[test]
fn batch_runs_on_a_model_of_the_hub() {
    let texts =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    let paths = texts.map(|name| (name, format!("bitnet-tiny/{name}")));
    let mut files: Vec<(&str, &str)> = paths.iter().map(|(n, path)| (*n, path.as_str())).collect();
    files.push(("model.safetensors", "bitnet-tiny/model.safetensors"));
    files.retain(|(_, path)| Path::new(&golden(path)).exists());
    let rig = Rig::new(&files, Faults::default());
    fs::write(rig.home.path().join("in.jsonl"), "{\"prompt\": \"Hello\", \"max_tokens\": 4}\n")
        .expect("a file");
    let answer = |model: &str, out: &str| -> Value {
        let arguments = ["batch", "run", "in.jsonl", "-o", out, "--model", model];
        let output = rig.run_with(&arguments, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line = fs::read(rig.home.path().join(out)).expect("the answers");
        serde_json::from_slice(&line).expect("one line")
    };
    let pulled = answer("hf:tiny/model-1.58", "pulled.jsonl");
    let local = answer(&golden("bitnet-tiny"), "local.jsonl");
    let body = |answer: &Value| answer["response"]["body"].clone();
    assert_eq!(body(&pulled)["choices"], body(&local)["choices"]);
    assert_eq!(body(&pulled)["model"], "model-1.58");
}

#[test]
fn list_has_models_with_sizes_that_follow_from_their_shapes() {
    let rig = Rig::new(&GGUF, Faults::default());
    let output = rig.run_with(&["model", "list", "--json"], &[]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.lines().count() >= 18, "{text}");
    for line in text.lines() {
        let family: Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(family["path"], Value::Null, "the cache is empty");
    }
    for family in tritmill_hub::FAMILIES {
        let shape = files::shape(family.shape).expect("a known shape");
        let linear = |linear| {
            let (rows, cols) = shape.linear_shape(linear);
            (rows * cols) as f64
        };
        let of_layer = |layer| shape.linears(layer).iter().map(|of| linear(*of)).sum::<f64>();
        let linears = (0..shape.layer_count).map(of_layer).sum::<f64>() / shape.layer_count as f64;
        let packed = linears * shape.layer_count as f64 / 4.0;
        let table = (shape.vocab_size * shape.hidden_size) as f64;
        // A separate head has its 8-bit copy; the embedding stays in the file's pages.
        let tables = if shape.tied_head { 1.0 } else { 2.0 };
        let check = |what: &str, stated: u64, expect: f64| {
            let ratio = stated as f64 / expect;
            assert!((0.97..1.03).contains(&ratio), "{}: {what}: {ratio}", family.name);
        };
        if shape.pooling.is_some() {
            // Nothing multiplies by the embedding, which stays in the file's pages.
            check("download", family.download_bytes, packed + 2.0 * table);
            check("memory", family.memory_bytes, packed);
            continue;
        }
        if shape.group_scales && !shape.ternary_tables {
            // Linears as `TQ2_0`; embedding and head of a mixture of experts and a tied embedding as F16, else the embedding as `Q4_K`
            // and the head as `Q6_K`.
            let weights = linears * shape.layer_count as f64;
            let (embedding, head) = (144.0 / 256.0, 210.0 / 256.0);
            let (in_file, head) = match (shape.tied_head, shape.experts.is_some()) {
                (true, _) => (2.0, 2.0),
                (false, true) => (4.0, 2.0),
                (false, false) => (embedding + head, head),
            };
            check("download", family.download_bytes, weights * 66.0 / 256.0 + table * in_file);
            check("memory", family.memory_bytes, weights * 2.125 / 8.0 + table * (head + 1.0));
            continue;
        }
        if shape.group_scales {
            // Two bits and a share of a scale, for embedding and head, too; the embedding stays in the file's pages.
            let (weights, bytes) = (linears * shape.layer_count as f64, 2.125 / 8.0);
            check("download", family.download_bytes, (weights + table * tables) * bytes);
            check("memory", family.memory_bytes, (weights + table) * bytes);
            continue;
        }
        check("download", family.download_bytes, packed + 2.0 * table * tables);
        check("memory", family.memory_bytes, packed + (2.0 * tables + 1.0) * table);
    }
    let output = rig.run_with(&["model", "list"], &[]);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(text.contains("tritmill model pull microsoft/bitnet-b1.58-2B-4T-gguf"), "{text}");
}
