//! `schemathesis` from PyPI makes valid and invalid requests from `/openapi.json` and checks the responses
//! against it. `cargo xtask test` installs it.

use std::{path::Path, process::Command};

use crate::rig::Admin;

/// Where `cargo xtask test` installs it.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/schemathesis/bin/schemathesis");

#[test]
fn responses_conform_to_the_openapi_document() {
    if !Path::new(PROGRAM).exists() {
        return tritmill_servers::skip("schemathesis (cargo xtask test installs it)");
    }
    let (_fleet, _worker, admin) = Admin::with_worker();
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
        // This stream has no end.
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
