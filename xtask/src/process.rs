//! Runs other programs from the repository's root. Each command is printed before it runs; all its
//! output goes to this process's standard output, so that one stream holds every summary.

use std::{
    ffi::OsStr,
    io::Write as _,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context as _, bail};

/// Returns the repository's root: where this program was built or, if it was copied to another
/// machine, the current folder.
pub fn root() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
        let built = built.expect("xtask lies in a folder of the workspace");
        let here = || std::env::current_dir().expect("the current folder is there");
        if built.join("Cargo.toml").exists() { built.to_owned() } else { here() }
    })
}

/// Returns the folder of what Cargo builds: `target` of the workspace, or that of the environment.
pub fn built() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty()) {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// Returns the cargo that started this program, without the variables that name the user's servers.
///
/// Nor has it what `cargo run` tells a program of its package: the build script of `ring` runs again, and all that depends
/// on it is built again, wherever these variables differ from the last build's.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).env_remove("REDIS_URL").env_remove("DATABASE_URL");
    let of_package =
        |name: &str| ["CARGO_MANIFEST_", "CARGO_PKG_"].iter().any(|of| name.starts_with(of));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(of_package) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns whether a cargo subcommand is installed.
pub fn has_cargo_subcommand(name: &str) -> bool {
    succeeds(cargo().args([name, "--version"]))
}

/// Returns whether the command starts and succeeds; hides what it prints.
pub fn succeeds(command: &mut Command) -> bool {
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Prints and runs the command; an error if it fails.
pub fn run(command: &mut Command) -> anyhow::Result<()> {
    let line = describe(command);
    let mut stdout = std::io::stdout();
    writeln!(stdout, "$ {line}")?;
    stdout.flush()?;
    let stderr = stdout.as_fd().try_clone_to_owned().context("standard output is closed")?;
    let status = command.stderr(stderr).status().with_context(|| format!("cannot start {line}"))?;
    if !status.success() {
        bail!("{line}: {status}");
    }
    Ok(())
}

/// Runs the command; returns what it prints, without white space at its ends. An error if it fails.
pub fn read(command: &mut Command) -> anyhow::Result<String> {
    let line = describe(command);
    let output = command.output().with_context(|| format!("cannot start {line}"))?;
    if !output.status.success() {
        bail!("{line}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words: Vec<_> =
        std::iter::once(name).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}
