//! Prefill and decode over batch sizes, beside the targets.

use std::fmt::Write as _;

use super::place::{Place, Target, features, list, number, targets_table};

/// Batches, tokens of the prompt, tokens to generate.
type Workload = (&'static str, &'static str, &'static str);

const WORKLOADS: [Workload; 2] =
    [("1,8,16,64,256,512", "128", "64"), ("1,64,256,512", "512", "32")];

const REHEARSED: [Workload; 1] = [("1,2", "12", "2")];

/// One measurement.
struct Row {
    phase: String,
    batch: u64,
    prompt: &'static str,
    median: f64,
}

/// Measures the kernels that run by default.
pub fn standard(place: &Place) -> anyhow::Result<String> {
    run(place, "standard")
}

/// Measures experimental kernels.
pub fn experimental(place: &Place) -> anyhow::Result<String> {
    run(place, "experimental")
}

/// Measures int8 keys and values, with attention in tiles and without.
pub fn int8(place: &Place) -> anyhow::Result<String> {
    let mut text = "| kernels | phase | batch | tokens/s |\n| --- | --- | --- | --- |\n".to_owned();
    for kernels in ["standard", "experimental"] {
        let sizes = place.sizes(
            "--batch 1,256 --prompt 512 --generate 16",
            "--batch 1 --prompt 12 --generate 2",
        );
        let words = format!("bench engine --kv q8 --gpu-kernels {kernels} --repetitions 1 {sizes}");
        for row in list(&place.measure(&words)?, "rows")? {
            let (phase, rate) =
                (row["phase"].as_str().unwrap_or_default(), number(row, "tokens_per_s"));
            writeln!(text, "| {kernels} | {phase} | {} | {rate:.0} |", row["batch"])?;
        }
    }
    Ok(text)
}

fn run(place: &Place, kernels: &str) -> anyhow::Result<String> {
    let mut text = "| phase | prompt | batch | tokens/s | slowest … fastest |\n\
                    | --- | --- | --- | --- | --- |\n"
        .to_owned();
    let (mut rows, mut used) = (Vec::new(), String::new());
    for &(batches, prompt, generate) in place.sizes(&WORKLOADS[..], &REHEARSED[..]) {
        let words = format!(
            "bench engine --gpu-kernels {kernels} --batch {batches} --prompt {prompt} --generate {generate}"
        );
        let found = place.measure(&words)?;
        used = features(&found)?;
        for row in list(&found, "rows")? {
            let phase = row["phase"].as_str().unwrap_or_default().to_owned();
            let batch = row["batch"].as_u64().unwrap_or_default();
            let [median, lowest, highest] =
                ["tokens_per_s", "tokens_per_s_lowest", "tokens_per_s_highest"]
                    .map(|name| number(row, name));
            writeln!(
                text,
                "| {phase} | {prompt} | {batch} | {median:.0} | {lowest:.0} … {highest:.0} |"
            )?;
            rows.push(Row { phase, batch, prompt, median });
        }
    }
    Ok(text + &targets_table(&targets(&rows)) + &used)
}

fn targets(rows: &[Row]) -> [Target; 5] {
    let decode = |batch| {
        let is = |row: &&Row| row.phase == "decode" && row.batch == batch && row.prompt == "128";
        rows.iter().find(is).map(|row| row.median)
    };
    let best = |phase: &str, prompt: Option<&str>| {
        let of = rows.iter().filter(|row| row.phase == phase);
        let of = of.filter(|row| prompt.is_none_or(|prompt| row.prompt == prompt));
        of.map(|row| row.median).max_by(f64::total_cmp)
    };
    let times = decode(16).zip(decode(1)).map(|(many, one)| many / one);
    let asked = str::to_owned;
    [
        ("decode, batch 1, tokens/s", asked("1500"), decode(1)),
        ("decode, batch 64", asked("20000"), decode(64)),
        ("decode, best batch at 512 tokens", asked("40000"), best("decode", Some("512"))),
        ("decode, batch 16 against batch 1, times", asked("8"), times),
        ("prefill", asked("150000"), best("prefill", None)),
    ]
}
