//! `cargo xtask gpu sanitize`: two prefills and two decodes under compute-sanitizer, which finds illegal accesses,
//! races in shared memory, and barriers that not all threads reach.

use anyhow::Context as _;

use super::{Place, programs};
use crate::process;

const SANITIZER: &str = "compute-sanitizer";
const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];
/// Prefills of 70 and 280 rows take the kernels with tiles, decodes of two and eight sequences the ones for few rows, with one
/// kernel of attention and with two.
const WORDS: &str =
    "bench engine --gpu-kernels experimental --batch 2,8 --prompt 35 --generate 1 --repetitions 1";

pub fn run(place: &Place) -> anyhow::Result<String> {
    if !programs::is_installed(SANITIZER) {
        return Ok(format!("**Skipped**: {SANITIZER} is not installed."));
    }
    for tool in TOOLS {
        let starter = [SANITIZER, "--tool", tool, "--error-exitcode", "9"];
        let mut command = place.command(&starter, WORDS)?;
        process::run(&mut command).with_context(|| format!("{tool} found errors"))?;
    }
    Ok(format!("{} found no errors in `tritmill {WORDS}`.", TOOLS.join(", ")))
}
