//! `cargo xtask gpu rehearse`: the chain on the emulated driver, which needs g++ and no GPU.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context as _;

use super::{
    FIRST, Place, Programs, SECOND,
    chain::{Chain, Part},
};
use crate::process::{self, root};

/// Builds the programs in the dev profile and rehearses both chains.
pub fn run() -> anyhow::Result<()> {
    let build = ["build", "--package", "tritmill", "--bin", "tritmill"];
    let tritmill = super::programs::built(&build, "tritmill")?;
    let results = root().join("target/gpu-rehearsal");
    rehearse(&tritmill, FIRST, &results, |_| true)?;
    rehearse(&tritmill, SECOND, &results, |_| true)
}

/// Rehearses a chain with a program; reports go to `results`.
fn rehearse(
    tritmill: &Path,
    chain: Chain,
    results: &Path,
    is_wanted: impl Fn(&Part) -> bool,
) -> anyhow::Result<()> {
    let programs = Programs::from_command_line(tritmill.to_owned()).with_driver(emulated_driver()?);
    chain.run(Place::new("cuda:0", programs, true, results, chain.name)?, is_wanted)
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
    use super::{super::chain::Run, *};

    /// All parts but the engine's tests, which this would build.
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
        for chain in [FIRST, SECOND] {
            let measures = |part: &Part| matches!(part.run, Run::Measurement(_));
            rehearse(&tritmill, chain, &folder, measures).expect("every part succeeds");
            let report = std::fs::read_to_string(folder.join(format!("{}.md", chain.name)));
            let report = report.expect("the chain wrote a report");
            for part in chain.parts.iter().filter(|part| measures(part)) {
                assert!(report.contains(&format!("## {}\n", part.name)), "{}: {report}", part.name);
            }
            let tables = ["emulated sm_90", "| graphs |"];
            assert!(chain.name != "first" || tables.iter().all(|t| report.contains(t)), "{report}");
        }
        std::fs::remove_dir_all(folder).expect("the folder is writable");
    }
}
