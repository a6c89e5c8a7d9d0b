//! The unmodified `openai` package from PyPI against a real service. `cargo xtask test` installs it.

use std::{path::Path, process::Command};

use serde_json::json;

use crate::{
    fleet::{Fleet, eventually},
    rig::{Admin, key},
};

/// Where `cargo xtask test` installs the package.
pub const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/openai/bin/python");

/// Runs a script with the first key; returns its output, or `None` if the package is not installed.
fn python(fleet: &Fleet, admin: &Admin, script: &str) -> Option<String> {
    if !Path::new(PYTHON).exists() {
        tritmill_servers::skip("the openai package (cargo xtask test installs it)");
        return None;
    }
    let mut command = Command::new(PYTHON);
    command
        .arg(format!("{}/tests/http/{script}", env!("CARGO_MANIFEST_DIR")))
        .env("OPENAI_BASE_URL", format!("http://{}/v1", admin.listen))
        .env("OPENAI_API_KEY", admin.first_key.as_deref().unwrap())
        .env("READ_KEY", key(fleet, "default", "read"));
    for proxy in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(proxy);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn openai_package_works() {
    let fleet = Fleet::start();
    // Slow enough that a closed stream is closed before its job has finished.
    let _worker = fleet.worker(&["--isa", "scalar"]);
    let admin = Admin::start(&fleet, &[]);
    let Some(said) = python(&fleet, &admin, "openai_client.py") else { return };
    assert_eq!(said.trim(), "served");
    eventually("jobs of closed streams are cancelled", || {
        fleet.sql("SELECT count(*) > 0 FROM all_jobs WHERE state = 'cancelled'").trim() == "t"
    });
}

#[test]
fn openai_package_gets_retry_after_from_a_full_queue() {
    let (fleet, admin) = Admin::without_worker();
    assert_eq!(fleet.run(&["queue", "limit", "demo@i2_s", "1"]).0, Some(0));
    // No worker runs. The first request is accepted, because the queue is empty.
    let caller = admin.first();
    let body = json!({ "model": "demo", "prompt": "Paid" });
    let waiting = caller.open_post("/v1/completions", &body);
    eventually("the first job is queued", || fleet.rows(&["all_jobs"]) == 1);
    let Some(said) = python(&fleet, &admin, "openai_busy.py") else { return };
    assert_eq!(said.trim(), "told when");
    drop(waiting);
}
