//! `cargo xtask gpu pack`: the programs that a machine with a GPU and no Rust needs, in `target/gpu`.

use std::fs;

use anyhow::{Context as _, ensure};

use super::programs::{self, PACKED};
use crate::process::root;

/// Maximum size of one transfer to a rented device.
const BYTES_MAX: u64 = 64 << 20;

pub fn run() -> anyhow::Result<()> {
    let folder = root().join("target").join("gpu");
    fs::create_dir_all(&folder).context("cannot write to target")?;
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut bytes = 0;
    for (name, from) in PACKED.into_iter().zip([this, programs::build()?, programs::build_tests()?])
    {
        let to = folder.join(name);
        programs::strip(&from, &to)?;
        bytes += fs::metadata(&to).context("cannot read a program")?.len();
    }
    ensure!(bytes < BYTES_MAX, "the programs have {} MiB, more than 64", bytes >> 20);
    println!(
        "{}: {} MiB. In a copy of the repository, on a machine with the same kind of processor \
         and no older C library: target/gpu/xtask gpu",
        folder.display(),
        bytes >> 20
    );
    Ok(())
}
