//! Checks of the Compose file and the Dockerfile that need no container runtime: settings are documented,
//! images are pinned, and the GPU worker requests a GPU.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};

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
    let compose: Value = serde_saphyr::from_str(&read("compose.yaml")).expect("YAML");
    let worker = &compose["services"]["worker-gpu"];
    assert_eq!(
        (&worker["profiles"], &worker["build"]["target"]),
        (&json!(["gpu"]), &json!("cuda"))
    );
    let devices = &worker["deploy"]["resources"]["reservations"]["devices"];
    assert_eq!(devices, &json!([{ "driver": "nvidia", "count": 1, "capabilities": ["gpu"] }]));
    // The settings that all services share.
    assert!(worker["environment"]["REDIS_URL"].is_string(), "{worker}");
    assert_eq!(worker["read_only"], true);
}

#[test]
fn build_context_has_what_its_links_point_to() {
    let included = read("Dockerfile.dockerignore");
    let included: Vec<&str> = included.lines().filter_map(|line| line.strip_prefix('!')).collect();
    let root =
        docker().parent().expect("docker lies in the root").canonicalize().expect("a folder");
    let is_included = |path: &Path| included.iter().any(|folder| path.starts_with(folder));
    let listed = Command::new("git").args(["ls-files", "-s"]).current_dir(&root).output();
    let listed = listed.expect("git runs");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).expect("paths are UTF-8");
    // The mode of symbolic links.
    let links = listed.lines().filter(|line| line.starts_with("120000 "));
    let links = links.filter_map(|line| line.split_once('\t')).map(|(_, path)| Path::new(path));
    let links: Vec<&Path> = links.filter(|link| is_included(link)).collect();
    assert!(links.contains(&Path::new("queue/migrations")), "{links:?}");
    for link in links {
        let target = root.join(link).canonicalize().expect("the link leads somewhere");
        let target = target.strip_prefix(&root).expect("it leads to this repository");
        assert!(is_included(target), "{} leads to {}", link.display(), target.display());
    }
}
