//! Two prefills and two decodes under compute-sanitizer, which finds illegal accesses,
//! races in shared memory, and barriers that not all threads reach.

use anyhow::ensure;

use super::{
    place::{Place, tiny_model},
    programs,
};

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
        let mut command = place.on_model(&starter, WORDS, &tiny_model());
        let (output, messages) = place.output(&mut command)?;
        let printed = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{tool} found errors:\n\n```\n{printed}{messages}\n```\n");
    }
    Ok(format!("{} found no errors in `tritmill {WORDS}`.", TOOLS.join(", ")))
}
