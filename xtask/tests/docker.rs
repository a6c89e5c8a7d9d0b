//! Checks of the container files that need no container runtime: settings are documented, images are
//! pinned, and the GPU worker's YAML requests a GPU.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn docker() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in a folder");
    root.join("docker")
}

fn read(name: &str) -> String {
    fs::read_to_string(docker().join(name)).expect("a file of docker/")
}

#[test]
fn compose_settings_are_documented() {
    let (compose, readme, example) =
        (read("compose.yaml"), read("README.md"), read(".env.example"));
    for (at, _) in compose.match_indices("${") {
        let name: String =
            compose[at + 2..].chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect();
        let documented = readme.contains(&name) || example.contains(&name);
        assert!(documented, "{name} is not documented");
    }
}

#[test]
fn images_are_pinned() {
    let images = read("compose.yaml") + &read("Dockerfile");
    for line in images.lines().map(str::trim) {
        let image = line.strip_prefix("image: ").or_else(|| line.strip_prefix("FROM "));
        let Some(image) = image.filter(|image| !image.contains("${")) else { continue };
        let name = image.split_whitespace().next().unwrap_or_default();
        assert!(name == "runtime" || name.contains(':') && !name.ends_with(":latest"), "{line}");
    }
}

#[test]
fn gpu_workers_request_a_gpu() {
    let script = r#"
import sys, yaml
compose, manifest = (yaml.safe_load(open(path)) for path in sys.argv[1:])
worker = compose["services"]["worker-gpu"]
assert worker["profiles"] == ["gpu"] and worker["build"]["target"] == "cuda", worker
device, = worker["deploy"]["resources"]["reservations"]["devices"]
assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}, device
assert worker["environment"] and worker["read_only"], "the settings that all services share"
container, = manifest["spec"]["template"]["spec"]["containers"]
assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
assert "--device=cuda:0" in container["args"]
labels = manifest["spec"]["template"]["metadata"]["labels"]
assert manifest["spec"]["selector"]["matchLabels"] == labels
"#;
    // Schemathesis depends on PyYAML.
    let python = docker().join("../target/schemathesis/bin/python");
    if !python.exists() {
        return tritmill_servers::skip("PyYAML of schemathesis (cargo xtask test installs it)");
    }
    let mut python = Command::new(python);
    python.args(["-c", script]).arg(docker().join("compose.yaml"));
    let output = python.arg(docker().join("kubernetes/worker-gpu.yaml")).output();
    let output = output.expect("Python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
