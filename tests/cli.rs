//! The program as a whole: help, doctor, unknown commands, the demo.

#[expect(dead_code, reason = "each test program uses its part of it")]
mod program;

use program::{fails, json, run};
use serde_json::Value;

const COMMANDS: [&str; 42] = [
    "",
    "admin",
    "standalone",
    "keys",
    "keys create",
    "keys list",
    "keys revoke",
    "tenants",
    "tenants list",
    "tenants limit",
    "demo",
    "batch",
    "batch run",
    "model",
    "model inspect",
    "model logits",
    "model generate",
    "model synth",
    "model convert",
    "kv",
    "kv inspect",
    "kv prune",
    "kv verify",
    "bench",
    "bench engine",
    "bench e2e",
    "bench fork",
    "bench kernels",
    "bench kv",
    "bench prefixes",
    "bench queue",
    "bench tuning",
    "queue show",
    "queue allow-class",
    "queue withdraw-class",
    "batches create",
    "batches results",
    "batches delete",
    "workers",
    "workers deletion-costs",
    "worker",
    "doctor",
];

#[test]
fn every_command_has_help() {
    for command in COMMANDS {
        let words: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
        let output = run(&words);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{command}");
        assert!(output.stdout.contains("Usage: tritmill"), "{command}: {}", output.stdout);
        // A command has examples; a group of commands lists them.
        let examples = output.stdout.contains("Examples:");
        assert!(examples || output.stdout.contains("Commands:"), "{command}: {}", output.stdout);
    }
}

#[test]
fn unknown_commands_are_refused_with_a_hint() {
    fails(&["docter"], "doctor");
    fails(&["--nonsense"], "unexpected argument");
}

#[test]
fn unsupported_device_lists_are_refused() {
    fails(&["demo", "--device", "cuda:0,cpu"], "only a worker can use both");
    fails(&["demo", "--device", "gpu"], "cuda:all");
    let one = "expected one device, not cuda:0,cuda:1";
    fails(&["bench", "engine", "--device", "cuda:0,cuda:1"], one);
    fails(&["model", "generate", "--prompt", "a", "--device", "cuda:all"], "not cuda:all");
}

#[test]
fn doctor_reports_the_machine() {
    let answer = json(&["doctor", "--json"]);
    assert_eq!(answer["ok"], true);
    assert!(answer["cores"].as_u64() >= Some(1));
    let isas = answer["isas"].as_array().expect("a list of ISAs");
    assert_eq!(isas[0], "scalar");
    assert!(isas.contains(&answer["isa"]));
    assert!(answer["memory_bandwidth_bytes_per_s"].as_f64() > Some(1e6));
    for check in answer["checks"].as_array().expect("checks") {
        assert_eq!(check["ok"], true, "{check}");
    }
}

#[test]
fn demo_answers_every_line_with_high_accuracy() {
    let output = run(&["demo", "--json"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let figures: Value =
        serde_json::from_str(output.stdout.lines().next_back().expect("figures")).expect("JSON");
    assert_eq!(figures["jobs"], 1000);
    assert!(figures["accuracy"].as_f64() >= Some(0.995), "{figures}");
    assert!(figures["tokens_per_s"].as_f64() > Some(0.0));
    assert!(figures["jobs_per_s"].as_f64() > Some(0.0));
}

#[test]
fn built_in_model_needs_no_files() {
    let line = "MEETING 03/Mar/24 at 9:30";
    let answer = json(&["model", "generate", "--chat", "--prompt", line, "--json"]);
    assert_eq!((&answer["text"], &answer["finish_reason"]), (&"2024-03-03".into(), &"stop".into()));
}

#[test]
fn a_closed_standard_error_ends_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("in.jsonl"), "{\"prompt\": \"Due 3/3/24\"}\n").expect("IN");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(["batch", "run", "in.jsonl", "-o", "out.jsonl"]).current_dir(folder.path());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().expect("it starts");
    drop(child.stderr.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    let answers = std::fs::read_to_string(folder.path().join("out.jsonl")).expect("OUT");
    assert_eq!(answers.lines().count(), 1);
}

/// Runs the program in a folder with this `tritmill.toml`; returns its exit code and standard error.
fn with_file(text: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("tritmill.toml"), text).expect("a settings file");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"));
    command.args(arguments).current_dir(folder.path()).env_remove("RUST_LOG");
    let output = command.output().expect("it starts");
    (output.status.code(), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn settings_of_the_file_need_each_other_as_options_do() {
    let serve = ["standalone", "--api", "127.0.0.1:0", "--store", "t.sqlite"];
    for (text, problem) in [
        ("tls-cert = 'c.pem'", "--tls-cert and --tls-key need each other"),
        ("tls-key = 'k.pem'", "--tls-cert and --tls-key need each other"),
        ("oidc-client-id = 'me'", "single sign-on needs --oidc-issuer"),
        ("oidc-issuer = 'https://id.example'", "--oidc-issuer needs --oidc-client-id"),
        ("[standalone]\nkv-peers = 'http://127.0.0.1:1'", "--kv-peers needs --kv-peer-key"),
    ] {
        let (code, stderr) = with_file(text, &serve);
        assert_eq!(code, Some(1), "{text}: {stderr}");
        assert!(stderr.contains(problem), "{text}: {stderr}");
    }
}

#[test]
fn refused_values_of_the_file_name_it() {
    let (code, stderr) = with_file("threads = 'x'", &["doctor"]);
    assert_eq!(code, Some(0), "an option that the command lacks: {stderr}");
    let (code, stderr) = with_file("max-file-mib = 'x'", &["standalone"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("The value comes from tritmill.toml."), "{stderr}");
    for typed in [&["model", "synth", "--shape", "bitnet-2b", "-o"][..], &["submit", "--window=x"]]
    {
        let (_, stderr) = with_file("redis = 'redis://127.0.0.1'", typed);
        assert!(stderr.contains("error:") && !stderr.contains("The value comes from"), "{stderr}");
    }
    let variable = "TRITMILL_CUDA_DISABLE";
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tritmill"));
    let output = command.args(["bench", "engine"]).env(variable, "x").output().expect("it starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(stderr.contains(&format!("The value comes from the variable {variable}.")), "{stderr}");
}

#[test]
fn settings_for_runs_with_a_server_stop_no_others() {
    let run = ["batch", "run", "none.jsonl", "-o", "out.jsonl"];
    let (code, stderr) = with_file("priority = 'low'", &run);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("none.jsonl") && !stderr.contains("--server"), "{stderr}");
    let (_, stderr) = with_file("", &[&run[..], &["--priority", "low"]].concat());
    assert!(stderr.contains("--priority needs --server"), "{stderr}");
    let half = "[batch.run]\nescalate-to = 'small'";
    let server = ["--server", "http://127.0.0.1:1", "--key", "k"];
    let server = [&["batch", "run", "tritmill.toml", "-o", "out.jsonl"][..], &server].concat();
    let (_, stderr) = with_file(half, &server);
    assert!(stderr.contains("--escalate-to and --escalate-after need each other"), "{stderr}");
}
