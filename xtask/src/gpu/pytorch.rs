//! The same shape in bf16 by PyTorch and by Tritmill, in turns. Skipped where PyTorch is
//! not installed or finds no GPU.

use std::{fmt::Write as _, process::Command};

use serde_json::Value;

use super::place::{Place, list, number};
use crate::process::{root, succeeds};

const CONTEXTS: [&str; 2] = ["128", "512"];
const BATCHES: &str = "1,16,64,256";
const STEPS: &str = "32";
const FINDS_A_GPU: &str = "import sys, torch; sys.exit(not torch.cuda.is_available())";

pub fn run(place: &Place) -> anyhow::Result<String> {
    if !succeeds(Command::new("python3").args(["-c", FINDS_A_GPU])) {
        return Ok("**Skipped**: `python3` has no PyTorch that finds a GPU.".to_owned());
    }
    let header = "| context | batch | prefill, PyTorch | Tritmill | ratio | decode, PyTorch | Tritmill | ratio |\n\
                  | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    let mut text = String::new();
    for context in CONTEXTS {
        text += header;
        let theirs = theirs(place, context)?;
        let words = format!("bench engine --batch {BATCHES} --prompt {context} --generate {STEPS}");
        let ours = place.measure(&words)?;
        for row in list(&theirs, "rows")? {
            let batch = &row["batch"];
            let mut line = format!("| {context} | {batch} |");
            for phase in ["prefill", "decode"] {
                let their = number(row, &format!("{phase}_tokens_per_s"));
                let is = |row: &&Value| row["phase"] == phase && row["batch"] == *batch;
                let our = list(&ours, "rows")?.iter().find(is);
                let our = our.map_or(f64::NAN, |row| number(row, "tokens_per_s"));
                line += &format!(" {their:.0} | {our:.0} | {:.2} |", our / their);
            }
            writeln!(text, "{line}")?;
        }
        let version = theirs["torch"].as_str().unwrap_or_default();
        writeln!(text, "\nPyTorch {version}: bf16, CUDA graphs.\n")?;
    }
    Ok(text)
}

fn theirs(place: &Place, context: &str) -> anyhow::Result<Value> {
    let mut command = Command::new("python3");
    command.arg(root().join("benches/peers/pytorch/run.py")).args(["--json", "--steps", STEPS]);
    command.args(["--device", &place.device, "--batch", BATCHES, "--context", context]);
    place.json(&mut command)
}
