//! `cargo xtask dist`: builds the stripped release program and a file with its debug symbols.

use std::{fs, path::Path, process::Command};

use anyhow::Context as _;

use super::process::{self, cargo, root};

pub fn run(arguments: &[String]) -> anyhow::Result<()> {
    anyhow::ensure!(arguments.is_empty(), "this task takes no arguments");
    let build =
        ["build", "--profile", "dist", "--locked", "--package", "tritmill", "--bin", "tritmill"];
    process::run(cargo().args(build))?;
    let folder = root().join("target").join("dist");
    let (program, symbols) = (folder.join("tritmill"), folder.join("tritmill.debug"));
    split(&program, &symbols)?;
    for path in [&program, &symbols] {
        let bytes = fs::metadata(path).context("the file was just written")?.len();
        println!("{}: {} MB", path.display(), bytes / 1_000_000);
    }
    Ok(())
}

/// Moves the debug symbols of a program to another file. Debuggers and `perf` find it by a link
/// in the program.
fn split(program: &Path, symbols: &Path) -> anyhow::Result<()> {
    let objcopy = || Command::new("objcopy");
    process::run(objcopy().arg("--only-keep-debug").arg(program).arg(symbols))?;
    process::run(objcopy().arg("--strip-debug").arg(program))?;
    // The link is a file name without a folder, so objcopy must run in the file's folder.
    let mut link = objcopy();
    link.current_dir(program.parent().context("a program lies in a folder")?);
    process::run(link.arg("--add-gnu-debuglink=tritmill.debug").arg(program))
}
