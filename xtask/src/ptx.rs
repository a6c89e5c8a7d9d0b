//! `cargo xtask ptx`: compiles the CUDA kernels to what the program carries, PTX and cubins, with NVRTC from
//! PyPI, which needs no GPU.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use super::{process, python};

/// Folder below `target` and package. Another version would compile the same sources differently. PTX of this one
/// needs a driver of CUDA 12.1.
const NVRTC: (&str, &str) = ("nvrtc", "nvidia-cuda-nvrtc-cu12==12.1.105");
/// Architectures that the program carries, with their folders. PTX of compute_90 differs from that of compute_80
/// in its header only, so it is not carried.
const CARRIED: [(&str, &str); 3] = [("compute_80", "ptx"), ("sm_90", "sm_90"), (HOPPER, "sm_90a")];
/// Architectures that the kernels are compiled for as a test.
const TESTED: [&str; 3] = ["sm_80", "sm_90", HOPPER];
/// The architecture of instructions that compute capability 9.0 alone has, and the ending of the files that use
/// them. Those are compiled for nothing else, and nothing else for it.
const HOPPER: &str = "sm_90a";
const HOPPER_ENDING: &str = "_wgmma.cu";
/// Options that make the arithmetic the same as the CPU's.
const FLAGS: [&str; 5] =
    ["--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--std=c++17"];

/// Installs NVRTC for the tests that compile the kernels, unless it is installed.
pub fn install_for_tests() -> anyhow::Result<()> {
    python::install(NVRTC.0, NVRTC.1)
}

/// Compiles every kernel for the tested architectures, or prints that NVRTC is missing.
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
    for (architecture, folder) in CARRIED {
        let out = outputs().join(folder);
        if out.exists() {
            std::fs::remove_dir_all(&out).context("cannot remove the old files")?;
        }
        compile(&library, architecture, &out)?;
    }
    process::run(compiler(&library).args(["--", "SOURCES"]).arg(outputs()))
}

/// Returns the folder of the kernels.
fn sources() -> PathBuf {
    process::root().join("engine/src/kernels/cuda")
}

/// Returns the folder of the compiled kernels, from which the engine's build takes them.
fn outputs() -> PathBuf {
    process::root().join("engine/generated/cuda")
}

/// NVRTC's library in its Python environment, if installed.
fn library() -> Option<PathBuf> {
    let packages = process::root().join("target").join(NVRTC.0).join("lib");
    let python = std::fs::read_dir(packages).ok()?.next()?.ok()?.path();
    let library = python.join("site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    library.exists().then_some(library)
}

/// Returns the files of kernels that are compiled for an architecture.
fn files(architecture: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    let list = |folder| std::fs::read_dir(folder).context("cannot list the kernels");
    for entry in list(sources())?.chain(list(sources().join("experimental"))?) {
        let path = entry?.path();
        let for_hopper = path.to_string_lossy().ends_with(HOPPER_ENDING);
        let is_kernels = path.extension().is_some_and(|extension| extension == "cu");
        if is_kernels && for_hopper == (architecture == HOPPER) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns the command that compiles, up to its flags.
fn compiler(library: &Path) -> Command {
    let mut command = Command::new("python3");
    command.arg(sources().join("compile_ptx.py")).arg(library).args(FLAGS);
    command
}

fn compile(library: &Path, architecture: &str, out: &Path) -> anyhow::Result<()> {
    process::run(compiler(library).args(["--", architecture]).arg(out).args(files(architecture)?))
}
