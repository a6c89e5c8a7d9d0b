//! `cargo xtask ptx`: compiles the CUDA kernels to the PTX that the program carries, with NVRTC from
//! PyPI, which needs no GPU.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use super::{process, test};

/// One version: another one would write other PTX for the same sources. Its PTX asks for a driver of
/// CUDA 12.1.
const NVRTC: (&str, &str) = ("nvrtc", "nvidia-cuda-nvrtc-cu12==12.1.105");
/// Oldest devices that the PTX is for.
const ARCHITECTURE: &str = "compute_80";
/// Devices that the kernels are compiled to the end for, as a test.
const TESTED: [&str; 2] = ["sm_80", "sm_90"];
/// What makes the arithmetic the same as the CPU's.
const FLAGS: [&str; 5] =
    ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"];

/// Installs NVRTC for the tests that compile the kernels, unless it is there.
pub fn install_for_tests() -> anyhow::Result<()> {
    test::install_python(NVRTC.0, NVRTC.1)
}

/// Compiles every kernel for real devices, or says that there is no NVRTC.
pub fn check() -> anyhow::Result<()> {
    let Some(library) = library() else {
        eprintln!("warning: CUDA kernels are not compiled: NVRTC is not installed");
        return Ok(());
    };
    let out = process::root().join("target").join("kernels");
    TESTED.iter().try_for_each(|architecture| compile(&library, architecture, &out))
}

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    ensure!(arguments.is_empty(), "this task takes no arguments");
    install_for_tests()?;
    let library = library().context("NVRTC is not installed")?;
    let out = sources().join("ptx");
    if out.exists() {
        std::fs::remove_dir_all(&out).context("cannot remove the old PTX")?;
    }
    compile(&library, ARCHITECTURE, &out)
}

/// Where the kernels are.
fn sources() -> PathBuf {
    process::root().join("engine/src/kernels/cuda")
}

/// The library in the Python environment that has it.
fn library() -> Option<PathBuf> {
    let packages = process::root().join("target").join(NVRTC.0).join("lib");
    let python = std::fs::read_dir(packages).ok()?.next()?.ok()?.path();
    let library = python.join("site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    library.exists().then_some(library)
}

/// The files of kernels.
fn files() -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(sources()).context("cannot list the kernels")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn compile(library: &Path, architecture: &str, out: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("python3");
    command.arg(sources().join("compile_ptx.py")).arg(library).args(FLAGS);
    command.args(["--", architecture]).arg(out).args(files()?);
    process::run(&mut command)
}
