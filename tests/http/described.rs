//! The document at `/openapi.json`, tried out: `schemathesis` of PyPI makes requests from it, good and
//! bad ones, and holds the answers to it. `cargo xtask test` installs it.

use std::{path::Path, process::Command};

use crate::{fleet::Fleet, rig::Admin};

/// Where `cargo xtask test` puts it.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/schemathesis/bin/schemathesis");

#[test]
fn whatever_the_document_allows_is_answered_as_it_says() {
    if !Path::new(PROGRAM).exists() {
        eprintln!("SKIPPED: no schemathesis at {PROGRAM}; cargo xtask test installs it");
        return;
    }
    let fleet = Fleet::start();
    let _worker = fleet.worker(&[]);
    let admin = Admin::start(&fleet, &[]);
    let key = admin.first_key.as_deref().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(PROGRAM)
        .current_dir(folder.path())
        .arg("run")
        .arg(format!("http://{}/openapi.json", admin.listen))
        .args(["--header", &format!("Authorization: Bearer {key}")])
        .args(["--seed", "1", "--max-examples", "8", "--generation-database", "none"])
        .args(["--phases", "examples,fuzzing", "--request-timeout", "20", "--no-color"])
        .args(["--checks", "not_a_server_error,status_code_conformance"])
        .args(["--checks", "content_type_conformance,response_schema_conformance"])
        // It has no end.
        .args(["--exclude-path", "/admin/v1/events"])
        .env_remove("HTTP_PROXY")
        .env_remove("http_proxy")
        .env_remove("ALL_PROXY")
        .env_remove("all_proxy")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("operations") || said.contains("Tested"), "{said}");
}
