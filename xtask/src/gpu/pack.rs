//! `cargo xtask gpu pack`: the programs that a machine with a GPU and no Rust needs, in `target/gpu`.

use std::fs;

use anyhow::Context as _;

use super::programs::{self, PACKED};
use crate::process::root;

pub fn run() -> anyhow::Result<()> {
    let folder = root().join("target").join("gpu");
    fs::create_dir_all(&folder).context("cannot write to target")?;
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut bytes = 0;
    for (name, from) in PACKED.into_iter().zip([this, programs::build()?, programs::build_tests()?])
    {
        let to = folder.join(name);
        programs::strip(&from, &to)?;
        bytes += fs::metadata(&to).context("it was just written")?.len();
    }
    println!(
        "{}: {} MiB. In a copy of the repository, on a machine with this one's kind of processor \
         and a C library no older: target/gpu/xtask gpu",
        folder.display(),
        bytes >> 20
    );
    Ok(())
}
