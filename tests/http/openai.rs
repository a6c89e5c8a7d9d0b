//! The `openai` package of PyPI, as it is, against a real service. `cargo xtask test` installs it.

use std::{path::Path, process::Command};

use crate::{fleet::Fleet, rig::Admin};

/// Where `cargo xtask test` puts it.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/openai/bin/python");

#[test]
fn the_unmodified_openai_package_is_served() {
    if !Path::new(PYTHON).exists() {
        eprintln!("SKIPPED: no openai package at {PYTHON}; cargo xtask test installs it");
        return;
    }
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let admin = Admin::start(&fleet, &[]);
    let output = Command::new(PYTHON)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http/openai_client.py"))
        .env("OPENAI_BASE_URL", format!("http://{}/v1", admin.listen))
        .env("OPENAI_API_KEY", admin.first_key.as_deref().unwrap())
        .env_remove("HTTP_PROXY")
        .env_remove("http_proxy")
        .env_remove("ALL_PROXY")
        .env_remove("all_proxy")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "served");
}
