//! `cargo xtask gpu pytorch`: the same shape in bf16 by PyTorch, and ours, in turns. Where PyTorch is not
//! installed or finds no GPU, that is said, and nothing is compared.

use std::process::{Command, Stdio};

use serde_json::Value;

use super::{Place, list, number, programs};
use crate::process::root;

const CONTEXTS: [&str; 2] = ["128", "512"];
const BATCHES: &str = "1,16,64,256";
const STEPS: &str = "32";
const FINDS_A_GPU: &str = "import sys, torch; sys.exit(not torch.cuda.is_available())";

pub fn run(place: &Place) -> anyhow::Result<()> {
    let mut python = Command::new("python3");
    let found = python.args(["-c", FINDS_A_GPU]).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        println!("**PyTorch: skipped.** `python3` has no PyTorch that finds a GPU.\n");
        return Ok(());
    }
    let model = place.model()?;
    println!(
        "| context | batch | prefill, PyTorch | Tritmill | times | decode, PyTorch | Tritmill | times |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for context in CONTEXTS {
        let theirs = theirs(place, context)?;
        let words =
            ["bench", "engine", "--batch", BATCHES, "--prompt", context, "--generate", STEPS];
        let ours = place.measure(&words, &model)?;
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
            println!("{line}");
        }
        println!(
            "\nPyTorch {}: bf16, CUDA graphs.\n",
            theirs["torch"].as_str().unwrap_or_default()
        );
    }
    Ok(())
}

fn theirs(place: &Place, context: &str) -> anyhow::Result<Value> {
    let mut command = Command::new("python3");
    command.arg(root().join("benches/peers/pytorch/run.py")).args(["--json", "--steps", STEPS]);
    command.args(["--device", &place.device, "--batch", BATCHES, "--context", context]);
    programs::json(&mut command)
}
