//! `cargo xtask gpu rehearse`: the chain on the emulated driver, which needs g++ and no GPU.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{PARTS, Part, Place, Programs, run_parts};
use crate::process::{self, root};

/// Builds the programs in the dev profile and rehearses every part.
pub fn run() -> anyhow::Result<()> {
    let build = ["build", "--package", "tritmill", "--bin", "tritmill"];
    let tritmill = super::programs::built(&build, "tritmill")?;
    rehearse(tritmill, &PARTS, root().join("target/gpu-rehearsal"))
}

/// Rehearses parts with a program; reports go to `results`.
fn rehearse(tritmill: PathBuf, parts: &[Part], results: PathBuf) -> anyhow::Result<()> {
    let programs = Programs::from_command_line(tritmill).with_driver(emulated_driver()?);
    let place = Place { device: "cuda:0".to_owned(), programs, is_rehearsal: true, results };
    run_parts(place, parts)
}

/// Compiles the emulated driver unless it is newer than its sources; returns its folder.
fn emulated_driver() -> anyhow::Result<PathBuf> {
    let folder = root().join("target/emulated-cuda");
    std::fs::create_dir_all(&folder).context("cannot write to target")?;
    let library = folder.join("libcuda.so");
    let sources = root().join("engine/src/kernels/cuda");
    if !is_newer(&library, &[&sources, &sources.join("emulate")])? {
        let build = sources.join("emulate/build.sh");
        process::run(Command::new("sh").arg(build).arg(&library))?;
    }
    Ok(folder)
}

/// Returns whether a file exists and is newer than every file in some folders.
fn is_newer(file: &Path, folders: &[&Path]) -> anyhow::Result<bool> {
    let Ok(made) = std::fs::metadata(file).and_then(|file| file.modified()) else {
        return Ok(false);
    };
    for folder in folders {
        for entry in std::fs::read_dir(folder)? {
            let source = entry?.metadata()?;
            if source.is_file() && source.modified()? > made {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every part but `check`, which would build the engine's tests, and `final`, which repeats `measure`.
    #[test]
    fn every_part_writes_a_report() {
        let this = std::env::current_exe().expect("a test knows its program");
        let tritmill = this.ancestors().nth(2).expect("a folder of programs").join("tritmill");
        let help = Command::new(&tritmill).args(["bench", "tuning", "--help"]).output();
        let is_built = help.is_ok_and(|output| output.status.success());
        if !is_built || !super::super::programs::is_installed("g++") {
            eprintln!("SKIPPED: this test needs g++ and an up-to-date target/debug/tritmill");
            return;
        }
        let folder =
            std::env::temp_dir().join(format!("tritmill-rehearsal-{}", std::process::id()));
        let parts: Vec<Part> = {
            let is_rehearsed = |part: &Part| !["check", "final"].contains(&part.name);
            PARTS.into_iter().filter(is_rehearsed).collect()
        };
        rehearse(tritmill, &parts, folder.clone()).expect("every part succeeds");
        for part in parts {
            let report = std::fs::read_to_string(folder.join(format!("{}.md", part.name)));
            let report = report.expect("the part wrote a report");
            assert!(report.contains("emulated sm_90"), "{report}");
        }
        std::fs::remove_dir_all(folder).expect("the folder is writable");
    }
}
