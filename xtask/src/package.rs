//! `cargo xtask package`: packs every published crate, then builds a project outside the workspace
//! against the packed client library.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};

use super::process::{self, built, cargo, root};

/// Crates that are not published.
const UNPUBLISHED: [&str; 3] = ["xtask", "tritmill-servers", "tritmill-fuzz"];
/// Crates that the client library consists of.
const CLIENT: [&str; 3] = ["tritmill-client", "tritmill-grammar", "tritmill-queue"];

/// A program that depends only on the client library.
const PROGRAM: &str = r#"
use tritmill_client::{Client, ClientError, Job, JobBuilder, JobId, JobState};

pub async fn answered(client: &Client, prompt: &str) -> Result<bool, ClientError> {
    let job: Job = JobBuilder::question("demo", prompt).build().expect("the prompt is short");
    let id: JobId = client.submit(job).await?;
    Ok(client.poll(id).await? == JobState::Completed)
}
"#;

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(arguments.is_empty(), "this task takes no arguments");
    let mut pack = cargo();
    pack.args(["package", "--workspace", "--no-verify", "--allow-dirty", "--offline", "--quiet"]);
    for name in UNPUBLISHED {
        pack.args(["--exclude", name]);
    }
    process::run(&mut pack)?;
    build_outside()
}

/// Builds [`PROGRAM`] against the packed crates.
fn build_outside() -> anyhow::Result<()> {
    let packed = built().join("package");
    let project = root().join("target/outside");
    fs::create_dir_all(project.join("src")).context("cannot write to target")?;
    let version = env!("CARGO_PKG_VERSION");
    let mut manifest = String::from(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n",
    );
    manifest += &format!("tritmill-client = \"{version}\"\n\n[patch.crates-io]\n");
    for name in CLIENT {
        let folder = format!("{name}-{version}");
        unpack(&packed.join(format!("{folder}.crate")), &project)?;
        manifest += &format!("{name} = {{ path = \"{folder}\" }}\n");
    }
    fs::write(project.join("Cargo.toml"), manifest)?;
    fs::write(project.join("src/lib.rs"), PROGRAM)?;
    // The same versions as here: nothing is downloaded.
    fs::copy(root().join("Cargo.lock"), project.join("Cargo.lock"))?;
    let mut check = cargo();
    check.current_dir(&project).env("CARGO_TARGET_DIR", root().join("target/outside-target"));
    process::run(check.args(["check", "--offline", "--quiet"]))?;
    println!(
        "packed crates: a project outside the workspace builds against tritmill-client {version}"
    );
    Ok(())
}

fn unpack(archive: &Path, folder: &Path) -> anyhow::Result<()> {
    process::run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(folder))
}
