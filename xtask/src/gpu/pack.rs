//! `cargo xtask gpu pack`: the programs that a machine with a GPU and no Rust needs, in one compressed file.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, ensure};

use super::programs::{self, PACKED};
use crate::process::{self, root};

/// Maximum size of one transfer to a rented device: the tracked files of the repository and the programs.
const BYTES_MAX: u64 = 64 << 20;

/// The file, in `target`.
const ARCHIVE: &str = "gpu.tar.xz";

pub fn run() -> anyhow::Result<()> {
    let target = root().join("target");
    let (folder, archive) = (target.join("gpu"), target.join(ARCHIVE));
    fs::create_dir_all(&folder).context("cannot write to target")?;
    let this = std::env::current_exe().context("cannot find this program")?;
    for (name, from) in PACKED.into_iter().zip([this, programs::build()?, programs::build_tests()?])
    {
        programs::strip(&from, &folder.join(name))?;
    }
    process::run(Command::new("tar").arg("-cJf").arg(&archive).arg("-C").arg(&target).arg("gpu"))?;
    let programs = fs::metadata(&archive).context("cannot read the programs")?.len();
    let files = tracked_bytes(root())?;
    let [all, programs] = [files + programs, programs].map(|bytes| bytes >> 20);
    ensure!(
        all < BYTES_MAX >> 20,
        "the programs have {programs} MiB, and {all} MiB with the repository's files: more than 64"
    );
    println!(
        "{}: {programs} MiB, {all} MiB with the repository's files. In a copy of the repository, on a machine with the \
         same kind of processor and no older C library:\n  \
         tar -xJf target/{ARCHIVE} -C target    # or: python3 -m tarfile -e target/{ARCHIVE} target\n  \
         target/gpu/xtask gpu first",
        archive.display(),
    );
    Ok(())
}

/// Returns the bytes of the files that git tracks.
fn tracked_bytes(root: &Path) -> anyhow::Result<u64> {
    let listed = Command::new("git").arg("-C").arg(root).args(["ls-files", "-z"]).output();
    let listed = listed.context("cannot run git")?;
    ensure!(listed.status.success(), "git lists no files here");
    let names = listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let sizes = names.map(|name| {
        let file = root.join(String::from_utf8_lossy(name).as_ref());
        fs::symlink_metadata(file).map_or(0, |file| file.len())
    });
    Ok(sizes.sum())
}
